# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Removals that rank 0 has been asked for, until they are carried out.

With several ranks a removal is not carried out where it is asked for, because the others go on to a
collective meanwhile. It waits here for a joint operation: one of its own at the end of a save
point, else whichever comes next, or the end of the run.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_resilience.adapters.lightning.work import Asked, Passage
from lightning_resilience.core.events import CheckpointRemoved
from lightning_resilience.core.evidence import redacted
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.guard import Guarded, guard


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.alone import Alone
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Removals"]

_log = logging.getLogger(__name__)


class Removals:
    """What is still to be removed.

    Args:
        alone: This rank's guarded calls.
    """

    def __init__(self, alone: Alone) -> None:
        self._alone = alone
        self._asked: list[Work] = []
        self._failed = False

    def add(self, work: Work) -> None:
        """Remove ``work.url`` when it is time."""
        self._asked.append(work)

    def keep(self, url: str) -> None:
        """Do not remove ``url`` any more."""
        self._asked[:] = [work for work in self._asked if work.url != url]

    def work(self, url: str) -> Work:
        """Return the work of carrying out all of them; absent is success.

        Args:
            url: Something on their storage.
        """
        if not self._asked:
            # Storage is asked nothing, so its breaker must not be told that it has answered.
            return Passage(self._alone.storage, url)
        return Asked(self._alone.storage, url, self._remove_all)

    def first(self) -> Protocol[Guarded] | None:
        """Return what is to be done before other work, or None where nothing is to be removed.

        They were asked for outside a save point, for example by a callback of the user's. That must
        not fail the operation that it comes before, so what fails may stay for later.
        """
        if not self._asked:
            return None
        url = self._asked[0].url
        call = self._alone.call("remove", self.work(url), kind="write")
        hasty = replace(call, patience=replace(call.patience, when_open="raise"))
        return guard(self._alone.breakers.joint_circuit(url, "write"), hasty)

    def finish(self) -> None:
        """Remove the rest, if that can be done at once, and say what is left. Idempotent."""
        try:
            self._remove_the_rest()
        finally:
            self._asked.clear()

    def _remove_all(self, token: CancelToken) -> None:
        # What is removed is taken off the list, so that an attempt goes on where the last ended.
        self._failed = True
        while self._asked:
            removal = self._asked[0]
            removal.attempt(token)
            # One that was abandoned leaves the list to its successor, which has another first.
            token.raise_if_cancelled()
            token.progress()
            self._alone.driver.sink.emit(CheckpointRemoved(path=redacted(removal.url)))
            if removal in self._asked:
                self._asked.remove(removal)
        self._failed = False

    def _remove_the_rest(self) -> None:
        # Nobody waits here: a run that has ended, maybe by an exception, must end. So each removal
        # has one attempt, as long as a probe's, and none where it has just failed or been
        # interrupted.
        if not self._asked:
            return
        if self._failed:
            self._tell_what_is_left("the last removal failed")
            return
        alone, url = self._alone, self._asked[0].url
        call = alone.call("remove", self.work(url), kind="write")
        hasty = replace(
            call,
            policy=replace(call.policy, max_attempts=1, unknown_max_attempts=1),
            patience=replace(call.patience, when_open="raise"),
            timeout_s=alone.breakers.policy.breaker.probe_timeout_s,
            may_go_alone=True,
            store_patience_s=0.0,
        )
        circuit = alone.breakers.circuit(url, "write")
        try:
            alone.driver.run(guard(circuit, hasty))
        except ResilienceError as error:
            self._tell_what_is_left(str(error))

    def _tell_what_is_left(self, why: str) -> None:
        left = ", ".join(redacted(removal.url) for removal in self._asked)
        _log.warning("not removed at the end of the run, remove by hand: %s (%s)", left, why)
