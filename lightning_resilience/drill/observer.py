# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a simulated world: what the store, the storage and the processes really do.

A check looks at the world from outside, and trusts nothing that a client says about itself: writes
are seen where they are performed, requests where they arrive. It is told of one thing after the
other and keeps what it needs, so that a check of a large world costs no more per event than one of
a small one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_resilience.core.events import Event
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["Observer", "Observers"]


class Observer:
    """Sees everything and does nothing; override what is of interest."""

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """A key was written or deleted in the store, and the store holds the result."""

    def read(self, now_s: float, process: Process, key: str) -> None:
        """A process has read a key, or several of which this is the first or the last."""

    def emptied(self, now_s: float) -> None:
        """The store has lost everything."""

    def began(self, now_s: float, request: Request) -> None:
        """A request has reached storage."""

    def ended(self, now_s: float, request: Request) -> None:
        """Storage has done with a request; its ``failed`` says how."""

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """A process has reported a fact."""

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """A process begins an operation."""

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """A process has ended an operation, with a result or an error."""

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """A process has started, crashed, paused, woken, been interrupted, failed or ended."""

    def happened(self, now_s: float, what: str) -> None:
        """Something that the scenario says has happened to the world."""


class Observers:
    """All observers of one world, with each kind of news only to those who want it.

    Args:
        observers: Who looks.
    """

    __slots__ = (
        "all",
        "began",
        "changed",
        "emitted",
        "emptied",
        "ended",
        "happened",
        "operation_began",
        "operation_ended",
        "read",
        "wrote",
    )

    def __init__(self, observers: Iterable[Observer]) -> None:
        self.all = tuple(observers)
        self.wrote = self._of("wrote")
        self.read = self._of("read")
        self.emptied = self._of("emptied")
        self.began = self._of("began")
        self.ended = self._of("ended")
        self.emitted = self._of("emitted")
        self.operation_began = self._of("operation_began")
        self.operation_ended = self._of("operation_ended")
        self.changed = self._of("changed")
        self.happened = self._of("happened")

    def _of(self, name: str) -> tuple[Callable[..., None], ...]:
        return tuple(
            getattr(observer, name)
            for observer in self.all
            if getattr(type(observer), name) is not getattr(Observer, name)
        )
