# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Change how a protocol's effects are performed, without the protocol knowing.

A transformer runs another protocol and decides, effect by effect, how it is carried out: split into
pieces with a sign of life in between (``beating``), or repeated while the store is away
(``persistent``). The inner protocol sees only results, so the same one runs with and without.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["transform"]

T = TypeVar("T")


def transform(inner: Protocol[T], perform: Callable[[Effect], Protocol[Any]]) -> Protocol[T]:
    """Run ``inner`` and let ``perform`` carry out each of its effects.

    Bounded by ``inner``: each turn advances it by one effect.

    Args:
        inner: The protocol.
        perform: Makes of each effect a protocol that returns its result, or raises its failure.

    Returns:
        What ``inner`` returns.
    """
    advance: Callable[[], Effect] = partial(inner.send, None)
    while True:
        try:
            effect = advance()
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            value = yield from perform(effect)
        except GeneratorExit:
            inner.close()
            raise
        except BaseException as error:  # noqa: BLE001 - every failure belongs to the inner protocol
            advance = partial(inner.throw, error)
        else:
            advance = partial(inner.send, value)
