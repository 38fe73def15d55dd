# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What carries out the steps of ``core.fetching`` on a simulated node, call by call."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.carrying import carried_out
from lightning_resilience.core.fetching import (
    Fetch,
    Lock,
    checking,
    examining,
    fetching,
    obtaining,
    settling,
)
from lightning_resilience.core.manifest import difference
from lightning_resilience.core.node_cache import cache_key
from lightning_resilience.drill.load_node import NodeFile, digest_inside
from lightning_resilience.drill.load_plan import Place
from lightning_resilience.drill.save_attempt import Kind, Op, question
from lightning_resilience.drill.save_storage import DAMAGED, Blob
from lightning_resilience.errors import CheckpointError, CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.drill.load_job import Load
    from lightning_resilience.drill.load_process import Actor
    from lightning_resilience.drill.load_rank import Rank
    from lightning_resilience.drill.save_attempt import Hand, Ops


__all__ = ["PATIENCE_S", "Reading"]

PATIENCE_S: Final = 10.0
"""After how long without a mark a reader counts as stopped or stuck, in seconds."""

_POLL_S: Final = 1.0
_PIECES: Final = 3
_PIECE_S: Final = 1.0


class Reading:
    """One load of one rank.

    Args:
        rank: The rank.
        seen: What all ranks start from.
        load: What it is a part of.
    """

    def __init__(self, rank: Rank, seen: Inspection, load: Load) -> None:
        self.path = ""
        self.waits_first = rank.world.plan.place is Place.OBJECTS
        self._rank = rank
        self._world = rank.world
        self._seen = seen
        self._load = load
        self._copies = rank.world.plan.place is not Place.LOCAL
        self._file = self._file_of("", seen) if self._copies else None
        self._readings: list[Actor] = []
        self._checked: Blob | None = None

    # The parts of a load --------------------------------------------------------------------------

    def settle(self, attempt: Actor) -> Ops:
        """Wait for the file, or for this rank's turn."""
        file = self._known()
        is_there = yield from carried_out(settling(PATIENCE_S), self._waiting(attempt, file))
        # Whoever has given up has let go of it already.
        if attempt.is_abandoned:
            self.release()
        elif is_there:
            self.path = file.name

    def attempt(self, attempt: Actor) -> Ops:
        """Have it on this node; where."""
        if self._copies:
            file = self._known()
            yield from self._obtain(attempt, file, partial(self._fetch, attempt, file))
            return file.name
        found = yield from self._find(attempt)
        self._checked = found
        self.release()
        self._file = file = self._file_of(f"\0{found.modified}", None)
        yield from self._obtain(attempt, file, partial(self._check, attempt, file))
        return self._seen.path

    def open(self, path: str | None) -> Blob:
        """Return what is opened, and mapped.

        Raises:
            FileNotFoundError: It is not there any more.
        """
        name = path or self.path
        if not self._copies:
            return self._there()
        found = self._rank.node.files.get(name)
        if found is None:
            raise FileNotFoundError(name)
        return found.blob

    def confirm(self) -> None:
        """Look whether what was checked is still what has that name.

        Raises:
            OSError: It is not.
        """
        if self._checked is not None and self._there() != self._checked:
            message = "it was replaced after it had been checked"
            raise OSError(errno.ESTALE, message, self._seen.path)

    def release(self) -> None:
        """Let other ranks of the node have their turn."""
        if self._file is not None:
            self._rank.node.release(self._file.lock(Lock.TURN.value), self)
            for attempt in self._readings:
                self._rank.node.release(self._file.lock(Lock.READING.value), attempt)

    def _file_of(self, identity: str, expected: Inspection | None) -> NodeFile:
        load = self._load
        seen = None if identity else self._seen
        return NodeFile(
            node=self._rank.node,
            key=cache_key(f"{self._seen.path}{identity}", expected=seen, common=load.name),
            load=load.name,
            expected=expected,
            refusals=load.refusals,
        )

    def _known(self) -> NodeFile:
        return self._file or self._file_of("", self._seen)

    def _obtain(self, attempt: Actor, file: NodeFile, make: Callable[[str], Ops]) -> Ops:
        node, part = self._rank.node, f"{file.key}-{next(self._world.staged)}"
        hands: dict[Fetch, Hand] = {
            **self._waiting(attempt, file),
            Fetch.GIVE_WAY: lambda _: _said("give way", partial(self._give_way, attempt)),
            Fetch.SWEEP: lambda _: _done("sweep", file.sweep),
            Fetch.MAKE: lambda _: make(part),
            Fetch.APPEAR: lambda _: _done(
                "let it appear", lambda: file.appear(part, self._world.now_s)
            ),
            Fetch.REFUSE: lambda text: _done("refuse it", partial(self._refuse, file, text)),
            Fetch.DISCARD: lambda _: _said("discard", lambda: node.parts.pop(part, None)),
        }
        try:
            yield from carried_out(obtaining(PATIENCE_S), hands)
        except CorruptCheckpointError:
            self._world.checks.refused(file)
            raise
        finally:
            self._world.reading.pop(attempt, None)
            if attempt in self._readings:
                self._readings.remove(attempt)

    def _give_way(self, attempt: Actor) -> None:
        if self._readings:
            self.release()
        self._readings.append(attempt)

    def _refuse(self, file: NodeFile, text: str) -> None:
        file.refusals[file.told] = text

    # Waiting --------------------------------------------------------------------------------------

    def _waiting(self, attempt: Actor, file: NodeFile) -> dict[Fetch, Hand]:
        world, node = self._world, self._rank.node
        holders: dict[Lock, object] = {Lock.TURN: self, Lock.READING: attempt}

        def look() -> Any:  # noqa: ANN401 - what the steps are told
            attempt.looked_s = world.now_s
            return file.look(world.now_s, is_checked=self._copies)

        def take(lock: Lock) -> bool:
            return node.take(file.lock(lock.value), self._rank, holders[lock])

        def mark() -> int | None:
            seen = file.mark(attempt)
            world.checks.waits(attempt, file, seen)
            return seen

        def pause() -> None:
            world.checks.watches(attempt)
            attempt.wakes_s = world.now_s + _POLL_S

        reading = file.lock(Lock.READING.value)
        return {
            Fetch.ASK: lambda _: _said("ask", attempt.ask),
            Fetch.LOOK: lambda _: _said("look", look),
            Fetch.TAKE: lambda lock: _done(f"take the {lock.value}", partial(take, lock)),
            Fetch.MARK: lambda _: _said("see the mark", mark),
            Fetch.NOW: lambda _: _said("see the clock", lambda: world.now_s),
            Fetch.HEARD: lambda _: _said("hear the reader", bool),
            Fetch.PAUSE: lambda _: _said("pause", pause),
            Fetch.BEAT: lambda _: _done("beat", partial(self._beat, attempt, file)),
            Fetch.RECHECK: lambda _: self._recheck(attempt, file),
            Fetch.DROP: lambda _: _done("drop it", lambda: node.files.pop(file.name, None)),
            Fetch.VOUCH: lambda _: _done("vouch for it", lambda: file.vouch(world.now_s)),
            Fetch.RELEASE: lambda _: _said("release", lambda: node.release(reading, attempt)),
        }

    def _beat(self, attempt: Actor, file: NodeFile) -> None:
        self._rank.node.beat(file.lock(Lock.READING.value), self._world.now_s)
        self._world.checks.marks(attempt)

    def _recheck(self, attempt: Actor, file: NodeFile) -> Ops:
        found = self._rank.node.files.get(file.name)
        if found is None:
            raise FileNotFoundError(file.name)
        blob = found.blob
        yield from self._pieces(attempt, file, "check a piece", kind=Kind.NODE)
        steps = examining(self._seen, blob.size_bytes, is_described=False, shown=self._seen.path)
        yield from carried_out(steps, _inside(lambda: blob))

    # Reading --------------------------------------------------------------------------------------

    def _there(self) -> Blob:
        blob = self._world.storage.files.get(self._seen.path)
        if blob is None:
            raise FileNotFoundError(self._seen.path)
        return blob

    def _find(self, attempt: Actor) -> Ops:
        attempt.ask()
        return (yield Op(kind=Kind.QUESTION, what="find it", run=self._there))

    def _fetch(self, attempt: Actor, file: NodeFile, part: str) -> Ops:
        def copied() -> Blob:
            return self._rank.node.part(part)

        hands: dict[Fetch, Hand] = {
            Fetch.FIND: question("find it", lambda _: self._there().size_bytes),
            Fetch.MANIFEST: question("read the manifest", lambda _: self._manifest(digests=False)),
            Fetch.ROOM: lambda size: _done("make room", partial(self._make_room, size)),
            Fetch.COPY: lambda _: self._copy(attempt, file, part),
            Fetch.CONTENTS: question("compare it", lambda of: self._compare(*of)),
        }
        steps = fetching(self._seen, may_ask=True, shown=self._seen.path)
        yield from carried_out(steps, {**hands, **_inside(copied)})

    def _make_room(self, size_bytes: int) -> None:
        node, now_s = self._rank.node, self._world.now_s
        before = {name: each.used_s for name, each in node.files.items()}
        node.make_room(size_bytes, now_s)
        self._world.checks.made_room(node, before)

    def _copy(self, attempt: Actor, file: NodeFile, part: str) -> Ops:
        world, node = self._world, self._rank.node

        def opened() -> Blob:
            world.checks.opens(attempt, file)
            return self._there()

        first: Blob = yield Op(kind=Kind.QUESTION, what="open it", run=opened)
        seen = yield from self._pieces(attempt, file, "read a piece", kind=Kind.QUESTION)
        # Who has opened a file keeps it; parts of an object are asked for by its name.
        blob = first if world.renames else seen[-1]
        if not world.renames and any(each != blob for each in (first, *seen)):
            blob = replace(blob, digest=DAMAGED, is_damaged=True)
        how = world.choose(
            [("it arrives", ""), ("a bit flips on the way", "flips"), ("it is cut", "flips")],
            calm=0.8,
        )
        if how != "it arrives":
            size_bytes = blob.size_bytes // 2 if how == "it is cut" else blob.size_bytes
            blob = replace(blob, digest=DAMAGED, size_bytes=size_bytes, is_damaged=True)
        node.parts[part] = blob
        world.reading.pop(attempt, None)
        return {"": (blob.size_bytes, blob.digest)}

    def _pieces(self, attempt: Actor, file: NodeFile, what: str, *, kind: Kind) -> Ops:
        world = self._world

        def piece() -> Blob:
            attempt.ask()
            world.now_s += _PIECE_S
            self._beat(attempt, file)
            return self._there() if kind is Kind.QUESTION and not world.renames else Blob()

        seen = []
        for _ in range(_PIECES):
            read: Blob = yield Op(kind=kind, what=what, run=piece)
            seen += [read]
        return seen

    def _check(self, attempt: Actor, file: NodeFile, part: str) -> Ops:
        """Read it through where it is."""
        world, node = self._world, self._rank.node
        world.checks.opens(attempt, file)
        read: list[Blob] = []

        def size() -> int:
            read.append(self._there())
            return read[0].size_bytes

        def read_through(_: object) -> Ops:
            yield from self._pieces(attempt, file, "read a piece", kind=Kind.NODE)
            return (yield Op(kind=Kind.QUESTION, what="see its length", run=size))

        hands: dict[Fetch, Hand] = {
            Fetch.MANIFEST: question("compare it", lambda _: self._manifest(digests=True)),
            Fetch.READ: read_through,
        }
        steps = checking(self._seen, shown=self._seen.path)
        yield from carried_out(steps, {**hands, **_inside(lambda: read[0])})
        node.parts[part] = Blob()
        world.reading.pop(attempt, None)

    # What is compared -----------------------------------------------------------------------------

    def _manifest(self, *, digests: bool) -> Manifest | None:
        manifest = self._world.looks.manifest(self._seen.path)
        if manifest is not None:
            blob = self._there()
            self._compare(manifest, {"": (blob.size_bytes, blob.digest if digests else None)})
        return manifest

    def _compare(self, manifest: Manifest, found: Mapping[str, tuple[int, str | None]]) -> None:
        what = difference(manifest, found)
        if not what:
            return
        if self._world.looks.manifest(self._seen.path) != manifest:
            message = "it was written again while it was read"
            raise CheckpointError(message)
        message = f"it is not what was saved: {what}"
        raise CorruptCheckpointError(message)


def _inside(blob: Callable[[], Blob]) -> dict[Fetch, Hand]:
    def digest() -> tuple[str, str]:
        found = digest_inside(blob())
        return (found, "") if found else ("", "it has no table of contents")

    def examine() -> None:
        if blob().is_damaged:
            message = "a checksum inside it does not fit"
            raise CorruptCheckpointError(message)

    return {
        Fetch.DIGEST: lambda _: _said("look inside", digest),
        Fetch.SUM: lambda _: _said("read it through", lambda: blob().digest),
        Fetch.EXAMINE: lambda _: _said("examine it", examine),
    }


def _said(what: str, run: Callable[[], Any]) -> Ops:
    return (yield Op(kind=Kind.ASK, what=what, run=run))


def _done(what: str, run: Callable[[], Any]) -> Ops:
    return (yield Op(kind=Kind.NODE, what=what, run=run))
