# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A file, or a span of it, as the body of a request: read as it is sent, never whole in memory.

To aiohttp it is no file: that would be read in pieces of 64 KiB, each in a thread, and wait for the
thread each time. What was just staged is read from memory, as botocore does for checksums.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final


if TYPE_CHECKING:
    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.ports import CancelToken


__all__ = ["Span", "Whole"]

_PIECE_BYTES: Final = 2**20
"""How much is read at once where the client does not say: as it does over TLS."""


class Span:
    """A span of an open file.

    Args:
        file: The file.
        offset: Where it begins.
        size_bytes: How long it is.
        token: Told of each piece that is read; the body breaks off once the caller has given up.
    """

    def __init__(self, file: Any, offset: int, size_bytes: int, *, token: CancelToken) -> None:
        self.size_bytes = size_bytes
        self._file = file
        self._offset = offset
        self._token = token
        self._position = 0

    def tell(self) -> int:
        """Return how much was read."""
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go on from elsewhere: whoever has read it for a checksum begins anew."""
        base = (0, self._position, self.size_bytes)[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = None, /) -> bytes:
        """Read the next piece, or all that is left.

        Raises:
            CallTimeoutError: The caller has given up.
            OSError: The file cannot be read.
        """
        self._token.raise_if_cancelled()
        left = max(0, self.size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(left, size)
        data = os.pread(self._file.fileno(), wanted, self._offset + self._position)
        self._position += len(data)
        self._token.progress()
        return data

    def __aiter__(self) -> Span:
        return self

    async def __anext__(self) -> bytes:
        data = self.read(_PIECE_BYTES)
        if not data:
            raise StopAsyncIteration
        return data


class Whole(Span):
    """A whole file, which makes an object as soon as all of it is sent.

    Args:
        file: The file.
        size_bytes: How long it is.
        landing: Told when its end was read, and when it is read from the beginning once more.
    """

    def __init__(self, file: Any, size_bytes: int, *, landing: Landing) -> None:
        super().__init__(file, 0, size_bytes, token=landing.token)
        self._landing = landing

    def read(self, size: int | None = None, /) -> bytes:
        """Read as a span is read; what is all sent does not break off any more."""
        if self._landing.is_sent and self._position == self.size_bytes:
            return b""
        data = super().read(size)
        if self._position == self.size_bytes:
            self._landing.send()
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go on from elsewhere."""
        position = super().seek(offset, whence)
        if position < self.size_bytes:
            self._landing.take_back()
        return position
