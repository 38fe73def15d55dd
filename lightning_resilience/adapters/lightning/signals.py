# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SIGUSR1: handlers that set a flag, and who looks at it.

Lightning's own handlers do inside a handler what must not be done there: a collective, which waits
for ranks that got no signal; under SLURM a whole save, maybe in the middle of another one, and a
program. They are replaced by one that notes the signal and forwards SIGTERM to the launcher's
children as the original does. Handlers that were there before Lightning's run after it as before.

* **Between two steps** all ranks act on it together (``boundary``), whichever rank was told.
* **In a wait** it is looked at several times a second, and ends the wait with Lightning's own
  exception, once: what is saved on that exception may wait again, until the process has to be gone.
* **While nothing is hooked yet**, from ``setup`` on, a handler of the same kind is there already.

A forked data-loader worker inherits the handlers, and they do nothing in it. What a background
thread still writes waits no longer once training has failed or was told to stop, but for what all
ranks wait for before they leave.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces import sigterm_exception
from lightning_resilience.adapters.lightning.namespaces_loops import (
    HANDLERS,
    REGISTER,
    requeue_signal,
    signal_connector,
)
from lightning_resilience.core.agenda import AgendaItem, AgendaKind, grace_s, leaves_alone
from lightning_resilience.runtime.system import SystemClock, unix_s
from lightning_resilience.topology import job_end_s, kill_delay_s


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.adapters.lightning.patches import Patches


__all__ = ["Termination", "quiet_children"]

_log = logging.getLogger(__name__)


