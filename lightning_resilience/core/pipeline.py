# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""In which order a checkpoint is written, moved and removed: the steps, without who carries it out.

Each order is a generator. It *yields* a step and is *sent* what came of it, or has the failure
thrown in. Adapters carry the steps out in storage, the drill in a storage of its own that fails and
stops anywhere, so what is simulated is what ships.

=====================  ============================================================================
order                  why
=====================  ============================================================================
``save``               stage, *unmark*, publish, verify, *mark*: at any instant a manifest stands
                       beside exactly what it describes, or there is none
``whole_save``         the same for a ``CheckpointIO`` that is called as a whole, without a mark
``publication``        the files of a tree in the order in which they were finished, each verified;
                       the older tree goes first, because a mixture of two would look complete
``assembly``           every shard is seen before the metadata appears
``removal``            *unmark*, then the checkpoint; of many files, what makes it look complete
``removal_of_shards``  goes first
``linking``            *unmark* the link's name, then link
``setting_aside``      a note, the copy, then the original; *unmark* last, because a damaged
                       checkpoint that had lost its manifest would be loaded unverified
=====================  ============================================================================

An attempt that was abandoned may go on beside its successor. ``ASK`` is where it stops: it comes
before what both would do, and before the one leaves word for the other. What it has already sent is
waited for (``core.landings``). A new attempt begins with the first step, but for what is known.

What waits in a node's spool is a save that has ended after ``STAGE``: ``Progress.staged`` is what
is published later, by the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

from lightning_resilience.core.shards import removal_order


__all__ = [
    "Do",
    "Progress",
    "Sent",
    "Step",
    "Steps",
    "assembly",
    "carry_out",
    "linking",
    "publication",
    "removal",
    "removal_of_shards",
    "save",
    "setting_aside",
    "whole_save",
]

T = TypeVar("T")


class Step(str, Enum):
    """One thing to do; what comes of it is sent back."""

    ASK = "ask"
    """Raise where this attempt was abandoned."""
    STAGE = "stage"
    """Write the checkpoint where nobody looks for one; what was staged."""
    DISCARD = "discard"
    """Remove what was staged, whatever is there of it."""
    UNMARK = "unmark"
    """Remove the manifest, if there is one."""
    MARK = "mark"
    """Write the manifest: the checkpoint is complete and verified."""
    CLEAR = "clear"
    """Remove what has the checkpoint's name."""
    PUBLISH = "publish"
    """Give what was staged, or one file of it, its final name."""
    VERIFY = "verify"
    """Raise unless storage has what was staged, or that file of it."""
    STAMP = "stamp"
    """What storage tells of the checkpoint; None where nothing is there."""
    WRITE = "write"
    """Have the user's ``CheckpointIO`` write it."""
    IS_THERE = "is there"
    """Whether something has the checkpoint's name; or has taken its place after a move."""
    NAMES = "names"
    """Names in the checkpoint's directory, all files; None where nothing is there."""
    REMOVE_FILE = "remove file"
    """Remove one file of the checkpoint."""
    REMOVE = "remove"
    """Remove the checkpoint, whatever it is."""
    TIDY = "tidy"
    """Remove directories of ours that are empty now."""
    LINK = "link"
    """Let the name point to another checkpoint."""
    IS_SAME = "is same"
    """Whether what is there is what was found damaged."""
    IS_ASIDE = "is aside"
    """Whether it was set aside already."""
    NOTE = "note"
    """Write beside where it goes why it was set aside."""
    MOVE = "move"
    """Rename it to where it goes; raise where it is not what was stamped."""
    COPY = "copy"
    """Copy one file of it to where it goes, and verify that."""
    LIST = "list"
    """What is at one place, by its number (``core.fallback``)."""
    JUDGE = "judge"
    """What is to be thought of a candidate: ``judging``."""
    LEAVE = "leave"
    """Say that a candidate was not loaded, and set it aside where that may be."""
    INSPECT = "inspect"
    """What can be seen of a candidate without its manifest."""
    COMPARE = "compare"
    """Why it is not what its manifest says; empty where it is, None where it has none."""
    IDENTIFY = "identify"
    """The mark of what is there now (``core.set_aside``)."""


@dataclass(frozen=True, slots=True)
class Do:
    """A step of some order, and what it is about, such as the name of a file; else None."""

    step: Enum
    of: Any = None


Steps: TypeAlias = Generator[Do, Any, T]
"""An order of steps that ends with a ``T``."""


def carry_out(steps: Steps[T], hands: Mapping[Any, Callable[[Any], Any]]) -> T:
    """Carry out one step after the other.

    Args:
        steps: The order.
        hands: What carries out each kind of step; called with what it is about.

    Returns:
        What the order ends with.

    Raises:
        BaseException: What a step has raised, unless the order goes on from there.
    """
    try:
        do = next(steps)
        while True:
            do = _next(steps, hands, do)
    except StopIteration as end:
        value: T = end.value
        return value


def _next(steps: Steps[T], hands: Mapping[Any, Callable[[Any], Any]], do: Do) -> Do:
    try:
        answer = hands[do.step](do.of)
    except BaseException as error:  # noqa: BLE001 - the order raises it again
        return steps.throw(error)
    return steps.send(answer)


# Saves --------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Progress(Generic[T]):
    """What the attempts of one save leave to each other.

    Args:
        staged: What is staged, where it can be published once more.
        verified: What is published and verified.
    """

    staged: T | None = None
    verified: T | None = None


