# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Find the checkpoint that a run starts from: rank 0 asks storage, and all ranks use its answers.

Each question is a joint operation, in which rank 0 retries behind the breaker and the others wait
on the shared store. Its answer is the record that all ranks decide on, so the number of requests
does not depend on the number of ranks. What is damaged is set aside by rank 0 in the same way, once
all ranks know of a good one.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from lightning_resilience.adapters.lightning.discovery import inspect, look_for, search, verify
from lightning_resilience.adapters.lightning.namespaces import (
    checkpoint_callbacks,
    innermost_wrapper,
    is_fitting,
    is_model_checkpoint,
    saves_exceptions,
)
from lightning_resilience.adapters.lightning.resilient_io import format_of
from lightning_resilience.adapters.private_filesystem import plain_url
from lightning_resilience.adapters.set_aside import set_aside
from lightning_resilience.core.events import CheckpointSetAside
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.fallback import choosing
from lightning_resilience.core.pipeline import Step, carry_out
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.resolution import (
    HPC_NAME,
    Found,
    Inspection,
    Search,
    last_name,
)
from lightning_resilience.core.set_aside import Moved, told
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.core.fallback import Choice
    from lightning_resilience.ports import CancelToken

    _Ask: TypeAlias = Callable[[Storage, CancelToken], Found]


__all__ = ["choose", "share"]

_log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


def share(trainer: Any, session: Session, path: str | os.PathLike[str]) -> Inspection:
    """Return what rank 0 sees of the path that it was given.

    Args:
        trainer: The Trainer.
        session: This rank's session.
        path: This rank's path; rank 0's counts.

    Raises:
        JointError: The same on every rank: it is not there, or that cannot be told.
        CheckpointError: The same on every rank: it is damaged. It stays where it is.

    Note:
        Every rank; joint.
    """
    url = os.fspath(path)
    is_ours = _is_ours(trainer)

    def look(storage: Storage, token: CancelToken) -> Inspection:
        return inspect(storage, token, url=url) if is_ours else Inspection(path=url)

    seen = _answered(session, url, _from_the_web(url) or look, kind=Inspection)
    if seen.rejected:
        message = f"the checkpoint {redacted(seen.path)} cannot be loaded: {seen.rejected}"
        raise CheckpointError(message)
    return seen


def choose(
    trainer: Any,
    session: Session,
    what: Search,
    *,
    doubts: Container[str] = (),
    passed: list[Inspection] | None = None,
) -> Choice:
    """Search for a checkpoint to start from, and set aside what is damaged.

    Args:
        trainer: The Trainer; its checkpoint callbacks have been set up.
        session: This rank's session.
        what: What is looked for.
        doubts: What has failed to load, and is read through before it is chosen.
        passed: What earlier searches of this start have set aside; grows with this one's.

    Raises:
        JointError: The same on every rank: it cannot be told what is there.
        CheckpointError: The same on every rank: something is there, and none of it can be loaded.
            All of it stays where it is.

    Note:
        Every rank; joint.
    """
    asks = _asks_for_hpc(trainer) if what is Search.HPC else _asks_for_last(trainer)

    passed = [] if passed is None else passed
    before = tuple(passed)

    def leave(damaged: Inspection) -> None:
        if _pass_over(trainer, session, damaged):
            passed.append(damaged)

    def list_place(number: int) -> Found:
        url, ask = asks[number]
        return _answered(session, url, ask, kind=Found)

    hands: dict[Step, Callable[[Any], object]] = {
        Step.LIST: list_place,
        Step.JUDGE: partial(_verify, trainer, session, doubts=doubts),
        Step.LEAVE: leave,
    }
    allows = session.checkpoints.allow_fresh_start
    choice = carry_out(choosing(what, len(asks), allow_fresh_start=allows, before=before), hands)
    if choice.seen is not None:
        _tell(session, logging.INFO, f"all ranks start from {choice.seen.path}")
        session.storage.training = choice.seen.training or session.storage.training
    if choice.note:
        _tell(session, logging.WARNING, f"{choice.note}, so all ranks start from it.")
    if choice.is_overridden:
        _tell(session, logging.WARNING, choice.unused)
    return choice


