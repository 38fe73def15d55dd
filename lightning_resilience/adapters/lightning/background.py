# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What ``AsyncCheckpointIO`` writes in its thread: counted, waited for, and its failures told.

Left to itself it keeps the first error for ever, and raises it on rank 0 alone: at the next save,
at the end, and in every later fit. Here the thread's errors are kept back from it and told to all
ranks, at the next step boundary or, for what is found out later, at the end of the fit, where all
ranks wait for what is still pending. A link to a checkpoint is made by that thread too, once the
checkpoint is there. The rest is in ``core.background``.

Under ``on_outage="spool"`` that thread spools a save that meets an outage: then it has gone well,
and what follows of it is the spool's business (``spooling``, ``flushing``).

An exception that ends training stays what the user sees, and a save that failed beside it is in a
note on it. Nobody agrees on anything then: the writes that make no progress are given up by
themselves (``signals``), and only rank 0 waits for the others.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.failing import add_note
from lightning_resilience.adapters.lightning.namespaces import (
    asynchronous_io,
    forget_told_error,
)
from lightning_resilience.adapters.names import name_of
from lightning_resilience.core.agenda import AgendaKind, AgendaRecord, record_of
from lightning_resilience.core.background import Backlog, FailedSave, error_of, item_of, note_of
from lightning_resilience.core.evidence import redacted, without_credentials
from lightning_resilience.core.joint import report_of
from lightning_resilience.core.records import decode, encode
from lightning_resilience.runtime.calls import PIECE_S


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_resilience.adapters.lightning.boundary import Boundary
    from lightning_resilience.adapters.lightning.patches import Patches
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.core.agenda import AgendaItem
    from lightning_resilience.ports import CancelToken


__all__ = ["Background", "hook_background"]

_log = logging.getLogger(__name__)


def hook_background(
    trainer: Any, session: Session, patches: Patches, *, limit: int
) -> Background | None:
    """Hook the Trainer's ``AsyncCheckpointIO``, if it has one, and what has to wait for it.

    Args:
        trainer: The Trainer; its strategy is hooked already.
        session: This rank's session.
        patches: Remembers what was replaced.
        limit: How many saves may be pending, ≥ 1.

    Returns:
        What knows of its saves; None where nothing is written in the background.

    Note:
        On every rank alike; not collective.
    """
    strategy = trainer.strategy
    asynchronous = asynchronous_io(strategy.checkpoint_io)
    if asynchronous is None:
        return None
    forget_told_error(asynchronous)
    background = Background(session, limit=limit, root=os.fspath(trainer.default_root_dir))
    inner = asynchronous.checkpoint_io
    hooks: list[tuple[Any, str, Callable[..., Any]]] = [
        (asynchronous, "save_checkpoint", background.hand_over),
        (asynchronous, "load_checkpoint", background.load),
        (inner, "save_checkpoint", background.write),
        (strategy, "load_checkpoint", background.load_together),
        (strategy, "on_exception", background.take_note),
        (strategy, "teardown", background.tear_down),
    ]
    for owner, name, hook in hooks:
        patches.replace(owner, name, partial(hook, getattr(owner, name)))
    return background


