# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a protocol may ask of the world: one frozen value per request.

A protocol is a generator. It *yields* an effect and is *sent* the result, or has the failure thrown
in. So a protocol holds the loops and the order, and does no I/O: the blocking driver
(``runtime.driver``) and the simulator run the same generators.

===================  =========================================  ====================================
effect               is sent                                    may have thrown in
===================  =========================================  ====================================
``Get``              the value, or None                         ``StoreUnavailableError``
``MultiGet``         a list of values or None                   ``StoreUnavailableError``
``Set``              None                                       ``StoreUnavailableError``
``Delete``           True if the key existed                    ``StoreUnavailableError``
``CompareAndSet``    the bytes that tell the outcome            ``StoreUnavailableError``
``Add``              the counter after it                       ``StoreUnavailableError``
``WaitFor``          True if the key exists                     ``StoreUnavailableError``
``Sleep``            None                                       an interruption
``Now``              seconds, this process's monotonic clock    —
``Draw``             a number in [0, 1)                         —
``Nonce``            a text that nobody else uses               —
``Call``             what ``work`` returned                     what it raised, ``CallTimeoutError``
``Local``            as the effect in it                        as the effect in it
``AtSite``           as the effect in it                        ``StoreUnavailableError``
``Emit``             None                                       —
===================  =========================================  ====================================
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar


if TYPE_CHECKING:
    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken


__all__ = [
    "Add",
    "AtSite",
    "Beat",
    "Call",
    "CompareAndSet",
    "Delete",
    "Draw",
    "Effect",
    "Emit",
    "Get",
    "Local",
    "MultiGet",
    "Nonce",
    "Now",
    "Protocol",
    "Renewal",
    "Set",
    "Sleep",
    "StoreEffect",
    "Voice",
    "WaitFor",
]


@dataclass(frozen=True, slots=True)
class Get:
    """Read one key; None where it does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class MultiGet:
    """Read several keys in one round trip."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Set:
    """Write a key. Idempotent."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key."""

    key: str


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Write ``desired`` if the value is ``expected``; see ``ports.SharedStore.compare_and_set``."""

    key: str
    expected: bytes
    desired: bytes


@dataclass(frozen=True, slots=True)
class Add:
    """Add to a counter. Never repeated, so only for hints and for charges that may over-count."""

    key: str
    amount: int


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait until a key exists, at most ``timeout_s`` seconds."""

    key: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let time pass."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Now:
    """Read this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Roll the dice."""


@dataclass(frozen=True, slots=True)
class Nonce:
    """Make a text that no other writer uses."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A key to write while something long runs, so that others see that this rank lives.

    The value written is a fresh nonce, so that each beat changes the bytes.
    """

    key: str
    every_s: float


@dataclass(frozen=True, slots=True)
class Voice:
    """What to report while a call makes no progress, so that a hang is not a silence.

    ``event`` makes it from the seconds since the last mark of progress.
    """

    every_s: float
    event: Callable[[float], Event]


@dataclass(frozen=True, slots=True)
class Emit:
    """Report a fact."""

    event: Event


StoreEffect: TypeAlias = Get | MultiGet | Set | Delete | CompareAndSet | Add | WaitFor


@dataclass(frozen=True, slots=True)
class Local:
    """Perform a store effect on this process's own store instead of the shared one.

    For what a process decides alone while the shared store is away. It never fails.
    """

    effect: StoreEffect


@dataclass(frozen=True, slots=True)
class AtSite:
    """Perform a store effect on the store that several jobs share, instead of the job's."""

    effect: StoreEffect


class Renewal(abc.ABC):
    """A lease in the shared store that is renewed while a call runs.

    Renewing is a compare-and-set from exactly the holder's bytes: a plain write would take the
    lease back from whoever has taken it over meanwhile.
    """

    every_s: float

    @abc.abstractmethod
    def request(self, nonce: str) -> CompareAndSet | Local | None:
        """Return the next renewal, or None once the lease is lost."""

    @abc.abstractmethod
    def answered(self, returned: bytes) -> None:
        """Take note of what the store returned; not called where it did not answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run foreign code.

    Without a timeout ``work`` runs inline and cannot be abandoned. With one it runs in a daemon
    thread; after ``timeout_s`` seconds without a mark of progress its cancel token is set, its
    result is discarded and ``CallTimeoutError`` is thrown into the protocol. ``is_leased`` work has
    ``timeout_s`` in all, whatever its progress: it must not outlive its holder's lease. ``renewal``
    is performed every so often until the call has ended, also while it runs inline.
    """

    work: Callable[[CancelToken], Any]
    timeout_s: float | None = None
    is_leased: bool = False
    beat: Beat | None = None
    voice: Voice | None = None
    renewal: Renewal | None = None


Effect: TypeAlias = (
    Get
    | MultiGet
    | Set
    | Delete
    | CompareAndSet
    | Add
    | WaitFor
    | Local
    | AtSite
    | Sleep
    | Now
    | Draw
    | Nonce
    | Call
    | Emit
)

T = TypeVar("T")

Protocol: TypeAlias = Generator[Effect, Any, T]
"""A conversation that ends with a ``T``."""
