# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Two ranks that both write: FSDP, ModelParallel and DeepSpeed on storage that they cannot reach.

Left to themselves they would make a local directory of the URL, ask the disk in between two
collectives, and write the metadata while other ranks' shards are still on their way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint import filesystem

from lightning_resilience.core.shards import METADATA_NAMES
from tests import faulty_filesystem, lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, Running, store_server
from tests.sharded_job import STRATEGIES, ShardedModel
from tests.warm_python import ROOT


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.s3_server import S3Server
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

GROUP_TIMEOUT_S = 6.0
OUTAGE_S = 8.0
"""Longer than the process group's timeout."""

DCP = {".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"}
ENGINE = {
    "checkpoint/mp_rank_00_model_states.pt",
    "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "latest",
}
FILES = {"ModelParallel sharded": DCP, "FSDP sharded": DCP, "DeepSpeed": ENGINE}
"""What a checkpoint is made of, where it is no single file."""
SHARDS = {
    "ModelParallel sharded": ("__0_0", "__1_0"),
    "FSDP sharded": ("__0_0", "__1_0"),
    "DeepSpeed": ("zero_pp_rank_0", "zero_pp_rank_1"),
}
"""Of each rank's own shard, a part of the name."""


@pytest.fixture
def start(warm_python: WarmPython, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a job of two ranks with one of the strategies, on storage with these faults."""
    servers = contextlib.ExitStack()
    homes: list[Path] = []

    def start_job(kind: str, *rules: Rule, **options: Any) -> Running:
        environment = options.pop("environment", {})
        made: dict[str, Any] = {
            "folder": f"faulty://{tmp_path}/checkpoints",
            "strategy": STRATEGIES[kind],
            "model": ShardedModel,
            "group_timeout_s": GROUP_TIMEOUT_S,
            **options,
        }
        home = tmp_path / f"job-{len(homes)}"
        homes.append(home)
        return lightning_job.start(
            warm_python,
            Job(**made),
            home,
            port=servers.enter_context(store_server()),
            plan=FaultPlan.write(home / "plan", *rules),
            environment=environment,
        )

    with servers:
        yield start_job


def succeeded(running: Running) -> None:
    """Wait for the end of a job that is to end well and to leave nothing on its node."""
    reports = running.wait()
    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert [report["patched"] + report["threads"] for report in reports] == [[], []]
    assert staged(running) == []


def failed_alike(running: Running, *, error: str = "JointError") -> list[dict[str, Any]]:
    """Wait for the end of a job that is to fail with the same error on both ranks."""
    reports = running.wait()
    assert all(report["code"] for report in reports), running.told()
    assert {report["error"] for report in reports} == {error}, running.told()
    assert len({report["text"] for report in reports}) == 1, running.told()
    assert [report["patched"] for report in reports] == [[], []]
    return reports


def staged(running: Running) -> list[Path]:
    """Return what is in the spool directory of a job."""
    return [path for path in running.home.glob("lightning-resilience-*/*/*") if path.exists()]


def files(running: Running, name: str = "") -> set[str]:
    """Return the files of a checkpoint, or of all, by their names below it; no manifests."""
    root = Path(running.job.folder.removeprefix("faulty://"), name)
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return {file for file in found if not file.startswith(".resilience/")}


def states(running: Running, word: str) -> list[str]:
    """Return with which weights and momenta each rank has started or ended."""
    pattern = re.compile(f"this rank {word} with (.*)")
    return [found[1] for rank in running.ranks if (found := pattern.search(rank.text()))]


def metadata(running: Running) -> set[str]:
    """Return the names of metadata anywhere in the checkpoints' folder."""
    return {name for name in files(running) if Path(name).name in METADATA_NAMES}


@pytest.mark.parametrize("kind", FILES)
def test_what_all_ranks_save_is_what_they_load(kind: str, start: Callable[..., Running]) -> None:
    """Every rank starts again with the weights and momenta with which it has ended."""
    first = start(kind)
    succeeded(first)

    again = start(kind, folder=first.job.folder, steps=6, resume=f"{first.job.folder}/step=4.ckpt")
    succeeded(again)

    assert [files(first, name) for name in first.names()] == [FILES[kind]] * 3
    ended = states(first, "ends")
    assert len(ended) == 2
    assert states(again, "starts") == ended
    assert not (ROOT / "faulty:").exists()


@pytest.mark.parametrize("kind", FILES)
def test_metadata_is_published_last(kind: str, start: Callable[..., Running]) -> None:
    """No file that makes a directory a checkpoint is sent before any shard has been verified."""
    running = start(kind, every=4)
    succeeded(running)

    calls = [
        (call["operation"], Path(call["path"]).name)
        for call in running.plan.calls("put_file", "info", name=".ckpt/")
    ]
    puts = [name for operation, name in calls if operation == "put_file"]
    first = next(place for place, name in enumerate(puts) if name in METADATA_NAMES)
    sent = calls.index(("put_file", puts[first]))
    assert puts[first:] == [name for name in METADATA_NAMES if name in FILES[kind]]
    assert {Path(name).name for name in FILES[kind]} == set(puts)
    assert all(("info", name) in calls[:sent] for name in puts[:first])


@pytest.mark.parametrize("kind", FILES)
def test_every_rank_publishes_what_it_has_written(kind: str, start: Callable[..., Running]) -> None:
    """The ranks may be on different nodes, and see nothing of each other's files."""
    running = start(kind, every=4)
    succeeded(running)

    for rank, shard in enumerate(SHARDS[kind]):
        senders = {call["rank"] for call in running.plan.calls("put_file", name=shard)}
        assert senders == {str(rank)}


@pytest.mark.parametrize("kind", ["ModelParallel full", "FSDP full"])
def test_what_is_gathered_is_one_file_under_its_url(
    kind: str, start: Callable[..., Running], tmp_path: Path
) -> None:
    """A strategy that gathers writes what plain Lightning writes, and the URL stays a URL."""
    guarded, plain = start(kind), start(kind, options=None, folder=f"{tmp_path}/plain")
    succeeded(guarded)
    assert [report["code"] for report in plain.wait()] == [0, 0], plain.told()

    assert files(guarded) == files(plain) == {"step=2.ckpt", "step=4.ckpt"}
    assert content(guarded, "step=4.ckpt") == content(plain, "step=4.ckpt")
    assert not (ROOT / "faulty:").exists()


def content(running: Running, name: str) -> str:
    """Return what is in a checkpoint of one file, in words."""
    path = Path(running.job.folder.removeprefix("faulty://"), name)
    saved = torch.load(path, weights_only=False)
    return str({key: saved[key] for key in ("state_dict", "optimizer_states", "global_step")})


def test_one_file_is_loaded_by_all_ranks_from_where_it_was_fetched(
    start: Callable[..., Running],
) -> None:
    """ModelParallel reads a gathered checkpoint from the node, and every rank has its part."""
    kind = "ModelParallel full"
    first = start(kind)
    succeeded(first)

    again = start(kind, folder=first.job.folder, steps=6, resume=f"{first.job.folder}/step=4.ckpt")
    succeeded(again)

    assert states(again, "starts") == states(first, "ends")


def test_one_rank_alone_saves_shards_as_well(start: Callable[..., Running]) -> None:
    """Without other ranks it is told by nobody but itself, and its checkpoint is complete."""
    first = start("DeepSpeed", ranks=1)
    assert [report["code"] for report in first.wait()] == [0], first.told()
    resume = f"{first.job.folder}/step=4.ckpt"
    again = start("DeepSpeed", ranks=1, folder=first.job.folder, steps=6, resume=resume)
    assert [report["code"] for report in again.wait()] == [0], again.told()

    assert files(first, "step=4.ckpt") == {name for name in ENGINE if "rank_1" not in name}
    assert states(again, "starts") == states(first, "ends")


def test_shards_go_to_object_storage_and_come_back(
    start: Callable[..., Running], s3_server: S3Server, bucket: str
) -> None:
    """On S3, every rank's shard and the metadata are objects under the checkpoint's key."""
    kind, job = "ModelParallel sharded", {"folder": f"s3://{bucket}/run"}
    first = start(kind, environment=s3_server.environment, **job)
    succeeded(first)
    resume = f"s3://{bucket}/run/step=4.ckpt"
    again = start(kind, environment=s3_server.environment, steps=6, resume=resume, **job)
    succeeded(again)

    listed = s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]
    keys = {item["Key"] for item in listed}
    manifests = {f"run/.resilience/step={step}.ckpt.json" for step in (2, 4, 6)}
    shards = {f"run/step={step}.ckpt/{name}" for step in (2, 4, 6) for name in DCP}
    assert keys == shards | manifests
    assert states(again, "starts") == states(first, "ends")
    assert not (ROOT / "s3:").exists()


