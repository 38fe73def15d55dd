# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which breaker a process follows now: the job's, or its own for as long as it is alone.

``Circuit`` is the job's. Its ``detour`` holds one that this process keeps for itself, in a store of
its own, and the same protocols run there (``on_its_own`` sends their store effects to it). The
rules for when that happens are in ``core.detour``.

Nothing that was decided alone is carried over: on the way back the shared record is read, and
rebuilt from the last *shared* one that was seen where the store came back empty.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_resilience.core import detour as core
from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.events import (
    HostIsolated,
    HostRejoined,
    LocalModeEnded,
    LocalModeEntered,
    ViewTrusted,
)
from lightning_resilience.core.records import encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.circuit import refresh, withdraw
from lightning_resilience.protocols.effects import (
    Add,
    CompareAndSet,
    Delete,
    Draw,
    Emit,
    Get,
    Local,
    MultiGet,
    Nonce,
    Now,
    Set,
    WaitFor,
)
from lightning_resilience.protocols.persistent import Persistence, with_persistence
from lightning_resilience.protocols.transform import transform


if TYPE_CHECKING:
    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.circuit_memory import Detour, Link
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = [
    "choose",
    "follow",
    "guide",
    "is_lost",
    "isolate",
    "lose",
    "old_view",
    "rejoin",
    "until_s",
]

T = TypeVar("T")

_NOT_ASKED: Final = "the shared store did not answer another call of this process"
_STORE_EFFECTS = (Get, MultiGet, Set, Delete, CompareAndSet, Add, WaitFor)


def choose(circuit: Circuit, *, may_go_alone: bool) -> Protocol[Circuit]:
    """Return the breaker that this process follows now.

    Where the store is lost, one call at a time finds out whether it answers again.

    Args:
        circuit: The job's.
        may_go_alone: Whether this call may be decided without the shared store.
    """
    detour = circuit.detour
    if detour is None:
        return circuit
    if detour.is_isolated:
        return detour.circuit
    if detour.link.lost_since_s is None:
        yield from _come_back(circuit, detour)
        return circuit
    if not may_go_alone:
        return circuit
    now_s: float = yield Now()
    if now_s < detour.link.next_try_at_s:
        # Perhaps it was a call of another dependency that has found the store lost.
        yield from _go_alone(circuit, detour, why=_NOT_ASKED)
        return detour.circuit
    draw: float = yield Draw()
    # Before it is asked: the other threads stay away meanwhile.
    detour.link.leave_alone(now_s=now_s, draw=draw)
    return circuit


def guide(circuit: Circuit, *, may_go_alone: bool = True) -> Circuit:
    """Return the breaker that says how things stand, without asking anybody.

    Args:
        circuit: The job's.
        may_go_alone: Whether this call may be decided without the shared store.
    """
    detour = circuit.detour
    if detour is None:
        return circuit
    is_lost = may_go_alone and detour.link.lost_since_s is not None
    return detour.circuit if detour.is_isolated or is_lost else circuit


def is_lost(circuit: Circuit) -> bool:
    """Tell whether the shared store was given up, by any call of this process."""
    return circuit.detour is not None and circuit.detour.link.lost_since_s is not None


def until_s(circuit: Circuit, followed: Circuit, *, deadline_at_s: float) -> float:
    """Return until when to follow a breaker before choosing anew, on this process's clock."""
    detour = circuit.detour
    if followed is circuit or detour is None or detour.is_isolated:
        return deadline_at_s
    return min(deadline_at_s, detour.link.next_try_at_s)


def follow(
    circuit: Circuit, followed: Circuit, inner: Protocol[T], *, op: str, patience_s: float | None
) -> Protocol[T]:
    """Run a protocol on the breaker that was chosen.

    Args:
        circuit: The job's breaker.
        followed: The one chosen; ``inner`` works on it.
        inner: What to run.
        op: Name of the operation, for the events.
        patience_s: How long the shared store may be away before the process goes alone, in seconds;
            None leaves the store's failures to the caller.

    Returns:
        What ``inner`` returns.
    """
    if followed is not circuit:
        return (yield from transform(inner, _on_its_own))
    if patience_s is None:
        return (yield from inner)
    if circuit.detour is not None and circuit.detour.link.lost_since_s is not None:
        # It was given up once: asked again, it has one try.
        patience_s = 0.0
    persistence = Persistence(op=op, patience_s=patience_s, error=_as_it_is)
    asking = with_persistence(inner, persistence)
    return (yield from transform(asking, partial(_ask, circuit)))


def _as_it_is(_lost_for_s: float, error: StoreUnavailableError) -> Exception:
    return error


def _on_its_own(effect: Effect) -> Protocol[Any]:
    if isinstance(effect, _STORE_EFFECTS):
        return (yield Local(effect))
    return (yield effect)


def _ask(circuit: Circuit, effect: Effect) -> Protocol[Any]:
    value = yield effect
    # A wait that ends without its key may have had no answer at all.
    if isinstance(effect, _STORE_EFFECTS) and not isinstance(effect, WaitFor):
        yield from _found(circuit)
    return value


