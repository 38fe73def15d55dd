# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One save of a strategy whose ranks all write: no collective is open while storage is asked.

==========  ===========  ===============================================================  =========
step        ranks        what it does                                                     storage
==========  ===========  ===============================================================  =========
``stage``   all          an empty directory of its own on this node                       no
(no name)   all          the strategy's own save into it, collectives and all             no
``write``   all          how that ended, and which files there are                        no
``clear``   rank 0       checks what all have told, and makes room                        yes
``publish`` all          publishes and verifies its shards                                yes
``save``    rank 0       sees every shard of every rank, then publishes the metadata      yes
==========  ===========  ===============================================================  =========

Every named step is a joint operation, so each ends with one verdict, and after a failure none of
the later ones begins: without every shard there is no metadata.

A strategy's save runs collectives in between its file calls, and gives every rank the same path. A
rank whose disk were to stall there would hold all the others in a collective. So it never sees the
checkpoint's own path, but each rank's own directory on the node: torch's and DeepSpeed's writers
name files by rank, and put together in one place they are the checkpoint. While it runs, what it
calls to share rank 0's path with all ranks is replaced.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.failing import add_note
from lightning_resilience.adapters.lightning.patches import Patches
from lightning_resilience.adapters.lightning.sharded_work import (
    Clearing,
    Commit,
    Leftover,
    Publishing,
    own_path,
)
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.storage import parent_of
from lightning_resilience.adapters.trees import measure
from lightning_resilience.core import shards
from lightning_resilience.core.breaker_record import passes
from lightning_resilience.core.events import DiversionFailed
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.manifest import Origin, manifest_of
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.shards import ShardRecord
from lightning_resilience.core.spooled import shards_note, shards_wait
from lightning_resilience.errors import JointError, ResilienceError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.ports import CancelToken


__all__ = ["ShardedSave", "raising", "run_in_lock_step"]


def raising(error: BaseException | None) -> None:
    """Raise ``error``, if any, where its operation's verdict is made."""
    if error is not None:
        raise error


