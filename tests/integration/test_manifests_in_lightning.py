# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Manifests, late landings and Lightning: each finds what it expects."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.core.manifest import decode_manifest
from lightning_resilience.errors import CorruptCheckpointError, JointError
from tests.faulty_filesystem import Rule
from tests.lightning_job import Job, find
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


pytestmark = pytest.mark.integration

KEPT = {"save_top_k": 1, "save_last": True}
HANG_S = 60.0
ATTEMPTS = 3


def manifests(job: Job) -> dict[str, Any]:
    """Return the manifests that are there, by the name of their checkpoint."""
    folder = Path(job.folder.removeprefix("faulty://"), ".resilience")
    found = [decode_manifest(path.read_bytes(), path=str(path)) for path in folder.iterdir()]
    return {manifest.path: manifest for manifest in found}


def test_what_is_kept_has_a_manifest_and_what_is_removed_has_none(
    faulty: Callable[..., Job],
) -> None:
    """There is one for each checkpoint of ``ModelCheckpoint``, and it says which step it is."""
    job = faulty(checkpoint=KEPT)

    fit(job)

    found = manifests(job)
    assert sorted(found) == names(job) == ["last.ckpt", "step=4.ckpt"]
    assert {manifest.step for manifest in found.values()} == {4}
    assert all(manifest.run and manifest.versions["lightning"] for manifest in found.values())


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("resume", ["last", "last.ckpt"])
def test_plain_lightning_resumes_from_what_was_saved(
    resume: str, tmp_path: Path, spool: Path
) -> None:
    """It finds the last checkpoint among our files, and reads it as its own."""
    del spool
    folder = str(tmp_path / "checkpoints")
    fit(Job(folder=folder, ranks=1, checkpoint=KEPT))
    path = resume if resume == "last" else f"{folder}/{resume}"

    plain = fit(Job(folder=folder, ranks=1, checkpoint=KEPT, options=None, resume=path, steps=6))

    assert plain.global_step == 6
    assert find(plain, "ModelCheckpoint").last_model_path.startswith(f"{folder}/last")


def test_a_damaged_checkpoint_is_not_resumed_from(faulty: Callable[..., Job]) -> None:
    """One bit is enough, and the error says so before anything is trained."""
    first = faulty()
    fit(first)
    path = Path(first.folder.removeprefix("faulty://"), "step=4.ckpt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(JointError, match="digest") as caught:
        fit(faulty(resume=f"{first.folder}/step=4.ckpt"))

    assert caught.value.outcome == "permanent"
    assert isinstance(caught.value.__cause__, CorruptCheckpointError)


@pytest.fixture
def released() -> Iterator[Callable[[], None]]:
    """Let the calls that hang go on, after some attempts have met one."""
    threads: list[threading.Thread] = []

    def release_later() -> None:
        plan = plan_in_use()

        def wait() -> None:
            ends_at_s = time.monotonic() + HANG_S
            # Each attempt takes the older manifest away first.
            while len(plan.calls("manifest_rm_file", name="last")) < ATTEMPTS:
                assert time.monotonic() < ends_at_s
                time.sleep(0.02)
            plan.release()

        threads.append(threading.Thread(target=wait))
        threads[0].start()

    yield release_later
    for thread in threads:
        thread.join(HANG_S)


def test_an_upload_that_lands_late_is_followed_by_the_newer_one(
    faulty: Callable[..., Job], released: Callable[[], None]
) -> None:
    """Its name is waited for; what is there in the end is the newest, and is committed."""
    job = faulty(
        Rule(operations=("land",), name="last", hang=True, last=1),
        checkpoint=KEPT,
        options={"retry": {"stall_timeout_s": 0.5, "unknown_max_attempts": 5}},
    )
    released()

    fit(job)

    folder = Path(job.folder.removeprefix("faulty://"))
    last = manifests(job)["last.ckpt"]
    assert last.step == torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 4
    assert (folder / "last.ckpt").stat().st_size == last.size_bytes
