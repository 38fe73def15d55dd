# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank tells its agents, and that neither silence nor absence of theirs fails training."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import pytest
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_resilience.adapters.lightning.reporting import Reporting
from lightning_resilience.adapters.telemetry import LoggingSink
from lightning_resilience.config import Environment
from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import ProgressRecord, StorageRecord
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.faulty_filesystem import Rule
from tests.lightning_job import make_callback, make_data, make_model, make_trainer
from tests.single_rank import fit


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


KEYS = Keys(run_id="job", incarnation="1-n")
HANG_S = 10.0


class Held(MemoryStore):
    """A store that answers once it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.asked = 0

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Wait."""
        self.asked += 1
        self.answers.wait(HANG_S)
        return super().compare_and_set(key, expected, desired)


class Gone(MemoryStore):
    """A store that does not answer."""

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Fail."""
        del key, expected, desired
        message = "no answer"
        raise StoreUnavailableError(message)


class Handle:
    """One connection to a store."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        """Pass on."""
        return getattr(self._store, name)

    def close(self) -> None:
        """Let go of this one."""


def reporting(store: MemoryStore, rank: int = 0, failing: Any = None) -> Reporting:
    """Make one rank's reports; what they close is a handle of their own."""
    driver = Driver(
        store=Handle(store),
        clock=SystemClock(),
        dice=SystemDice(rank=rank),
        sink=LoggingSink(rank=rank),
    )
    made = Reporting(driver, KEYS, rank=rank, step=lambda: 7)
    made.failing = failing
    return made


def found(store: Any, key: str, kind: Any) -> Any:
    """Return a record that the agents read; None where there is none."""
    raw = store.get(key)
    return None if raw is None else decode(kind, raw, key=key)


def incident(store: Any) -> Any:
    """Return the incident that stands for the agents."""
    return found(store, KEYS.joint("incident", 0), IncidentRecord)


def progress(store: Any) -> tuple[int, int] | None:
    """Return how far the agents know that the job has come."""
    record = found(store, KEYS.progress, ProgressRecord)
    return None if record is None else (record.step, record.checkpoint_step)


# One rank's reports -------------------------------------------------------------------------------


def test_a_checkpoint_is_told_by_a_thread_and_training_goes_on() -> None:
    """Of those that come while one is being told, the newest is told next, and once."""
    store = Held()
    mine = reporting(store)

    for step in (2, 4, 6, 4, 6):
        mine.saved(step)
    assert progress(store) is None
    store.answers.set()
    mine.close()

    assert progress(store) == (6, 6)
    # One to create the record, which another step's finds and then replaces.
    assert store.asked <= 3


def test_a_checkpoint_before_the_first_step_is_no_progress() -> None:
    """A fit that starts from the beginning has come to nothing yet."""
    store = MemoryStore()
    mine = reporting(store)

    mine.went_on(0)
    mine.close()

    assert progress(store) is None


def test_what_ends_training_is_told_with_the_step_and_once() -> None:
    """With what stands among the ranks, also where rank 0 has failed with its echo."""
    store = MemoryStore()
    stands = IncidentRecord(rank=2, kind="error", error="ValueError: bad", step=5, writer="w")
    mine = reporting(store, failing=SimpleNamespace(told=stands, leaves_alone=True))
    mine.saved(4)

    mine.leave(RuntimeError("an echo"))
    mine.leave(ValueError("what teardown raised"))
    mine.close()

    assert incident(store) == stands
    assert progress(store) == (7, 4)
    assert store.get(KEYS.joint("failed", 0)) is None


def test_a_rank_leaves_once() -> None:
    """The stage tells first; the hook for exceptions comes by with the same one."""
    store = Held()
    store.answers.set()
    mine, error = reporting(store), ValueError("bad")

    mine.leave(error)
    asked = store.asked
    mine.leave(error)

    assert asked > 0
    assert store.asked == asked


