# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every ``CheckpointIO`` that a Trainer can have, on storage that fails."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from lightning_resilience import (
    ConfigError,
    JointError,
    ResilienceCallback,
    ResilientCheckpointIO,
    RetriesExhaustedError,
)
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import (
    BREAKER,
    RETRY,
    Job,
    find,
    make_data,
    make_model,
    make_trainer,
    store_server,
)
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm_python import WarmPython


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]

OUTAGE = Rule(operations=("put_file",), error="reset", last=4)
"""Opens the circuit, and fails its first probe."""


class DirectoryIO(CheckpointIO):
    """Writes a directory: weights first, then an index that makes them a checkpoint."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write it to a local path."""
        assert storage_options is None
        self.paths.append(str(path))
        Path(path, "weights").mkdir(parents=True)
        torch.save(checkpoint, Path(path, "weights", "0.pt"))
        Path(path, "index.json").write_text(json.dumps(["weights/0.pt"]), encoding="utf-8")

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> Any:
        """Read it from a local path."""
        self.paths.append(str(path))
        index = json.loads(Path(path, "index.json").read_text(encoding="utf-8"))
        file = Path(path, index[0])
        return torch.load(file, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Leave removal to whoever has published it."""
        raise AssertionError(path)


class OwnPlaceIO(DirectoryIO):
    """Ignores the path that it is given."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Write it nowhere."""


def with_io(job: Job, checkpoint_io: Any) -> Any:
    """Make the Trainer of a job with this plugin."""
    return make_trainer(
        Job(**{**vars(job), "trainer": {**job.trainer, "plugins": [checkpoint_io]}})
    )


def load(folder: Path) -> Any:
    """Read a checkpoint of that format."""
    return DirectoryIO().load_checkpoint(folder)


def run(trainer: Any, resume: str | None = None) -> Any:
    """Train."""
    trainer.fit(make_model(), make_data(), ckpt_path=resume)
    return trainer


def resilient(inner: Any = None, **options: Any) -> ResilientCheckpointIO:
    """Make one with times for tests."""
    return ResilientCheckpointIO(inner, **{"retry": RETRY, "breaker": BREAKER, **options})


def saved(job: Job) -> list[str]:
    """Return the names of the checkpoints that are there; a probe leaves a folder beside them."""
    return [name for name in names(job) if name.endswith(".ckpt")]


# A user's own, with the callback ------------------------------------------------------------------


def test_an_io_of_the_users_own_writes_and_reads_on_this_node(
    faulty: Callable[..., Job], spool: Path
) -> None:
    """Its directory is published whole through an outage, and fetched to be read."""
    job = faulty(OUTAGE)
    own = DirectoryIO()

    run(with_io(job, own))
    trained = run(with_io(Job(**{**vars(job), "steps": 6}), own), f"{job.folder}/step=4.ckpt")

    assert trained.global_step == 6
    assert saved(job) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    folder = Path(job.folder.removeprefix("faulty://"), "step=6.ckpt")
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.*"))]
    assert files == ["index.json", "weights/0.pt"]
    assert [Path(path).name for path in own.paths] == [
        *("step=2.ckpt", "step=4.ckpt", "step=4.ckpt", "step=6.ckpt")
    ]
    assert all(Path(path).is_relative_to(spool) for path in own.paths)
    assert list(spool.rglob("*.*")) == []


def test_files_are_published_in_the_order_in_which_they_were_finished(
    faulty: Callable[..., Job],
) -> None:
    """Whoever comes in between finds weights without an index, and not the other way."""
    job = faulty(steps=2)

    run(with_io(job, DirectoryIO()))

    put = [Path(call["path"]).name for call in plan_in_use().calls("put_file")]
    assert put == ["0.pt", "index.json"]


def test_what_was_published_before_an_outage_is_not_sent_again(
    faulty: Callable[..., Job],
) -> None:
    """The next attempt goes on with the file at which the last has ended."""
    job = faulty(Rule(operations=("put_file",), name="index", error="reset", last=1), steps=2)

    run(with_io(job, DirectoryIO()))

    put = [Path(call["path"]).name for call in plan_in_use().calls("put_file")]
    assert put == ["0.pt", "index.json", "index.json"]


def test_a_directory_takes_the_place_of_an_older_one_on_a_filesystem(
    tmp_path: Path, spool: Path
) -> None:
    """By rename: the older one is gone as a whole, and nothing of ours is left beside it."""
    assert spool.exists()
    folder = tmp_path / "checkpoints"
    options = {"filename": "top", "enable_version_counter": False, "save_last": True}
    job = Job(folder=str(folder), ranks=1, checkpoint={**options, "save_top_k": -1})
    own = DirectoryIO()

    run(with_io(job, own))

    # The second save of each name has found the first.
    there = sorted(path.name for path in folder.iterdir())
    assert there == [".resilience", "last.ckpt", "top.ckpt"]
    assert load(folder / "last.ckpt")["global_step"] == 4
    assert load(folder / "top.ckpt")["global_step"] == 4
    assert {Path(path).name for path in own.paths} == {"last.ckpt", "top.ckpt"}
    assert all(Path(path).parent.parent == folder for path in own.paths)


def test_an_io_that_ignores_the_path_is_told_what_to_do(faulty: Callable[..., Job]) -> None:
    """It raised nothing and wrote nothing: one attempt, and the text names the option."""
    job = faulty()

    with pytest.raises(JointError, match=r"nothing is there.*staging=False") as caught:
        run(with_io(job, OwnPlaceIO()))

    assert caught.value.outcome == "permanent"
    assert isinstance(caught.value.__cause__, ConfigError)
    assert saved(job) == []


def test_an_io_that_cannot_write_locally_is_called_with_the_real_path(
    faulty: Callable[..., Job],
) -> None:
    """With ``staging=False`` it is called as a whole, and repeated as a whole."""
    job = faulty(Rule(operations=("open",), error="reset", last=2))

    trained = run(with_io(job, ResilientCheckpointIO(Own(), staging=False)))

    assert saved(job) == job.expected
    assert len(plan_in_use().calls("open")) == 4
    assert lightning_job.patched(trained) == []


class Own(TorchCheckpointIO):
    """A user's own, which finds its way by itself."""


# Without the callback -----------------------------------------------------------------------------


def test_alone_it_waits_out_an_outage(faulty: Callable[..., Job]) -> None:
    """Saves, loads and removals are guarded and verified without a callback."""
    job = faulty(OUTAGE, options=None, checkpoint={"save_top_k": 1})
    trained = run(with_io(job, resilient()))
    again = faulty(
        Rule(operations=("open",), name="step=4", error="reset", last=2), options=None, steps=6
    )

    resumed = run(with_io(again, resilient()), f"{job.folder}/step=4.ckpt")

    assert (trained.global_step, resumed.global_step) == (4, 6)
    assert saved(job) == ["step=4.ckpt", "step=6.ckpt"]
    assert lightning_job.our_threads() == []


def test_alone_it_raises_what_repeating_cannot_help_as_it_is(faulty: Callable[..., Job]) -> None:
    """A denial is one attempt, and code around a Trainer catches it by its type."""
    job = faulty(Rule(operations=("put_file",), error="denied"), options=None)

    with pytest.raises(PermissionError, match="Access Denied"):
        run(with_io(job, resilient()))

    assert len(plan_in_use().calls("put_file")) == 1


def test_alone_it_raises_the_last_failure_of_a_series_as_the_cause(
    faulty: Callable[..., Job],
) -> None:
    """A failure of a kind that nobody knows is tried twice."""
    job = faulty(Rule(operations=("put_file",), error="odd"), options=None)

    with pytest.raises(RetriesExhaustedError) as caught:
        run(with_io(job, resilient()))

    assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(plan_in_use().calls("put_file")) == 2


def test_alone_a_missing_checkpoint_is_a_missing_file(tmp_path: Path, spool: Path) -> None:
    """As Lightning's own says it."""
    assert spool.exists()

    with pytest.raises(FileNotFoundError):
        resilient().load_checkpoint(tmp_path / "a.ckpt")


def test_switched_off_it_is_lightnings_own(
    faulty: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``LIGHTNING_RESILIENCE=off`` a storage error is raised at once."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")
    job = faulty(Rule(operations=("open",), error="reset"), options=None)

    with pytest.raises(ConnectionResetError):
        run(with_io(job, resilient()))


@pytest.mark.multiprocess
def test_alone_on_two_ranks_it_warns(warm_python: WarmPython, tmp_path: Path) -> None:
    """It saves all the same, and says what is missing."""
    plugins = {"plugins": [ResilientCheckpointIO()]}
    job = Job(folder=f"faulty://{tmp_path}/checkpoints", options=None, trainer=plugins, steps=2)
    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port)
        codes = [process.wait(lightning_job.HANG_S) for process in running.ranks]

    assert codes == [0, 0], running.told()
    assert running.names() == job.expected
    assert "without ResilienceCallback" in running.ranks[0].text()
    assert "without ResilienceCallback" not in running.ranks[1].text()


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_it_can_be_copied_before_and_after_use(way: str, faulty: Callable[..., Job]) -> None:
    """A copy has the options, and nothing that is open."""
    job = faulty(options=None, steps=2)
    used = resilient(DirectoryIO(), run_id="mine")
    used.save_checkpoint({"step": 7}, f"{job.folder}/a.ckpt")

    copied = pickle.loads(pickle.dumps(used)) if way == "pickle" else copy.deepcopy(used)

    assert copied.load_checkpoint(f"{job.folder}/a.ckpt") == {"step": 7}
    assert copied.options == used.options
    for one in (used, copied):
        one.teardown()
    assert lightning_job.our_threads() == []


