# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Find the checkpoint that a run starts from: rank 0 asks storage, and all ranks use its answers.

Each question is a joint operation, in which rank 0 retries behind the breaker and the others wait
on the shared store. Its answer is the record that all ranks decide on, so the number of requests
does not depend on the number of ranks.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from lightning_resilience.adapters.lightning.discovery import inspect, look_for, search
from lightning_resilience.adapters.lightning.namespaces import (
    checkpoint_callbacks,
    innermost_wrapper,
    is_model_checkpoint,
    saves_exceptions,
)
from lightning_resilience.adapters.lightning.resilient_io import format_of
from lightning_resilience.adapters.private_filesystem import plain_url
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.resolution import (
    HPC_NAME,
    Found,
    Inspection,
    Search,
    best_first,
    last_name,
    refusal,
)
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.storage import Storage
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
        CheckpointError: The same on every rank: it is damaged.

    Note:
        Every rank; joint.
    """
    seen = _inspect(trainer, session, os.fspath(path))
    if seen.rejected:
        message = f"the checkpoint {redacted(seen.path)} cannot be loaded: {seen.rejected}"
        raise CheckpointError(message)
    return seen


def choose(trainer: Any, session: Session, what: Search) -> Inspection | None:
    """Search for a checkpoint to start from.

    Args:
        trainer: The Trainer; its checkpoint callbacks have been set up.
        session: This rank's session.
        what: What is looked for.

    Returns:
        The checkpoint, or None where nothing is there.

    Raises:
        JointError: The same on every rank: it cannot be told what is there.
        CheckpointError: The same on every rank: something is there, and none of it can be loaded.

    Note:
        Every rank; joint.
    """
    asks = _asks_for_hpc(trainer) if what is Search.HPC else _asks_for_last(trainer)
    found = [_answered(session, url, ask, kind=Found) for url, ask in asks]
    rejected: list[Inspection] = []
    candidates = (candidate for place in found for candidate in place.candidates)
    for candidate in best_first(candidates, by_number=what is Search.HPC):
        seen = _inspect(trainer, session, candidate.url)
        if not seen.rejected:
            _tell(session, seen, rejected)
            return seen
        rejected.append(seen)
    refused = refusal(what.value, found, rejected)
    if refused:
        raise CheckpointError(refused)
    return None


def _tell(session: Session, seen: Inspection, rejected: list[Inspection]) -> None:
    if session.member.rank != 0:
        return
    for each in rejected:
        _log.warning("not loaded, %s: %s", each.rejected, redacted(each.path))
    _log.info("all ranks start from %s", redacted(seen.path))


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


def _inspect(trainer: Any, session: Session, url: str) -> Inspection:
    wrapper = innermost_wrapper(trainer.strategy.checkpoint_io)
    inner = trainer.strategy.checkpoint_io if wrapper is None else wrapper.checkpoint_io
    # In a format of the user's it may be anything, and a web server need not answer questions.
    asks = format_of(inner).is_ours and not plain_url(url).startswith("http")

    def look(storage: Storage, token: CancelToken) -> Inspection:
        return inspect(storage, token, url=url) if asks else Inspection(path=url)

    return _answered(session, url, look, kind=Inspection)


def _answered(
    session: Session, url: str, ask: Callable[[Storage, CancelToken], T], *, kind: type[T]
) -> T:
    """Let rank 0 ask, and return its answer on every rank."""

    def encoded(token: CancelToken) -> str:
        return encode(ask(session.storage, token)).decode()

    final = session.on_rank_zero("resolve", url, encoded, kind="read")
    return decode(kind, final.detail.encode(), key=f"what rank 0 has seen of {redacted(url)}")
