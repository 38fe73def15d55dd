# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks on strategies that know nothing but local paths: FSDP, ``ModelParallel``, DeepSpeed.

They make a ``Path`` of every URL, and each rank writes or reads there with plain file calls in
between collectives. What they write in full, on rank 0 through the ``CheckpointIO``, is saved as
for every other strategy, by the URL as it is; shards take the steps of ``sharded_save``, and loads
those of ``sharded_load``.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.commit import origin_of
from lightning_resilience.adapters.lightning.sharded_load import load_in_lock_step
from lightning_resilience.adapters.lightning.sharded_save import ShardedSave
from lightning_resilience.adapters.lightning.sharded_work import Removal, look
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.shards import Form, Saving


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.ports import CancelToken


__all__ = ["complete_teardown", "hook_sharded"]


def complete_teardown(strategy: Any, patches: Patches) -> None:
    """Let the strategy's ``teardown`` end that of its ``CheckpointIO``, as the base's does.

    FSDP's and ``ModelParallel``'s leave it out, so nobody would wait for what is still written in
    the background, nor learn that it has failed.
    """
    teardown = strategy.teardown

    def tear_down() -> None:
        teardown()
        strategy.checkpoint_io.teardown()

    patches.replace(strategy, "teardown", tear_down)


def hook_sharded(strategy: Any, session: Session, patches: Patches, *, saving: Saving) -> None:
    """Replace what is different for these strategies, after ``hook_strategy``.

    Args:
        strategy: The Trainer's strategy.
        session: This rank's session.
        patches: Remembers what was replaced.
        saving: How this strategy writes.
    """
    patches.replace(strategy, "load_checkpoint", partial(_load, strategy, session))
    if saving is Saving.SHARDED:
        patches.replace(strategy, "remove_checkpoint", partial(_remove, session))
        patches.replace(strategy, "save_checkpoint", partial(_save, strategy, session))
        return
    saved = partial(_save_in_full, strategy, session, strategy.save_checkpoint)
    patches.replace(strategy, "save_checkpoint", saved)


def _of_class(strategy: Any, name: str) -> Callable[..., Any]:
    return partial(getattr(type(strategy), name), strategy)


def _save(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    strategy: Any,
    session: Session,
    checkpoint: dict[str, Any],
    filepath: str | os.PathLike[str],
    storage_options: Any = None,
) -> None:
    write = _of_class(strategy, "save_checkpoint")
    if storage_options is not None:
        # Refused by the strategy, on every rank, and before anything else.
        write(checkpoint, filepath, storage_options)
        return
    # What the strategy does as well: a name may hold a metric that is not the same on every rank.
    url = os.fspath(strategy.broadcast(filepath))
    origin = origin_of(checkpoint, session.storage)
    ShardedSave(strategy, session, url, write=partial(write, checkpoint), origin=origin).run()


def _save_in_full(  # noqa: PLR0917 - as above
    strategy: Any,
    session: Session,
    save: Callable[..., None],
    checkpoint: dict[str, Any],
    filepath: str | os.PathLike[str],
    storage_options: Any = None,
) -> None:
    if storage_options is not None:
        _of_class(strategy, "save_checkpoint")(checkpoint, filepath, storage_options)
        return
    url = os.fspath(strategy.broadcast(filepath))
    # As the strategy does: one file takes the place of older shards, but of no other directory.
    spooling = session.alone.spooling
    session.on_rank_zero(
        *("make room", url, partial(_make_room, session, url)),
        kind="write",
        instead=None if spooling is None else partial(spooling.nothing_is_in_the_way, url),
    )
    save(checkpoint, url)


def _make_room(session: Session, url: str, token: CancelToken) -> None:
    token.raise_if_cancelled()
    form = look(session.storage.place(url))
    if form is Form.OTHER:
        message = "a directory that is no checkpoint has the checkpoint's name"
        raise IsADirectoryError(errno.EISDIR, message, redacted(url))
    if form is Form.SHARDS:
        Removal(session.storage, url).attempt(token)


def _load(
    strategy: Any, session: Session, checkpoint_path: str | os.PathLike[str], **options: Any
) -> Any:
    load = _of_class(strategy, "load_checkpoint")
    url = os.fspath(strategy.broadcast(checkpoint_path))
    return load_in_lock_step(strategy, session, url, read=partial(load, **options))


def _remove(session: Session, filepath: str | os.PathLike[str]) -> None:
    session.remove(Removal(session.storage, os.fspath(filepath)))