# Adopted ------------------------------------------------------------------------------------------


def test_the_callback_adopts_one_and_its_options(faulty: Callable[..., Job]) -> None:
    """What is joint is the callback's, and how it retries is said once, on either."""
    job = faulty(Rule(operations=("put_file",), error="odd"), options=None)
    trainer = with_io(job, resilient(retry={**RETRY, "unknown_max_attempts": 3}))
    trainer.callbacks.insert(0, ResilienceCallback())

    with pytest.raises(JointError):
        run(trainer)

    assert len(plan_in_use().calls("put_file")) == 3


def test_options_on_both_are_refused(faulty: Callable[..., Job]) -> None:
    """Nobody knows which of them was meant."""
    job = faulty()

    with pytest.raises(ConfigError, match=r"Callback has retry, breaker.*IO has run_id") as caught:
        run(with_io(job, ResilientCheckpointIO(run_id="mine")))

    assert "Give all of them to the callback" in str(caught.value)
    assert saved(job) == []


# Written in the background ------------------------------------------------------------------------


def test_a_write_in_the_background_waits_out_an_outage(faulty: Callable[..., Job]) -> None:
    """Training goes on meanwhile, and ``fit`` ends once it is written and verified."""
    job = faulty(OUTAGE)
    asynchronous = AsyncCheckpointIO()
    trainer = with_io(job, asynchronous)

    run(trainer)

    assert saved(job) == job.expected
    callback = find(trainer, "ResilienceCallback")
    history = callback.breaker_report()["faulty://:write"].history
    assert "open" in [state for _, state, _ in history]
    assert type(asynchronous.checkpoint_io) is TorchCheckpointIO
    assert lightning_job.patched(trainer) == []
    assert lightning_job.our_threads() == []


