# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""In which order a rank comes by the checkpoint that it loads: who waits, who reads, who checks.

Each order is a generator of steps, as those of ``core.pipeline`` are, which adapters and the drill
carry out. ``core.node_cache`` has the rules that they follow.

=============  ====================================================================================
order          why
=============  ====================================================================================
``loading``    who waits for another rank of its node does so outside of the attempts, in which a
               slot of the storage is held; nobody with a slot waits for somebody without one
``settling``   before a slot is asked for: the file is there, or this rank has its *turn*
``obtaining``  with a slot: make the file under a name of its own, and let it appear when it is
               complete and checked; what is damaged is refused for the others as well
``fetching``   what storage says of it, the copy, and each check before anybody can see that
``checking``   the same checks of what stays where it is, on a local disk
=============  ====================================================================================

What an earlier start has left in the cache was good then. A disk may have changed it since, so one
rank of the node reads it through before any of them uses it: it is *vouched* for in this load.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from lightning_resilience.core.node_cache import Step, Watch, next_step, watched
from lightning_resilience.core.pipeline import Do
from lightning_resilience.core.resolution import difference
from lightning_resilience.errors import CallTimeoutError, CheckpointError, CorruptCheckpointError


if TYPE_CHECKING:
    from lightning_resilience.core.manifest import Contents, Manifest
    from lightning_resilience.core.pipeline import Steps
    from lightning_resilience.core.resolution import Inspection


__all__ = [
    "Fetch",
    "Lock",
    "There",
    "checking",
    "examining",
    "fetching",
    "loading",
    "obtaining",
    "settling",
]


class Lock(str, Enum):
    """A lock of a node that the kernel takes from a process that dies."""

    TURN = "turn"
    """Whoever has it asks for a slot of the storage."""
    READING = "reading"
    """Whoever has it reads."""


