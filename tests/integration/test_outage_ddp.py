# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Two ranks, DDP on gloo, and storage that fails in every place where Lightning touches it.

The process group's timeout is 6 s, and the outages are longer: a rank that waited in a collective
would be gone before they end.

By default a save is spooled, so training goes on and only its end waits. Where the claim is about
what stands behind a call that takes that long in the middle of training, or about a deadline, the
job says ``on_outage="wait"``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from lightning.pytorch import Callback

from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import WAIT, Job, Running, store_server


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

GROUP_TIMEOUT_S = 6.0
OUTAGE_S = 8.0
"""Longer than the process group's timeout."""
Jobs: TypeAlias = "dict[str, Running]"

NOT_PATIENT = {"on_outage": "fail"}


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a store server that outlives the ranks."""
    with store_server() as number:
        yield number


@pytest.fixture
def start(warm_python: WarmPython, tmp_path: Path, port: int) -> Callable[..., Running]:
    """Start a job of two ranks on storage with these faults."""

    def start_job(*rules: Rule, **job: Any) -> Running:
        folder = f"faulty://{tmp_path}/checkpoints"
        plan = FaultPlan.write(tmp_path / "plan", *rules)
        made = Job(**{"folder": folder, **job})
        return lightning_job.start(warm_python, made, tmp_path / "job", port=port, plan=plan)

    return start_job


def succeeded(running: Running, *, abandoned: int = 0) -> list[dict[str, Any]]:
    """Wait for the end of a job that is to end well, with so many calls that still hang."""
    reports = running.wait()
    assert [report["code"] for report in reports] == [0, 0], running.told()
    threads = ["lightning-resilience-call"] * abandoned
    assert [report["threads"] for report in reports] == [threads, []]
    assert [report["patched"] + report["handlers"] for report in reports] == [[], []]
    return reports


def struck_s(running: Running) -> float:
    """Time between the first and the last call that failed, in seconds."""
    times = [call["at_s"] for call in running.plan.calls() if call["struck"]]
    return float(times[-1] - times[0])


def failed_alike(running: Running, *, within_s: float = 5.0) -> list[dict[str, Any]]:
    """Wait for the end of a job that is to fail with the same error on both ranks."""
    reports = running.wait()
    first, second = reports
    assert first["code"] != 0, running.told()
    assert second["code"] != 0, running.told()
    assert (first["error"], first["text"]) == (second["error"], second["text"]), running.told()
    assert abs(first["ended_at_s"] - second["ended_at_s"]) < within_s
    for report in reports:
        assert report["error"] == "JointError", running.told()
        assert (report["patched"], report["threads"], report["handlers"]) == ([], [], [])
    return reports


# What stands between the ranks and a collective, place by place -----------------------------------


def links_fail(_trainer: Any) -> None:
    """Make links follow the plan: ``save_last="link"`` does not go through fsspec."""
    plan = FaultPlan(os.environ["FAULTY_FILESYSTEM"])
    link = os.symlink

    def symlink(source: Any, target: Any, **kwargs: Any) -> None:
        if plan.strike("symlink", str(target)) is not None:
            raise ConnectionResetError
        link(source, target, **kwargs)

    def copy(source: Any, target: Any, **_kwargs: Any) -> None:
        # Lightning copies where it cannot link.
        plan.strike("copy", f"{source} {target}")
        raise ConnectionResetError

    vars(os)["symlink"] = symlink
    vars(shutil)["copy"] = copy


def outage(*operations: str, name: str = "") -> Rule:
    """Reset the connections of these operations for longer than the group's timeout."""
    return Rule(operations=operations, name=name, error="reset", lasting_s=OUTAGE_S)


PLACES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "everywhere": (outage(), {}),
    "put": (outage("put_file"), {"before": lightning_job.show_bar}),
    "exists": (outage("info", name="step=2"), {}),
    "list": (outage("isdir", "ls"), {}),
    "remove": (outage("rm_file", name="step=2"), {"checkpoint": {"save_top_k": 1}}),
    "last": (outage("put_file", name="last"), {"checkpoint": {"save_last": True}}),
    "link": (outage("symlink"), {"checkpoint": {"save_last": "link"}, "before": links_fail}),
}


def begin(
    places: Mapping[str, tuple[Rule, dict[str, Any]]],
    policy: Mapping[str, str],
    warm_python: WarmPython,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Jobs]:
    """Start one job for each place, all at the same time: they spend theirs waiting."""
    with contextlib.ExitStack() as servers:
        jobs = {}
        for place, (rule, options) in places.items():
            home = tmp_path_factory.mktemp(place.replace(" ", "-"))
            folder = f"{home}/checkpoints" if place == "link" else f"faulty://{home}/checkpoints"
            jobs[place] = lightning_job.start(
                warm_python,
                Job(folder=folder, group_timeout_s=GROUP_TIMEOUT_S, options=policy, **options),
                home / "job",
                port=servers.enter_context(store_server()),
                plan=FaultPlan.write(home / "plan", rule),
            )
        yield jobs