def test_a_write_in_the_background_is_verified(faulty: Callable[..., Job]) -> None:
    """A put that stores nothing is made again."""
    job = faulty(Rule(operations=("put_file",), swallow=True, last=1))

    run(with_io(job, AsyncCheckpointIO()))

    assert saved(job) == job.expected


def test_a_failure_in_the_background_ends_the_fit(faulty: Callable[..., Job]) -> None:
    """With what the storage has raised as its cause, and nothing is left behind."""
    job = faulty(Rule(operations=("put_file",), error="denied"), steps=2)
    handlers = lightning_job.handlers()
    trainer = with_io(job, AsyncCheckpointIO())

    with pytest.raises(JointError, match=r"step=2.ckpt failed in the background") as caught:
        run(trainer)

    assert isinstance(caught.value.__cause__, PermissionError)
    assert lightning_job.handlers() == handlers
    assert lightning_job.patched(trainer) == []
    assert len(plan_in_use().calls("put_file")) == 1


def test_an_inner_one_of_ours_is_adopted_in_its_place(faulty: Callable[..., Job]) -> None:
    """``AsyncCheckpointIO(ResilientCheckpointIO())`` uses the callback's breakers."""
    job = faulty(OUTAGE)
    inner = ResilientCheckpointIO(DirectoryIO())

    trainer = run(with_io(job, AsyncCheckpointIO(inner)))

    assert saved(job) == job.expected
    report = find(trainer, "ResilienceCallback").breaker_report()
    assert "open" in [state for _, state, _ in report["faulty://:write"].history]
    assert inner.adopted_by is None


def test_loads_through_one_are_guarded(faulty: Callable[..., Job]) -> None:
    """It passes them on to the inner one, which waits and retries."""
    job = faulty(steps=2)
    fit(job)
    again = faulty(Rule(operations=("open",), name="step=2", error="reset", last=2))

    trained = run(with_io(again, AsyncCheckpointIO()), f"{job.folder}/step=2.ckpt")

    assert trained.global_step == 4


