# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Training with its checkpoints on ``gs://``: saved, resumed from, and set aside where damaged."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

from lightning_resilience.core.manifest import decode_manifest
from lightning_resilience.errors import JointError
from tests.lightning_job import Job
from tests.single_rank import fit


if TYPE_CHECKING:
    from pathlib import Path

    from tests.gcs_server import GcsServer


pytest.importorskip("gcsfs")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    # aiohttp says so of what gcsfs gives it.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]


@pytest.fixture
def folder(
    gcs_server: GcsServer, gcs_bucket: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A prefix in a bucket that every client finds, Lightning's own as well."""
    del spool
    for name in ("gs", "gcs"):
        monkeypatch.setitem(fsspec.config.conf, name, gcs_server.storage_options)
    return f"gs://{gcs_bucket}/run"


def test_what_is_kept_is_there_with_its_manifest_and_nothing_else(
    folder: str, gcs_server: GcsServer, gcs_bucket: str
) -> None:
    """Checkpoints that are not kept are removed with theirs."""
    fit(Job(folder=folder, ranks=1, checkpoint={"save_top_k": 1, "save_last": True}))

    kept = ["last.ckpt", "step=4.ckpt"]
    names = gcs_server.names(gcs_bucket)
    assert names == sorted([f"run/{n}" for n in kept] + [f"run/.resilience/{n}.json" for n in kept])
    for name in kept:
        data = gcs_server.read(f"{folder}/{name}")
        marked = gcs_server.read(f"{folder}/.resilience/{name}.json")
        assert data is not None
        assert marked is not None
        manifest = decode_manifest(marked, path=name)
        assert manifest.step == torch.load(io.BytesIO(data), weights_only=True)["global_step"] == 4


def test_a_run_goes_on_from_its_last_checkpoint(folder: str) -> None:
    """It is found, fetched and read from the bucket."""
    fit(Job(folder=folder, ranks=1))

    second = fit(Job(folder=folder, ranks=1, resume=f"{folder}/step=4.ckpt", steps=6))

    assert second.global_step == 6
    assert second.ckpt_path == f"{folder}/step=4.ckpt"


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_it_is_loaded(
    folder: str, gcs_server: GcsServer, gcs_bucket: str
) -> None:
    """What has lost its end is found out before anything of it is loaded."""
    fit(Job(folder=folder, ranks=1, checkpoint={"save_last": True}))
    good = gcs_server.read(f"{folder}/last.ckpt") or b""
    gcs_server.write(f"{folder}/last-v1.ckpt", good)
    gcs_server.write(f"{folder}/last.ckpt", good[:-9])

    second = fit(Job(folder=folder, ranks=1, resume="last", steps=6))

    aside = [name for name in gcs_server.names(gcs_bucket) if "/set-aside/" in name]
    assert second.ckpt_path == f"{folder}/last-v1.ckpt"
    assert second.global_step == 6
    assert gcs_server.read(f"gs://{gcs_bucket}/{aside[0]}") == good[:-9]
    assert aside[1] == f"{aside[0]}.json"


def test_a_missing_bucket_is_told_before_anything_is_trained(
    folder: str, gcs_server: GcsServer
) -> None:
    """It is not taken for a directory that has no checkpoints yet, and is not made."""
    del folder
    steps: list[Any] = []

    with pytest.raises(JointError, match="no-such-bucket-here"):
        fit(Job(folder="gs://no-such-bucket-here/run", ranks=1, resume="last", before=steps.append))

    assert "no-such-bucket-here" not in gcs_server.buckets()
