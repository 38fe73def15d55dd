# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks on the strategy: save and remove become joint operations, and ``teardown`` puts all back.

They sit on the strategy and not in the ``CheckpointIO``, because Lightning calls the latter on rank
0 alone in places where no other rank takes part (launchers and tuners, for their temporary files).
They sit on the *instance*, from ``setup`` on: a patched instance could not be sent to a spawned
process.

``teardown`` of the strategy is what Lightning runs at every end, also after an exception; the
``teardown`` hooks of callbacks are not called then.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.checkpoint_io import ForeignSave, StagedSave
from lightning_resilience.adapters.lightning.namespaces import is_stock_io, is_wrapping_io


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.ports import CancelToken


__all__ = ["hook_strategy"]


def hook_strategy(
    strategy: Any, session: Session, patches: Patches, *, at_end: Callable[[], None]
) -> None:
    """Replace the strategy's methods on the instance.

    Args:
        strategy: The Trainer's strategy.
        session: This rank's session.
        patches: Remembers what was replaced.
        at_end: Called when the strategy is torn down, before it is.
    """
    patches.replace(strategy, "save_checkpoint", partial(_save, strategy, session))
    patches.replace(strategy, "remove_checkpoint", partial(_remove, strategy, session))
    teardown = strategy.teardown

    def torn_down() -> None:
        try:
            at_end()
        finally:
            teardown()

    patches.replace(strategy, "teardown", torn_down)


def _save(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    strategy: Any,
    session: Session,
    checkpoint: dict[str, Any],
    filepath: str | os.PathLike[str],
    storage_options: Any = None,
) -> None:
    url = os.fspath(filepath)
    if not strategy.is_global_zero:
        session.save(url, None)
        return
    checkpoint_io = strategy.checkpoint_io
    if is_stock_io(checkpoint_io):
        storage = session.storage.with_options(storage_options)
        session.save(url, StagedSave(storage, url, checkpoint, nonce=session.driver.dice.nonce))
        return
    write = partial(
        checkpoint_io.save_checkpoint, checkpoint, filepath, storage_options=storage_options
    )
    # AsyncCheckpointIO and its like write later, so there is nothing to see yet.
    verify = not is_wrapping_io(checkpoint_io)
    session.save(url, ForeignSave(session.storage, url, write, verify=verify))


def _remove(strategy: Any, session: Session, filepath: str | os.PathLike[str]) -> None:
    url = os.fspath(filepath)
    checkpoint_io = strategy.checkpoint_io
    if is_stock_io(checkpoint_io):
        session.remove(url, partial(session.storage.remove, url))
        return

    def remove(token: CancelToken) -> None:
        token.raise_if_cancelled()
        checkpoint_io.remove_checkpoint(filepath)

    session.remove(url, remove)
