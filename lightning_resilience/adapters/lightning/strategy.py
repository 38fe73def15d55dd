# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks on the strategy: save, load and remove are joint, and ``teardown`` puts all back.

They sit on the strategy and not in the ``CheckpointIO``, because Lightning calls the latter on rank
0 alone in places where no other rank takes part (launchers and tuners, for their temporary files).
They sit on the *instance*, from ``setup`` on: a patched instance could not be sent to a spawned
process.

A ``CheckpointIO`` that passes on to another (``AsyncCheckpointIO``) stays where it is, and the
inner one is guarded for the time of the fit: what is written in the background waits and retries on
its own thread. Its handing over is joint, and what becomes of it is told by ``background``.

``teardown`` of the strategy is what Lightning runs at every end, also after an exception; the
``teardown`` hooks of callbacks are not called then.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_resilience.adapters.lightning.mappings import hook_mappings
from lightning_resilience.adapters.lightning.namespaces import (
    innermost_wrapper,
    is_wrapping_io,
)
from lightning_resilience.adapters.lightning.resilient_io import (
    ResilientCheckpointIO,
    format_of,
)
from lightning_resilience.adapters.lightning.work import Asked, HandedOver
from lightning_resilience.core.spooled import may_be_spooled


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.mappings import Mappings
    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.ports import CancelToken


__all__ = ["hook_loads", "hook_strategy", "removal_of"]

_log = logging.getLogger(__name__)


def hook_strategy(
    strategy: Any,
    session: Session,
    patches: Patches,
    *,
    at_end: Callable[[], None],
    is_failing: Callable[[], bool],
) -> None:
    """Replace the strategy's methods on the instance.

    Args:
        strategy: The Trainer's strategy.
        session: This rank's session.
        patches: Remembers what was replaced.
        at_end: Called when the strategy is torn down: before it is, or after it where a background
            thread may still write.
        is_failing: Whether the Trainer is being torn down for an exception.
    """
    patches.replace(strategy, "save_checkpoint", partial(_save, strategy, session))
    patches.replace(strategy, "remove_checkpoint", partial(_remove, strategy, session))
    teardown = strategy.teardown
    wrapper = innermost_wrapper(strategy.checkpoint_io)
    if wrapper is None:
        torn_down = partial(_in_order, at_end, teardown)
    else:
        _guard_inside(wrapper, session, patches)
        waited_for = partial(_wait_for_writes, teardown, is_failing)
        torn_down = partial(_in_order, waited_for, at_end)
    patches.replace(strategy, "teardown", torn_down)


def hook_loads(trainer: Any, session: Session, patches: Patches) -> None:
    """Replace the strategy's method for loading, which every rank calls."""
    strategy, mappings = trainer.strategy, hook_mappings(trainer, patches)
    patches.replace(strategy, "load_checkpoint", partial(_load, strategy, session, mappings))


def _in_order(first: Callable[[], None], then: Callable[[], None]) -> None:
    try:
        first()
    finally:
        then()


def _guard_inside(wrapper: Any, session: Session, patches: Patches) -> None:
    inner = wrapper.checkpoint_io
    if not isinstance(inner, ResilientCheckpointIO):
        inner = ResilientCheckpointIO(inner)
        patches.replace(wrapper, "_checkpoint_io", inner)
    patches.replace(inner, "adopted_by", session.alone)


def _wait_for_writes(teardown: Callable[[], None], is_failing: Callable[[], bool]) -> None:
    try:
        teardown()
    except BaseException as error:
        if not is_failing():
            raise
        # What ended training stays the exception that the user sees.
        _log.warning("a checkpoint was not written in the background: %r", error)


def _save(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    strategy: Any,
    session: Session,
    checkpoint: dict[str, Any],
    filepath: str | os.PathLike[str],
    storage_options: Any = None,
) -> None:
    url = os.fspath(filepath)
    checkpoint_io = strategy.checkpoint_io
    # An older one of this name may wait for its removal still, where that has failed.
    session.keep(url)
    if is_wrapping_io(checkpoint_io):
        pass_on = partial(
            checkpoint_io.save_checkpoint, checkpoint, filepath, storage_options=storage_options
        )
        work = _waiting_for_room(session, url, pass_on) if strategy.is_global_zero else None
        with session.alone.retaining.handing_over(url):
            session.hand_over("save", url, work)
        return
    if not strategy.is_global_zero:
        session.save(url, None)
        return
    work = format_of(checkpoint_io).save(
        session.storage,
        url,
        checkpoint,
        nonce=session.driver.dice.nonce,
        storage_options=storage_options,
    )
    spooling = session.alone.spooling
    if spooling is None or not may_be_spooled(url):
        session.save(url, work)
        return
    spooling.divert(work)
    with spooling.saving(url):
        session.save(url, work)


def _waiting_for_room(session: Session, url: str, pass_on: Callable[[], Any]) -> Work:
    background = session.background
    if background is None:
        return HandedOver(session.storage, url, pass_on)

    def hand_over(token: CancelToken) -> None:
        background.wait_for_room(token)
        pass_on()

    return Asked(session.storage, url, hand_over)


def _load(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    strategy: Any,
    session: Session,
    mappings: Mappings,
    checkpoint_path: str | os.PathLike[str],
    **options: Any,
) -> Any:
    url = os.fspath(checkpoint_path)
    checkpoint_io = strategy.checkpoint_io
    # As the strategy's own does.
    torch.cuda.empty_cache()
    if is_wrapping_io(checkpoint_io):
        pass_on = partial(checkpoint_io.load_checkpoint, checkpoint_path, **options)
        work = HandedOver(session.storage, url, pass_on)
        return session.hand_over("load", url, work, by_all=True)
    format_ = format_of(checkpoint_io)
    chosen = session.chosen
    is_chosen = chosen is not None and chosen.path == url
    reading = format_.load(
        session.storage,
        url,
        nonce=session.driver.dice.nonce,
        options=options,
        expected=chosen if is_chosen else None,
        common=f"{session.member.keys.incarnation}-{session.operations}",
        # What is loaded at another time is not let go of.
        mappings=mappings if is_chosen else None,
    )
    return session.load(url, reading)


def removal_of(strategy: Any, session: Session, url: str) -> Work:
    """Return what removes a checkpoint that one file or one ``CheckpointIO`` makes.

    Args:
        strategy: The Trainer's strategy.
        session: This rank's session.
        url: The checkpoint.
    """
    checkpoint_io = strategy.checkpoint_io
    wrapper = innermost_wrapper(checkpoint_io)
    inner = checkpoint_io if wrapper is None else wrapper.checkpoint_io
    return format_of(inner).remove(session.storage, url)


def _remove(strategy: Any, session: Session, filepath: str | os.PathLike[str]) -> None:
    session.remove(removal_of(strategy, session, os.fspath(filepath)))
