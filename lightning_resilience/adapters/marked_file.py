# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An open file that marks its progress, and remembers what it has raised.

Who reads a checkpoint through a library (``torch.load``, ``zipfile``) does not see every failed
read: some take it for the end of the file, some read on. So the file remembers the first one, and
whoever has opened it asks afterwards.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.trees import PIECE_BYTES


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.ports import CancelToken


__all__ = ["MarkedFile"]


class MarkedFile(io.RawIOBase):
    """An open file that marks its progress, and remembers what it has raised.

    Args:
        file: A binary file that can seek; whoever opened it closes it.
        token: Told of each piece, and asked before it whether the caller has given up.
    """

    def __init__(self, file: Any, token: CancelToken) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._file = file
        self._token = token

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read one piece, or less."""
        view = memoryview(buffer).cast("B")[:PIECE_BYTES]
        with self._remembering():
            self._token.raise_if_cancelled()
            data = self._file.read(len(view))
            self._token.progress(read=len(data))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go somewhere else in the file."""
        with self._remembering():
            self._file.seek(offset, whence)
            return int(self._file.tell())

    def tell(self) -> int:
        """Tell where in the file this is."""
        return int(self._file.tell())

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            raise
