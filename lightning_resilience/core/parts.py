# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a file is cut into the parts of an upload, and how many of them are under way at once.

One connection to object storage is slower than the network, so a few parts go at the same time. A
part is read as it is sent, so neither its length nor their number costs memory; requests are paid
for, so parts are not short. The protocol allows 10,000 of them: longer files have longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


__all__ = ["Cut", "cut"]

_PARTS_MAX: Final = 10_000
# More hardly helps one connection pool, and a retry is load: so is a burst.
_IN_FLIGHT_MAX: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a file is sent.

    Args:
        part_bytes: Length of each part but the last.
        count: How many parts there are, ≥ 1.
        in_flight: How many of them are under way at once, ≥ 1.
    """

    part_bytes: int
    count: int
    in_flight: int


def cut(size_bytes: int, *, part_bytes: int) -> Cut:
    """Cut a file into parts.

    Args:
        size_bytes: Length of the file, ≥ 1.
        part_bytes: Length of a part; doubled as often as there would be too many.

    Returns:
        The parts.
    """
    while part_bytes * _PARTS_MAX < size_bytes:
        part_bytes *= 2
    count = -(-size_bytes // part_bytes)
    return Cut(part_bytes=part_bytes, count=count, in_flight=min(_IN_FLIGHT_MAX, count))
