# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What storage has acknowledged to this process and was not asked for since, by name.

One list for the whole process, because a save that is attempted again does so with another client.
A receipt is kept from a publication to the next question for the size of that name, which is how
every save is verified; ``core.receipts`` says what it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.receipts import contradiction
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from lightning_resilience.core.receipts import Receipt


__all__ = ["acknowledge", "compare", "forget"]

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