@pytest.mark.multiprocess
def test_on_two_ranks_a_background_write_holds_nobody_up(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The outage is longer than the group's timeout, and both ranks wait for the last write."""
    before = Job(folder=str(tmp_path / "checkpoints"), steps=2, ranks=1, options=None)
    run(make_trainer(before))
    outage = Rule(operations=("put_file",), error="reset", lasting_s=8.0)
    plan = FaultPlan.write(
        tmp_path / "plan", outage, Rule(operations=("open",), name="step=2", error="reset", last=2)
    )
    folder = f"faulty://{before.folder}"
    plugins = {"plugins": [AsyncCheckpointIO()]}
    job = Job(folder=folder, resume=f"{folder}/step=2.ckpt", steps=4, trainer=plugins)

    with store_server() as port:
        running = lightning_job.start(warm_python, job, tmp_path / "job", port=port, plan=plan)
        reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert running.steps() == [2, 4]
    (last_put,) = [call["at_s"] for call in plan.calls("put_file", name="step=4")][-1:]
    assert min(report["ended_at_s"] for report in reports) > last_put
    assert [report["patched"] + report["threads"] for report in reports] == [[], []]
    history = reports[0]["breakers"]["faulty://:write"]["history"]
    assert "open" in [state for _, state, _ in history]


class Fails(Callback):
    """Ends training while a write waits in the background."""

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Fail, once the storage has opened the circuit."""
        if trainer.global_step > 2:
            ends_at_s = time.monotonic() + lightning_job.HANG_S
            while len(plan_in_use().calls("put_file")) < 3 and time.monotonic() < ends_at_s:
                time.sleep(0.01)
            message = "a bug in training"
            raise ValueError(message)


def test_a_write_that_waits_does_not_keep_a_failed_training(faulty: Callable[..., Job]) -> None:
    """The exception that ended training is what ``fit`` raises, at once, and not the write's."""
    job = faulty(Rule(operations=("put_file",), error="reset"))
    trainer = with_io(job, AsyncCheckpointIO())
    trainer.callbacks.insert(0, Fails())

    with pytest.raises(ValueError, match="a bug in training"):
        run(trainer)

    assert lightning_job.patched(trainer) == []
    assert lightning_job.our_threads() == []


# Refused ------------------------------------------------------------------------------------------

make: Any = ResilientCheckpointIO


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inner": object()}, "inner=… of type object is not allowed.*CheckpointIO"),
        ({"inner": DirectoryIO(), "staging": "no"}, "staging=.*True or False"),
        ({"staging": False}, "staging=False.*inner is not given"),
        ({"inner": AsyncCheckpointIO()}, r"AsyncCheckpointIO\(ResilientCheckpointIO\(\)\)"),
        ({"retry": {"max_atempts": 2}}, "max_attempts"),
        ({"retry": {"max_attempts": 3}}, "trip_failures=3.*max_attempts=3"),
        ({"store": "http://host:1"}, "tcp://HOST:PORT"),
        ({"stagging": True}, "Did you mean 'staging'"),
        ({"spool_dir": ""}, "spool_dir"),
        ({"breaker": {"open_for_s": -1}}, "open_for_s=-1"),
        ({"budget": {"retry_floor": 15}}, "retry_floor=15.*trip_failures=3"),
        ({"budget": "x"}, "budget=….*BudgetConfig"),
        ({"admission": {"slot_lease_s": 1}}, "slot_lease_s=1"),
        ({"admission": 5}, "admission=5 of type int.*AdmissionConfig"),
        ({"run_id": " "}, "run_id=… of type str"),
        ({"storage_options": "key=value"}, "storage_options=… of type str.*a mapping"),
        ({"classify": "transient"}, "classify=… of type str"),
        ({"strict": 1}, "strict=1 of type int"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    """Before anything is opened."""
    with pytest.raises(ConfigError) as caught:
        make(**options)

    assert re.search(text, str(caught.value)), caught.value


def test_every_option_has_its_bad_values() -> None:
    """No option is missing from the table above."""
    marks: list[pytest.Mark] = vars(test_a_bad_option_is_refused_by_name)["pytestmark"]
    tried = {name for mark in marks if mark.args for row in mark.args[1] for name in row[0]}

    assert set(inspect.signature(ResilientCheckpointIO).parameters) - {"unknown"} <= tried
