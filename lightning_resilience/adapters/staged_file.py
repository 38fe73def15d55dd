# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Open files that publish when they are closed, and only if nothing went wrong before.

``close`` publishes; an exception inside the ``with`` block, or losing the file without ``close``,
discards. fsspec's transactions work: inside one, ``close`` keeps the staged file, and the
transaction's end calls ``commit`` or ``discard``.

Context managers around a file do not all hand on what ended their block: those of ``fsspec.open``
and of pandas call ``close`` whatever happened. So ``close`` looks at who is calling, and discards
where that is the ``__exit__`` of a block that is left by an exception which is younger than the
file. A plain ``close()`` in an ``except`` clause is no such thing, and publishes.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from lightning_resilience.adapters.staging import Staged, StagedWriter, discard


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType


__all__ = ["StagedFile", "StagedText"]


def _is_leaving_a_block_by(error: BaseException | None) -> bool:
    """Tell whether a caller is an ``__exit__`` that was given ``error``."""
    # Its public twin, inspect.stack, reads the sources of all frames as well.
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == "__exit__":
            given = list(frame.f_locals.values())
            details = [each for value in given if isinstance(value, tuple) for each in value]
            if any(value is error for value in [*given, *details]):
                return True
        frame = frame.f_back
    return False


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
        self._is_lost = False
        # What is written while an exception is handled, for example a report of it, is complete.
        self._older = sys.exc_info()[1]
        super().__init__(path)

    def close(self) -> None:
        """Complete the file, and publish it unless a transaction will. Idempotent.

        Raises:
            Exception: What publishing raised; then nothing has appeared.
        """
        if self.closed:
            return
        error = sys.exc_info()[1]
        is_younger = error is not None and error is not self._older
        if self._is_lost or (is_younger and _is_leaving_a_block_by(error)):
            self.discard()
            return
        try:
            self._staged = self.finish()
        except BaseException:
            self.discard()
            raise
        super().close()
        self._older = None
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
        self._staged = self._older = None
        self.abandon()
        super().close()

    def _dealloc_warn(self, source: object) -> None:
        """Take note that what was wrapped around this file is lost: its finaliser will close it."""
        del source
        self._is_lost = True

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
