# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a file is cut into the parts of an upload, and how many of them are under way at once.

The object storage protocol allows 10,000 parts. Each part that is under way is in memory, once as
it was read and for a moment once more as it is sent, so the length of a part decides how many
there may be:

=====================  ==========  =======================  =====================
file                   part        under way at once        in memory, at most
=====================  ==========  =======================  =====================
up to 78 GiB           8 MiB       4                        64 MiB
up to 156 GiB          16 MiB      2                        64 MiB
beyond                 1/10,000    1                        two parts
=====================  ==========  =======================  =====================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


__all__ = ["Cut", "cut"]

_PARTS_MAX: Final = 10_000
_IN_FLIGHT_BYTES: Final = 32 * 2**20
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
    in_flight = max(1, min(_IN_FLIGHT_MAX, _IN_FLIGHT_BYTES // part_bytes, count))
    return Cut(part_bytes=part_bytes, count=count, in_flight=in_flight)