def run_in_lock_step(strategy: Any, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Let the strategy work in this rank's own directory, together with the other ranks.

    Args:
        strategy: The Trainer's strategy.
        call: Its own save or load.

    Returns:
        What it returned, and what it raised; to be told to the others before anything else. A
        request to stop is raised at once.
    """
    own = Patches()
    own.replace(strategy, "broadcast", _keep)
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised
        return None, error
    except BaseException as error:
        cause = _first_failure(error)
        if cause is None:
            raise
        return None, cause
    finally:
        own.undo()


def _keep(obj: Any, src: int = 0) -> Any:
    # Each rank has a path of its own.
    del src
    return obj


def _first_failure(error: BaseException) -> Exception | None:
    # torch's CheckpointException is no Exception, and tells of each rank's: here it is one failure
    # of many, and no request to stop.
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return None
    first = failures[min(failures)]
    cause = first[0] if isinstance(first, tuple) else first
    return cause if isinstance(cause, Exception) else None


class ShardedSave:
    """One rank's part in one save.

    Args:
        strategy: The Trainer's strategy.
        session: This rank's session.
        url: Where the checkpoint goes, the same on every rank.
        write: The strategy's own save, given a local path.
        origin: Where the checkpoint comes from, for its manifest.
    """

    def __init__(
        self,
        strategy: Any,
        session: Session,
        url: str,
        *,
        write: Callable[[str], Any],
        origin: Origin,
    ) -> None:
        self._origin = origin
        self._strategy = strategy
        self._session = session
        self._url = url.rstrip("/")
        self._write = write
        self._is_first = session.member.rank == 0
        self._folder = Path()
        self._expected: dict[str, int] = {}
        self._contents: dict[str, tuple[int, str]] = {}
        self._waits_because = shards_wait(session.member.on_outage)

    def run(self) -> None:
        """Save.

        Raises:
            JointError: The same on every rank: there is no complete checkpoint of this name, unless
                it is an older one.
        """
        try:
            mine = self._stage()
            self._say_where_it_waits()
            destination = self._clear()
            self._publish(mine, destination)
            self._commit(mine, destination)
        except JointError as error:
            note = shards_note(self._session.member.on_outage, outcome=error.outcome)
            if note:
                add_note(error, note)
            raise
        finally:
            if self._folder.name:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _stage(self) -> ShardRecord:
        session, storage = self._session, self._session.storage
        session.by_all("stage", self._url, Asked(storage, self._url, self._make), is_guarded=False)
        _, error = run_in_lock_step(self._strategy, partial(self._write, str(self._folder)))
        ask = partial(self._describe, error)
        told: str = session.by_all(
            "write", self._url, Asked(storage, self._url, ask), is_guarded=False
        )
        return decode(ShardRecord, told.encode(), key="write")

    def _say_where_it_waits(self) -> None:
        breakers = self._session.alone.breakers
        name = breakers.circuit(self._url, "write").dependency
        seen = breakers.records().get(name)
        if self._is_first and self._waits_because and seen is not None and not passes(seen):
            self._session.driver.sink.emit(
                DiversionFailed(
                    dependency=name,
                    operation="save",
                    target=redacted(self._url),
                    error=self._waits_because,
                )
            )

    def _make(self, token: CancelToken) -> None:
        del token
        # Here, because a spool directory that cannot be used is a failure for all ranks to know of.
        folder = own_path(self._session.storage, self._session.driver.dice.nonce)
        folder.mkdir(parents=True)
        self._folder = folder

    def _describe(self, error: BaseException | None, token: CancelToken) -> str:
        raising(error)
        rank = self._session.member.rank
        if not any(item.is_file() for item in self._folder.rglob("*")):
            return encode(ShardRecord(rank=rank, sizes={})).decode()
        tree = measure(str(self._folder), token)
        sizes = {name: size for name, (size, _) in tree.contents.items()}
        digests = {name: digest for name, (_, digest) in tree.contents.items()}
        return encode(ShardRecord(rank=rank, sizes=sizes, digests=digests)).decode()

    def _clear(self) -> str:
        session, url = self._session, self._url
        session.keep(url)
        failure = self._read_reports() if self._is_first else None
        work = Clearing(
            session.storage,
            url,
            nonce=session.driver.dice.nonce(),
            check=partial(raising, failure),
        )
        final = session.on_rank_zero("clear", url, work.attempt, kind="write")
        return f"{parent_of(url)}/{final.detail}" if final.detail else url

    def _read_reports(self) -> Exception | None:
        try:
            told = self._session.told("write")
            records = [decode(ShardRecord, text.encode(), key="write") for text in told]
            self._expected = shards.check_plan(records, world_size=self._session.member.world_size)
        except ResilienceError as error:
            return error
        self._contents = shards.contents_of(records)
        return None

    def _publish(self, mine: ShardRecord, destination: str) -> None:
        publishing = self._publishing(destination, shards.shards_of(mine.sizes))
        try:
            self._session.by_all("publish", destination, publishing)
        except JointError:
            # Shards without metadata are no checkpoint, but they use up storage.
            self._remove_later(destination)
            raise

    def _commit(self, mine: ShardRecord, destination: str) -> None:
        commit = None
        if self._is_first:
            commit = Commit(
                self._session.storage,
                self._url,
                destination=destination,
                expected=self._expected,
                metadata=self._publishing(destination, shards.metadata_of(mine.sizes)),
                done=manifest_of(self._url, self._contents, self._origin),
            )
            commit.waits_because = self._waits_because
        try:
            self._session.save(self._url, commit)
        except JointError:
            # Elsewhere metadata may be on its way, and must find all shards there when it lands.
            if destination != self._url:
                self._remove_later(destination)
            raise

    def _remove_later(self, destination: str) -> None:
        self._session.remove_later(Leftover(self._session.storage, destination))

    def _publishing(self, destination: str, sizes: dict[str, int]) -> Publishing:
        publishing = Publishing(
            self._session.storage,
            destination,
            folder=self._folder,
            sizes=sizes,
            nonce=self._session.driver.dice.nonce,
        )
        publishing.waits_because = self._waits_because
        return publishing
