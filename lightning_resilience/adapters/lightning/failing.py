# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves training with an exception, and the others that must not wait for it.

::

    this rank leaves          tell the others first ──▶ on_exception of all callbacks ──▶ teardown
    another rank has left     learn of it ──▶ waits of ours end ──▶ collectives are ended (waking)

The stage is wrapped on the Trainer, because that is the first place that an exception comes to:
callbacks that stand before ours may block in their ``on_exception``, and launchers that make
processes do not call that hook in them at all.

What the user sees is the rank's own exception, unchanged. Only where that is no more than the echo
of another rank's failure, a broken transport, does ``PeerFailedError`` take its place, which names
the rank and the cause; the echo is its ``__cause__``.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters import process_groups
from lightning_resilience.adapters.lightning.namespaces import (
    saving_of,
    stage_runner,
)
from lightning_resilience.adapters.lightning.waking import wake
from lightning_resilience.core.events import RankLeft
from lightning_resilience.core.incident import (
    IncidentKind,
    PeerInterruption,
    error_of,
    incident_of,
    is_echo,
    is_notable,
    is_shared,
    note_of,
    why_not_saved,
)
from lightning_resilience.core.shards import Saving
from lightning_resilience.errors import PeerFailedError, ResilienceError
from lightning_resilience.protocols.incident import first_incident, publish_incident
from lightning_resilience.runtime.alarm import Alarm


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.core.incident import IncidentRecord
    from lightning_resilience.protocols.joint import Member
    from lightning_resilience.runtime.driver import Driver


__all__ = ["Failing", "add_note", "hook_stage", "tell_of_ended_group", "telling"]

_log = logging.getLogger(__name__)


