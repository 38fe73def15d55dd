# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The one loop behind every shared change: decide, compare-and-set, and decide again.

A compare-and-set has three outcomes here, told apart by what it returns:

* **won**: it returned the desired bytes. They carry a writer nonce, so nobody else can have written
  them;
* **conflict**: it returned other bytes. Those are what is there now, and the decision is made anew;
* **gone**: it returned the *expectation*, which is what a store says when the key does not exist.
  That means that the store came back empty; it never means "unchanged".

The loop is bounded, and its pauses grow with jitter: those who lost come back at different times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import backoff
from lightning_resilience.protocols.effects import CompareAndSet, Draw, Nonce, Sleep


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Written", "create", "update", "write"]

_ATTEMPTS: Final = 12
_BASE_S: Final = 0.005
_CAP_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What came of a change.

    Args:
        won: Whether this process's bytes are there now.
        raw: What is there now; empty where the key is gone.
    """

    won: bool
    raw: bytes

    @property
    def gone(self) -> bool:
        """True where the key does not exist any more."""
        return not self.raw


def write(key: str, expected: bytes, desired: bytes) -> Protocol[Written]:
    """Try once to replace ``expected`` by ``desired``.

    Args:
        key: The key.
        expected: The exact bytes that were read; empty to create.
        desired: What to write. Must carry a fresh writer nonce.

    Returns:
        What came of it.
    """
    returned: bytes = yield CompareAndSet(key, expected, desired)
    if returned == desired:
        return Written(won=True, raw=returned)
    if returned == expected:
        return Written(won=False, raw=b"")
    return Written(won=False, raw=returned)


def create(key: str, desired: bytes) -> Protocol[Written]:
    """Create a write-once key, or learn what somebody else has created.

    Args:
        key: The key.
        desired: What to write. Must carry a fresh writer nonce.

    Returns:
        What came of it; never ``gone``.
    """
    return (yield from write(key, b"", desired))


def update(key: str, raw: bytes, change: Callable[[bytes, str], bytes | None]) -> Protocol[Written]:
    """Change a key that exists, deciding anew whenever somebody else was faster.

    Args:
        key: The key.
        raw: The exact bytes that were read last.
        change: Makes the desired bytes of the current ones and a fresh nonce, or None where there
            is nothing to do.

    Returns:
        What is there in the end. Not ``won`` where there was nothing to do, where the key is gone,
        or where this process lost every time; the caller looks again at what is there.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        nonce: str = yield Nonce()
        desired = change(raw, nonce)
        if desired is None:
            return Written(won=False, raw=raw)
        written = yield from write(key, raw, desired)
        if written.won or written.gone:
            return written
        raw = written.raw
        draw: float = yield Draw()
        yield Sleep(backoff.delay_s(attempt, base_s=_BASE_S, cap_s=_CAP_S, draw=draw))
    return Written(won=False, raw=raw)
