# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The two ends of a spool: what an earlier start has left is published, and so is what is left now.

* **At the start of a fit**, before a checkpoint is searched for, each node tells what dead
  processes have left on it that belongs to this training. Rank 0 decides which of it is published
  (``core.spool.plan_for``), and the nodes publish it, so that a search finds it like any other.
* **At the end**, also of an agreed stop, all ranks wait until rank 0's spool is empty, on the
  shared store and for a bounded time (``core.run_end``). On an exception rank 0 waits alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightning_resilience.adapters.lightning.failing import telling
from lightning_resilience.adapters.lightning.namespaces import (
    checkpoint_directories,
    innermost_wrapper,
    is_wrapping_io,
    saving_of,
)
from lightning_resilience.adapters.lightning.removals import carry_out_the_rest
from lightning_resilience.adapters.lightning.resilient_io import format_of
from lightning_resilience.adapters.lightning.spooling import Spooling
from lightning_resilience.adapters.lightning.storeless import Storeless
from lightning_resilience.adapters.lightning.unspooling import NotComparableError, Publishing
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.names import name_of
from lightning_resilience.adapters.spool import left_behind
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.resolution import HPC_NAME
from lightning_resilience.core.run_end import is_lost, refusal_in, rest_of
from lightning_resilience.core.shards import Saving
from lightning_resilience.core.spool import flush_s, plan_for
from lightning_resilience.core.spooled import SpoolEntry, may_be_spooled, why_saves_wait
from lightning_resilience.errors import CorruptCheckpointError, JointError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.spool import Kept, SpoolDirectory
    from lightning_resilience.ports import CancelToken


__all__ = ["Flushing", "publish_what_was_left"]

_log = logging.getLogger(__name__)

# On an exception nobody has said how long there is; torchrun leaves half a minute.
_GRACE_S: Final = 30.0


