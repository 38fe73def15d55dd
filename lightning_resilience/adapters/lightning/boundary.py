# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The boundary between two training steps, where all ranks act on the same item of the agenda.

Lightning begins every step of a distributed training with a broadcast of rank 0's stop flag. That
broadcast is what all ranks agree by: rank 0 raises the flag for whatever there is to agree on, and
each rank then reads from the shared store what that is. The method is wrapped on the instance of
the training loop; without distributed training there is nobody to agree with, and the whole step
is.

A step in which nobody wants anything costs each rank a look at its own attributes.

What a rank may do at the boundary is everything: the last batch is complete on all ranks and the
next one is not begun. Where gradients of several batches are accumulated, all ranks act after the
update, because a checkpoint has no gradients in it; unless there is no time for that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.halting import Halting
from lightning_resilience.adapters.lightning.namespaces import sigterm_exception
from lightning_resilience.adapters.lightning.namespaces_loops import (
    BROADCAST,
    STEP,
    has_broadcast,
    is_between_updates,
    rewind_validation,
    signal_connector,
    training_loop,
)
from lightning_resilience.adapters.lightning.watching import Watch
from lightning_resilience.core.agenda import (
    ASK_AGAIN_S,
    AgendaKind,
    acts_now,
    looks,
    most_urgent,
    record_of,
    with_save,
)
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.agenda import ask, put, take


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.lightning.signals import Termination
    from lightning_resilience.core.agenda import AgendaItem, AgendaRecord


__all__ = ["Boundary"]


