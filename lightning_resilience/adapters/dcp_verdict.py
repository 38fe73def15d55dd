# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How an error that every rank has leaves a save or load of ``torch.distributed.checkpoint``.

That package catches whatever a writer or reader raises, and gathers it from all ranks in order to
raise it on all. An error of a joint operation is on all ranks already, and where one of them is
lost the gathering would wait for it until the process group's timeout. So the error is wrapped in
something that cannot be gathered: pickled, as every rank does first, it raises the error. All ranks
leave at that point, and no collective was begun.
"""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


__all__ = ["SharedFailure"]


class SharedFailure(BaseException):
    """Carries an error past whoever would gather it.

    No ``Exception``, because reading metadata takes any of those for metadata that is not there.

    Args:
        error: What all ranks raise.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Raise the error."""
        del protocol
        raise self.error
