# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Attributes that are replaced on an object, and put back.

Only instances are touched, never classes: another Trainer in the same process sees nothing of it.
What was set on the instance before is set again, and what was not is removed, in the reverse order.
"""

from __future__ import annotations

from typing import Any


__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """What has been replaced so far."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` on the instance, and remember what was set there."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back. Idempotent."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _ABSENT:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