class Fetch(str, Enum):
    """One thing to do; what comes of it is sent back."""

    PREPARE = "prepare"
    """Wait outside of the attempts; whether the storage has to be asked."""
    ATTEMPTS = "attempts"
    """Ask the storage, in as many attempts as it takes; what came of it."""
    GIVE_UP = "give up"
    """Let other ranks of the node try."""
    FINISH = "finish"
    """Make a value of what came of the attempts; None where there were none."""

    CONFIRM = "confirm"
    """Raise where what was checked is no longer what has that name."""

    ASK = "ask"
    """Raise where the caller has given up."""
    LOOK = "look"
    """What of the file is on the node: ``There``."""
    TAKE = "take"
    """Take a lock where nobody has it; whether this attempt has it now."""
    MARK = "mark"
    """The mark of another one that holds the reading; None where nobody does."""
    NOW = "now"
    """This rank's clock, in seconds."""
    HEARD = "heard"
    """Tell the caller that the reader goes on."""
    PAUSE = "pause"
    """Wait a moment."""
    GIVE_WAY = "give way"
    """Let go of what an abandoned attempt of this rank holds still."""
    BEAT = "beat"
    """Show the others that the reader goes on."""
    SWEEP = "sweep"
    """Remove what other readers have made so far: they are dead, or were taken over."""
    MAKE = "make"
    """Make the file, complete and checked, under a name that nobody looks for."""
    APPEAR = "appear"
    """Give it its name."""
    VOUCH = "vouch"
    """Tell the others of this load that it was checked."""
    REFUSE = "refuse"
    """Tell them why it is not to be loaded."""
    DISCARD = "discard"
    """Remove what was made, whatever is there of it."""
    RECHECK = "recheck"
    """Raise unless what is in the cache is still what was fetched."""
    DROP = "drop"
    """Remove it from the cache."""
    RELEASE = "release"
    """Let go of the reading."""

    FIND = "find"
    """Its length in storage, None where that does not say; raise where it is not there."""
    MANIFEST = "manifest"
    """Its manifest, None where it has none; raise where already its sizes differ."""
    ROOM = "room"
    """Remove from the cache what has to go for so many bytes."""
    COPY = "copy"
    """Copy it; length and digest of what has arrived."""
    READ = "read"
    """Read it through where it is; its length."""
    CONTENTS = "contents"
    """Raise where what has arrived is not what the manifest says."""
    DIGEST = "digest"
    """Digest of its table of contents, and why that cannot be told."""
    SUM = "sum"
    """Digest of all its bytes, read through on this node."""
    EXAMINE = "examine"
    """Raise where a checksum inside it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class There:
    """What a rank sees of a file on its node.

    Args:
        is_there: Whether it is there, and somebody has vouched for it in this load.
        is_left: Whether one is there that an earlier load has left.
        refusal: Why a reader of this load has refused it; None where none has.
    """

    is_there: bool = False
    is_left: bool = False
    refusal: str | None = None


# One rank -----------------------------------------------------------------------------------------


def loading() -> Steps[Any]:
    """Do what is done on the node before and after the attempts, and the attempts between."""
    value: Any = None
    if (yield Do(Fetch.PREPARE)):
        try:
            value = yield Do(Fetch.ATTEMPTS)
        except GeneratorExit:
            raise
        except BaseException:
            yield Do(Fetch.GIVE_UP)
            raise
    loaded: Any = yield Do(Fetch.FINISH, value)
    # Not before: whoever has opened it keeps what it was then.
    yield Do(Fetch.CONFIRM)
    return loaded


# The ranks of a node ------------------------------------------------------------------------------


def settling(patience_s: float) -> Steps[bool]:
    """Wait until the file is there, or it is this rank's turn; whether it is there.

    Args:
        patience_s: After how long without a mark a reader counts as stopped or stuck, in seconds.

    Raises:
        CorruptCheckpointError: A reader has refused it.
    """
    step, seen = yield from _awaited(Lock.TURN, patience_s)
    if step is not Step.READ:
        return step is Step.USE
    if not seen.is_left or not (yield Do(Fetch.TAKE, Lock.READING)):
        return False
    try:
        is_good = yield from _rechecked()
    except GeneratorExit:
        raise
    except BaseException:
        yield Do(Fetch.RELEASE)
        raise
    yield Do(Fetch.RELEASE)
    return is_good


def obtaining(patience_s: float) -> Steps[None]:
    """Have the file, made by this rank or by another one.

    Args:
        patience_s: As for ``settling``.

    Raises:
        CorruptCheckpointError: It is not what was saved.
    """
    # One of this rank's that was abandoned hangs, and others may do better.
    yield Do(Fetch.GIVE_WAY)
    step, seen = yield from _awaited(Lock.READING, patience_s)
    if step is Step.USE:
        yield Do(Fetch.RELEASE)
        return
    try:
        yield from _made_or_refused(step, seen)
    except GeneratorExit:
        # Nobody is there to carry anything out, and the kernel takes the lock.
        raise
    except BaseException:
        yield Do(Fetch.RELEASE)
        yield Do(Fetch.DISCARD)
        raise
    yield Do(Fetch.RELEASE)


def _made_or_refused(step: Step, seen: There) -> Steps[None]:
    try:
        yield from _made(step, seen)
    except CorruptCheckpointError as error:
        # So that the others do not fetch it, one after the other, to find out the same.
        yield Do(Fetch.REFUSE, str(error))
        raise


def _made(step: Step, seen: There) -> Steps[None]:
    yield Do(Fetch.BEAT)
    if step is Step.READ:
        if seen.is_left and (yield from _rechecked()):
            return
        # Those of readers that were taken over find out by their rename.
        yield Do(Fetch.SWEEP)
    yield Do(Fetch.MAKE)
    yield Do(Fetch.ASK)
    yield Do(Fetch.APPEAR)
    yield Do(Fetch.VOUCH)


def _rechecked() -> Steps[bool]:
    yield Do(Fetch.BEAT)
    try:
        yield Do(Fetch.RECHECK)
    except CallTimeoutError:
        raise
    except (CheckpointError, OSError):
        yield Do(Fetch.DROP)
        return False
    yield Do(Fetch.VOUCH)
    return True


def _awaited(lock: Lock, patience_s: float) -> Steps[tuple[Step, There]]:
    now_s: float = yield Do(Fetch.NOW)
    watch = Watch(since_s=now_s)
    while True:
        yield Do(Fetch.ASK)
        seen: There = yield Do(Fetch.LOOK)
        is_settled = seen.is_there or seen.refusal is not None
        has_lock = not is_settled and (yield Do(Fetch.TAKE, lock))
        if has_lock:
            # Whoever had it may have made the file since that look.
            seen = yield Do(Fetch.LOOK)
        now_s = yield Do(Fetch.NOW)
        step = next_step(
            is_there=seen.is_there,
            is_refused=seen.refusal is not None,
            has_lock=has_lock,
            silent_s=watch.silent_s(now_s),
            patience_s=patience_s,
        )
        if step is Step.REFUSE:
            yield Do(Fetch.RELEASE)
            raise CorruptCheckpointError(seen.refusal or "")
        if step is not Step.WAIT:
            return step, seen
        mark: int | None = yield Do(Fetch.MARK)
        # Order: the mark is not older than the time from which its reader counts as silent.
        now_s = yield Do(Fetch.NOW)
        before, watch = watch, watched(watch, mark, now_s=now_s)
        if watch is not before:
            yield Do(Fetch.HEARD)
        yield Do(Fetch.PAUSE)


# What a reader does -------------------------------------------------------------------------------


def fetching(expected: Inspection | None, *, may_ask: bool, shown: str) -> Steps[None]:
    """Copy a checkpoint to the node, and check the copy.

    Args:
        expected: What rank 0 has seen of it; None where nobody has looked.
        may_ask: Whether the storage answers questions.
        shown: The checkpoint, in messages.

    Raises:
        CorruptCheckpointError: It is not what its manifest says, or damaged by itself.
        CheckpointError: Other bytes have arrived than storage has.
        OSError: It is not what rank 0 has seen.
    """
    size_bytes: int | None = None
    manifest: Manifest | None = None
    if may_ask:
        size_bytes = yield Do(Fetch.FIND)
        manifest = yield Do(Fetch.MANIFEST)
    yield Do(Fetch.ROOM, size_bytes or 0)
    contents: Contents = yield Do(Fetch.COPY)
    copied_bytes, saved = contents[""]
    if size_bytes not in {None, copied_bytes}:
        message = f"{copied_bytes} bytes of {shown} arrived, but it has {size_bytes}"
        raise CheckpointError(message)
    if manifest is not None:
        yield Do(Fetch.CONTENTS, (manifest, contents))
    is_described = manifest is not None
    yield from examining(
        expected, copied_bytes, saved=saved, is_described=is_described, shown=shown
    )


def checking(expected: Inspection | None, *, shown: str) -> Steps[None]:
    """Read a checkpoint through where it is.

    Args:
        expected: As for ``fetching``.
        shown: Likewise.

    Raises:
        CorruptCheckpointError: It is not what its manifest says, or damaged by itself.
        OSError: It is not what rank 0 has seen.
    """
    manifest: Manifest | None = yield Do(Fetch.MANIFEST)
    size_bytes: int = yield Do(Fetch.READ)
    is_described = manifest is not None
    yield from examining(expected, size_bytes, is_described=is_described, shown=shown)


def examining(
    expected: Inspection | None,
    size_bytes: int,
    *,
    saved: str | None = None,
    is_described: bool,
    shown: str,
) -> Steps[None]:
    """Look into a checkpoint that is on this node.

    Args:
        expected: As for ``fetching``.
        size_bytes: Its length here.
        saved: Digest of all its bytes here; None where they were not read yet.
        is_described: Whether it was compared with its manifest.
        shown: As for ``fetching``.

    Raises:
        CorruptCheckpointError: It is damaged by itself.
        OSError: It is not what rank 0 has seen.
    """
    # Order: what differs from what rank 0 has seen may be an older state, or have suffered on its
    # way, and is read again. What is damaged as rank 0 has seen it stays so.
    if expected is not None:
        _compare(difference(expected, size_bytes=size_bytes), shown)
        if expected.digest:
            digest, damage = yield Do(Fetch.DIGEST)
            _compare(damage or difference(expected, digest=digest), shown)
        if expected.saved:
            if saved is None:
                saved = yield Do(Fetch.SUM)
            _compare(difference(expected, saved=saved), shown)
            # Every byte is what was saved, so no checksum inside has more to say.
            return
    if not is_described:
        yield Do(Fetch.EXAMINE)


def _compare(different: str, shown: str) -> None:
    if different:
        # As a handle that went stale: a network filesystem may show this rank an older state, and
        # a later attempt may see what rank 0 sees.
        message = f"this is not the checkpoint that rank 0 has chosen: {different}"
        raise OSError(errno.ESTALE, message, shown)