@pytest.mark.parametrize("folder", ["faulty://{}/checkpoints", "{}/checkpoints"])
def test_a_checkpoint_takes_the_place_of_an_older_one_of_its_name(
    folder: str, start: Callable[..., Running], tmp_path: Path
) -> None:
    """Of the older one nothing is left, and no directory but the checkpoint's."""
    names = {"filename": "same", "enable_version_counter": False}
    running = start("ModelParallel sharded", checkpoint=names, folder=folder.format(tmp_path))
    succeeded(running)

    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == [".resilience", "same.ckpt"]
    assert files(running, "same.ckpt") == DCP
    assert torch.load(root / "same.ckpt" / "meta.pt", weights_only=False)["global_step"] == 4


# Failures -----------------------------------------------------------------------------------------

HASTY = {"retry": {"stall_timeout_s": 1.5, "deadline_s": 8.0}}
"""For faults that do not end: the operation gives up, and a busy machine does not."""


CELLS = [
    ("ModelParallel sharded", "denied"),
    ("ModelParallel sharded", "reset"),
    ("ModelParallel sharded", "hang"),
    ("ModelParallel sharded", "lost"),
    ("DeepSpeed", "denied"),
    ("DeepSpeed", "hang"),
]


@pytest.mark.parametrize(("kind", "fault"), CELLS)
def test_without_every_shard_there_is_no_metadata(
    kind: str, fault: str, start: Callable[..., Running], tmp_path: Path
) -> None:
    """Whichever rank fails, all end with one verdict, and nothing looks like a checkpoint."""
    faults: dict[str, dict[str, Any]] = {
        "denied": {"error": "denied"},
        "reset": {"error": "reset"},
        "hang": {"hang": True},
        "lost": {"swallow": True},
    }
    cells = [
        start(
            kind,
            Rule(operations=("put_file",), name=shard, **faults[fault]),
            options={} if fault == "denied" else HASTY,
            folder=f"faulty://{tmp_path}/{rank}",
        )
        for rank, shard in enumerate(SHARDS[kind])
    ]

    for rank, running in enumerate(cells):
        reports = failed_alike(running)

        # While the circuit is open, the other rank may be kept from its own shard until the end.
        first = {rank} if fault == "denied" else {0, 1}
        assert {report["first_rank"] for report in reports} <= first
        assert metadata(running) == set()
        assert sent_metadata(running) == []
        assert staged(running) == []


