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
from lightning_resilience.core.halting import Halt, look_s
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.halting import close_halt, meet


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.core.agenda import AgendaRecord


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
        self._halt = self._new(0)
        loop = validation_loop(trainer)
        patches.replace(loop, VALIDATION, partial(self._validate, getattr(loop, VALIDATION)))

    def _new(self, validation: int) -> Halt:
        ranks = self._member.world_size
        looks_at_s = self._driver.clock.now_s() + look_s(ranks)
        return Halt(validation=validation, world_size=ranks, looks_at_s=looks_at_s)

    def _validate(self, inner: Callable[[], Any]) -> Any:
        self._halt = halt = self._new(self._halt.validation + 1)
        value = inner()
        if halt.limit is not None and self._member.rank == 0:
            # Who still validates finds out by itself otherwise, limit by limit.
            with contextlib.suppress(StoreUnavailableError):
                self._driver.run(close_halt(self._member, halt.validation), hurry=True)
        return value

    def is_reached(self, item: tuple[int, AgendaRecord] | None) -> bool:
        """Tell whether all ranks leave the validation now, between two batches.

        Args:
            item: What this rank wants of all ranks, if anything: number on the agenda, and record.

        Raises:
            JointUnavailableError: This rank has said that it stands here, and cannot reach the
                shared store any more to learn whether it may go on.
        """
        halt, batch = self._halt, validated_batches(self._trainer)
        now_s = self._driver.clock.now_s()
        if halt.is_due(batch, now_s=now_s, wants_stop=item is not None):
            meeting = meet(
                self._member,
                halt,
                batch=batch,
                length=validation_length(self._trainer),
                item=item if self._member.rank == 0 else None,
            )
            self._driver.run(meeting, hurry=True)
        return halt.is_reached(batch)