@pytest.fixture(scope="module")
def ill(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Start one job for each place, whose saves wait."""
    yield from begin(PLACES, WAIT, warm_python, tmp_path_factory)


@pytest.fixture(scope="module")
def spooled(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Start one job for each place, whose saves are spooled."""
    yield from begin(PLACES, {}, warm_python, tmp_path_factory)


@pytest.mark.parametrize("place", PLACES)
def test_an_outage_longer_than_the_group_timeout_is_survived(place: str, ill: Jobs) -> None:
    """Wherever storage fails for longer than the group's timeout, both ranks wait for it."""
    survived(place, ill[place])


@pytest.mark.parametrize("place", PLACES)
def test_an_outage_that_outlasts_training_is_survived(place: str, spooled: Jobs) -> None:
    """Wherever storage fails, both ranks train on, and the end waits until all is as it should."""
    survived(place, spooled[place])


def survived(place: str, running: Running) -> None:
    """Check that a job has ended well with all checkpoints, and only with them."""
    succeeded(running)

    kept = ["step=4.ckpt"] if place == "remove" else running.job.expected
    last = ["last.ckpt"] if place in {"last", "link"} else []
    assert running.names() == last + kept
    assert running.steps() == [4] * len(last) + ([4] if place == "remove" else [2, 4])
    assert struck_s(running) > 2


def test_every_rank_reads_the_same_history(ill: Jobs) -> None:
    """At the end, the breaker's history is the same on both ranks, and shows the outage."""
    running = ill["put"]

    breakers = [report["breakers"]["faulty://:write"] for report in succeeded(running)]

    assert breakers[0]["history"] == breakers[1]["history"]
    states = [state for _, state, _ in breakers[0]["history"]]
    assert states[:3] == ["closed", "open", "half_open"]
    assert states[-1] in {"recovering", "closed"}


def test_an_outage_sees_few_requests(ill: Jobs) -> None:
    """An outage sees the attempts that open the circuit, and then one probe at a time."""
    running = ill["put"]

    succeeded(running)

    struck = [call for call in running.plan.calls("put_file") if call["struck"]]
    # Three failures open the circuit; probes follow, 2.5 s apart.
    assert 3 < len(struck) <= 3 + 1 + OUTAGE_S / 2.5


def test_the_progress_bar_tells_of_an_outage(ill: Jobs) -> None:
    """It says what a save waits for, and afterwards the epoch again, on rank 0 alone."""
    running = ill["put"]

    succeeded(running)

    texts = [process.text() for process in running.ranks]
    waiting = [text.find("paused, waits for faulty://:write") for text in texts]
    assert 0 < waiting[0] < texts[0].rfind("Epoch 0:"), running.told()
    assert waiting[1] == -1


def test_a_last_checkpoint_that_is_a_link_is_one(ill: Jobs) -> None:
    """An outage while linking does not turn the link into a copy."""
    running = ill["link"]

    succeeded(running)

    assert Path(running.job.folder, "last.ckpt").is_symlink()


# Which collective stands behind rank 0's call -----------------------------------------------------


class Following(Callback):
    """A collective of the user's, right after what the checkpoint callbacks do after a step.

    Args:
        kind: Which.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Enter it, on every rank."""
        strategy = trainer.strategy
        collectives: dict[str, Callable[[], Any]] = {
            "barrier": strategy.barrier,
            "broadcast": partial(strategy.broadcast, 0),
            "reduce": partial(strategy.reduce, torch.ones(1)),
            "gather": partial(strategy.all_gather, torch.ones(1)),
            "decision": partial(strategy.reduce_boolean_decision, decision=True),
        }
        collectives[self._kind]()


class Removing(Callback):
    """Asks for a removal at a step without a save."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Ask, on every rank, as a checkpoint callback does."""
        if trainer.global_step == 3:
            folder = lightning_job.find(trainer, "ModelCheckpoint").dirpath
            trainer.strategy.remove_checkpoint(f"{folder}/step=2.ckpt")


def last_comes(trainer: Any, *, callback: Callback) -> None:
    """Let a Trainer have a callback that runs after its checkpoint callbacks."""
    trainer.callbacks.append(callback)


def has_versions(trainer: Any) -> None:
    """Have files there already, so that the next one needs a third name."""
    if os.environ["RANK"] == "0":
        path = lightning_job.find(trainer, "ModelCheckpoint").dirpath
        folder = Path(path[path.index("/") :].removeprefix("//"))
        folder.mkdir(parents=True)
        for name in ("step=2.ckpt", "step=2-v1.ckpt"):
            torch.save({"global_step": 0}, folder / name)


REMOVES: dict[str, Any] = {"steps": 6, "checkpoint": {"save_top_k": 1}}
BEHIND: dict[str, tuple[Rule, dict[str, Any]]] = {
    # What comes after a removal: Lightning's own broadcast of its stop flag, at every step ...
    "removal, stop flag": (outage("rm_file", name="step=2"), REMOVES),
    # ... and whatever a callback of the user's does before that.
    **{
        f"removal, {kind}": (
            outage("rm_file", name="step=2"),
            REMOVES | {"before": partial(last_comes, callback=Following(kind))},
        )
        for kind in ("barrier", "broadcast", "reduce", "gather", "decision")
    },
    "removal, by a callback": (
        outage("rm_file", name="step=2"),
        {
            "steps": 6,
            "checkpoint": {"save_last": True},
            "before": partial(last_comes, callback=Removing()),
        },
    ),
    "removal, time": (
        outage("rm_file", name="step=2"),
        {
            "checkpoint": {
                "every_n_train_steps": None,
                "train_time_interval": timedelta(0),
                "save_top_k": 1,
            }
        },
    ),
    "removal, top k": (
        outage("rm_file", name="step=2"),
        {"every": 1, "checkpoint": {"monitor": "step", "mode": "max", "save_top_k": 1}},
    ),
    "version": (outage("info", name="step=2-v1"), {"before": has_versions}),
}
KEPT = {
    "removal, by a callback": ["last.ckpt", "step=4.ckpt", "step=6.ckpt"],
    "removal, time": ["step=4.ckpt"],
    "removal, top k": ["step=4.ckpt"],
    "version": ["step=2.ckpt", "step=4.ckpt", "step=2-v1.ckpt", "step=2-v2.ckpt"],
}


@pytest.fixture(scope="module")
def behind(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Start one job for each collective that may stand behind rank 0's call."""
    yield from begin(BEHIND, WAIT, warm_python, tmp_path_factory)


@pytest.mark.parametrize("place", BEHIND)
def test_no_collective_waits_for_a_call_of_rank_zero(place: str, behind: Jobs) -> None:
    """Whatever the other rank comes to next, it is there no longer than its timeout."""
    running = behind[place]

    succeeded(running)

    assert running.names() == KEPT.get(place, ["step=6.ckpt"])
    assert struck_s(running) > 2


# Failing together ---------------------------------------------------------------------------------


def test_under_fail_both_ranks_raise_the_same_error(start: Callable[..., Running]) -> None:
    """With ``on_outage="fail"`` both ranks raise one error with the first cause and its rank."""
    running = start(Rule(operations=("put_file",), error="reset"), options=NOT_PATIENT)

    reports = failed_alike(running)

    assert "ConnectionResetError" in reports[1]["text"]
    assert "on rank 0" in reports[1]["text"]
    assert [report["first_rank"] for report in reports] == [0, 0]
    assert reports[0]["causes"][0].startswith("ConnectionResetError")
    assert running.names() == []


def test_a_permanent_error_takes_one_attempt_and_reaches_both_ranks(
    start: Callable[..., Running],
) -> None:
    """AccessDenied is tried once, opens no circuit, and ends both ranks with its code in words."""
    running = start(Rule(operations=("put_file",), error="denied"))

    reports = failed_alike(running)

    assert len(running.plan.calls("put_file")) == 1
    assert "permanent" in reports[1]["text"]
    assert "AccessDenied" in reports[1]["text"]
    assert "on rank 0" in reports[1]["text"]
    history = reports[1]["breakers"]["faulty://:write"]["history"]
    assert [state for _, state, _ in history] == ["closed"]


def test_an_error_that_nobody_knows_has_a_small_limit(start: Callable[..., Running]) -> None:
    """An unknown failure is tried twice, and then ends both ranks alike."""
    running = start(Rule(operations=("put_file",), error="odd"))

    reports = failed_alike(running)

    assert len(running.plan.calls("put_file")) == 2
    assert "RuntimeError" in reports[1]["text"]


def test_the_deadline_ends_both_ranks(start: Callable[..., Running]) -> None:
    """An outage longer than the deadline ends both ranks with the same error."""
    running = start(
        Rule(operations=("put_file",), error="reset"),
        options={**WAIT, "retry": {"deadline_s": 4.0}},
    )

    reports = failed_alike(running)

    assert "ConnectionResetError" in reports[1]["text"]


# Calls that do not come back ----------------------------------------------------------------------


def test_a_call_that_hangs_is_abandoned_and_the_next_succeeds(
    start: Callable[..., Running],
) -> None:
    """A put that never returns is left behind at ``stall_timeout_s``, and made again."""
    running = start(
        Rule(operations=("put_file",), hang=True, last=1), options={"retry": {"stall_timeout_s": 1}}
    )

    succeeded(running, abandoned=1)

    assert running.names() == running.job.expected
    assert running.steps() == [2, 4]
    assert "was abandoned after 1 s without progress" in running.ranks[0].text()
    assert "failed (transient)" in running.ranks[0].text()


def remove_what_the_hang_holds(trainer: Any) -> None:
    """After the last save: take the checkpoint away, let the hanging call go on, and let it end."""
    plan = FaultPlan(os.environ["FAULTY_FILESYSTEM"])
    callback = lightning_job.find(trainer, "ModelCheckpoint")
    if os.environ["RANK"] != "0":
        return
    inner = callback.on_train_end

    def on_train_end(*args: Any) -> None:
        inner(*args)
        os.unlink(callback.best_model_path.removeprefix("faulty://"))  # noqa: PTH108
        plan.release()
        assert lightning_job.our_threads("lightning-resilience-call", within_s=20) == []

    callback.on_train_end = on_train_end


def test_an_abandoned_call_does_not_publish_later(start: Callable[..., Running]) -> None:
    """What was abandoned finds its token set when it comes back, and shows nothing."""
    running = start(
        Rule(operations=("put_file",), hang=True, last=1),
        steps=2,
        options={"retry": {"stall_timeout_s": 1}},
        before=remove_what_the_hang_holds,
    )

    succeeded(running)

    assert len(running.plan.calls("put_file")) == 2
    assert running.names() == []


def test_a_put_that_only_pretends_is_made_again(start: Callable[..., Running]) -> None:
    """A save is believed once storage reports the file's size, not because nothing was raised."""
    running = start(Rule(operations=("put_file",), swallow=True, last=1))

    succeeded(running)

    assert len(running.plan.calls("put_file")) == 3
    assert running.steps() == [2, 4]


# Restarts -----------------------------------------------------------------------------------------


def die_in_the_second_save(trainer: Any) -> None:
    """Make this rank vanish in the middle of a run, its keys left in the store."""
    save = trainer.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        if trainer.global_step >= 4:
            os._exit(9)
        save(*args, **kwargs)

    trainer.save_checkpoint = save_checkpoint


@pytest.mark.parametrize(
    ("rules", "before"),
    [
        ((), die_in_the_second_save),
        ((Rule(operations=("put_file",), error="denied", last=1),), None),
    ],
    ids=["died", "failed"],
)
def test_keys_of_an_earlier_attempt_are_never_believed(
    rules: tuple[Rule, ...],
    before: Callable[[Any], None] | None,
    warm_python: WarmPython,
    tmp_path: Path,
    port: int,
) -> None:
    """The next attempt of the same run, on the same store server, does all of its own saves."""
    plan = FaultPlan.write(tmp_path / "plan", *rules)
    job = Job(folder=f"faulty://{tmp_path}/checkpoints", before=before)
    again = Job(folder=job.folder)
    run: dict[str, Any] = {"port": port, "run_id": "run", "plan": plan}
    first = lightning_job.start(warm_python, job, tmp_path / "first", **run)
    codes = [report["code"] for report in first.wait()]
    for name in first.names():
        (tmp_path / "checkpoints" / name).unlink()
    lightning_job.forget_group(port)

    second = lightning_job.start(warm_python, again, tmp_path / "second", restarts=1, **run)
    succeeded(second)

    assert codes == ([1, 1] if rules else [9, 9])
    assert second.names() == again.expected
    assert second.steps() == [2, 4]


def test_an_open_circuit_of_an_earlier_attempt_ends_in_a_probe_not_in_a_hang(
    warm_python: WarmPython, tmp_path: Path, port: int
) -> None:
    """An attempt that starts on an open circuit waits for its probe, and then trains on."""
    plan = FaultPlan.write(tmp_path / "plan", Rule(operations=("put_file",), error="reset", last=4))
    job = Job(folder=f"faulty://{tmp_path}/checkpoints", options=NOT_PATIENT)
    again = Job(folder=job.folder)
    first = lightning_job.start(
        warm_python, job, tmp_path / "first", port=port, run_id="run", plan=plan
    )
    failed_alike(first)
    lightning_job.forget_group(port)

    second = lightning_job.start(
        warm_python, again, tmp_path / "second", port=port, run_id="run", restarts=1, plan=plan
    )
    reports = succeeded(second)

    assert second.names() == again.expected
    states = [state for _, state, _ in reports[0]["breakers"]["faulty://:write"]["history"]]
    assert "open" in states
    assert states[-1] in {"recovering", "closed"}
