# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a shared store does with its keys: the semantics that ``ports.SharedStore`` states.

They are those of ``torch.distributed.Store``, including what looks odd: a compare-and-set on a key
that is missing, with an expectation, answers *the expectation* and writes nothing. So whoever
repeats what it once read is told that nothing has changed, when everything is gone.

The memory store of one process and the store of a simulated world are both made of this, so what
is learnt about one holds for the other. No locks, no waiting and no failures: those are theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.errors import CorruptRecordError


if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["Cells"]


class Cells:
    """The keys of one store and their values. One caller at a time."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        """Return the value, or None where the key does not exist."""
        return self.values.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of all ``keys``, None for each that does not exist."""
        return [self.values.get(key) for key in keys]

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        self.values[key] = bytes(value)

    def delete(self, key: str) -> bool:
        """Delete the key; True if it existed."""
        return self.values.pop(key, None) is not None

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``.

        Returns:
            ``desired`` where it was written; the present value where that is another one; and
            ``expected`` where there is no such key and something was expected.
        """
        current = self.values.get(key)
        if current is None and expected:
            return expected
        if current is not None and current != expected:
            return current
        self.values[key] = bytes(desired)
        return desired

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, kept as decimal text, and return it.

        Raises:
            CorruptRecordError: The key holds something that is not a number.
        """
        current = self.values.get(key, b"0")
        try:
            total = int(current) + amount
        except ValueError as error:
            text = f"cannot add {amount} to {key!r}: it holds {current[:40]!r}, not a number"
            raise CorruptRecordError(text, key=key) from error
        self.values[key] = b"%d" % total
        return total
