# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that save and load with ``torch.distributed.checkpoint``, where some of it fails.

The last word is always the same: all ranks say the same, and there is metadata under the
checkpoint's name only where every shard of every rank is there.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests import lightning_job
from tests.dcp_job import JOINT, OPTIONS, RETRY, DcpJob, run_rank
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import store_server


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lightning_job import Running
    from tests.s3_server import S3Server
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

HANG_S = 50.0
KEYS_OF_A_BATCH = 130
"""What two ranks have in the store before keys are removed, which is done for 16 operations."""


@pytest.fixture
def start(warm_python: WarmPython, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a job of some ranks, on storage with these faults."""
    with contextlib.ExitStack() as servers:

        def start_job(
            *steps: tuple[str, str], rules: tuple[Rule, ...] = (), **options: Any
        ) -> Running:
            environment = options.pop("environment", None)
            job: Any = DcpJob(
                **{"folder": f"faulty://{tmp_path}/checkpoints", "steps": steps, **options}
            )
            plan = FaultPlan.write(tmp_path / "plan", *rules)
            return lightning_job.start(
                warm_python,
                job,
                tmp_path / "job",
                port=servers.enter_context(store_server()),
                plan=plan,
                environment=environment,
                function=run_rank,
            )

        yield start_job


def rows(running: Running, *, within_s: float = HANG_S) -> list[list[dict[str, Any]]]:
    """Return what each rank has told of each step, once all have ended."""
    reports = running.wait(within_s)
    assert [report["code"] for report in reports] == [0] * len(reports), running.told()
    return [report["steps"] for report in reports]


def values_of(told: list[list[dict[str, Any]]], step: int) -> list[Any]:
    """Return what each rank has loaded in a step: the rows that it has, in the order of ranks."""
    assert [rank[step].get("error") for rank in told] == [None] * len(told)
    weights = [rank[step]["value"][0] for rank in told]
    assert all(rank[step]["value"][1] == weights[0][0] for rank in told)
    return [row for weight in weights for row in weight]


def expected(value: float) -> list[list[float]]:
    """Return the whole tensor of a state."""
    return [[4.0 * row + column + value for column in range(4)] for row in range(8)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_saved_is_loaded_by_torch_as_well(
    start: Callable[..., Running], tmp_path: Path, ranks: int
) -> None:
    """What the writer has saved, both readers load, and the reader loads what torch has saved."""
    folder = tmp_path / "checkpoints"

    told = rows(
        start(
            ("save", "ours"),
            ("load", "ours"),
            ("load_stock", "ours"),
            ("save_stock", "torchs"),
            ("load", "torchs"),
            folder=str(folder),
            ranks=ranks,
        )
    )

    assert values_of(told, 1) == values_of(told, 2) == expected(1.0)
    assert values_of(told, 4) == expected(2.0)
    shards = [path.name.split("_")[2] for path in (folder / "ours").glob("*.distcp")]
    assert sorted(shards) == [str(rank) for rank in range(ranks)]
    assert (folder / ".resilience" / "ours.json").exists()


DENIED = {"error": "denied"}
NEW = {"name": "checkpoints/new"}
POINTS: dict[str, dict[str, Any]] = {
    "open": {"operations": ("stage_open",), **DENIED},
    "write": {"operations": ("stage_write",), **DENIED},
    "publish": {"operations": ("put_file",), **NEW, **DENIED},
    "verify": {"operations": ("put_file",), **NEW, "swallow": True},
}
"""Where a rank's part can fail, and how."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_a_failure_of_one_rank_is_that_of_all(
    start: Callable[..., Running], tmp_path: Path, point: str, rank: int
) -> None:
    """All raise the same error, which names the rank, and there is no metadata; the older stays."""
    told = rows(
        start(
            ("save_stock", "old"),
            ("save", "new"),
            ("load", "old"),
            rules=(Rule(rank=rank, **POINTS[point]),),
        )
    )

    (error, text, first_rank), *others = [
        (each[1].get("error"), each[1].get("text"), each[1].get("first_rank")) for each in told
    ]
    assert (error, first_rank) == ("JointError", rank)
    assert others == [(error, text, first_rank)]
    assert f"on rank {rank}" in str(text)
    assert not (tmp_path / "checkpoints" / "new" / ".metadata").exists()
    assert not (tmp_path / "checkpoints" / ".resilience" / "new.json").exists()
    assert values_of(told, 2) == expected(1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_local_file_that_gets_no_name_fails_on_all_ranks(
    start: Callable[..., Running], tmp_path: Path, rank: int
) -> None:
    """Beside its target a staged file is renamed; where that is refused, nothing of it is left."""
    folder = tmp_path / "checkpoints"
    rule = Rule(operations=("rename",), name=f"new/__{rank}_", error="denied")

    told = rows(start(("save", "old"), ("save", "new"), folder=str(folder), rules=(rule,)))

    assert [(each[1]["error"], each[1]["first_rank"]) for each in told] == [
        ("JointError", rank)
    ] * 2
    left = sorted(path.name.split("_")[2] for path in (folder / "new").iterdir())
    assert left == [str(1 - rank)]
    assert (folder / "old" / ".metadata").exists()


def test_metadata_that_cannot_be_published_fails_on_all_ranks(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """Every shard is there, and there is no checkpoint: all ranks raise what rank 0 has met."""
    rule = Rule(operations=("put_file",), name="new/.metadata", error="denied")

    told = rows(start(("save_stock", "old"), ("save", "new"), ("load", "old"), rules=(rule,)))

    assert [(each[1]["error"], each[1]["first_rank"]) for each in told] == [("JointError", 0)] * 2
    assert told[0][1]["text"] == told[1][1]["text"]
    assert len(list((tmp_path / "checkpoints" / "new").glob("*.distcp"))) == 2
    assert not (tmp_path / "checkpoints" / "new" / ".metadata").exists()
    assert values_of(told, 2) == expected(1.0)


def test_a_checkpoint_without_its_manifest_is_no_success(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """Where the commit mark cannot be written, all ranks say so; what is there loads all the same.

    It is complete, and nobody has said so.
    """
    rule = Rule(operations=("manifest_put_file",), name="new", error="denied")

    told = rows(start(("save", "new"), ("load", "new"), rules=(rule,)))

    assert [(each[0]["error"], each[0]["first_rank"]) for each in told] == [("JointError", 0)] * 2
    assert not (tmp_path / "checkpoints" / ".resilience" / "new.json").exists()
    assert values_of(told, 1) == expected(1.0)


def test_a_blip_is_waited_out_by_all(start: Callable[..., Running]) -> None:
    """Where the first request of each kind breaks off, the save succeeds on all ranks."""
    rules = tuple(
        Rule(operations=("put_file",), name=name, error="reset", last=1)
        for name in ("__0_", "__1_", ".metadata")
    )

    told = rows(start(("save", "new"), ("load", "new"), rules=rules))

    assert values_of(told, 1) == expected(1.0)


def test_a_save_over_an_older_one_that_fails_leaves_that(start: Callable[..., Running]) -> None:
    """Under the same name the older checkpoint loads until the new metadata is there."""
    rule = Rule(operations=("put_file",), name="same/.metadata", error="denied", first=2, last=2)

    told = rows(
        start(
            ("save", "same"),
            ("save", "same"),
            ("load", "same"),
            ("save", "same"),
            ("load", "same"),
            rules=(rule,),
        )
    )

    assert [each[1]["error"] for each in told] == ["JointError"] * 2
    assert values_of(told, 2) == expected(1.0)
    assert values_of(told, 4) == expected(3.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_is_named(
    start: Callable[..., Running], tmp_path: Path, rank: int
) -> None:
    """The other ends with a ``JointError`` that names it, long before the group's timeout."""
    rule = Rule(operations=("put_file",), name=f"new/__{rank}_", kill=True)
    running = start(("save", "new"), rules=(rule,), group_timeout_s=600.0)

    reports = running.wait(HANG_S)

    other = reports[1 - rank]["steps"][0]
    assert reports[rank]["code"] == -signal.SIGKILL
    assert (other["error"], other["first_rank"]) == ("JointError", rank)
    assert f"rank {rank}" in other["text"]
    assert not (tmp_path / "checkpoints" / "new" / ".metadata").exists()


@pytest.mark.parametrize(
    ("operation", "name"), [("put_file", "new/.metadata"), ("manifest_put_file", "new")]
)
def test_rank_zero_is_killed_while_it_completes_the_checkpoint(
    start: Callable[..., Running], tmp_path: Path, operation: str, name: str
) -> None:
    """The other names it; what is found afterwards is a complete checkpoint, or none."""
    rule = Rule(operations=(operation,), name=name, kill=True)
    running = start(("save", "new"), rules=(rule,), group_timeout_s=600.0)
    reports = running.wait(HANG_S)

    other = reports[1]["steps"][0]
    assert reports[0]["code"] == -signal.SIGKILL
    assert (other["error"], other["first_rank"]) == ("JointError", 0)

    told = rows(start(("load", "new")))

    is_there = operation == "manifest_put_file"
    assert [each[0].get("error") is None for each in told] == [is_there] * 2
    assert (tmp_path / "checkpoints" / "new" / ".metadata").exists() is is_there


def test_a_flipped_bit_is_found_before_any_tensor_is_touched(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """Where one shard is not what was saved, no rank has loaded anything, and all say which."""
    folder = tmp_path / "checkpoints"
    rows(start(("save", "new"), folder=str(folder)))
    (shard,) = (folder / "new").glob("__1_*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)

    told = rows(start(("load", "new"), folder=str(folder)))

    assert [each[0]["error"] for each in told] == ["JointError"] * 2
    assert told[0][0]["text"] == told[1][0]["text"]
    assert "CorruptCheckpointError" in told[0][0]["text"]
    assert shard.name in told[0][0]["text"]
    assert "CorruptCheckpointError" in {each[0]["cause"] for each in told}


@pytest.mark.parametrize("damage", ["shard is gone", "shard is short", "no metadata"])
def test_what_is_missing_is_found_by_one_rank(
    start: Callable[..., Running], tmp_path: Path, damage: str
) -> None:
    """Rank 0 looks, and all raise the same."""
    folder = tmp_path / "checkpoints"
    rows(start(("save", "new"), folder=str(folder)))
    (shard,) = (folder / "new").glob("__1_*.distcp")
    if damage == "shard is gone":
        shard.unlink()
    elif damage == "shard is short":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (folder / "new" / ".metadata").unlink()

    told = rows(start(("load", "new"), folder=str(folder)))

    assert [(each[0]["error"], each[0]["first_rank"]) for each in told] == [("JointError", 0)] * 2
    assert told[0][0]["text"] == told[1][0]["text"]


def test_a_save_in_a_thread_is_joint_as_well(start: Callable[..., Running]) -> None:
    """``async_save`` raises the same on all ranks, in its future, and the next save succeeds."""
    rule = Rule(operations=("put_file",), name="new/__1_", error="denied", last=1)

    told = rows(start(("save_async", "new"), ("save_async", "new"), ("load", "new"), rules=(rule,)))

    assert [(each[0]["error"], each[0]["first_rank"]) for each in told] == [("JointError", 1)] * 2
    assert values_of(told, 2) == expected(2.0)


def test_object_storage_is_saved_to_and_loaded_from(
    start: Callable[..., Running], s3_server: S3Server, bucket: str
) -> None:
    """The same on S3, where shards are fetched to the node before they are read."""
    told = rows(
        start(
            ("save", "new"),
            ("load", "new"),
            folder=f"s3://{bucket}/checkpoints",
            environment=s3_server.environment,
        )
    )

    assert values_of(told, 1) == expected(1.0)


def test_a_save_in_a_process_is_joint_as_well(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """The writer travels there; the error is the same on all ranks, and the next save succeeds."""
    rule = Rule(operations=("put_file",), name="new/__1_", error="denied", last=1)

    told = rows(
        start(("save_in_process", "new"), ("save_in_process", "new"), rules=(rule,)),
        within_s=150.0,
    )

    assert [(each[0]["error"], each[0]["first_rank"]) for each in told] == [("JointError", 1)] * 2
    assert [each[1].get("error") for each in told] == [None] * 2
    assert (tmp_path / "checkpoints" / ".resilience" / "new.json").exists()


def test_groups_of_ranks_save_at_the_same_time(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """Each pair agrees among itself, and neither waits for the other."""
    told = rows(start(("save_in_pairs", "new"), ("save_in_pairs", "next"), ranks=4))

    assert [row.get("error") for each in told for row in each] == [None] * 8
    names = {path.stem for path in (tmp_path / "checkpoints" / ".resilience").glob("*.json")}
    assert names == {"new-0", "new-1", "next-0", "next-1"}


def test_ranks_save_by_themselves_although_there_is_a_group(start: Callable[..., Running]) -> None:
    """With ``no_dist`` each rank has a checkpoint of its own, and waits for nobody."""
    told = rows(start(("save_by_itself", "own"), ("save", "new"), ("load", "new")))

    assert [each[0].get("error") for each in told] == [None] * 2
    assert values_of(told, 2) == expected(1.0)


def test_one_rank_asks_whether_there_is_a_checkpoint(start: Callable[..., Running]) -> None:
    """Of four ranks one looks for the manifest and the files; all read the metadata."""
    running = start(("save", "new"), ("load", "new"), ranks=4)
    told = rows(running)

    assert values_of(told, 1) == expected(1.0)
    looked = running.plan.calls("info", name="new/.metadata")
    asked_by = [call["rank"] for call in running.plan.calls("manifest_cat_file", name="new")]
    read_by = [call["rank"] for call in running.plan.calls("cat_file", name="new/.metadata")]
    # Who has written a file reads its end once.
    assert asked_by == ["0", "0"]
    assert {call["rank"] for call in looked} == {"0"}
    assert sorted(read_by) == ["0", "0", "1", "2", "3"]


def test_an_outage_that_outlasts_the_group_is_waited_out(start: Callable[..., Running]) -> None:
    """No rank is in a collective meanwhile, so the group's timeout does not run."""
    rule = Rule(operations=("put_file",), name="/new/", error="reset", lasting_s=9.0)
    options = {**OPTIONS, "joint": {**JOINT, "joint_timeout_s": 4.5}}

    told = rows(
        start(
            ("save", "new"),
            ("load", "new"),
            rules=(rule,),
            group_timeout_s=6.0,
            options={**options, "retry": {**RETRY, "deadline_s": 40.0}},
        )
    )

    assert values_of(told, 1) == expected(1.0)
    assert min(each[0]["elapsed_s"] for each in told) > 6.0


def test_a_rank_that_is_interrupted_tells_the_others(start: Callable[..., Running]) -> None:
    """It goes on being interrupted, and the other does not wait for it in a collective."""
    rule = Rule(operations=("put_file",), name="new/__1_", hang=True)
    running = start(("save", "new"), rules=(rule,), group_timeout_s=600.0)
    running.until(
        lambda: bool(running.plan.calls("put_file", name="new/__1_")), what="rank 1 publishes"
    )

    running.ranks[1].signal(signal.SIGINT)
    told = rows(running)

    assert told[1][0]["error"] == "KeyboardInterrupt"
    assert (told[0][0]["error"], told[0][0]["first_rank"]) == ("JointError", 1)
    assert "cancelled" in told[0][0]["text"]


def test_a_rank_that_is_killed_while_it_reads_is_named(start: Callable[..., Running]) -> None:
    """The other has loaded nothing, and ends long before the group's timeout."""
    rule = Rule(operations=("open",), name="new/__1_", rank=1, kill=True)
    running = start(("save", "new"), ("load", "new"), rules=(rule,), group_timeout_s=600.0)

    reports = running.wait(HANG_S)

    other = reports[0]["steps"][1]
    assert reports[1]["code"] == -signal.SIGKILL
    assert (other["error"], other["first_rank"]) == ("JointError", 1)


def test_any_number_of_saves_leaves_few_keys(start: Callable[..., Running], tmp_path: Path) -> None:
    """A writer for each save is no start anew: what nobody reads again is removed."""
    told = rows(start(*[("save_often", "same")] * 4, folder=str(tmp_path / "checkpoints")))

    numbers = [row["value"] for row in told[0]]
    assert max(numbers) <= KEYS_OF_A_BATCH
