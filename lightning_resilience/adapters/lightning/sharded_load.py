# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One load of a strategy whose ranks read together: no collective is open while storage is asked.

========  ======  ==============================================================================
step      ranks   what it does
========  ======  ==============================================================================
``find``  rank 0  tells all whether it is one file, or a directory with its metadata; or fails
``load``  all     fetches it to this node; a local one is looked at by every rank, and stays
(none)    all     the strategy's own load of the local path, collectives and all
``apply`` all     how that ended
========  ======  ==============================================================================

Each rank fetches the whole checkpoint: which parts of it a rank needs is known to the strategy
only, and only while it loads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.sharded_save import raising, run_in_lock_step
from lightning_resilience.adapters.lightning.sharded_work import Fetched, Look
from lightning_resilience.adapters.lightning.work import Asked


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.ports import CancelToken


__all__ = ["load_in_lock_step"]


def load_in_lock_step(
    strategy: Any, session: Session, url: str, *, read: Callable[[str], Any]
) -> Any:
    """Load a checkpoint on all ranks.

    Args:
        strategy: The Trainer's strategy.
        session: This rank's session.
        url: The checkpoint, the same on every rank.
        read: The strategy's own load, given a local path.

    Returns:
        What that returned.

    Raises:
        JointError: The same on every rank: no rank goes on with what it has loaded.
    """
    storage = session.storage
    session.on_rank_zero("find", url, Look(storage, url).attempt, kind="read")
    fetched = Fetched(storage, url, nonce=session.driver.dice.nonce)
    try:
        path = session.by_all("load", url, fetched, kind="read")
        loaded, error = run_in_lock_step(strategy, partial(read, path))
        told = Asked(storage, url, partial(_tell, error))
        session.by_all("apply", url, told, is_guarded=False)
    finally:
        fetched.discard()
    return loaded


def _tell(error: Exception | None, token: CancelToken) -> None:
    del token
    raising(error)
