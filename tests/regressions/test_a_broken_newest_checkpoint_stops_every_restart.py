# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C32: the newest checkpoint is broken, and no restart gets past it.

``allenai/allennlp#2129``, ``sml2h3/dddd_trainer#36``, ``awslabs/awsome-distributed-ai#190``: a
crash or a full disk has left half a file, each start fails at it with "failed finding central
directory", and users remove it by hand.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from lightning_resilience.core.manifest import (
    Origin,
    encode_manifest,
    manifest_of,
    manifest_path,
)
from tests import lightning_job
from tests.lightning_job import Job, Running, store_server
from tests.single_rank import fit


if TYPE_CHECKING:
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def commit(path: Path, data: bytes) -> None:
    """Write the manifest of a checkpoint that has this content."""
    digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"
    manifest = manifest_of(str(path), {"": (len(data), digest)}, Origin())
    target = Path(manifest_path(str(path)))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(encode_manifest(manifest))


def flipped(data: bytes) -> bytes:
    """Return the same with one bit flipped, in a place that no table of contents tells of."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def start(warm_python: WarmPython, folder: Path, home: Path, *, ours: bool, port: int) -> Running:
    """Start two ranks that go on from the last checkpoint."""
    job = Job(folder=str(folder), options={} if ours else None, resume="last", steps=3)
    return lightning_job.start(warm_python, job, home, port=port)


def test_it_is_set_aside_and_all_ranks_start_from_the_one_before(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The newest is cut off and the one before has a flipped bit; plain Lightning fails."""
    before = Job(
        folder=str(tmp_path / "before"),
        steps=2,
        ranks=1,
        options=None,
        trainer={"default_root_dir": tmp_path},
    )
    fit(before)
    whole = (tmp_path / "before" / "step=2.ckpt").read_bytes()
    folders = {name: tmp_path / name / "files" for name in ("plain", "ours")}
    for folder in folders.values():
        folder.mkdir(parents=True)
        files = {"last-v2": whole[:-100], "last-v1": flipped(whole), "last": whole}
        for age, (name, data) in enumerate(files.items()):
            path = folder / f"{name}.ckpt"
            path.write_bytes(data)
            os.utime(path, (2e9 - 60 * age, 2e9 - 60 * age))
        commit(folder / "last-v1.ckpt", whole)

    with store_server() as one, store_server() as two, store_server() as three:
        plain = start(warm_python, folders["plain"], tmp_path / "a", ours=False, port=one)
        ours = start(warm_python, folders["ours"], tmp_path / "b", ours=True, port=two)
        without, first = plain.wait(), ours.wait()
        again = start(warm_python, folders["ours"], tmp_path / "c", ours=True, port=three)
        second = again.wait()

    assert 0 not in {report["code"] for report in without}, plain.told()
    assert "PyTorchFileReader" in plain.told()
    for running, reports in ((ours, first), (again, second)):
        assert [report["code"] for report in reports] == [0, 0], running.told()
        resumed = {report["resumed"] for report in reports}
        assert resumed == {str(folders["ours"] / "last.ckpt")}, running.told()
    aside = folders["ours"] / ".resilience" / "set-aside"
    moved = {path.stem: path.read_bytes() for path in aside.glob("last*") if path.suffix != ".json"}
    assert moved == {"last-v1.ckpt": flipped(whole), "last-v2.ckpt": whole[:-100]}
    reasons = [json.loads(path.read_bytes())["reason"] for path in sorted(aside.glob("*.json"))]
    assert "it has the digest" in reasons[0]
    assert "not written to its end" in reasons[1]
    assert "set aside as" in ours.ranks[0].text()
    assert "set aside as" not in again.told()
