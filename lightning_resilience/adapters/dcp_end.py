# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a writer and a reader for ``torch.distributed.checkpoint`` have in common.

Both are about one directory, have the same options, and take a seat among the ranks for as long as
one save or load lasts. torch calls the methods here on either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.dcp_options import check_dcp_options, check_directory
from lightning_resilience.errors import ConfigError
from lightning_resilience.runtime.system import SystemDice


if TYPE_CHECKING:
    import os

    from lightning_resilience.adapters.dcp_session import Seat


__all__ = ["DcpEnd"]


class DcpEnd:
    """One end of a checkpoint: the part that does not depend on the direction.

    Args:
        path: Path or URL of the checkpoint's directory.
        options: Those of ``check_dcp_options``.

    Raises:
        ConfigError: An option is out of range, or contradicts another.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._url = check_directory(path)
        self._options = check_dcp_options(**options)
        self._dice = SystemDice(rank=0)
        self._begin()

    def _begin(self) -> None:
        """Forget the save or load before: another one begins."""
        self._id = self._dice.nonce()
        self._seat: Seat | None = None

    def _leave(self) -> None:
        """Let the next one have this rank's seat; also after one that has ended half way."""
        at, self._seat = self._seat, None
        if at is not None:
            at.leave()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, of another directory where one is named."""
        if checkpoint_id:
            self._url = check_directory(checkpoint_id)
        self._leave()
        self._begin()

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the checkpoint's directory."""
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a checkpoint may be there."""
        try:
            check_directory(checkpoint_id)
        except ConfigError:
            return False
        return True