def die_while_publishing(rank: str, _trainer: Any) -> None:
    """Let a rank be killed when it sends its shard."""

    def put_file(*_args: Any, **_kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == rank:
        vars(faulty_filesystem)["FaultyFileSystem"].put_file = put_file


@pytest.mark.parametrize("killed", [0, 3])
def test_a_rank_that_is_killed_while_it_publishes_is_named_by_the_others(
    killed: int, start: Callable[..., Running]
) -> None:
    """Of four ranks three end with the same error, and nothing looks like a checkpoint."""
    kind, before = "ModelParallel sharded", partial(die_while_publishing, str(killed))
    running = start(kind, ranks=4, before=before)

    reports = running.wait()

    others = [report for report in reports if report["rank"] != killed]
    assert reports[killed]["code"] == -signal.SIGKILL
    assert len({report["text"] for report in others}) == 1, running.told()
    assert {(report["outcome"], report["first_rank"]) for report in others} == {("lost", killed)}
    assert metadata(running) == set()
    assert sent_metadata(running) == []


def sent_metadata(running: Running) -> list[str]:
    """Return the metadata that somebody has tried to send."""
    calls = running.plan.calls("put_file")
    return [call["path"] for call in calls if call["path"].endswith(METADATA)]


METADATA = tuple(f".ckpt/{name}" for name in METADATA_NAMES)


def test_what_a_failed_save_has_published_is_removed(start: Callable[..., Running]) -> None:
    """Shards without metadata are no use to anybody, and do not stay in storage."""
    denied = Rule(operations=("put_file",), name="__1_0", error="denied")
    running = start("ModelParallel sharded", denied)
    failed_alike(running)

    assert [call for call in running.plan.calls("put_file", name="__0_0") if not call["struck"]]
    assert files(running) == set()


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_metadata_that_cannot_be_published_is_the_same_failure_on_all_ranks(
    name: str, start: Callable[..., Running]
) -> None:
    """The checkpoint is never complete, and every rank knows."""
    denied = Rule(operations=("put_file",), name=name, error="denied")
    running = start("ModelParallel sharded", denied)

    reports = failed_alike(running)

    assert {report["outcome"] for report in reports} == {"permanent"}
    assert name not in {Path(found).name for found in metadata(running)}


@pytest.mark.parametrize("shard", SHARDS["ModelParallel sharded"])
def test_an_outage_of_one_shard_longer_than_the_group_timeout_is_survived(
    shard: str, start: Callable[..., Running]
) -> None:
    """The other rank waits on the shared store and not in a collective."""
    ill = Rule(operations=("put_file",), name=f"step=2.ckpt/{shard}", error="reset")
    running = start("ModelParallel sharded", replace(ill, lasting_s=OUTAGE_S))

    succeeded(running)

    assert files(running, "step=2.ckpt") == files(running, "step=4.ckpt") == DCP


def test_shards_wait_for_storage_and_say_that_they_are_not_spooled(
    start: Callable[..., Running],
) -> None:
    """Nothing of them is left on the node, and all of both checkpoints is in storage."""
    ill = Rule(operations=("put_file",), name="step=2.ckpt/__1_0", error="reset")
    running = start(
        "ModelParallel sharded",
        replace(ill, lasting_s=OUTAGE_S),
        options={"on_outage": "spool"},
    )

    succeeded(running)

    assert "which is ill: CheckpointError: waits: sharded checkpoints are not spooled" in (
        running.told()
    )
    assert "while storage is ill, a save of this Trainer waits: sharded" in running.told()
    assert "waits on this node until storage is well" not in running.told()
    assert files(running, "step=2.ckpt") == files(running, "step=4.ckpt") == DCP


def test_what_is_gathered_is_spooled_as_any_file(start: Callable[..., Running]) -> None:
    """Nor does it ask an ill storage whether older shards have its name, where none can."""
    asked = ("put_file", "info", "rm_file", "ls", "manifest_put_file", "manifest_cat_file")
    ill = Rule(operations=asked, name="step=", error="reset", lasting_s=OUTAGE_S)
    running = start("FSDP full", ill, options={"on_outage": "spool"})

    succeeded(running)

    assert "waits on this node until storage is well" in running.told()
    assert files(running) == {"step=2.ckpt", "step=4.ckpt"}


def test_an_outage_while_ranks_load_is_survived(start: Callable[..., Running]) -> None:
    """No rank is in a collective while another one cannot fetch."""
    kind = "ModelParallel sharded"
    first = start(kind)
    succeeded(first)
    ill = Rule(operations=("open",), name="__1_0", error="reset", lasting_s=OUTAGE_S)
    resume = f"{first.job.folder}/step=4.ckpt"

    again = start(kind, ill, folder=first.job.folder, steps=6, resume=resume)
    succeeded(again)

    assert states(again, "starts") == states(first, "ends")


def test_a_directory_without_metadata_is_no_checkpoint_to_any_rank(
    start: Callable[..., Running],
) -> None:
    """Every rank ends with the same error, which says what is missing."""
    kind = "ModelParallel sharded"
    first = start(kind)
    succeeded(first)
    resume = f"{first.job.folder}/step=4.ckpt"
    Path(resume.removeprefix("faulty://"), "meta.pt").unlink()

    again = start(kind, folder=first.job.folder, steps=6, resume=resume)

    reports = failed_alike(again, error="CheckpointError")
    assert all("without the metadata of a checkpoint" in report["text"] for report in reports)


@pytest.mark.parametrize("kind", ["ModelParallel full", "FSDP full"])
def test_a_background_write_of_a_gathered_checkpoint_does_not_fail_in_silence(
    kind: str, start: Callable[..., Running]
) -> None:
    """These strategies forget to wait for it at the end of the fit; all ranks do, and raise."""
    denied = Rule(operations=("put_file",), name="step=4", error="denied")
    running = start(kind, denied, trainer={"plugins": [AsyncCheckpointIO()]})

    writer, other = running.wait()

    assert writer["error"] == other["error"] == "JointError", running.told()
    assert writer["text"] == other["text"]
    assert writer["causes"][0] == "PermissionError: Access Denied"
    assert files(running) == {"step=2.ckpt"}
    assert writer["patched"] == other["patched"] == []


def full_on_rank_one(_trainer: Any) -> None:
    """Let the node's disk be full when rank 1 writes its shard."""
    if os.environ["RANK"] == "0":
        return

    def write_data(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    vars(filesystem)["FileSystemWriter"].write_data = write_data


def test_a_rank_that_cannot_write_on_its_node_fails_all_before_storage_is_asked(
    start: Callable[..., Running],
) -> None:
    """What torch tells all ranks in a collective becomes one verdict, and nothing is published."""
    running = start("ModelParallel sharded", before=full_on_rank_one)

    reports = failed_alike(running)

    assert {report["outcome"] for report in reports} == {"capacity"}
    assert running.plan.calls("put_file", "rm") == []
    assert staged(running) == []


def unreadable_on_rank_one(_trainer: Any) -> None:
    """Let rank 1 alone fail at the last file that the strategy reads."""
    if os.environ["RANK"] == "0":
        return
    load = torch.load

    def load_but(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith("meta.pt"):
            message = "the archive is damaged"
            raise RuntimeError(message)
        return load(path, *args, **kwargs)

    vars(torch)["load"] = load_but


def test_no_rank_trains_on_with_what_another_could_not_load(
    start: Callable[..., Running],
) -> None:
    """The strategy's own load has no collective at its end, so only we can tell the others."""
    kind = "ModelParallel sharded"
    first = start(kind)
    succeeded(first)
    resume = f"{first.job.folder}/step=4.ckpt"

    again = start(
        kind, folder=first.job.folder, steps=6, resume=resume, before=unreadable_on_rank_one
    )

    reports = failed_alike(again)
    assert {report["first_rank"] for report in reports} == {1}
    assert all("the archive is damaged" in report["text"] for report in reports)
    assert states(again, "starts") == []
    assert staged(again) == []
