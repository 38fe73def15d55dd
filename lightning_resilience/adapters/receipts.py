# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What storage has acknowledged to this process and was not asked for since, by name.

One list for the whole process, because a save that is attempted again does so with another client.
A receipt is kept from a publication to the next question for the size of that name, which is how
every save is verified; ``core.receipts`` says what it shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.core.receipts import TAIL_BYTES, Receipt, contradiction
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["acknowledge", "compare", "forget", "receipt_by_tail", "with_tail"]

_kept: Final[dict[str, Receipt]] = {}


def acknowledge(key: str, receipt: Receipt) -> None:
    """Keep what storage has said of what it has taken under a name. Any thread."""
    _kept[key] = receipt


def forget(key: str) -> None:
    """Forget it: something else is asked of that name. Any thread."""
    _kept.pop(key, None)


def compare(key: str, found: Receipt) -> None:
    """Compare what is there with what was acknowledged, once. Any thread.

    Args:
        key: The name.
        found: What storage says of what is there.

    Raises:
        CheckpointError: It is something else; another attempt writes it again.
    """
    taken = _kept.pop(key, None)
    what = "" if taken is None else contradiction(taken, found)
    if what:
        message = f"what is at {redacted(key)} is not what was written: {what}"
        raise CheckpointError(message)


def receipt_by_tail(staged_path: str) -> Receipt:
    """Return what tells a file that was sent from others, where the storage gives it no name.

    Args:
        staged_path: The file.

    Raises:
        OSError: It cannot be read.
    """
    with Path(staged_path).open("rb") as file:
        size_bytes = file.seek(0, 2)
        file.seek(_tail_begins(size_bytes))
        return Receipt(tail=xxhash.xxh3_128_hexdigest(file.read()), size_bytes=size_bytes)


def with_tail(key: str, found: Receipt, read: Callable[..., bytes]) -> Receipt:
    """Return what storage says of what is there, with its end where only that tells it. Any thread.

    Args:
        key: The name.
        found: What storage says of what is there, with its length.
        read: Reads it from *start* to *end*.

    Raises:
        OSError: What the storage raised, but that it may not be read.
    """
    taken = _kept.get(key)
    if taken is None or not taken.is_told_by_its_tail(found.size_bytes):
        return found
    size_bytes = found.size_bytes or 0
    try:
        data = read(start=_tail_begins(size_bytes), end=size_bytes)
    except Exception as error:
        # Who may write and not read has nothing to compare, and that fails no save.
        if classify(error).failure is not FailureClass.PERMANENT:
            raise
        return found
    return replace(found, tail=xxhash.xxh3_128_hexdigest(data))


def _tail_begins(size_bytes: int) -> int:
    return max(0, size_bytes - TAIL_BYTES)
