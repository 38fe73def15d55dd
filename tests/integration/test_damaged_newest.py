# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The newest checkpoint is damaged, in many ways, and both ranks start from the one before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash

from lightning_resilience import CheckpointError, JointError
from lightning_resilience.core.manifest import (
    Origin,
    encode_manifest,
    manifest_of,
    manifest_path,
)
from tests import lightning_job
from tests.lightning_job import Job, store_server
from tests.single_rank import fit


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def flipped(data: bytes) -> bytes:
    """Flip one bit, in a place that no table of contents tells of."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


PAGE = b"<!DOCTYPE html><html><body><h1>503 Service Unavailable</h1></body></html>"
WAYS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda _data: b"",
    "zeros": lambda data: bytes(len(data)),
    "flipped": flipped,
    "page": lambda _data: PAGE,
    "page of its length": lambda data: PAGE.ljust(len(data)),
    "longer": lambda data: data + data[:100],
}
CELLS = [(kind, way) for kind in ("local", "remote") for way in WAYS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint of step 2, as Lightning itself writes it."""
    folder = tmp_path_factory.mktemp("before")
    options = {"default_root_dir": folder}
    fit(Job(folder=str(folder), steps=2, ranks=1, options=None, trainer=options))
    return (folder / "step=2.ckpt").read_bytes()


def put(path: Path, data: bytes, *, saved: bytes, at_s: float) -> None:
    """Write a checkpoint, and a manifest that says what was saved."""
    path.write_bytes(data)
    os.utime(path, (at_s, at_s))
    digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(saved)}"
    manifest = Path(manifest_path(str(path)))
    manifest.parent.mkdir(exist_ok=True)
    manifest.write_bytes(
        encode_manifest(manifest_of(str(path), {"": (len(saved), digest)}, Origin()))
    )


@pytest.mark.parametrize(("kind", "way"), CELLS)
def test_both_ranks_start_from_the_one_before(
    kind: str, way: str, whole: bytes, warm_python: WarmPython, tmp_path: Path
) -> None:
    """The damaged one is kept, out of the way; the job trains on to its end."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    damaged = WAYS[way](whole)
    put(folder / "last.ckpt", whole, saved=whole, at_s=1.9e9)
    put(folder / "last-v1.ckpt", damaged, saved=whole, at_s=2e9)
    url = f"faulty://{folder}" if kind == "remote" else str(folder)
    job = Job(folder=url, resume="last", steps=3, every=3, group_timeout_s=30.0)

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert {report["resumed"] for report in reports} == {f"{url}/last.ckpt"}, running.told()
    assert {report["step"] for report in reports} == {3}
    aside = [
        path for path in (folder / ".resilience" / "set-aside").iterdir() if "ckpt" in path.name
    ]
    kept = [path.read_bytes() for path in aside if path.suffix != ".json"]
    assert kept == [damaged]
    assert not (folder / "last-v1.ckpt").exists()


@pytest.mark.parametrize("way", ["zeros", "flipped", "page of its length"])
def test_a_path_that_names_a_damaged_one_is_the_same_error_on_both_ranks(
    way: str, whole: bytes, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Its manifest and its size are as they should be: found out while it is fetched, not moved."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    put(folder / "older.ckpt", whole, saved=whole, at_s=1.9e9)
    put(folder / "a.ckpt", WAYS[way](whole), saved=whole, at_s=2e9)
    url = f"faulty://{folder}"
    job = Job(folder=url, resume=f"{url}/a.ckpt", steps=3, group_timeout_s=30.0)

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        reports = running.wait()

    texts = {report["text"] for report in reports}
    assert [report["error"] for report in reports] == ["JointError", "JointError"], running.told()
    assert len(texts) == 1
    assert "a.ckpt is not what was saved" in texts.pop()
    # One of the two, which are on one node, has fetched it, and nobody has opened it besides.
    assert len(running.plan.calls("open", name="a.ckpt")) == 1
    assert (folder / "a.ckpt").read_bytes() == WAYS[way](whole)


def test_where_all_are_damaged_in_storage_each_is_named(
    whole: bytes, faulty: Callable[..., Job]
) -> None:
    """Their sizes are right, so each is found out only while it is fetched."""
    job = faulty(resume="last", steps=3)
    folder = Path(job.folder.removeprefix("faulty://"))
    folder.mkdir()
    for number, name in enumerate(("last.ckpt", "last-v1.ckpt", "last-v2.ckpt")):
        put(folder / name, flipped(whole), saved=whole, at_s=1.9e9 + number)

    with pytest.raises(CheckpointError) as caught:
        fit(job)

    for name in ("last.ckpt", "last-v1.ckpt", "last-v2.ckpt"):
        assert f"{job.folder}/{name}: " in str(caught.value)
    assert str(caught.value).count("set aside by this start") == 2


def test_one_of_a_later_version_is_not_passed_over_for_an_older_one(
    whole: bytes, tmp_path: Path
) -> None:
    """The run says what to install; nothing is moved, and nothing written over."""
    put(tmp_path / "step=1.ckpt", whole, saved=whole, at_s=1.9e9)
    put(tmp_path / "last.ckpt", whole, saved=whole, at_s=2e9)
    manifest = Path(manifest_path(str(tmp_path / "last.ckpt")))
    manifest.write_bytes(manifest.read_bytes().replace(b'"v":1', b'"v":2'))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    with pytest.raises(JointError, match=r"has version 2.*Install that one"):
        fit(Job(folder=str(tmp_path), resume="last", steps=3, ranks=1))

    assert {path: path.read_bytes() for path in before} == before
    assert not (tmp_path / ".resilience" / "set-aside").exists()