def _found(circuit: Circuit) -> Protocol[None]:
    detour = circuit.detour
    if detour is None or not detour.link.tries:
        return
    detour.link.answered()
    yield from _come_back(circuit, detour)


def _come_back(circuit: Circuit, detour: Detour) -> Protocol[None]:
    """Say that this breaker is the job's again; each does when it is next used."""
    alone_since_s, detour.alone_since_s = detour.alone_since_s, None
    if alone_since_s is None:
        return
    now_s: float = yield Now()
    yield Emit(LocalModeEnded(dependency=circuit.dependency, lost_for_s=now_s - alone_since_s))


def old_view(circuit: Circuit, followed: Circuit) -> Protocol[BreakerView | None]:
    """Return the last view where the store does not answer now, and it serves for a while longer.

    The store is asked once, without patience: a call that may go ahead does not wait for it.

    Args:
        circuit: The job's breaker.
        followed: The one chosen.

    Returns:
        The view to go ahead on; None where the breaker is to be asked as always.
    """
    view, detour = circuit.view, circuit.detour
    if followed is not circuit or view is None or detour is None:
        return None
    now_s: float = yield Now()
    is_needed = detour.link.lost_since_s is None and not circuit.is_fresh(now_s=now_s)
    if not is_needed or not core.trusts(view, circuit.config, now_s=now_s):
        return None
    if now_s < detour.link.next_try_at_s:
        # It has just not answered, and is left alone.
        return view
    return (yield from _refresh_or_trust(circuit, view, detour.link))


def _refresh_or_trust(
    circuit: Circuit, view: BreakerView, link: Link
) -> Protocol[BreakerView | None]:
    try:
        yield from transform(refresh(circuit), partial(_ask, circuit))
    except StoreUnavailableError as error:
        now_s: float = yield Now()
        draw: float = yield Draw()
        link.leave_alone(now_s=now_s, draw=draw)
        yield Emit(
            ViewTrusted(
                dependency=circuit.dependency,
                error=str(error),
                age_s=now_s - view.read_at_s,
                longest_s=core.trust_s(circuit.config),
            )
        )
        return view
    return None


def lose(circuit: Circuit, error: StoreUnavailableError) -> Protocol[None]:
    """Go on alone, because the shared store does not answer.

    Args:
        circuit: The job's breaker.
        error: The store's.

    Raises:
        StoreUnavailableError: There is no way to go alone.
    """
    detour = circuit.detour
    if detour is None:
        raise error
    now_s: float = yield Now()
    link = detour.link
    if now_s >= link.next_try_at_s:
        draw: float = yield Draw()
        link.leave_alone(now_s=now_s, draw=draw)
    if link.lost_since_s is None:
        link.lost_since_s = now_s
    yield from _go_alone(circuit, detour, why=str(error))


def _go_alone(circuit: Circuit, detour: Detour, *, why: str) -> Protocol[None]:
    if detour.alone_since_s == detour.link.lost_since_s or detour.is_isolated:
        return
    detour.alone_since_s = detour.link.lost_since_s
    detour.circuit.probe_share = core.ProbeShare(1 / detour.processes)
    state = BreakerState.CLOSED if circuit.view is None else BreakerState(circuit.view.record.state)
    yield from _seed(detour, state, reason="the shared store does not answer")
    share = detour.circuit.probe_share.share
    yield Emit(LocalModeEntered(dependency=circuit.dependency, error=why, share=share))


def isolate(circuit: Circuit) -> Protocol[None]:
    """Trip this host alone where its calls fail and the others' do not.

    Args:
        circuit: The job's breaker, after this process has reported a failure.
    """
    detour, view = circuit.detour, circuit.view
    if detour is None or view is None or detour.is_isolated:
        return
    now_s: float = yield Now()
    if not core.stands_alone(
        view.record, circuit.window, circuit.config, host=circuit.host, now_s=now_s
    ):
        return
    detour.circuit.probe_share = core.ProbeShare(
        core.share_on_a_host(hosts=circuit.hosts, processes=detour.processes)
    )
    reason = f"{circuit.window.failures} failures in a row, and no quorum of {circuit.hosts} hosts"
    yield from _seed(detour, BreakerState.OPEN, reason=reason)
    detour.is_isolated = True
    yield Emit(HostIsolated(dependency=circuit.dependency, host=circuit.host, reason=reason))


def rejoin(circuit: Circuit) -> Protocol[None]:
    """Follow the job's breaker again after a call of this host has succeeded.

    Args:
        circuit: The job's breaker.
    """
    detour = circuit.detour
    if detour is None or not detour.is_isolated:
        return
    detour.is_isolated = False
    yield Emit(HostRejoined(dependency=circuit.dependency, host=circuit.host))
    # Where the store is away, the vote lapses by itself. It is no result of the shared circuit.
    yield from withdraw(circuit)


def _seed(detour: Detour, state: BreakerState, *, reason: str) -> Protocol[None]:
    own = detour.circuit
    writer: str = yield Nonce()
    before = None if own.view is None else own.view.record
    record = core.seeded(own.config, before, state=state, reason=reason, writer=writer)
    yield Local(Set(own.key, encode(record)))
    own.place = None
    yield from transform(refresh(own), _on_its_own)