def _pass_over(trainer: Any, session: Session, damaged: Inspection) -> bool:
    """Say what was not loaded; return whether it was set aside. Every rank; joint."""
    # Who only reads checkpoints changes none: another job may be writing them.
    moves = bool(damaged.mark) and is_fitting(trainer)
    moved = _set_aside(session, damaged) if moves else None
    _tell(session, logging.WARNING, told(damaged, moved))
    return moved is not None and bool(moved.to)


def _set_aside(session: Session, damaged: Inspection) -> Moved:
    def move(storage: Storage, token: CancelToken) -> Moved:
        nonce = session.driver.dice.nonce()
        return set_aside(storage, token, damaged=damaged, nonce=nonce)

    moved = _answered(session, damaged.path, move, kind=Moved, access="write")
    if moved.to and session.member.rank == 0:
        paths = {"path": redacted(moved.path), "to": redacted(moved.to)}
        session.driver.sink.emit(CheckpointSetAside(reason=redacted(damaged.rejected), **paths))
    return moved


def _tell(session: Session, level: int, text: str) -> None:
    if session.member.rank == 0:
        _log.log(level, "%s", redacted(text))


def _asks_for_hpc(trainer: Any) -> list[tuple[str, _Ask]]:
    root = os.fspath(trainer.default_root_dir)
    return [_in_directory(root, pattern=HPC_NAME, extension="")]


def _asks_for_last(trainer: Any) -> list[tuple[str, _Ask]]:
    callbacks = checkpoint_callbacks(trainer)
    # Rank 0 has told the others its directories, so all ranks leave out the same ones.
    directories = {
        (
            os.fspath(callback.dirpath),
            last_name(callback.CHECKPOINT_NAME_LAST, callback.FILE_EXTENSION),
            callback.FILE_EXTENSION,
        ): None
        for callback in callbacks
        if is_model_checkpoint(callback)
    }
    saved = [callback.ckpt_path for callback in callbacks if saves_exceptions(callback)]
    return [
        *(
            _in_directory(directory, pattern=pattern, extension=extension)
            for directory, pattern, extension in directories
        ),
        *((path, partial(look_for, url=path)) for path in saved),
    ]


def _in_directory(directory: str, *, pattern: str, extension: str) -> tuple[str, _Ask]:
    ask = partial(search, directory=directory, pattern=pattern, extension=extension)
    return f"{directory.rstrip('/')}/", ask


def _verify(trainer: Any, session: Session, url: str, *, doubts: Container[str]) -> Inspection:
    is_ours, is_doubted = _is_ours(trainer), url in doubts

    def look(storage: Storage, token: CancelToken) -> Inspection:
        return verify(storage, token, url=url, is_ours=is_ours, is_doubted=is_doubted)

    return _answered(session, url, _from_the_web(url) or look, kind=Inspection)


def _is_ours(trainer: Any) -> bool:
    # In a format of the user's it may be anything.
    wrapper = innermost_wrapper(trainer.strategy.checkpoint_io)
    inner = trainer.strategy.checkpoint_io if wrapper is None else wrapper.checkpoint_io
    return format_of(inner).is_ours


def _from_the_web(url: str) -> Callable[[Storage, CancelToken], Inspection] | None:
    # A web server need not answer questions.
    if not plain_url(url).startswith("http"):
        return None
    return lambda _storage, _token: Inspection(path=url)


def _answered(
    session: Session,
    url: str,
    ask: Callable[[Storage, CancelToken], T],
    *,
    kind: type[T],
    access: str = "read",
) -> T:
    """Let rank 0 ask, and return its answer on every rank."""

    def encoded(token: CancelToken) -> str:
        return encode(ask(session.storage, token)).decode()

    final = session.on_rank_zero("resolve", url, encoded, kind=access)
    return decode(kind, final.detail.encode(), key=f"what rank 0 has seen of {redacted(url)}")
