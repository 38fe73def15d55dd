# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Attributes that are replaced on an object, and put back.

Only instances are touched, never classes: another Trainer in the same process sees nothing of it.
What was set on the instance before is set again, and what was not is removed, in reverse order.

An instance is asked for its attributes by name, never for its ``__dict__``: CPython 3.11 and 3.12
make that dictionary when somebody first looks, and every look-up on the object is slower from then
on, in every step where it is the training loop or the strategy.

A replaced method stays behind when its owner is copied or sent to another process in the middle of
a fit: the copy has the method of its class, as if nothing had been replaced.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Patches"]

_ABSENT = object()


class _Hook:
    """A method that is replaced on one instance."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # The owner is being copied: by now it stands for its copy.
        return _method_of_class, (self._owner, self._name)


def _method_of_class(owner: Any, name: str) -> Any:
    for kind in type(owner).__mro__:
        if name in vars(kind):
            return vars(kind)[name].__get__(owner, type(owner))
    message = f"{type(owner).__name__} has no method {name!r}"
    raise AttributeError(message)


def _own(owner: Any, name: str) -> Any:
    """Return what is set on the instance itself."""
    seen = getattr(owner, name, _ABSENT)
    if isinstance(seen, _Hook):
        return seen
    is_method = getattr(seen, "__self__", None) is owner
    of_class = getattr(type(owner), name, None)
    if seen is _ABSENT or (is_method and getattr(seen, "__func__", None) is of_class):
        return _ABSENT
    return vars(owner).get(name, _ABSENT)


class Patches:
    """What has been replaced so far."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` on the instance, and remember what was set there."""
        self._replaced.append((owner, name, _own(owner, name)))
        setattr(owner, name, _Hook(owner, name, value) if callable(value) else value)

    def undo(self) -> None:
        """Put everything back. Idempotent."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not _ABSENT:
                setattr(owner, name, before)
                continue
            # Somebody else's clean-up may have come first.
            with contextlib.suppress(AttributeError):
                delattr(owner, name)
