# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Open files that publish when they are closed, and only if nothing went wrong before.

``close`` publishes; an exception inside the ``with`` block, or losing the file without ``close``,
discards. fsspec's transactions work: inside one, ``close`` keeps the staged file, and the
transaction's end calls ``commit`` or ``discard``.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from lightning_resilience.adapters.staging import Staged, StagedWriter, discard


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


__all__ = ["StagedFile", "StagedText"]


class StagedFile(StagedWriter):
    """A binary file for writing that appears at its place when it is closed.

    Args:
        path: Name of the staged file.
        publish: Makes the complete file appear; called once, by ``close`` or ``commit``.
        autocommit: False inside a transaction of fsspec.
    """

    mode = "wb"

    def __init__(
        self, path: str, publish: Callable[[Staged], None], *, autocommit: bool = True
    ) -> None:
        self._publish = publish
        self._autocommit = autocommit
        self._staged: Staged | None = None
        super().__init__(path)

    def close(self) -> None:
        """Complete the file, and publish it unless a transaction will. Idempotent.

        Raises:
            Exception: What publishing raised; then nothing has appeared.
        """
        if self.closed:
            return
        try:
            self._staged = self.finish()
        except BaseException:
            self.discard()
            raise
        super().close()
        if self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Publish the complete file. For ``close`` and for fsspec's transactions."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        try:
            self._publish(staged)
        finally:
            discard(self.path)

    def discard(self) -> None:
        """Forget all that was written. Idempotent; nothing appears."""
        self._staged = None
        self.abandon()
        super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publish at the end of the block, discard if an exception ended it."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        """Discard: a file that nobody closed is not complete."""
        if getattr(self, "_fd", -1) >= 0:
            self.discard()


class StagedText(io.TextIOWrapper):
    """Text on top of a ``StagedFile``; it discards where that would, too."""

    buffer: StagedFile  # type: ignore[assignment] # narrower than what the base declares

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publish at the end of the block, discard if an exception ended it."""
        if kind is not None:
            # The base class would write out its buffer and close what is beneath.
            self.buffer.discard()
        self.close()

    def __del__(self) -> None:
        """Discard: a file that nobody closed is not complete."""
        if not self.closed:
            self.buffer.discard()
