# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What filesystems say of a file, each under names of its own, under one."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["modified_s"]

_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def modified_s(item: Mapping[str, Any]) -> float | None:
    """Return when something was written, in seconds of the storage's clock since 1970.

    Args:
        item: What the filesystem says of it.

    Returns:
        None where it does not say.
    """
    said = next((item[key] for key in _TIMES if item.get(key) is not None), None)
    if isinstance(said, str):
        # Python 3.10 does not know the letter that stands for UTC.
        with contextlib.suppress(ValueError):
            said = datetime.fromisoformat(said.replace("Z", "+00:00"))
    if isinstance(said, datetime):
        return (said if said.tzinfo else said.replace(tzinfo=timezone.utc)).timestamp()
    return float(said) if isinstance(said, (int, float)) else None