class Flushing:
    """The end of the spool of one fit.

    Args:
        trainer: The Trainer; its strategy is hooked already.
        session: This rank's session.
        patches: Remembers what was replaced.

    Note:
        Made on every rank alike; rank 0 has the spool.
    """

    def __init__(self, trainer: Any, session: Session, patches: Patches) -> None:
        self._session = session
        self._root = os.fspath(trainer.default_root_dir)
        self.left_s: Callable[[], float | None] = lambda: None
        """Tells how long this process may still run, in seconds; None where nobody says so."""
        is_behind = is_wrapping_io(trainer.strategy.checkpoint_io)
        self.storeless = Storeless(session, partial(_spools, trainer), is_behind=is_behind)
        self._is_failing = False
        self._has_waited = False
        strategy, background = trainer.strategy, session.background
        if session.member.rank == 0:
            session.alone.spooling = Spooling(session.alone, config=session.spool)
            _say_what_waits(trainer)
        patches.replace(strategy, "on_exception", partial(self._take_note, strategy.on_exception))
        if background is None:
            patches.replace(
                strategy, "load_checkpoint", partial(self._load, strategy.load_checkpoint)
            )
            patches.replace(strategy, "teardown", partial(self._tear_down, strategy.teardown))
        else:
            # Order: what is pending there may be spooled yet.
            background.end = self._tear_down

    def flush(self, left_s: float | None) -> None:
        """Have all ranks wait until nothing waits on rank 0's node; for a bounded time.

        What was put off is removed then as well.

        Args:
            left_s: How long this process may still run, in seconds; None where nobody says so.

        Raises:
            JointError: The same on every rank; also where storage has refused what had waited.
        """
        session = self._session
        if not self.storeless.end.is_due:
            return
        spooling = session.alone.spooling
        ends_at_s = session.driver.clock.now_s() + flush_s(session.spool, left_s=left_s)
        self._has_waited = True

        def wait(token: CancelToken) -> str:
            if spooling is None:
                return ""
            spooling.flush(ends_at_s - session.driver.clock.now_s(), token)
            return session.alone.removals.rest(ends_at_s)

        try:
            told = session.on_rank_zero("flush", self._root, wait, is_guarded=False)
        except JointError as error:
            if not is_lost(error):
                raise
            refused = refusal_in(error)
            if refused is not None:
                raise refused from error
            _log.warning("%s The run has come to its end all the same.", error)
            if spooling is not None:
                spooling.flush(ends_at_s - session.driver.clock.now_s())
            return
        carry_out_the_rest(session, rest_of(told))

    def _load(
        self, inner: Callable[..., Any], checkpoint_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # What waits on rank 0's node is not in storage yet, or an older one of that name is.
        session, spooling = self._session, self._session.alone.spooling

        def wait(token: CancelToken) -> None:
            if spooling is not None:
                spooling.await_published(checkpoint_path, token)

        if self.storeless.end.is_due:
            session.on_rank_zero("await", os.fspath(checkpoint_path), wait, is_guarded=False)
        return inner(checkpoint_path, *args, **kwargs)

    def _take_note(self, inner: Callable[..., Any], exception: BaseException) -> None:
        self._is_failing = True
        inner(exception)

    def _tear_down(self, inner: Callable[[], None]) -> None:
        spooling = self._session.alone.spooling
        try:
            if not self._is_failing:
                self._flush_at_end()
            elif spooling is not None and not self._has_waited:
                if self._session.background is not None:
                    self._session.background.wait_for_all()
                # What storage has refused is named when the spool is closed; the exception stays.
                with contextlib.suppress(Exception):
                    spooling.flush(flush_s(self._session.spool, left_s=self._grace_s()))
        finally:
            if spooling is not None:
                spooling.close()
            self.storeless.close()
            inner()

    def _flush_at_end(self) -> None:
        # The stage is over, and what is to tell the others of an exception is closed next.
        failing, flush = self._session.failing, partial(self.flush, None)
        if failing is None:
            flush()
        else:
            telling(flush, failing)

    def _grace_s(self) -> float:
        left_s = self.left_s()
        return _GRACE_S if left_s is None else min(_GRACE_S, left_s)


def _spools(trainer: Any, url: str) -> bool:
    """Tell whether a checkpoint of that path may wait on rank 0's node, on all ranks alike."""
    is_staged = format_of(trainer.strategy.checkpoint_io).can_be_asked
    return is_staged and saving_of(trainer) is Saving.RANK_ZERO and may_be_spooled(url)


def _say_what_waits(trainer: Any) -> None:
    checkpoint_io = trainer.strategy.checkpoint_io
    wrapper = innermost_wrapper(checkpoint_io)
    inner = checkpoint_io if wrapper is None else wrapper.checkpoint_io
    why = why_saves_wait(
        is_sharded=saving_of(trainer) is Saving.SHARDED, is_staged=format_of(inner).can_be_asked
    )
    if why:
        _log.info('on_outage="spool": while storage is ill, a save of this Trainer %s', why)


# The next start ----------------------------------------------------------------------------------


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has, for rank 0."""

    v: int = 1
    names: tuple[str, ...] = ()
    entries: tuple[SpoolEntry, ...] = ()


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has decided, for all."""

    v: int = 1
    publish: dict[str, tuple[str, ...]] = {}
    drop: dict[str, tuple[str, ...]] = {}


class _Published(msgspec.Struct, frozen=True, kw_only=True):
    """Where belongs what was published: of one rank, and then of all."""

    v: int = 1
    paths: tuple[str, ...] = ()


def publish_what_was_left(trainer: Any, session: Session, asked: Any) -> None:
    """Publish what dead processes have left on the nodes that belongs to this training.

    Args:
        trainer: The Trainer; its checkpoint callbacks have been set up.
        session: This rank's session.
        asked: The path that the run is to start from, if it is one.

    Raises:
        JointError: The same on every rank: something could not be published. It stays where it is.

    Note:
        Every rank; joint.
    """
    mine: list[tuple[SpoolDirectory, Kept]] = []
    root = f"{os.fspath(trainer.default_root_dir).rstrip('/')}/"

    def look(token: CancelToken) -> str:
        token.raise_if_cancelled()
        if trainer.local_rank:
            return ""
        mine[:] = left_behind(session.storage.spool_directory, _wanted_by(trainer, asked))
        names = tuple(kept.name for _, kept in mine)
        return encode(_Found(names=names, entries=tuple(kept.entry for _, kept in mine))).decode()

    try:
        asking = Asked(session.storage, root, look)
        session.by_all("unspool", root, asking, kind="read", is_guarded=False)
        texts = session.told("unspool") if session.member.rank == 0 else ()
        told = session.on_rank_zero("plan", root, partial(_plan, texts), is_guarded=False)
        plan = decode(_Told, told.detail.encode(), key="the plan for what nodes have left")
        drop = plan.drop.get(str(session.member.rank), ())
        publish = plan.publish.get(str(session.member.rank), ())
        _drop(mine, drop)
        _say_what_stays(mine, {*drop, *publish})
        if plan.publish:
            _publish(session, root, [each for each in mine if each[1].name in publish])
            _drop(mine, publish)
            _share_what_is_there(session, root)
    finally:
        for spool, _ in mine:
            spool.release()


def _share_what_is_there(session: Session, root: str) -> None:
    # Where a checkpoint was left is no name that is free, and every rank has to know that.
    key = "what nodes have published"
    texts = session.told("publish") if session.member.rank == 0 else ()

    def collect(token: CancelToken) -> str:
        del token
        each = [decode(_Published, text.encode(), key=key).paths for text in texts if text]
        return encode(_Published(paths=tuple(sorted({*chain.from_iterable(each)})))).decode()

    told = session.on_rank_zero("share", root, collect, is_guarded=False)
    if session.flushing is not None:
        there = decode(_Published, told.detail.encode(), key=key)
        session.flushing.storeless.published(there.paths)


def _wanted_by(trainer: Any, asked: Any) -> Callable[[SpoolEntry], bool]:
    homes = {name_of(directory) for directory in checkpoint_directories(trainer)}
    path = name_of(asked) if isinstance(asked, (str, os.PathLike)) and asked else None
    # What a job saves as it is requeued is in no callback's directory.
    root = name_of(trainer.default_root_dir)

    def wanted(entry: SpoolEntry) -> bool:
        name = name_of(entry.path)
        folder, _, last = name.rpartition("/")
        is_requeued = folder == root and re.match(HPC_NAME, last) is not None
        return name == path or folder in homes or is_requeued

    return wanted


def _plan(texts: Iterable[str], token: CancelToken) -> str:
    del token
    found: list[tuple[int, str, SpoolEntry]] = []
    for rank, text in enumerate(texts):
        if text:
            one = decode(_Found, text.encode(), key=f"what rank {rank} has found")
            found += [(rank, *each) for each in zip(one.names, one.entries, strict=True)]
    plan = plan_for(found)
    return encode(
        _Told(
            publish={str(rank): names for rank, names in plan.publish.items()},
            drop={str(rank): names for rank, names in plan.drop.items()},
        )
    ).decode()


def _drop(mine: Iterable[tuple[SpoolDirectory, Kept]], names: Iterable[str]) -> None:
    gone = set(names)
    for spool, kept in mine:
        if kept.name in gone:
            spool.drop(kept.name)


def _say_what_stays(mine: Iterable[tuple[SpoolDirectory, Kept]], settled: set[str]) -> None:
    for _, kept in mine:
        if kept.name not in settled:
            _log.warning(
                "the spooled checkpoint %s stays on this node: another one of %s, of another "
                "training and of a later step, is published",
                *(kept.file, redacted(kept.entry.path)),
            )


def _publish(session: Session, root: str, mine: list[tuple[SpoolDirectory, Kept]]) -> None:
    done: set[str] = set()
    there: set[str] = set()

    def publish(token: CancelToken) -> str:
        for spool, one in mine:
            if one.name in done:
                continue
            work = Publishing(
                session.storage, one, nonce=session.driver.dice.nonce, from_before=True
            )
            try:
                published = work.attempt(token)
            except (CorruptCheckpointError, NotComparableError) as error:
                _log.warning("%s It is set aside as %s.", error, spool.set_aside(one.name))
            else:
                _log.info(
                    "%s, which an earlier start had left on this node, is %s",
                    redacted(one.entry.path),
                    "published" if published is not None else "older than what is in storage",
                )
                there.add(one.entry.path)
            done.add(one.name)
        return encode(_Published(paths=tuple(sorted(there)))).decode()

    session.by_all("publish", root, Asked(session.storage, root, publish))