def test_another_rank_tells_nothing_of_what_it_did_not_cause() -> None:
    """The store has one server, and all ranks leave at the same moment."""
    store = MemoryStore()
    stands = IncidentRecord(rank=2, kind="error", error="ValueError: bad", step=5, writer="w")
    mine = reporting(store, rank=1, failing=SimpleNamespace(told=stands, leaves_alone=True))

    mine.leave(RuntimeError("an echo"))

    assert incident(store) is None
    assert progress(store) is None


def test_a_later_failure_does_not_replace_the_first() -> None:
    """Two ranks that could not ask each other: the first to tell stands."""
    store = MemoryStore()

    reporting(store, rank=1).leave(ValueError("first"))
    reporting(store, rank=2).leave(ValueError("second"))

    assert incident(store).error == "ValueError: first"


@pytest.mark.parametrize("make", [Held, Gone])
def test_a_store_that_does_not_answer_holds_up_nobody(make: Callable[[], MemoryStore]) -> None:
    """Neither a save nor the end of training waits for it, nor fails."""
    store = make()
    mine = reporting(store)
    began_s = time.monotonic()

    mine.start([], run_id="job")
    mine.saved(2)
    mine.leave(ValueError("bad"))
    mine.close()

    assert time.monotonic() - began_s < HANG_S / 2
    if isinstance(store, Held):
        store.answers.set()


@pytest.mark.parametrize("missing", ["incarnation", "store", "agents_run_id", "enabled"])
def test_without_agents_that_listen_nothing_is_opened(missing: str) -> None:
    """All that they export has to be there."""
    variables = {
        "incarnation": "1-n",
        "store": "tcp://127.0.0.1:1",
        "agents_run_id": "job",
        "enabled": True,
    }
    without = Environment(**{**variables, missing: False if missing == "enabled" else None})  # type: ignore[arg-type]

    assert Reporting.open(without, rank=0, step=lambda: 0) is None


# A whole fit of one rank --------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The agents' store, of which the environment tells."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("LIGHTNING_RESILIENCE_STORE", f"tcp://127.0.0.1:{store.port}")
    monkeypatch.setenv("LIGHTNING_RESILIENCE_INCARNATION", "1-n")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    return store


class Reader:
    """Reads the agents' store."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store

    def get(self, key: str) -> bytes | None:
        """Return what is there."""
        return self._store.get(key) if self._store.check([key]) else None


class FailsAt(lightning.pytorch.Callback):
    """Fails before a step.

    Args:
        step: The step.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Fail."""
        if trainer.global_step == self._step:
            message = "bad"
            raise ValueError(message)


def fail(job: Job, step: int) -> None:
    """Train until a step that fails."""
    trainer = make_trainer(job)
    trainer.callbacks.append(FailsAt(step))
    with pytest.raises(ValueError, match="bad"):
        trainer.fit(make_model(), make_data(), ckpt_path=job.resume)


def test_a_fit_tells_its_storage_and_its_newest_checkpoint(
    server: dist.TCPStore, faulty: Callable[..., Any]
) -> None:
    """And nothing of an end, since it has ended well."""
    job = faulty()

    fit(job)

    told = found(Reader(server), KEYS.storage, StorageRecord)
    assert told.urls == (job.folder,)
    assert progress(Reader(server)) == (4, 4)
    assert incident(Reader(server)) is None


def test_a_run_id_of_the_users_own_is_told(
    server: dist.TCPStore, faulty: Callable[..., Any]
) -> None:
    """Agents find the circuits of the workers by it."""
    fit(faulty(options={"run_id": "mine"}))

    assert found(Reader(server), KEYS.storage, StorageRecord).run_id == "mine"


class OwnIO(TorchCheckpointIO):
    """A user's own, which saves as the stock one does."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save."""
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, OwnIO])
def test_whoever_writes_checkpoints_their_steps_are_told(
    plugin: Callable[[], Any], server: dist.TCPStore, faulty: Callable[..., Any]
) -> None:
    """From the thread that writes in the background, too, with the step that it has written."""
    fit(faulty(trainer={"plugins": [plugin()]}))

    assert progress(Reader(server)) == (4, 4)


