# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Carry out an order of steps by hands that are generators themselves.

So that each hand may yield what its own driver understands: effects of a protocol, where the steps
of a load are around guarded attempts; or operations of a simulated storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from lightning_resilience.core.pipeline import Steps


__all__ = ["carried_out"]

T = TypeVar("T")


def carried_out(
    steps: Steps[T], hands: Mapping[Any, Callable[[Any], Generator[Any, Any, Any]]]
) -> Generator[Any, Any, T]:
    """Carry out one step after the other, by hands that are generators themselves.

    Args:
        steps: The order.
        hands: As for ``carry_out``; what they yield is yielded, and what is sent is sent to them.

    Returns:
        What the order ends with.
    """
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            do = steps.send(answer) if failure is None else steps.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        answer = failure = None
        try:
            answer = yield from hands[do.step](do.of)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - the order raises it again
            failure = error
