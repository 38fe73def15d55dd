# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a file is cut into the parts of an upload, and how many of them are under way at once.

One connection to object storage is slower than the network, so several parts go at the same time. A
part is read as it is sent, so its length costs no memory, and each one under way costs what its
connection buffers. The parts of a file fill whole rounds: were one left for a last round, all the
other connections would wait for it. Requests are paid for, and each waits for its answer, so parts
are as long as that allows. All but the last are of one length, as some servers demand.

The protocol allows 10,000 parts: longer files have longer ones. A file that is still being written
is cut by the length that it is expected to have. If it becomes longer than 10,000 of those parts,
the upload that was begun cannot hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


__all__ = ["CONNECTIONS", "Cut", "Lengths", "cut"]

_PARTS_MAX: Final = 10_000
_MEMORY_BYTES: Final = 64 * 2**20
# Twice what was measured over TLS, where a connection holds a piece of 1 MiB several times: as it
# was read, with the frame of its chunk, encrypted, and what the socket has not taken yet.
_CONNECTION_BYTES: Final = 6 * 2**20
_IN_FLIGHT: Final = _MEMORY_BYTES // _CONNECTION_BYTES
# What is asked while parts are under way must not wait for one of them to end.
CONNECTIONS: Final = _IN_FLIGHT + 6
"""How many connections a client of object storage should have at most."""
_PADDING: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What a storage takes, in bytes.

    Args:
        single_bytes: Up to this length a file is sent whole, by one request.
        shortest_bytes: No part but the last is shorter; a limit of the protocol.
        longest_bytes: No part is longer, unless there would be too many.
    """

    single_bytes: int
    shortest_bytes: int
    longest_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a file is sent.

    Args:
        part_bytes: Length of each part but the last.
        in_flight: How many parts are under way at once at most, ≥ 1.
        single_bytes: A file that is still being written is not begun before it is longer.
    """

    part_bytes: int
    in_flight: int
    single_bytes: int

    def holds(self, size_bytes: int) -> bool:
        """Tell whether a file of this length can be sent in these parts."""
        return size_bytes <= self.part_bytes * _PARTS_MAX

    def ready(self, size_bytes: int, *, is_whole: bool) -> int:
        """Return how many parts can be sent, the first ones, once a file has grown to this length.

        Args:
            size_bytes: How many bytes are in the file.
            is_whole: Whether it will not grow any more; its last part may be shorter.
        """
        if not is_whole and size_bytes <= self.single_bytes:
            return 0
        count = -(-size_bytes // self.part_bytes) if is_whole else size_bytes // self.part_bytes
        return min(count, _PARTS_MAX)

    def span(self, number: int, size_bytes: int) -> tuple[int, int]:
        """Return where a part begins and how long it is.

        Args:
            number: Number of the part, from 1.
            size_bytes: How many bytes are in the file; the part is ready.
        """
        offset = (number - 1) * self.part_bytes
        return offset, min(self.part_bytes, size_bytes - offset)


def cut(size_bytes: int, lengths: Lengths) -> Cut:
    """Cut a file into parts.

    Args:
        size_bytes: Length of the file, or about how long it will be.
        lengths: What the storage takes.

    Returns:
        The parts.
    """
    # A file is a little longer than the tensors in it, and must not need a round more for that.
    padded_bytes = size_bytes + size_bytes // _PADDING
    rounds = max(1, -(-padded_bytes // (lengths.longest_bytes * _IN_FLIGHT)))
    part_bytes = -(-padded_bytes // (rounds * _IN_FLIGHT))
    part_bytes = min(max(part_bytes, lengths.shortest_bytes), lengths.longest_bytes)
    part_bytes = max(part_bytes, -(-size_bytes // _PARTS_MAX))
    return Cut(part_bytes=part_bytes, in_flight=_IN_FLIGHT, single_bytes=lengths.single_bytes)