class Termination:
    """Whether this process was told to stop, and whether somebody has acted on it.

    Args:
        trainer: The Trainer; its signal handlers are not registered yet.
        patches: Remembers what was replaced.
        grace_s: How long the process may still run after a signal, in seconds; None where the user
            has not said so.
    """

    def __init__(self, trainer: Any, patches: Patches, *, grace_s: float | None) -> None:
        self.is_pending = False
        """Whether a signal has come that nobody has acted on. Cheap to look at, at every step."""
        self.is_agreed = False
        """Whether all ranks have agreed to stop, so that they leave after the same step."""
        self.waits_for_writes = False
        """Whether all ranks wait for what is written in the background, though training ends."""
        self._trainer = trainer
        self._exception = sigterm_exception(trainer)
        self._grace_s = grace_s
        self._granted_s = 0.0
        self._clock = SystemClock()
        end_s = job_end_s()
        self._job_ends_at_s = None if end_s is None else self._clock.now_s() + end_s - unix_s()
        self._launcher_s = kill_delay_s()
        self._pid = os.getpid()
        self._signum = 0
        self._came_at_s = 0.0
        self._ends_at_s: float | None = None
        self._is_ending = False
        self._is_stopping = False
        self._thread = threading.current_thread()
        self._connector = signal_connector(trainer)
        self._early: dict[int, Any] = {}
        self._install_early()
        inner = getattr(self._connector, REGISTER)
        patches.replace(self._connector, REGISTER, partial(self._register, inner))
        for name in HANDLERS:
            patches.replace(self._connector, name, self._handle)

    # Handlers -------------------------------------------------------------------------------------

    def _handle(self, signum: int, frame: object) -> None:
        # In the handler: flags and a signal, no collective, no lock, no I/O.
        del frame
        if os.getpid() != self._pid or self._is_stopping:
            # A forked data-loader worker has inherited the handler; the Trainer is not its own.
            return
        if signum == signal.SIGTERM and self._signum != signal.SIGTERM:
            launcher = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(signum)
        # Under SLURM it runs twice for SIGTERM: Lightning has two handlers there.
        if not self.is_pending:
            self._note(signum)
        self.is_pending = True

    def _note(self, signum: int) -> None:
        now_s = self._clock.now_s()
        ends_in_s = None if self._job_ends_at_s is None else self._job_ends_at_s - now_s
        self._signum, self._came_at_s = signum, now_s
        self._granted_s = grace_s(
            self._grace_s,
            is_warning=signum != signal.SIGTERM,
            ends_in_s=ends_in_s,
            launcher_s=self._launcher_s,
        )

    def _numbers(self) -> list[int]:
        # Not on every platform, and not everywhere Lightning's.
        given = (signal.SIGTERM, getattr(signal, "SIGUSR1", 0), requeue_signal(self._trainer))
        return sorted({int(number) for number in given if number})

    def _may_install(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def _install_early(self) -> None:
        if self._may_install():
            for number in self._numbers():
                self._early[number] = self._install(number)

    def _install(self, number: int) -> Any:
        before = signal.getsignal(number)
        if before is signal.SIG_IGN or _is_handled_in_c(number, before):
            # Who ignores it has reasons, and a handler in C cannot be called after ours.
            return before
        signal.signal(number, _Chain(self._handle, before))
        return before

    def _remove_early(self) -> None:
        while self._early:
            number, before = self._early.popitem()
            if isinstance(signal.getsignal(number), _Chain):
                signal.signal(number, before)

    def _register(self, inner: Callable[[], None]) -> None:
        # Lightning puts back, at its end, what it finds here.
        self._remove_early()
        if not self._may_install():
            inner()
            return
        before = {number: signal.getsignal(number) for number in self._numbers()}
        inner()
        for number, handler in before.items():
            if signal.getsignal(number) is handler:
                self._install(number)

    # What has come --------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        """How long this process may still run, in seconds, if a signal has come."""
        return self._came_at_s + self._granted_s - self._clock.now_s()

    @property
    def remaining_s(self) -> float | None:
        """How long this process may still run once all ranks stop, in seconds, ≥ 0.

        Whichever rank was told to stop; None for as long as they like.
        """
        if self._ends_at_s is None:
            return None
        return max(0.0, self._ends_at_s - self._clock.now_s())

    def items(self) -> list[AgendaItem]:
        """Return what this process asks of all ranks: to stop, once a signal has come."""
        if not self.is_pending:
            return []
        name = self._name()
        item = AgendaItem(
            kind=AgendaKind.STOP, reason=f"{name} was received", detail=name, left_s=self.left_s
        )
        return [item]

    def leave_in_time(self) -> None:
        """Raise Lightning's exception where a signal came too long ago to wait for the others."""
        if self.is_pending and leaves_alone(self.left_s, granted_s=self._granted_s):
            _log.warning(
                "%s was received %.1f s ago, and the ranks have not agreed to stop: this one "
                "leaves alone.",
                self._name(),
                self._granted_s - self.left_s,
            )
            self._raise()

    def stop(self, left_s: float | None) -> None:
        """Take note that all ranks stop; waits may go on until this process has to be gone.

        Args:
            left_s: How long that is, in seconds from now; None for as long as they like.
        """
        self.is_pending = False
        self._is_ending = self._is_stopping = True
        self._ends_at_s = None if left_s is None else self._clock.now_s() + left_s
        self._connector.received_sigterm = True

    def check(self) -> None:
        """Raise Lightning's exception for SIGTERM: in the Trainer's thread once a signal.

        There also once the time is over that a stopping process may take. In a background thread,
        in every wait once training is ending without success, unless somebody waits for it.
        """
        if threading.current_thread() is not self._thread:
            if self.is_pending or (self._is_ending and not self.waits_for_writes):
                raise self._exception
        elif self.is_pending:
            # Not in the handler, which may have interrupted another log call.
            _log.info("%s was received: this wait ends, and training stops.", self._name())
            self._raise()
        elif self._ends_at_s is not None and self._clock.now_s() >= self._ends_at_s:
            _log.warning("no time is left: this wait ends.")
            raise self._exception

    def _raise(self) -> None:
        self.stop(max(self.left_s, 0.0))
        raise self._exception

    def _name(self) -> str:
        return signal.Signals(self._signum).name

    def acknowledge(self) -> None:
        """Take note that the Trainer is stopping already, for an exception."""
        self._is_ending = True
        if self.is_pending:
            self.stop(max(self.left_s, 0.0))
            _log.info("%s was received: training stops.", self._name())

    def close(self) -> None:
        """Put back what is still there of the handlers of the beginning. Idempotent."""
        if self._may_install():
            self._remove_early()
        if self.is_pending:
            # Training was over before anybody could act on it: what comes after can see it here.
            self.is_pending = False
            self._connector.received_sigterm = True
            _log.warning("%s was received when training had ended already.", self._name())


class _Chain:
    """A handler that runs after ours, if it can be run."""

    def __init__(self, first: Callable[[int, object], None], then: Any) -> None:
        self._first = first
        self._then = then

    def __call__(self, signum: int, frame: object) -> None:
        self._first(signum, frame)
        if callable(self._then):
            self._then(signum, frame)


def _is_handled_in_c(number: int, known: Any) -> bool:
    # Python knows what was there when it began, and nothing of what C code has installed since, as
    # faulthandler does. Linux tells which signals are caught.
    if known is None:
        return True
    if known is not signal.SIG_DFL:
        return False
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[-1], 16) >> (number - 1) & 1)


@contextlib.contextmanager
def quiet_children() -> Iterator[None]:
    """Let no child's death disturb this: torch's handler raises when a data-loader worker dies."""
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(number)
    if before is None:
        yield
        return
    signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)
