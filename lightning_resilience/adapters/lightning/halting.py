# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A stop in the middle of a validation: all ranks leave it after the same batch.

A validation may last for hours without a collective. As long as nobody wants to stop, each batch
costs a rank a look at its clock, and each second one store operation, from the second second on.

What is saved then says that the validation has only just begun, because its results so far are in
no checkpoint: whoever resumes validates anew.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces_loops import (
    VALIDATION,
    validated_batches,
    validation_length,
    validation_loop,
)
from lightning_resilience.core.agenda import ASK_AGAIN_S
from lightning_resilience.core.halting import (
    OPEN,
    QUIET_S,
    STOP,
    PlaceRecord,
    limit_of,
    look_s,
    pause_s,
)
from lightning_resilience.core.joint import unavailable_error
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.halting import close_halt, hold, look, open_halt, stand
from lightning_resilience.protocols.persistent import Persistence, with_persistence


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.core.agenda import AgendaRecord
    from lightning_resilience.core.halting import HaltRecord


__all__ = ["Halting"]


class Halting:
    """One rank's part in leaving a validation together with the others.

    Args:
        trainer: The Trainer; its validation loop is hooked.
        session: This rank's session, of several.
        patches: Remembers what was replaced.
    """

    def __init__(self, trainer: Any, session: Session, patches: Patches) -> None:
        self._trainer = trainer
        self._member = session.member
        self._driver = session.driver
        self._validation = 0
        self._begin()
        loop = validation_loop(trainer)
        patches.replace(loop, VALIDATION, partial(self._validate, getattr(loop, VALIDATION)))

    def _begin(self) -> None:
        self._validation += 1
        self._limit: int | None = None
        self._raises = 0
        self._is_told = False
        self._answer: HaltRecord | None = None
        self._looks_at_s = self._driver.clock.now_s() + look_s(self._member.world_size)

    def _validate(self, inner: Callable[[], Any]) -> Any:
        self._begin()
        value = inner()
        if self._limit is not None and self._member.rank == 0:
            self._hurry(close_halt(self._member, self._validation))
        return value

    def is_reached(self, item: tuple[int, AgendaRecord] | None) -> bool:
        """Tell whether all ranks leave the validation now, between two batches.

        Args:
            item: On rank 0, what is wanted of all ranks: number on the agenda, and record. On the
                others it is not None where this rank wants a stop.

        Raises:
            JointUnavailableError: This rank has said that it stands here, and cannot reach the
                shared store any more to learn whether it may go on.
        """
        batch = validated_batches(self._trainer)
        if self._answer is None:
            self._agree(batch, item)
        answer = self._answer
        return answer is not None and answer.state == STOP and batch >= answer.batch

    def _agree(self, batch: int, item: tuple[int, AgendaRecord] | None) -> None:
        if self._limit is not None:
            if batch >= self._limit:
                self._hold(batch, item if self._member.rank == 0 else None)
        elif self._is_called(item):
            # First of all: what is said may arrive without an answer.
            self._limit = limit_of(batch, raises=0)
            self._hurry(stand(self._member, self._validation, self._place(self._limit)))

    def _is_called(self, item: tuple[int, AgendaRecord] | None) -> bool:
        now_s = self._driver.clock.now_s()
        if item is not None and not self._is_told:
            self._is_told = True
            self._looks_at_s = now_s
        if now_s < self._looks_at_s:
            return False
        pause = pause_s if self._is_told else look_s
        self._looks_at_s = now_s + pause(self._member.world_size)
        opens = self._is_told and self._member.rank == 0
        protocol = open_halt if opens else look
        record = self._hurry(protocol(self._member, self._validation))
        return record is not None and record.state == OPEN

    def _hold(self, batch: int, item: tuple[int, AgendaRecord] | None) -> None:
        self._raises += 1
        limit = limit_of(batch, raises=self._raises)
        persistence = Persistence(
            op="agenda", patience_s=self._member.store_patience_s, error=self._unavailable
        )
        holding = hold(self._member, self._validation, self._place(limit), item=item)
        record = self._driver.run(with_persistence(holding, persistence))
        if record.state == OPEN:
            self._limit = limit
        else:
            self._answer = record

    def _unavailable(self, lost_for_s: float, error: StoreUnavailableError) -> Exception:
        return unavailable_error(
            "agenda",
            seq=self._validation,
            rank=self._member.rank,
            lost_for_s=lost_for_s,
            cause=str(error),
        )

    def _place(self, limit: int) -> PlaceRecord:
        return PlaceRecord(limit=limit, length=validation_length(self._trainer))

    def _hurry(self, protocol: Any) -> Any:
        with contextlib.suppress(StoreUnavailableError):
            return self._driver.run(protocol, hurry=True)
        self._looks_at_s = self._driver.clock.now_s() + (ASK_AGAIN_S if self._is_told else QUIET_S)
        return None
