# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a config dataclass refuses a bad option, with the same words everywhere.

Every field of a config is declared with :func:`option`, which keeps its reason beside its default
(the option table is generated from that), and checked in ``__post_init__`` with the functions
below. All of them raise ``ConfigError`` with the option's name, its value and what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, Final, TypeGuard

from lightning_resilience.errors import ConfigError


__all__ = [
    "check_at_least",
    "check_choice",
    "check_flag",
    "check_kind",
    "check_less",
    "check_seconds",
    "check_share",
    "check_whole",
    "option",
]

# Far above every sensible count, and far below what a record or a float could not hold any more.
_LARGEST_WHOLE: Final = 10**9


def option(default: Any, *, why: str) -> Any:  # noqa: ANN401 - stands for any type
    """Declare a config field with its default and the reason for the default.

    Args:
        default: The default value.
        why: One phrase for the option table.

    Returns:
        A dataclass field.
    """
    return field(default=default, metadata={"why": why})


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _text(value: object) -> str:
    # Python refuses to print whole numbers of more than some thousand digits.
    if isinstance(value, int) and not -(_LARGEST_WHOLE**2) <= value <= _LARGEST_WHOLE**2:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)


def check_seconds(name: str, value: object, *, above: float = 0.0, zero: bool = False) -> None:
    """Refuse what is not a finite duration in seconds.

    Args:
        name: Name of the option.
        value: Its value.
        above: Exclusive lower bound.
        zero: Whether 0 is allowed although ``above`` is 0.

    Raises:
        ConfigError: The value is no finite number, or out of range.
    """
    allowed = f"a finite number of seconds {'≥' if zero else '>'} {above:g}"
    if not _is_number(value):
        message = f"{name}={_text(value)} is not allowed: it must be {allowed}."
        raise ConfigError(message)
    if value < above or (value == above and not zero):
        message = f"{name}={_text(value)} is out of range: it must be {allowed}."
        raise ConfigError(message)


def check_whole(name: str, value: object, *, minimum: int, maximum: int = _LARGEST_WHOLE) -> None:
    """Refuse what is not a whole number from ``minimum`` to ``maximum``, a thousand millions.

    Raises:
        ConfigError: The value is no whole number, or out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        message = (
            f"{name}={_text(value)} is not allowed: it must be a whole number ≥ {minimum} "
            f"and ≤ {maximum}."
        )
        raise ConfigError(message)


def check_share(name: str, value: object, *, zero: bool = False) -> None:
    """Refuse what is not a share of a whole: a number in (0, 1].

    Args:
        name: Name of the option.
        value: Its value.
        zero: Whether 0 is allowed as well.

    Raises:
        ConfigError: The value is no number, or out of range.
    """
    if not _is_number(value) or not 0 <= value <= 1 or (value == 0 and not zero):
        allowed = f"a number in {'[' if zero else '('}0, 1]"
        message = f"{name}={_text(value)} is not allowed: it must be {allowed}."
        raise ConfigError(message)


def check_choice(name: str, value: object, *, choices: tuple[str, ...]) -> None:
    """Refuse what is not one of ``choices``.

    Raises:
        ConfigError: The value is none of them.
    """
    if value not in choices:
        message = (
            f"{name}={_text(value)} is not allowed: "
            f"it must be one of {', '.join(map(repr, choices))}."
        )
        raise ConfigError(message)


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ConfigError: The value is something else; 0 and 1 are.
    """
    if not isinstance(value, bool):
        message = f"{name}={_text(value)} is not allowed: it must be True or False."
        raise ConfigError(message)


def check_kind(name: str, value: object, *, fits: bool, allowed: str) -> None:
    """Refuse what is not of the kind that an option takes; None is always allowed.

    Only the type is shown, because a value of the wrong kind may be a secret.

    Args:
        name: Name of the option.
        value: Its value.
        fits: Whether it is of that kind.
        allowed: What the option takes.

    Raises:
        ConfigError: It is not.
    """
    if value is not None and not fits:
        shown = repr(value) if isinstance(value, int) or value == "" else "…"
        message = (
            f"{name}={shown} of type {type(value).__name__} is not allowed: it must be {allowed}, "
            "or None."
        )
        raise ConfigError(message)


def check_less(smaller: tuple[str, float], larger: tuple[str, float], *, why: str) -> None:
    """Refuse two options whose values contradict each other: the first must be less.

    Args:
        smaller: Name and value of the option that must be less.
        larger: Name and value of the option that must be more.
        why: What goes wrong otherwise.

    Raises:
        ConfigError: The first value is not less than the second.
    """
    if not smaller[1] < larger[1]:
        message = (
            f"{smaller[0]}={smaller[1]:.12g} must be less than {larger[0]}={larger[1]:.12g}: "
            f"{why}. Lower the first or raise the second."
        )
        raise ConfigError(message)


def check_at_least(larger: tuple[str, float], smaller: tuple[str, float], *, why: str) -> None:
    """Refuse two options whose values contradict each other: the first must be at least the second.

    Args:
        larger: Name and value of the option that must not be less.
        smaller: Name and value of what it is compared with.
        why: What goes wrong otherwise.

    Raises:
        ConfigError: The first value is less than the second.
    """
    if not larger[1] >= smaller[1]:
        message = (
            f"{larger[0]}={larger[1]:.12g} must be at least {smaller[0]}={smaller[1]:.12g}: "
            f"{why}. Raise the first or lower the second."
        )
        raise ConfigError(message)