def save(
    known: Progress[T],
    *,
    keeps_staged: bool,
    publish: Callable[[T], Steps[object]] | None = None,
) -> Steps[T]:
    """Save a checkpoint, in one attempt of several.

    Args:
        known: What earlier attempts have left.
        keeps_staged: Whether what is staged is there after it was published. A rename uses it up,
            and one copy of a large checkpoint for each attempt would fill the disk.
        publish: The steps that publish and verify what is staged; None for those of one file.
    """
    done = known.verified
    if done is None:
        done = yield from _published(known, publish or _file, keeps_staged=keeps_staged)
    # One that was abandoned says nothing to its successor, which publishes anew.
    yield Do(Step.ASK)
    known.verified = done
    yield Do(Step.MARK, done)
    return done


def _published(
    known: Progress[T], publish: Callable[[T], Steps[object]], *, keeps_staged: bool
) -> Steps[T]:
    staged = known.staged
    if staged is None:
        staged = yield Do(Step.STAGE)
    known.staged = staged if keeps_staged else None
    try:
        yield Do(Step.UNMARK)
        yield from publish(staged)
    except GeneratorExit:
        # Nobody is there to carry anything out.
        raise
    except BaseException:
        if not keeps_staged:
            yield Do(Step.DISCARD, staged)
        raise
    return staged


def _file(staged: object) -> Steps[None]:
    yield Do(Step.PUBLISH, staged)
    yield Do(Step.VERIFY, staged)


@dataclass(slots=True, kw_only=True)
class Sent:
    """How much of a tree is in storage.

    Args:
        names: Files that are published and verified.
        is_cleared: Whether the older tree is gone.
    """

    names: set[str] = field(default_factory=set)
    is_cleared: bool = False


def publication(known: Sent, names: Collection[str], *, renames: bool) -> Steps[None]:
    """Publish a tree, and verify every file; an attempt goes on where the last has ended.

    Args:
        known: What earlier attempts have done.
        names: Its files, in the order in which they were finished. A file itself has the empty
            name; it replaces the older one at once.
        renames: Whether the tree takes its place as a whole.
    """
    if renames:
        yield Do(Step.PUBLISH, "")
    for name in names:
        if name in known.names:
            continue
        if not renames:
            if name and not known.is_cleared:
                yield Do(Step.ASK)
                yield Do(Step.CLEAR)
                known.is_cleared = True
            yield Do(Step.PUBLISH, name)
        yield Do(Step.VERIFY, name)
        known.names.add(name)


def assembly(known: Progress[Any], done: T, *, renames: bool) -> Steps[T]:
    """Make a checkpoint of a directory in which all shards should be.

    Args:
        known: What earlier attempts have left: what tells the directory that was to be renamed.
        done: What it is then.
        renames: Whether the directory takes the checkpoint's name afterwards; else it has that.
    """
    # After an attempt that was given up while its rename was on the way.
    if known.staged is None or not (yield Do(Step.IS_THERE, known.staged)):
        if renames and known.staged is None:
            known.staged = yield Do(Step.STAMP)
        yield Do(Step.VERIFY)
        yield Do(Step.PUBLISH)
        if renames:
            yield Do(Step.UNMARK)
            # Only what was verified: that rename may come now, and what was published since is in
            # a new directory, with nothing else in it.
            yield Do(Step.MOVE, known.staged)
            yield Do(Step.DISCARD)
    yield Do(Step.ASK)
    yield Do(Step.MARK, done)
    return done


def whole_save() -> Steps[tuple[str | None, str | None]]:
    """Have a checkpoint written under its final name by somebody else.

    Returns:
        What storage told of it before and after. What will be there is not known, so no manifest
        is written.
    """
    before: str | None = yield Do(Step.STAMP)
    yield Do(Step.UNMARK)
    yield Do(Step.ASK)
    yield Do(Step.WRITE)
    after: str | None = yield Do(Step.STAMP)
    return before, after


def linking() -> Steps[None]:
    """Let a name point to another checkpoint."""
    yield Do(Step.UNMARK)
    yield Do(Step.LINK)


# Removals -----------------------------------------------------------------------------------------


def removal() -> Steps[None]:
    """Remove a checkpoint; absent is success."""
    yield Do(Step.UNMARK)
    yield Do(Step.ASK)
    yield Do(Step.REMOVE)
    yield Do(Step.TIDY)


def removal_of_shards() -> Steps[None]:
    """Remove a checkpoint of many files: what is half removed must not look complete."""
    yield Do(Step.ASK)
    names: Collection[str] | None = yield Do(Step.NAMES)
    if names is None:
        return
    yield Do(Step.UNMARK)
    for name in removal_order(names):
        yield Do(Step.ASK)
        yield Do(Step.REMOVE_FILE, name)
    yield from removal()


def setting_aside(*, renames: bool) -> Steps[str]:
    """Set a damaged checkpoint aside; an attempt goes on where one has ended.

    Args:
        renames: Whether one rename does it; else it is copied, and only then removed.

    Returns:
        Why it stays where it is; empty where it is set aside.
    """
    if (yield Do(Step.IS_THERE)):
        if not (yield Do(Step.IS_SAME)):
            return "it was written again meanwhile"
        yield Do(Step.NOTE)
        if renames:
            yield Do(Step.MOVE)
        else:
            yield from _copied_and_removed()
    elif not (yield Do(Step.IS_ASIDE)):
        return "it is no longer there"
    yield Do(Step.UNMARK)
    return ""


def _copied_and_removed() -> Steps[None]:
    names: list[str] = list((yield Do(Step.NAMES)))
    for name in names:
        yield Do(Step.COPY, name)
    # Order: all is copied; then what makes it look complete goes first. And only what was copied.
    first = removal_order(names)
    for name in (*first, *(name for name in names if name not in first)):
        yield Do(Step.ASK)
        yield Do(Step.REMOVE_FILE, name)
    if names != [""]:
        yield Do(Step.TIDY)
