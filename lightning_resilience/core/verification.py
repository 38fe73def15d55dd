# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is known of the checkpoints of a directory, and whether the newest one is good.

================  ==================================================================================
state             when
================  ==================================================================================
``verified``      it has a manifest, and every file has the size and the digest that this says
``unverified``    nothing is wrong with what could be looked at, and that was not all of it: it has
                  no manifest (its archive is whole, or it has a format that nobody can check), or
                  only sizes were compared
``corrupt``       it differs from its manifest, or it has none and is damaged by itself
``orphan``        a manifest without a checkpoint, or what a save has left that did not end
================  ==================================================================================

The newest is the one with the highest step, by its manifest or else by its name (``step=4``).
One that says no step counts as written after those that are older than it. The same step: the one
that was written later; then by name. Orphans are no checkpoints, so none is ever the newest.

An unverified newest is good: checkpoints of plain Lightning have no manifests, and they load. So is
not a corrupt one, because a run would have to go back behind it, and not a directory without any.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.manifest import difference
from lightning_resilience.core.shards import METADATA_NAMES, UNFINISHED, Form


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lightning_resilience.core.manifest import Manifest


__all__ = [
    "EXTENSION",
    "Finding",
    "Look",
    "Seen",
    "State",
    "describe",
    "newest_first",
    "newest_is_good",
    "of_described",
    "of_undescribed",
    "orphan",
    "step_of",
]

EXTENSION: Final = ".ckpt"
"""What names of checkpoints end with; one that has a manifest may have any name."""

_STEP: Final = re.compile(r"(?<![A-Za-z])step=(\d+)")


class State(str, Enum):
    """What is known of a checkpoint; see the table above."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"
    CORRUPT = "corrupt"
    ORPHAN = "orphan"


class Look(str, Enum):
    """What one file looks like to somebody who has nothing but the file."""

    WHOLE = "whole"
    """An archive, whose every record has its checksum."""
    LISTED = "listed"
    """An archive whose table of contents is there; its records were not read."""
    UNSUMMED = "unsummed"
    """An archive in one piece that was written without checksums."""
    DAMAGED = "damaged"
    """An archive that is not."""
    PREFIXED = "prefixed"
    """An archive with something in front of it, maybe another archive."""
    EMPTY = "empty"
    ZEROS = "zeros"
    PAGE = "page"
    """What a web server or an object store says to a person: HTML or XML."""
    LEGACY = "legacy"
    """What ``torch.save`` wrote before it wrote archives."""
    OTHER = "other"
    """Anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of one file.

    Args:
        look: What it looks like.
        size_bytes: Its length.
        detail: What is wrong with an archive, in one line.
    """

    look: Look
    size_bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is known of one checkpoint.

    Args:
        name: Its name in its directory.
        state: What is known of it.
        reason: Why not more is known, or what is wrong; empty for a verified one.
        step: Optimizer steps that it has been trained for; None where neither its manifest nor its
            name says so.
        size_bytes: Length of all its files; None where that is not known.
        modified_s: When it was written, in seconds of the storage's clock; None where that does not
            say.
    """

    name: str
    state: State
    reason: str = ""
    step: int | None = None
    size_bytes: int | None = None
    modified_s: float | None = None


def step_of(name: str, manifest: Manifest | None) -> int | None:
    """Return the step that a checkpoint says it has; None where it says none.

    Args:
        name: Its name.
        manifest: Its manifest, None where it has none.
    """
    if manifest is not None and manifest.step is not None:
        return manifest.step
    found = _STEP.search(name)
    return None if found is None else int(found.group(1))


def of_described(
    manifest: Manifest, found: Mapping[str, tuple[int, str | None]]
) -> tuple[State, str]:
    """Judge a checkpoint that has a manifest.

    Args:
        manifest: What was saved.
        found: Size in bytes and digest of each file; a digest of None was not computed.

    Returns:
        Its state and the reason.
    """
    what = difference(manifest, found)
    if what:
        return State.CORRUPT, f"it is not what was saved: {what}"
    if any(digest is None for _, digest in found.values()):
        return State.UNVERIFIED, "its sizes are those of its manifest; no digest was compared"
    return State.VERIFIED, ""