class Background:
    """What this rank knows of its saves in the background; ranks other than 0 have none.

    Args:
        session: This rank's session.
        limit: How many saves may be pending, ≥ 1.
        root: The Trainer's directory: what a wait for all saves is said to be about.
    """

    def __init__(self, session: Session, *, limit: int, root: str) -> None:
        self._session = session
        self._limit = limit
        self._root = root
        self._backlog = Backlog()
        self._errors: dict[str, BaseException] = {}
        self._links: dict[str, Work] = {}
        self._changed = threading.Condition()
        self._ask: Callable[[AgendaItem], None] | None = None
        self._ended_by: BaseException | None = None
        self.end: Callable[[Callable[[], None]], None] = _just
        """Ends the rest of the strategy, once nothing is pending any more where all went well."""

    def report_at(self, boundary: Boundary) -> None:
        """Have failures told to all ranks at ``boundary``."""
        self._ask = boundary.ask
        boundary.on(AgendaKind.FAIL, self._raise)

    # Waits ----------------------------------------------------------------------------------------

    def wait_for_room(self, token: CancelToken) -> None:
        """Return on rank 0 once another save may be handed over.

        Bounded by what is pending: every write has its own deadline.

        Args:
            token: Of the call that waits.

        Raises:
            CallTimeoutError: The call was abandoned.
        """
        if not self._backlog.has_room(self._limit):
            _log.info(
                "training waits for storage: max_pending_saves=%d, and that many checkpoints were "
                "handed over and are not written yet.",
                self._limit,
            )
        self._wait_until(lambda: self._backlog.has_room(self._limit), token)

    def settle(self) -> None:
        """Have all ranks wait until nothing is pending, whatever becomes of it.

        Raises:
            JointError: The same on every rank: rank 0 could not wait for that long.
        """

        def wait(token: CancelToken) -> str:
            self.wait_for_all(token)
            return ""

        self._learn("drain", self._root, wait)

    def await_written(self, path: str | os.PathLike[str]) -> None:
        """Have all ranks wait until a pending save of ``path`` has ended, if there is one.

        Args:
            path: The checkpoint; rank 0's counts.

        Raises:
            JointError: The same on every rank: that save has failed, or rank 0 could not wait.
        """
        key = name_of(path)
        spooling = self._session.alone.spooling

        def wait(token: CancelToken) -> str:
            self._wait_until(lambda: not self._backlog.awaits(key), token)
            if spooling is not None:
                spooling.await_published(key, token)
            failed = self._backlog.failure_of(key)
            return "" if failed is None else self._told(failed)

        record = self._learn("await", os.fspath(path), wait)
        if record is not None:
            raise error_of(record) from self._errors.get(key)

    def wait_for_all(self, token: CancelToken | None = None) -> None:
        """Return once nothing is pending, whatever has become of it; this rank alone."""
        self._wait_until(lambda: not self._backlog.pending, token)

    def _wait_until(self, done: Callable[[], bool], token: CancelToken | None = None) -> None:
        with self._changed:
            while not done():
                self._changed.wait(PIECE_S)
                if token is not None:
                    token.raise_if_cancelled()

    # Hooks ----------------------------------------------------------------------------------------

    def hand_over(
        self, inner: Callable[..., Any], checkpoint: Any, path: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Stand for ``AsyncCheckpointIO.save_checkpoint``: count the save."""
        key = name_of(path)
        self._change(Backlog.handed_over, key)
        try:
            inner(checkpoint, path, *args, **kwargs)
        except BaseException:
            self._change(Backlog.withdrawn, key)
            raise

    def write(
        self, inner: Callable[..., Any], checkpoint: Any, path: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Stand for ``save_checkpoint`` of what it passes checkpoints on to, in its thread."""
        if not self._backlog.pending:
            # Not handed over: whoever calls it waits for it, and is told by it.
            inner(checkpoint, path, *args, **kwargs)
            return
        try:
            inner(checkpoint, path, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - told to all ranks; raised, it is told for ever
            self._fail(os.fspath(path), error)
        else:
            self._written(path)

    def link(self, target: str, work: Work, token: CancelToken) -> None:
        """Make a link to a checkpoint, on rank 0: once that is written, and not if it never is.

        Args:
            target: The checkpoint.
            work: Makes the link.
            token: Of the call.
        """
        token.raise_if_cancelled()
        key = name_of(target)
        with self._changed:
            if self._backlog.awaits(key):
                self._links[key] = work
                return
            has_failed = self._backlog.failure_of(key) is not None
        if not has_failed:
            self._session.alone.run("link", work, kind="write")

    def load(self, inner: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand for ``AsyncCheckpointIO.load_checkpoint``: wait for a pending save of the path.

        Raises:
            BaseException: What that save has failed with.
        """
        key = name_of(path)
        self._wait_until(lambda: not self._backlog.awaits(key))
        if self._session.alone.spooling is not None:
            self._session.alone.spooling.await_published(key)
        if self._backlog.failure_of(key) is not None:
            raise self._errors[key]
        return inner(path, *args, **kwargs)

    def load_together(
        self, inner: Callable[..., Any], checkpoint_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for the strategy's ``load_checkpoint``: rank 0 waits for a pending save, for all.

        Raises:
            JointError: The same on every rank: that save has failed.
        """
        self.await_written(checkpoint_path)
        return inner(checkpoint_path, *args, **kwargs)

    def take_note(self, inner: Callable[..., Any], exception: BaseException) -> None:
        """Stand for the strategy's ``on_exception``."""
        self._ended_by = exception
        inner(exception)

    def tear_down(self, inner: Callable[[], None]) -> None:
        """Stand for the strategy's ``teardown``: where training went well, all ranks wait.

        Raises:
            JointError: The same on every rank: a save has failed, and nobody was told yet. Nothing
                is torn down then; Lightning comes here again, for this exception.
        """
        ended_by, self._ended_by = self._ended_by, None
        if ended_by is None:
            self._drain()
        try:
            self.end(inner)
        finally:
            if ended_by is not None:
                self._tell_beside(ended_by)

    def _written(self, path: str | os.PathLike[str]) -> None:
        key, link = name_of(path), None
        try:
            # Order: before it counts as written, so that whoever waits for all waits for this too.
            while (link := self._next_link(key)) is not None:
                self._session.alone.run("link", link, kind="write")
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(os.fspath(path) if link is None else link.url, error)

    def _next_link(self, key: str) -> Work | None:
        with self._changed:
            link = self._links.pop(key, None)
            if link is None:
                self._change(Backlog.written, key)
        return link

    # Failures -------------------------------------------------------------------------------------

    def _fail(self, url: str, error: BaseException) -> None:
        alone = self._session.alone
        classify = alone.breakers.patience(url, "write", alone.storage).classify
        report = report_of(error, rank=self._session.member.rank, outcome=classify(error))
        failed = FailedSave(path=name_of(url), subject=redacted(url), report=report)
        # As text: a handler may keep the record, and the traceback in it.
        told = without_credentials("".join(traceback.format_exception(error)).rstrip())
        _log.warning("%s\n%s", note_of(failed), told)
        _let_go_of_checkpoint(error)
        self._links.pop(failed.path, None)
        self._errors[failed.path] = error
        self._change(Backlog.not_written, failed)
        if self._ask is not None:
            self._ask(item_of(failed))

    def _drain(self) -> None:
        def wait(token: CancelToken) -> str:
            self.wait_for_all(token)
            failures = self._backlog.unreported
            return self._told(failures[0]) if failures else ""

        record = self._learn("drain", self._root, wait)
        if record is not None:
            self._raise(record)

    def _raise(self, record: AgendaRecord) -> None:
        """Tell this rank; on rank 0, that is the report of all failures until now."""
        failures = self._taken()
        error = error_of(record)
        _add_notes(error, failures[1:])
        raise error from self._errors[failures[0].path] if failures else None

    def _tell_beside(self, exception: BaseException) -> None:
        _add_notes(exception, self._taken())

    def _taken(self) -> tuple[FailedSave, ...]:
        with self._changed:
            failures = self._backlog.unreported
            self._backlog = self._backlog.reported()
        return failures

    def _told(self, failed: FailedSave) -> str:
        member, nonce = self._session.member, self._session.driver.dice.nonce
        return encode(record_of(item_of(failed), rank=member.rank, writer=nonce())).decode()

    def _learn(self, op: str, url: str, wait: Callable[[CancelToken], str]) -> AgendaRecord | None:
        # Not guarded: it asks no storage, and what it waits for waits behind the breaker itself.
        told = self._session.on_rank_zero(op, url, wait, is_guarded=False).detail
        return decode(AgendaRecord, told.encode(), key=op) if told else None

    def _change(self, change: Callable[[Backlog, Any], Backlog], what: str | FailedSave) -> None:
        with self._changed:
            self._backlog = change(self._backlog, what)
            self._changed.notify_all()


def _just(inner: Callable[[], None]) -> None:
    inner()


def _let_go_of_checkpoint(error: BaseException) -> None:
    # It may be kept until the fit ends, and the frames in which it was raised hold the checkpoint.
    links = [error]
    for link in links:
        link.__traceback__ = None
        links += [one for one in (link.__cause__, link.__context__) if one and one not in links]


def _add_notes(exception: BaseException, failures: Iterable[FailedSave]) -> None:
    for failed in failures:
        add_note(exception, note_of(failed))