@pytest.mark.usefixtures("server")
def test_a_checkpoint_that_is_published_late_is_progress_to_its_own_step(
    faulty: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has gone on meanwhile, but after a restart it would not be there."""
    told: list[int] = []
    monkeypatch.setattr(Reporting, "saved", lambda _self, step: told.append(step))
    rule = Rule(operations=("put_file",), error="reset", lasting_s=1.0)
    options = {"on_outage": "spool", "spool": {"flush_timeout_s": 30.0}}

    fit(faulty(rule, options=options))

    assert sorted(told) == [2, 4]


def test_the_agents_know_before_anybody_may_block(
    server: dist.TCPStore, faulty: Callable[..., Any]
) -> None:
    """A callback that stands before ours, and takes its time to clean up."""
    seen: list[Any] = []

    class CleansUp(FailsAt):
        """Looks what has been told by then."""

        def on_exception(self, *_: Any) -> None:
            """Look."""
            seen.append(incident(Reader(server)))

    trainer = make_trainer(faulty())
    trainer.callbacks.insert(0, CleansUp(3))
    with pytest.raises(ValueError, match="bad"):
        trainer.fit(make_model(), make_data())

    assert [each.error for each in seen] == ["ValueError: bad"]


def test_a_checkpoint_that_waits_on_the_node_is_no_progress(
    server: dist.TCPStore, faulty: Callable[..., Any]
) -> None:
    """It may be lost with the node: what is not in storage is not there after a restart."""
    rule = Rule(operations=("put_file",), error="reset")
    options = {"on_outage": "spool", "spool": {"flush_timeout_s": 0.5}}

    fail(faulty(rule, options=options), 3)

    assert progress(Reader(server)) == (3, -1)
    assert incident(Reader(server)).error == "ValueError: bad"


def test_a_program_that_survives_an_error_is_not_over(
    server: dist.TCPStore, faulty: Callable[..., Any]
) -> None:
    """It has caught what one fit raised; the next one begins with nothing told against it."""
    fail(faulty(folder="memory://first"), 3)
    assert incident(Reader(server)) is not None

    fit(faulty(folder="memory://second"))

    assert incident(Reader(server)) is None
    told = found(Reader(server), KEYS.storage, StorageRecord)
    assert told.urls == ("memory://first", "memory://second")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_what_a_fit_starts_from_is_progress(
    server: dist.TCPStore, faulty: Callable[..., Any]
) -> None:
    """It was read and checked, so a restart finds it."""
    job = faulty()
    fit(job)
    server.delete_key(KEYS.progress)

    fail(faulty(resume=f"{job.folder}/step=4.ckpt", steps=8), 5)

    assert progress(Reader(server)) == (5, 4)


def test_an_error_before_the_session_is_told_as_well(
    server: dist.TCPStore, faulty: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an option that contradicts the Trainer; nobody has connected by then."""
    monkeypatch.setenv("RANK", "0")
    job = faulty()
    trainer = make_trainer(job)
    trainer.callbacks.append(make_callback({}))

    with pytest.raises(Exception, match="two ResilienceCallbacks"):
        trainer.fit(make_model(), make_data())

    assert incident(Reader(server)).failure == "permanent"


def test_without_an_incarnation_the_store_is_told_nothing(
    server: dist.TCPStore, faulty: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under plain torchrun nobody would read it: the store has the joint operations' keys only."""
    monkeypatch.delenv("LIGHTNING_RESILIENCE_INCARNATION")
    fail(faulty(), 3)

    assert [key for key in server.list_keys() if "incident" in key] == []
    assert not server.check([KEYS.progress])
    assert not server.check([KEYS.storage])