def of_undescribed(form: Form, seen: Mapping[str, Seen]) -> tuple[State, str]:
    """Judge a checkpoint that has no manifest.

    Args:
        form: One file, or a directory that is complete or not.
        seen: What was seen of each file, by its path below the checkpoint; a file itself has the
            empty name.

    Returns:
        Its state and the reason.
    """
    if form is Form.OTHER:
        return State.CORRUPT, UNFINISHED
    faults = ((name, _fault(name, each)) for name, each in sorted(seen.items()))
    for name, fault in faults:
        if fault:
            return State.CORRUPT, f"{name or 'it'} {fault}"
    looks = {each.look for each in seen.values()}
    return State.UNVERIFIED, f"it has no manifest; {_what_was_seen(looks)}"


def _fault(name: str, seen: Seen) -> str:
    """Say what is wrong with one file; a file of a directory may be empty, or hold anything."""
    is_needed = not name or name in METADATA_NAMES
    if seen.look is Look.DAMAGED or (seen.look is Look.PREFIXED and not name):
        return f"is damaged ({seen.size_bytes} bytes): {seen.detail}"
    if seen.look is Look.EMPTY and is_needed:
        return "is empty"
    if seen.look is Look.ZEROS:
        return f"holds {seen.size_bytes} bytes, all of them zero"
    if seen.look is Look.PAGE:
        return f"is a page of HTML or XML ({seen.size_bytes} bytes), as servers send for an error"
    return ""


def _what_was_seen(looks: set[Look]) -> str:
    if looks <= {Look.WHOLE}:
        return "every record of its archive has its checksum"
    if looks <= {Look.WHOLE, Look.LISTED}:
        return "the table of contents of its archive is there, and its records were not read"
    if looks <= {Look.UNSUMMED}:
        return "its archive is in one piece, and was saved without checksums"
    if looks & {Look.WHOLE, Look.LISTED, Look.UNSUMMED}:
        return "some of its files are whole archives, others have a format that nobody can check"
    if looks <= {Look.LEGACY}:
        return "it has the older format of torch.save, which holds no checksums"
    return "it is not an archive of torch.save, and nobody can check its format"


def orphan(name: str, *, modified_s: float | None, manifest: Manifest | None = None) -> Finding:
    """Describe what has no checkpoint.

    Args:
        name: Of the checkpoint that is gone, or of what a save has left.
        modified_s: When it was written.
        manifest: That of the checkpoint that is gone; None for what a save has left.
    """
    gone = "it has a manifest, and nothing is there: it was removed by a program that knows of none"
    left = "a save that has not ended has left it, or writes it now"
    return Finding(
        name=name,
        state=State.ORPHAN,
        reason=left if manifest is None else gone,
        step=None if manifest is None else step_of(name, manifest),
        modified_s=modified_s,
    )


def newest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return all findings in the order of their checkpoints, the newest first, orphans last."""
    items = list(findings)
    dated = [
        (_at(item), item.step)
        for item in items
        if item.step is not None and item.state is not State.ORPHAN
    ]

    def rank(item: Finding) -> tuple[bool, float, float, str]:
        step: float = -1
        if item.step is not None:
            step = item.step
        elif item.modified_s is not None:
            step = max((older for at_s, older in dated if at_s <= _at(item)), default=-1)
        return item.state is not State.ORPHAN, step, _at(item), item.name

    return sorted(items, key=rank, reverse=True)


def _at(item: Finding) -> float:
    return float("-inf") if item.modified_s is None else item.modified_s


def newest_is_good(ordered: Sequence[Finding]) -> bool:
    """Tell whether the newest checkpoint is verified, or unverified with nothing against it.

    Args:
        ordered: From ``newest_first``.
    """
    return bool(ordered) and ordered[0].state in {State.VERIFIED, State.UNVERIFIED}


def describe(ordered: Sequence[Finding]) -> str:
    """Say in one line what was found.

    Args:
        ordered: From ``newest_first``.
    """
    if not ordered or ordered[0].state is State.ORPHAN:
        left = f" ({len(ordered)} left over from others)" if ordered else ""
        return f"no checkpoint{left}: nothing to start from"
    counts = Counter(item.state for item in ordered)
    counted = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
    newest = ordered[0]
    said = f"the newest, {newest.name}, is {newest.state.value}"
    if newest_is_good(ordered):
        return f"{counted}; {said}"
    return f"{counted}; {said}: start from another one, or find out what damages them"
