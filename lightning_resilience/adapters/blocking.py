# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Does a call of this function do the work before it returns?

A coroutine function and a generator function return at once, with something that will do the work
when somebody awaits it or asks it for values. Guarding their call would guard nothing, and say that
all is well.
"""

from __future__ import annotations

import functools
import inspect
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final

from lightning_resilience.errors import ConfigError


__all__ = ["DEFERRED", "name_of", "refuse_deferred", "refuse_deferred_result"]

DEFERRED: Final = frozenset({AsyncGeneratorType, CoroutineType, GeneratorType})
"""Types of what does its work later."""

_FLAGS: Final = (
    inspect.CO_COROUTINE
    | inspect.CO_GENERATOR
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_ITERABLE_COROUTINE
)


def name_of(function: object) -> str:
    """Return the name of a function, of what a partial calls, or of a callable object's class."""
    inner = _innermost(function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def refuse_deferred(function: object) -> None:
    """Refuse what cannot be called, and what does its work after the call.

    Partials and wrappers (``functools.wraps``) are looked through.

    Raises:
        ConfigError: It is no function, or a coroutine or generator function.
    """
    if not callable(function):
        message = (
            f"A guard calls a function, and an object of type {type(function).__name__} is none. "
            "Pass the function and its arguments: guard.call(function, argument), not "
            "guard.call(function(argument))."
        )
        raise ConfigError(message)
    inner = _innermost(function)
    for candidate in (inner, type(inner).__call__ if callable(inner) else None):
        code = getattr(candidate, "__code__", None)
        if code is not None and code.co_flags & _FLAGS:
            raise _deferred(f"{name_of(function)!r} is a coroutine or generator function")


def refuse_deferred_result(function: object, value: object) -> None:
    """Refuse the result of a call that has only begun.

    A generator is refused from a generator function only: a function may do its work and return an
    iterator over what it has.

    Args:
        function: What was called.
        value: What it returned, of one of the types ``DEFERRED``.

    Raises:
        ConfigError: The work is not done.
    """
    if isinstance(value, CoroutineType):
        # Nobody will await it, and Python warns of that.
        value.close()
    refuse_deferred(function)
    if not isinstance(value, GeneratorType):
        raise _deferred(f"{name_of(function)!r} has returned a {type(value).__name__}")


def _innermost(function: object) -> Any:
    inner: Any = function
    while isinstance(unwrapped := _unwrapped(inner), functools.partial):
        inner = unwrapped.func
    return unwrapped


def _unwrapped(function: Any) -> Any:
    try:
        return inspect.unwrap(function)
    except ValueError:
        # It says that it wraps itself: it is taken as it is.
        return function


def _deferred(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: its call returns before the work is done, so a guard would guard nothing. Guard "
        "the blocking function that does the work; where a wrapper waits for the end of it, guard "
        "a function of your own that calls the wrapper."
    )
