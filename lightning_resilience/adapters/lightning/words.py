# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Options of joint operations that may be given by themselves as well as in a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from lightning_resilience.config import build
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.errors import ConfigError


__all__ = ["with_words"]


def with_words(
    joint: Mapping[str, Any] | None,
    on_outage: str | None,
    on_store_loss: str | None,
    **more: str | float | None,
) -> JointConfig:
    """Return the options of joint operations.

    Args:
        joint: Those in a mapping, or None.
        on_outage: That one by itself, or None where it was not given.
        on_store_loss: The same.
        more: Others, by name.

    Raises:
        ConfigError: One is given twice, unknown, or out of range.
    """
    words = {"on_outage": on_outage, "on_store_loss": on_store_loss, **more}
    given = {name: word for name, word in words.items() if word is not None}
    both = [name for name in given if isinstance(joint, Mapping) and name in joint]
    if both:
        message = (
            f"{both[0]} is given twice: {both[0]}={given[both[0]]!r} and "
            f"joint={{{both[0]!r}: {cast('Any', joint)[both[0]]!r}}}. Give it once."
        )
        raise ConfigError(message)
    return replace(build(JointConfig, joint), **cast("dict[str, Any]", given))
