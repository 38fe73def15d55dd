# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The ordered record of a run: a digest of all of it, and a story of what matters.

Two runs of one seed, scenario and commit have one digest, in any process and on any machine. It
covers what was read from the store and what was written to it byte by byte, what reached storage
and how it ended, what processes reported word by word, what they made and what became of them, each
with its instant and all in order.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from lightning_resilience.drill.observer import Observer


if TYPE_CHECKING:
    from lightning_resilience.core.cells import Cells
    from lightning_resilience.core.events import Event
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["Story", "Trace"]

# What an entry begins with: its instant, its kind, and how long its two texts are, so that no two
# sequences of entries are one sequence of bytes.
_pack: Final = struct.Struct("<dcII").pack
_LONGEST_BUFFER: Final = 1 << 16
_encode: Final = msgspec.json.Encoder().encode


class Trace(Observer):
    """Makes the digest of a run.

    Args:
        cells: What the store holds.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._hash = xxhash.xxh3_128()
        # Hashing many small entries at once is cheaper than one after the other.
        self._buffer = bytearray()

    @property
    def digest(self) -> str:
        """What tells this run from every other one, 32 hexadecimal digits."""
        self._flush()
        return self._hash.hexdigest()

    def _note(self, now_s: float, kind: bytes, *, who: str = "", what: bytes = b"") -> None:
        name = who.encode()
        self._buffer += _pack(now_s, kind, len(name), len(what)) + name + what
        if len(self._buffer) > _LONGEST_BUFFER:
            self._flush()

    def _flush(self) -> None:
        self._hash.update(self._buffer)
        self._buffer.clear()

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note what is there now, byte by byte."""
        del before
        value = self._cells.values.get(key)
        kind = b"d" if value is None else b"w"
        self._note(now_s, kind, who=process.name, what=key.encode())
        self._note(now_s, b"=", what=value or b"")

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Note who looked, and where."""
        self._note(now_s, b"r", who=process.name, what=key.encode())

    def emptied(self, now_s: float) -> None:
        """Note it."""
        self._note(now_s, b"0")

    def began(self, now_s: float, request: Request) -> None:
        """Note who came, and what for."""
        self._note(now_s, b"b", who=request.process.name, what=_request(request))

    def ended(self, now_s: float, request: Request) -> None:
        """Note how it ended."""
        end = f" {request.is_abandoned} {request.failed!r}".encode()
        self._note(now_s, b"e", who=request.process.name, what=_request(request) + end)

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Note what was said, word by word."""
        self._note(now_s, b"s", who=process.name, what=type(event).__name__.encode())
        self._note(now_s, b":", what=_encode(event))

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Note what is made."""
        what = f"{operation.kind} {operation.number}".encode()
        self._note(now_s, b"(", who=operation.process.name, what=what)

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Note how it ended, and what it has cost."""
        what = f"{operation.number} {operation.store_operations} {_ending(operation)}".encode()
        self._note(now_s, b")", who=operation.process.name, what=what)

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note it."""
        self._note(now_s, b"p", who=process.name, what=what.encode())

    def happened(self, now_s: float, what: str) -> None:
        """Note it."""
        self._note(now_s, b"h", what=what.encode())


def _request(request: Request) -> bytes:
    operation = request.operation
    return f"{request.kind} {operation.kind} {operation.number} {request.attempt}".encode()


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