class Boundary:
    """One rank's view of the agenda.

    Args:
        trainer: The Trainer; its training loop is hooked.
        session: This rank's session.
        termination: Whether this process was told to stop.
        patches: Remembers what was replaced.
    """

    def __init__(
        self, trainer: Any, session: Session, *, termination: Termination, patches: Patches
    ) -> None:
        self.look: Callable[[], None] | None = None
        """What looks, before every step but without a request, whether to ask for anything."""
        self._trainer = trainer
        self._member = session.member
        self._driver = session.driver
        self._termination = termination
        self._connector = signal_connector(trainer)
        self._told = sigterm_exception(trainer)
        self._items: dict[AgendaKind, AgendaItem] = {}
        self._actions: dict[AgendaKind, Callable[[AgendaRecord], None]] = {}
        self._number = 1
        self._steps = 0
        self._asked: AgendaKind | None = None
        self._quiet_until_s = 0.0
        self._save_s: float | None = None
        self._watch: Watch | None = None
        if self._member.world_size > 1 and self._member.rank == 0:
            self._watch = Watch(self._member, self._driver)
            self._watch.turn_to(self._number)
        self._halting: Halting | None = None
        if self._member.world_size > 1:
            self._halting = Halting(trainer, session, patches)
        self._hook(training_loop(trainer), patches)

    def _hook(self, loop: Any, patches: Patches) -> None:
        if self._member.world_size == 1:
            name, hook = STEP, self._before_step
        elif has_broadcast(self._trainer):
            name, hook = BROADCAST, self._in_broadcast
        else:
            name, hook = STEP, self._before_some_steps
        patches.replace(loop, name, partial(hook, getattr(loop, name)))
        strategy = self._trainer.strategy
        patches.replace(
            strategy, "save_checkpoint", partial(self._measure, strategy.save_checkpoint)
        )

    def ask(self, item: AgendaItem) -> None:
        """Ask that all ranks act on ``item`` at the next boundary.

        Returns at once, without an operation of the store. Of a kind that is asked for already,
        the first item stays. It is asked for until all ranks have acted on an item of its kind.

        Args:
            item: What to act on.

        Note:
            Any rank, any thread, not collective.
        """
        self._items.setdefault(item.kind, item)

    def on(self, kind: AgendaKind, action: Callable[[AgendaRecord], None]) -> None:
        """Set what all ranks do for items of a kind.

        The action runs in the Trainer's thread, on every rank, between the same two steps, with the
        same record; it may hold joint operations and collectives. What it raises leaves ``fit``,
        so it must raise on all ranks or on none. Where it returns, training goes on. A kind without
        an action is passed over.

        Args:
            kind: The kind.
            action: What to do.

        Note:
            In ``setup``, on every rank alike.
        """
        self._actions[kind] = action

    def close(self) -> None:
        """Let the helper thread end. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def between_batches(self) -> None:
        """Stop with all ranks, between two batches of a validation, or leave in time.

        Nothing but a stop is acted on there.

        Raises:
            SIGTERMException: All ranks stop here; or this process was told to stop, half of its
                time is over, and nothing is agreed.
        """
        record = self._wanted_stop() if self._is_wanted() else None
        if self._halting is None:
            if record is not None:
                rewind_validation(self._trainer)
                self._act(with_save(record, save_s=self._save_s))
        elif self._is_halted(self._halting, record):
            rewind_validation(self._trainer)
            self._take()
        self._termination.leave_in_time()

    def _is_halted(self, halting: Halting, record: AgendaRecord | None) -> bool:
        if record is None:
            return halting.is_reached(None)
        if self._watch is None:
            self._prepare()
        return halting.is_reached((self._number, with_save(record, save_s=self._save_s)))

    def _wanted_stop(self) -> AgendaRecord | None:
        record = self._wanted()
        if record is None or record.kind != AgendaKind.STOP.value or not self._is_time(record):
            return None
        return record

    # Hooks: the beginning of a step ---------------------------------------------------------------

    def _before_step(self, inner: Callable[..., Any], *args: Any) -> Any:
        # One rank: nobody to agree with.
        if self.look is not None:
            self.look()
        if self._is_wanted():
            record = self._wanted()
            if record is not None and self._is_time(record):
                self._act(with_save(record, save_s=self._save_s))
        return inner(*args)

    def _in_broadcast(self, inner: Callable[[], None]) -> None:
        if self.look is not None:
            self.look()
        raises = self._is_wanted() and self._prepare()
        # Lightning's own handler, which would set this too, is not installed.
        self._connector.received_sigterm = raises
        try:
            inner()
        except self._told:
            pass
        else:
            return
        finally:
            self._connector.received_sigterm = False
        self._take()

    def _before_some_steps(self, inner: Callable[..., Any], *args: Any) -> Any:
        if self.look is not None:
            self.look()
        step, self._steps = self._steps, self._steps + 1
        if looks(step):
            raises = self._is_wanted() and self._prepare()
            if self._trainer.strategy.broadcast(raises):
                self._take()
        return inner(*args)

    # Inside ---------------------------------------------------------------------------------------

    def _measure(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began_at_s = self._driver.clock.now_s()
        value = inner(*args, **kwargs)
        self._save_s = self._driver.clock.now_s() - began_at_s
        return value

    def _is_wanted(self) -> bool:
        return bool(
            self._items
            or self._termination.is_pending
            or (self._watch is not None and self._watch.has_heard)
        )

    def _wanted(self) -> AgendaRecord | None:
        """Return the most urgent item that this rank knows of."""
        items = [*self._items.values(), *self._termination.items()]
        nonce = self._driver.dice.nonce
        records = [record_of(item, rank=self._member.rank, writer=nonce()) for item in items]
        heard = None if self._watch is None else self._watch.heard()
        return most_urgent(records if heard is None else [*records, heard])

    def _prepare(self) -> bool:
        """Ask for what this rank wants; on rank 0, tell whether all are to look at the agenda."""
        record = self._wanted()
        if record is None or self._is_quiet(record):
            return False
        if self._watch is not None and not self._is_time(record):
            return False
        self._asked = AgendaKind(record.kind)
        self._quiet_until_s = self._driver.clock.now_s() + ASK_AGAIN_S
        try:
            if self._watch is None:
                self._driver.run(ask(self._member, self._number, record), hurry=True)
                return False
            agreed = with_save(record, save_s=self._save_s)
            self._driver.run(put(self._member, self._number, agreed), hurry=True)
        except StoreUnavailableError:
            # Not told: whoever waits for an answer asks again.
            self._termination.leave_in_time()
            return False
        return True

    def _is_time(self, record: AgendaRecord) -> bool:
        return acts_now(record, is_between_updates=is_between_updates(self._trainer))

    def _is_quiet(self, record: AgendaRecord) -> bool:
        is_known = self._asked is not None and self._asked.value == record.kind
        if not is_known or self._driver.clock.now_s() >= self._quiet_until_s:
            return False
        self._termination.leave_in_time()
        return True

    def _take(self) -> None:
        record = self._driver.run(take(self._member, self._number))
        self._number += 1
        self._asked = None
        if self._watch is not None:
            self._watch.turn_to(self._number)
        self._act(record)

    def _act(self, record: AgendaRecord) -> None:
        kind = AgendaKind(record.kind)
        # Before it is acted on: what is asked for meanwhile is for the next boundary.
        self._items.pop(kind, None)
        action = self._actions.get(kind)
        if action is not None:
            action(record)