class Failing:
    """One rank's part in the end of a start of the job.

    Args:
        member: Who this rank is.
        driver: Runs protocols; its waits end when another rank has left.
        step: Tells the training step that this rank has completed.

    Attributes:
        told: The incident that stands, once this rank has left alone and told the others.

    Note:
        Made and used by the thread that trains; an alarm's thread learns of other ranks.
    """

    def __init__(self, member: Member, *, driver: Driver, step: Callable[[], int]) -> None:
        self._member = member
        self._driver = driver
        self._step = step
        self.told: IncidentRecord | None = None
        self._thread = threading.current_thread()
        self._has_left = threading.Event()
        self._is_agreed = False
        self._woken = threading.Event()
        self._peer: PeerFailedError | None = None
        self._inner_interrupt = driver.interrupt
        driver.interrupt = self._interrupt
        self._alarm = Alarm(
            driver.store, member.keys.joint("failed", 0), self._ring, dice=driver.dice
        )

    # What this rank does --------------------------------------------------------------------------

    def agree(self) -> None:
        """Take note that all ranks leave at this point of the program, so that it is no incident.

        Called before the exception with which they leave is raised.
        """
        self._is_agreed = True

    @property
    def leaves_alone(self) -> bool:
        """Whether this rank has left training with an exception that not all ranks share."""
        return self._has_left.is_set() and not self._is_agreed

    def leave(self, error: BaseException) -> BaseException:
        """Tell the others that this rank leaves, once; it never blocks for long.

        Args:
            error: The exception that it leaves with.

        Returns:
            The exception for the user: the same, or one that names the rank which left first.
        """
        if isinstance(error, PeerInterruption):
            error = error.error
        if self._has_left.is_set():
            return error
        self._has_left.set()
        if self._is_agreed or is_shared(error):
            self._is_agreed = True
            return error
        is_an_echo = is_echo(error, was_woken=self._woken.is_set())
        mine = incident_of(
            error,
            is_an_echo=is_an_echo,
            rank=self._member.rank,
            step=self._step(),
            writer=self._driver.dice.nonce(),
        )
        standing = self.told = self._publish(mine)
        if isinstance(error, PeerFailedError):
            return error
        peer = self._peer
        if standing is not None and standing != mine:
            peer = error_of(standing, rank=self._member.rank)
        if is_an_echo and peer is not None:
            peer.__cause__ = error
            return peer
        if standing is not None and is_notable(mine, standing):
            add_note(error, note_of(standing))
        return error

    def _publish(self, mine: IncidentRecord) -> IncidentRecord | None:
        try:
            standing: IncidentRecord = self._driver.run(
                publish_incident(self._member.keys, mine), hurry=True
            )
        except ResilienceError as failure:
            # Nobody can be told. The others see it by what does not come from this rank.
            _log.warning("the other ranks could not be told of %s: %s", mine.error, failure)
            return None
        if standing is mine:
            self._tell(standing)
        return standing

    def why_not_saved(self, trainer: Any) -> str:
        """Return why rank 0 saves no checkpoint on this exception, or nothing where it may.

        It ends the process group of this rank first: what is called on the way to a checkpoint may
        hold a collective, which would wait for ranks that are not there.
        """
        on_cpu = trainer.strategy.root_device.type == "cpu"
        is_replicated = saving_of(trainer) is Saving.RANK_ZERO
        why = why_not_saved(on_cpu=on_cpu, is_replicated=is_replicated, is_group_ended=True)
        if why:
            return why
        if not process_groups.is_world_ended():
            process_groups.cut(process_groups.gloo_addresses())
        is_ended = process_groups.is_world_ended()
        return why_not_saved(on_cpu=on_cpu, is_replicated=is_replicated, is_group_ended=is_ended)

    def close(self) -> None:
        """Let the alarm's thread end. Idempotent."""
        self._has_left.set()
        self._driver.interrupt = self._inner_interrupt
        self._alarm.close()

    # What it learns of others ---------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``PeerInterruption`` in the thread that trains once another rank has left.

        Where both were told to stop, this rank leaves with its own exception for that.
        """
        peer = self._peer
        if peer is None or self._has_left.is_set():
            return
        if threading.current_thread() is self._thread:
            if peer.kind == IncidentKind.SIGNAL.value:
                self._inner_interrupt()
            raise PeerInterruption(peer)

    def _interrupt(self) -> None:
        # Order: a launcher sends SIGTERM because a rank has failed, and that is the cause.
        self.check()
        self._inner_interrupt()

    def _ring(self) -> None:
        incident: IncidentRecord | None = None
        try:
            incident = self._driver.run(first_incident(self._member.keys), hurry=True)
        except ResilienceError as failure:
            _log.warning("another rank has left; which one could not be read: %s", failure)
        if self._has_left.is_set():
            return
        self._peer = error_of(incident, rank=self._member.rank)
        if incident is not None:
            self._tell(incident)
        try:
            wake(self._driver.sink, has_left=self._has_left, woken=self._woken)
        except Exception as failure:  # noqa: BLE001 - nobody is above this thread to handle it
            _log.warning("the collectives of this rank could not be ended", exc_info=failure)

    def _tell(self, incident: IncidentRecord) -> None:
        self._driver.sink.emit(
            RankLeft(
                first_rank=incident.rank,
                kind=incident.kind,
                step=incident.step,
                error=incident.error,
            )
        )


def hook_stage(trainer: Any, failing: Failing, patches: Patches) -> None:
    """Let ``failing`` be the first to see an exception that ends the stage.

    Args:
        trainer: The Trainer, which has not begun its stage.
        failing: This rank's part.
        patches: Remembers what was replaced.
    """
    owner, name = stage_runner(trainer)
    patches.replace(owner, name, partial(telling, getattr(owner, name), failing))


def telling(inner: Callable[[], Any], failing: Failing) -> Any:
    """Do something, and where that raises, tell the other ranks before anything else does.

    Args:
        inner: What is done.
        failing: This rank's part.
    """
    try:
        return inner()
    except BaseException as error:
        shown = failing.leave(error)
        if shown is error:
            raise
        raise shown from shown.__cause__


def add_note(exception: BaseException, text: str) -> None:
    """Add a note to an exception, where its Python has notes; 3.10 has the log line only."""
    note: Callable[[str], None] | None = getattr(exception, "add_note", None)
    if note is not None:
        note(text)


def tell_of_ended_group(exception: BaseException) -> None:
    """Say in a note why a collective failed that is none of a rank which has left just now.

    A second ``fit`` in a process whose group was ended fails in Lightning's first barrier, before
    any hook of a callback.
    """
    if not process_groups.is_world_ended():
        return
    text = (
        "The process group of this process was ended when a rank had left an earlier fit, so its "
        "collectives fail. Start the processes anew, or call "
        "torch.distributed.destroy_process_group() on every rank before the next fit."
    )
    add_note(exception, text)
    _log.warning(text)
