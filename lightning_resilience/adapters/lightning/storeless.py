# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank does in a joint operation where the shared store is gone for everybody.

``core.store_loss`` says when. Every rank is by itself then, so all that the ranks must agree on is
made of what all of them know: what was in a directory at the start of the run, and what the run has
saved since. Rank 0 stages its checkpoint in the spool, from where it is published as any other that
waits there: by a thread that may decide without the store.

=========  ====================================  =================================================
operation  rank 0                                the others
=========  ====================================  =================================================
save       spools the checkpoint                 go on as if they had been told so
exists     answers from what all know            answer from what all know
link       makes it, or once its target is       go on
           published
remove     leaves it for later                   go on
flush      waits until nothing waits             go on
clear up   leaves it to be named at the end      go on
=========  ====================================  =================================================
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.work import detail_of
from lightning_resilience.adapters.names import name_of
from lightning_resilience.core.retention import Stage
from lightning_resilience.core.run_end import RunEnd
from lightning_resilience.core.spool import is_spooled
from lightning_resilience.core.store_loss import (
    answer_of,
    has_another_way,
    is_deferred,
    known_answer,
    names_in,
    unsettled_statement,
)
from lightning_resilience.protocols.effects import Call
from lightning_resilience.protocols.guard import Guarded


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint import JointResult


__all__ = ["Storeless"]

_log = logging.getLogger(__name__)


class Storeless:
    """One rank's ways around the shared store, the same on every rank.

    Args:
        session: This rank's session.
        spools: Tells whether a checkpoint of that path may wait on the node, on all ranks alike.
        is_behind: Whether rank 0 writes in the background.

    Note:
        Used by the thread that trains.
    """

    def __init__(
        self, session: Session, spools: Callable[[str], bool], *, is_behind: bool = False
    ) -> None:
        self._session = session
        self._spools = spools
        self._names: dict[str, frozenset[str] | None] = {}
        self._saved: set[str] = set()
        self.end = RunEnd(is_behind=is_behind)
        """What all ranks know of what may wait on rank 0's node."""

    def listed(self, directory: str, told: str) -> None:
        """Note what all ranks were told to be in a directory at the start of the run."""
        self._names[name_of(directory)] = names_in(told)

    def published(self, paths: Iterable[str]) -> None:
        """Note what all ranks were told that an earlier start had left, and that is there now."""
        self._saved.update(map(name_of, paths))

    def begins(self, op: str, url: str, *, workers: tuple[int, ...]) -> bool:
        """Note that a joint operation begins; tell, on all ranks alike, whether it may be left.

        It is left without a verdict where the store is gone.
        """
        self.end = self.end.begun(op)
        return has_another_way(
            op,
            workers=workers,
            defer_after_s=self._session.member.defer_after_s,
            is_spooled=op != "save" or self._spools(url),
            is_answered=op != "exists" or bool(self._answer(url)),
        )

    def instead(self, op: str, work: Work) -> Callable[[str], Protocol[Guarded]] | None:
        """Return what rank 0 does instead; None where that is nothing."""
        stall_s = self._session.alone.breakers.policy.retry.stall_timeout_s

        def attempt(_why: str, token: CancelToken) -> Any:
            return work.attempt(token)

        do = {"save": work.instead, "link": attempt, "flush": attempt}.get(op)
        if do is None:
            return None
        return partial(_do, do, math.inf if op == "flush" else stall_s)

    def saved(self, url: str, result: JointResult) -> Stage:
        """Note a save that has not failed; return what has become of it."""
        self._saved.add(name_of(url))
        told = result.final.detail
        if is_deferred(result.final):
            told = "" if result.value is None else detail_of("save", result.value)
            return Stage.SPOOLED if not told or is_spooled(told) else Stage.VERIFIED
        return Stage.SPOOLED if is_spooled(told) else Stage.VERIFIED

    def answer(self, url: str, final: FinalRecord) -> str:
        """Return whether a checkpoint exists, as text."""
        return answer_of(final, known=self._answer(url))

    def _answer(self, url: str) -> str:
        name = name_of(url)
        folder, _, last = name.rpartition("/")
        return known_answer(last, saved=name in self._saved, names=self._names.get(folder))

    def close(self) -> None:
        """Say what the ranks have never agreed on. Idempotent."""
        member = self._session.member
        text = unsettled_statement(member.unsettled)
        if text and member.rank == 0:
            _log.warning(text)


def _do(do: Callable[[str, CancelToken], Any], timeout_s: float, why: str) -> Protocol[Guarded]:
    value = yield Call(partial(do, why), timeout_s=timeout_s)
    return Guarded(value=value, attempts=0, elapsed_s=0.0)
