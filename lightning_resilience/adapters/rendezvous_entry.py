# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The entry point by which torch finds the rendezvous backend ``resilient``.

Torch loads every entry point of ``torchrun.handlers`` in every process that imports its rendezvous
package, and calls it without arguments; an exception there is no more than a line in a log. So this
file imports nothing but what it needs to be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


__all__ = ["resilient"]


def resilient() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes the handler; torch calls that with the launcher's parameters."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from lightning_resilience.adapters.rendezvous import create_handler  # noqa: PLC0415 - see above

    return create_handler(parameters)
