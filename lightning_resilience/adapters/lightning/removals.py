# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Removals that rank 0 has been asked for, until they are carried out.

With several ranks a removal is not carried out where it is asked for, because the others go on to a
collective meanwhile. It waits here for a joint operation: one of its own at the end of a save
point, else whichever comes next, or the end of the run. One that would take the last good
checkpoint stays here meanwhile, until ``core.retention`` lets it go.

Where saves are spooled, a removal that storage is too ill for is put off, and training goes on. The
end of the run waits for what was put off, on all ranks, as it does for the spool.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.adapters.lightning.work import Asked, Passage
from lightning_resilience.core.events import CheckpointRemoved, CheckpointRetained
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.retention import Decision
from lightning_resilience.core.run_end import is_lost
from lightning_resilience.core.save_failures import is_outage
from lightning_resilience.errors import JointError, ResilienceError
from lightning_resilience.protocols.effects import Call
from lightning_resilience.protocols.guard import Guarded, guard


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.alone import Alone
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.core.events import Event
    from lightning_resilience.core.retention import Removal
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Removals", "carry_out_the_rest"]

_log = logging.getLogger(__name__)


_NEVER: Final = {
    Decision.RESUMED: "this run has started from it",
    Decision.OUTSIDE: "it is in no checkpoint callback's directory, nor saved by this run",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """What is to be removed; without a ``removal`` it is no checkpoint, and nothing protects it."""

    work: Work
    removal: Removal | None


class _Rest(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells all of the removals that are left."""

    v: int = 1
    url: str
    left_s: float


def _later(why: str, token: CancelToken) -> str:
    """Leave them on the list: the next operation begins with them, and so does the end."""
    del why, token
    return "put off"


class Removals:
    """What is still to be removed.

    Args:
        alone: This rank's guarded calls.
    """

    def __init__(self, alone: Alone) -> None:
        self._alone = alone
        self._asked: list[_Asked] = []
        self._failed = False
        self._ends_at_s = math.inf

    def add(self, work: Work) -> None:
        """Remove ``work.url``, which is no checkpoint, when it is time."""
        self._asked.append(_Asked(work=work, removal=None))

    def ask(self, work: Work, *, replaced_by: str = "") -> None:
        """Remove the checkpoint ``work.url`` once nothing speaks against it.

        Args:
            work: Removes it.
            replaced_by: The save that it waits for; empty for any that comes after it.
        """
        removal = self._alone.retaining.removal(work.url, replaced_by=replaced_by)
        self._asked.append(_Asked(work=work, removal=removal))
        if self._alone.spooling is not None:
            self._alone.spooling.asked_to_remove(work.url)

    def keep(self, url: str) -> None:
        """Do not remove ``url`` any more: something is about to be written there."""
        self._asked[:] = [asked for asked in self._asked if asked.work.url != url]
        self._alone.retaining.overwritten(url)

    def work(self, url: str) -> Work:
        """Return the work of carrying out all that may be; absent is success.

        Args:
            url: Something on their storage.
        """
        if not self._due():
            # Storage is asked nothing, so its breaker must not be told that it has answered.
            return Passage(self._alone.storage, url)
        return Asked(self._alone.storage, url, self.carry_out, instead=_later)

    def rest(self, ends_at_s: float) -> str:
        """Return what all ranks are told of what is left; empty where nothing is.

        Args:
            ends_at_s: When there is no more time for it, on this process's clock.
        """
        left_s = ends_at_s - self._alone.driver.clock.now_s()
        due = self._due()
        if not due or left_s <= 0:
            return ""
        return encode(_Rest(url=due[0].work.url, left_s=left_s)).decode()

    def first(self) -> Protocol[Guarded | None] | None:
        """Return what is to be done before other work, or None where there is nothing.

        Removals were asked for outside a save point, for example by a callback of the user's, or
        had to wait. That must not fail the operation that they come before, so what fails may stay
        for later.
        """
        due = self._due()
        if not due and not self._alone.retaining.has_to_look:
            return None
        return self._first(due[0].work.url if due else None)

    def finish(self, within_s: float | None = None) -> None:
        """Remove the rest, if that can be done at once, and say what is left. Idempotent.

        Args:
            within_s: When no further one is begun, in seconds from now; None for no such end.
        """
        try:
            self._remove_the_rest(within_s)
            self._tell_what_is_kept()
        finally:
            self._asked.clear()

    def _first(self, url: str | None) -> Protocol[Guarded | None]:
        alone = self._alone
        if alone.retaining.has_to_look:
            timeout_s = alone.breakers.policy.breaker.probe_timeout_s
            yield Call(alone.retaining.look, timeout_s=timeout_s)
        if url is None:
            return None
        call = alone.call("remove", self.work(url), kind="write")
        hasty = replace(call, patience=replace(call.patience, when_open="raise"))
        return (yield from guard(alone.breakers.joint_circuit(url, "write"), hasty))

    def _due(self) -> list[_Asked]:
        decided = [(asked, self._decide(asked)) for asked in list(self._asked)]
        for asked, decision in decided:
            if decision.is_never:
                self._take_off(asked, why=_NEVER.get(decision, ""))
        return [asked for asked, decision in decided if decision is Decision.REMOVE]

    def _decide(self, asked: _Asked) -> Decision:
        if asked.removal is None:
            return Decision.REMOVE
        return self._alone.retaining.decide(asked.removal)

    def _take_off(self, asked: _Asked, *, why: str = "") -> None:
        if asked in self._asked:
            self._asked.remove(asked)
        if why:
            self._tell(CheckpointRetained(path=redacted(asked.work.url), reason=why))

    def _tell(self, event: Event) -> None:
        self._alone.driver.sink.emit(event)

    def carry_out(self, token: CancelToken) -> None:
        """Carry out all that may be, in one attempt of several."""
        # What is removed is taken off the list, so that an attempt goes on where the last ended.
        self._failed = True
        self._alone.retaining.look(token, [asked.work.url for asked in self._asked])
        # One that was abandoned leaves the list to its successor, which has another first.
        token.raise_if_cancelled()
        while (due := self._due()) and self._alone.driver.clock.now_s() < self._ends_at_s:
            self._remove(due[0], token)
        self._failed = False

    def _remove(self, asked: _Asked, token: CancelToken) -> None:
        asked.work.attempt(token)
        token.raise_if_cancelled()
        token.progress()
        self._alone.retaining.removed(asked.work.url)
        self._tell(CheckpointRemoved(path=redacted(asked.work.url)))
        self._take_off(asked)

    def _remove_the_rest(self, within_s: float | None) -> None:
        # Nobody waits here: a run that has ended, maybe by an exception, must end. So each removal
        # has one attempt, as long as a probe's, and none where it has just failed or been
        # interrupted.
        due = self._due()
        if not due:
            return
        if self._failed:
            self._tell_what_is_left("the last removal failed")
            return
        if within_s is not None and within_s <= 0:
            self._tell_what_is_left("there was no time left")
            return
        alone, url = self._alone, due[0].work.url
        timeout_s = alone.breakers.policy.breaker.probe_timeout_s
        if within_s is not None:
            timeout_s, self._ends_at_s = within_s, alone.driver.clock.now_s() + within_s
        call = alone.call("remove", self.work(url), kind="write")
        hasty = replace(
            call,
            policy=replace(call.policy, max_attempts=1, unknown_max_attempts=1),
            patience=replace(call.patience, when_open="raise"),
            timeout_s=timeout_s,
            may_go_alone=True,
            store_patience_s=0.0,
        )
        circuit = alone.breakers.circuit(url, "write")
        try:
            alone.driver.run(guard(circuit, hasty))
        except ResilienceError as error:
            self._tell_what_is_left(str(error))
        else:
            self._tell_what_is_left("there was no time left")

    def _tell_what_is_left(self, why: str) -> None:
        left = ", ".join(redacted(asked.work.url) for asked in self._due())
        if left:
            _log.warning("not removed at the end of the run, remove by hand: %s (%s)", left, why)

    def _tell_what_is_kept(self) -> None:
        for asked in self._asked:
            if self._decide(asked) is Decision.WAIT:
                why = "the run has ended before a newer checkpoint was verified"
                self._tell(CheckpointRetained(path=redacted(asked.work.url), reason=why))


def carry_out_the_rest(session: Session, told: str) -> None:
    """Carry out on rank 0 what was put off, while the others wait; for a bounded time.

    Args:
        session: This rank's session.
        told: What rank 0 has told of it.

    Raises:
        JointError: The same on every rank; not where storage is as ill as it was, nor where ranks
            have ended already.
    """
    if not told:
        return
    alone = session.alone
    rest = decode(_Rest, told.encode(), key="what is left to remove")
    retry = replace(alone.breakers.policy.retry, deadline_s=rest.left_s)
    try:
        session.on_rank_zero("clear up", rest.url, alone.removals.carry_out, retry=retry)
    except JointError as error:
        # Then it is named, with all that is left.
        if not is_outage(error) and not is_lost(error):
            raise
