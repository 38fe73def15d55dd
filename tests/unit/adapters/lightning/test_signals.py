# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Handlers note a signal and nothing else, leave others' alone, and are gone at the end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_resilience.adapters.lightning import namespaces_loops
from lightning_resilience.adapters.lightning.patches import Patches
from lightning_resilience.adapters.lightning.signals import Termination
from lightning_resilience.core.agenda import AgendaKind
from lightning_resilience.runtime.system import unix_s
from tests.lightning_job import Job, handlers, make_trainer, patched, restore


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


NUMBERS = [signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture
def trainer(tmp_path: Any) -> Any:
    """A Trainer of one rank without anything of ours."""
    return make_trainer(Job(folder=str(tmp_path), ranks=1, options=None))


@pytest.fixture
def make(trainer: Any) -> Iterator[Callable[..., Termination]]:
    """Hook the Trainer; all is put back, whatever the test has done."""
    before = handlers()
    patches = Patches()
    made: list[Termination] = []

    def hook(*, grace_s: float | None = 1000.0) -> Termination:
        made.append(Termination(trainer, patches, grace_s=grace_s))
        return made[-1]

    yield hook
    for termination in made:
        termination.close()
    patches.undo()
    restore(before)


@contextlib.contextmanager
def registered(trainer: Any) -> Iterator[None]:
    """Lightning's handlers are installed, as while it trains."""
    trainer._signal_connector.register_signal_handlers()
    yield
    trainer._signal_connector.teardown()


def test_the_private_names_exist(trainer: Any) -> None:
    """A release of Lightning that renames one of them is noticed here."""
    connector = namespaces_loops.signal_connector(trainer)
    loop = namespaces_loops.training_loop(trainer)

    names = (namespaces_loops.REGISTER, *namespaces_loops.HANDLERS)
    assert all(callable(getattr(connector, name)) for name in names)
    assert callable(getattr(loop, namespaces_loops.STEP))
    assert namespaces_loops.has_broadcast(trainer)
    assert namespaces_loops.requeue_signal(trainer) == 0
    assert namespaces_loops.is_between_updates(trainer)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("when", ["early", "training"])
def test_a_signal_is_noted_and_nothing_else(
    number: signal.Signals, when: str, trainer: Any, make: Callable[..., Termination]
) -> None:
    """It becomes the wish to stop, with its name and the time that is left."""
    termination = make(grace_s=1000.0)
    assert termination.items() == []

    with registered(trainer) if when == "training" else contextlib.nullcontext():
        signal.raise_signal(number)

    (item,) = termination.items()
    assert (item.kind, item.detail) == (AgendaKind.STOP, number.name)
    assert item.left_s is not None
    assert 900.0 < item.left_s <= 1000.0
    assert not trainer.received_sigterm


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("when", ["early", "training"])
def test_the_handler_of_the_user_runs_as_well(
    number: signal.Signals, when: str, trainer: Any, make: Callable[..., Termination]
) -> None:
    """Once for each signal, while ours is there and when it is gone."""
    came: list[int] = []
    mine = lambda number, _frame: came.append(number)  # noqa: E731 - compared by identity
    signal.signal(number, mine)
    termination = make()

    with registered(trainer) if when == "training" else contextlib.nullcontext():
        signal.raise_signal(number)
    termination.close()

    assert came == [number]
    assert signal.getsignal(number) is mine


def test_a_signal_that_is_ignored_stays_ignored(
    trainer: Any, make: Callable[..., Termination]
) -> None:
    """Whoever ignores SIGUSR1 has reasons."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    termination = make()

    with registered(trainer):
        signal.raise_signal(signal.SIGUSR1)

    assert not termination.is_pending


def test_a_handler_in_c_is_left_alone(
    trainer: Any, make: Callable[..., Termination], tmp_path: Path
) -> None:
    """``faulthandler`` on SIGUSR1 goes on writing stacks: it cannot be called after ours."""
    with (tmp_path / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        termination = make()
        signal.raise_signal(signal.SIGUSR1)
        with registered(trainer):
            # Lightning's own putting back, at the end, does away with it.
            signal.raise_signal(signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR1)

    text = (tmp_path / "stacks").read_text(encoding="utf-8")
    assert text.count("most recent call first") >= 2
    assert not termination.is_pending


@pytest.mark.parametrize("trains", [True, False], ids=["after training", "before it"])
def test_nothing_is_left_behind(
    trains: bool,  # noqa: FBT001 - a parameter of a test
    trainer: Any,
    make: Callable[..., Termination],
) -> None:
    """Handlers and methods are what they were, also where training never began."""
    before = handlers()
    termination = make()
    assert handlers() != before

    if trains:
        with registered(trainer):
            assert handlers() != before
    termination.close()
    termination.close()

    assert handlers() == before


def test_a_forked_process_does_nothing_with_it(make: Callable[..., Termination]) -> None:
    """It has inherited the handler, and neither dies of the signal nor notes it."""
    termination = make()

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
            os._exit(int(termination.is_pending))
        os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not termination.is_pending


def test_a_trainer_in_another_thread_gets_no_handlers(trainer: Any) -> None:
    """Python allows them in the main thread only, and the training works without."""
    before = handlers()
    patches = Patches()
    failed: list[BaseException] = []

    def train() -> None:
        try:
            termination = Termination(trainer, patches, grace_s=1.0)
            with registered(trainer):
                pass
            termination.close()
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    patches.undo()

    assert failed == []
    assert handlers() == before
    assert patched(trainer) == []


def test_a_wait_ends_once_for_a_signal(trainer: Any, make: Callable[..., Termination]) -> None:
    """What is saved on the exception may wait again, and further signals do not end that."""
    termination = make()
    termination.check()
    signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SIGTERMException):
        termination.check()

    assert trainer.received_sigterm
    signal.raise_signal(signal.SIGTERM)
    termination.check()


def test_a_wait_of_a_stopping_process_ends_with_its_time(make: Callable[..., Termination]) -> None:
    """Whatever it still does, it does not do longer than it may run."""
    termination = make()

    termination.stop(1000.0)
    termination.check()
    termination.stop(0.0)

    with pytest.raises(SIGTERMException):
        termination.check()


@pytest.mark.parametrize(
    ("granted_s", "left_s"), [(None, None), (0.0, 0.0), (-1.0, 0.0)], ids=["any", "none", "over"]
)
def test_a_stopping_process_knows_how_long_it_may_run(
    granted_s: float | None, left_s: float | None, make: Callable[..., Termination]
) -> None:
    """Also one that had no signal itself; until it stops, nobody has said anything."""
    termination = make()
    before_s = termination.remaining_s

    termination.stop(granted_s)

    assert (before_s, termination.remaining_s) == (None, left_s)


def test_a_background_thread_waits_no_longer_once_training_ends(
    make: Callable[..., Termination],
) -> None:
    """Neither after a signal nor after an exception is anybody left who would wait for it."""
    ended: list[type[BaseException] | None] = []
    termination = make()

    def wait() -> None:
        try:
            termination.check()
        except BaseException as error:  # noqa: BLE001 - looked at below
            ended.append(type(error))
        else:
            ended.append(None)

    for end in (None, termination.acknowledge):
        if end is not None:
            end()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    assert ended == [None, SIGTERMException]


@pytest.mark.parametrize(("grace_s", "leaves"), [(1e-9, True), (1000.0, False)])
def test_a_rank_leaves_alone_in_time(
    grace_s: float,
    leaves: bool,  # noqa: FBT001 - a column of a table
    make: Callable[..., Termination],
) -> None:
    """Where the others have not agreed when half of its time is over, and not before."""
    termination = make(grace_s=grace_s)
    termination.leave_in_time()
    signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SIGTERMException) if leaves else contextlib.nullcontext():
        termination.leave_in_time()


def test_a_signal_that_nobody_could_act_on_can_be_seen_afterwards(
    trainer: Any, make: Callable[..., Termination], caplog: pytest.LogCaptureFixture
) -> None:
    """Training had ended; the flag is there for what comes after it, and a line in the log."""
    termination = make()
    signal.raise_signal(signal.SIGUSR1)

    termination.close()

    assert trainer.received_sigterm
    assert "SIGUSR1 was received when training had ended already" in caplog.text


def test_a_warning_under_slurm_leaves_the_time_until_the_end_of_the_job(
    make: Callable[..., Termination], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM says when that is, and a save that takes a minute still fits."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(unix_s()) + 200))
    termination = make(grace_s=None)

    signal.raise_signal(signal.SIGUSR1)

    (item,) = termination.items()
    assert item.left_s is not None
    assert 100.0 < item.left_s <= 201.0
