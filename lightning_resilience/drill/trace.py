# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The ordered record of a run: a digest of all of it, and a story of what matters.

Two runs of one seed, scenario and commit have one digest, in any process and on any machine. It
covers what was written to the store byte by byte, what reached storage, what processes reported and
what became of them, each with its instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from lightning_resilience.drill.observer import Observer


if TYPE_CHECKING:
    from lightning_resilience.core.cells import Cells
    from lightning_resilience.core.events import Event
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["Story", "Trace"]


class Trace(Observer):
    """Makes the digest of a run.

    Args:
        cells: What the store holds.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._hash = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        """What tells this run from every other one, 32 hexadecimal digits."""
        return self._hash.hexdigest()

    def _note(self, now_s: float, what: str) -> None:
        self._hash.update(f"{now_s.hex()} {what}\n".encode())

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note what is there now, byte by byte."""
        del before
        self._note(now_s, f"{process.name} {key}")
        self._hash.update(self._cells.values.get(key, b""))

    def emptied(self, now_s: float) -> None:
        """Note it."""
        self._note(now_s, "emptied")

    def began(self, now_s: float, request: Request) -> None:
        """Note who came."""
        self._note(now_s, f"{request.process.name} {request.kind} {request.attempt}")

    def ended(self, now_s: float, request: Request) -> None:
        """Note how it ended."""
        self._note(now_s, f"{request.process.name} {request.kind} {request.failed!r}")

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Note what was said."""
        self._note(now_s, f"{process.name} {type(event).__name__}")

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Note how it ended."""
        self._note(now_s, f"{operation.process.name} {operation.number} {_ending(operation)}")

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note it."""
        self._note(now_s, f"{process.name} {what}")

    def happened(self, now_s: float, what: str) -> None:
        """Note it."""
        self._note(now_s, what)


def _ending(operation: Operation) -> str:
    error = operation.error
    return "ok" if error is None else f"{type(error).__name__}: {error}"


class Story(Observer):
    """Tells a run line by line, to whoever wants to know what has happened.

    Attributes:
        lines: The story so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _tell(self, now_s: float, who: str, what: str) -> None:
        self.lines.append(f"{now_s:10.4f} s  {who:<10} {what}")

    def emptied(self, now_s: float) -> None:
        """Tell that all is lost."""
        self._tell(now_s, "store", "has lost everything")

    def began(self, now_s: float, request: Request) -> None:
        """Tell who comes to storage."""
        operation = request.operation
        what = f"{request.kind} for {operation.kind} {operation.number}"
        if request.kind == "call":
            what += f", attempt {request.attempt}"
        self._tell(now_s, request.process.name, f"→ storage: {what}")

    def ended(self, now_s: float, request: Request) -> None:
        """Tell what storage answered."""
        answer = "done" if request.failed is None else f"{request.failed!r}"
        late = ", but nobody waits for it" if request.is_abandoned else ""
        self._tell(now_s, request.process.name, f"← storage: {request.kind} {answer}{late}")

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Tell what a process says."""
        self._tell(now_s, process.name, str(event))

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Tell what a process begins."""
        self._tell(now_s, operation.process.name, f"begins {operation.kind} {operation.number}")

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Tell how it ends."""
        self._tell(
            now_s,
            operation.process.name,
            f"ends {operation.kind} {operation.number}: {_ending(operation)}",
        )

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Tell what became of a process."""
        self._tell(now_s, process.name, what)

    def happened(self, now_s: float, what: str) -> None:
        """Tell what became of the world."""
        self._tell(now_s, "world", what)
