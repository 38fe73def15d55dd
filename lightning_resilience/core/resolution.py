# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run starts from: decided by every rank from what one rank has seen.

Rank 0 alone asks storage, and shares what it saw. What follows from that is decided here, by each
rank for itself, so all come to the same file or the same error:

==============  ============================  ======================================================
``ckpt_path``   what is looked for            where nothing is found
==============  ============================  ======================================================
``"last"``      files with the last one's     a start from the beginning, on all ranks
                name, in the directories of
                the checkpoint callbacks
``"hpc"``       ``hpc_ckpt_<n>.ckpt`` in the  the same: every job has a first start
                Trainer's root directory
None            the same under SLURM; then    what Lightning does without
                what was saved on an
                exception, when fitting
a path, best    that path                     an error
==============  ============================  ======================================================

The newest (``core.candidates``) is inspected first, and where it is damaged, the next; once a good
one is found, the damaged ones are set aside (``core.set_aside``). For ``"last"`` that may be one of
another name: a job that is killed in a save point has left a last one that is older, or, in its
first save point, none (``core.fallback``). Damaged ones are no empty directory, and neither are
others that nobody can go on from: where there are some and none can be chosen, a start from the
beginning would hide that the work is there. It is refused, with all of them left where they are, so
that the next start is refused as well; unless ``allow_fresh_start`` says otherwise.

A storage that cannot tell has given no answer: rank 0 asks again, or all ranks raise.

Of a file in object storage that has a manifest rank 0 asks for the manifest and the size, and opens
nothing: where the sizes agree, the digest in the manifest stands for the content, and whoever
fetches the file compares all of its bytes with that (``core.fetching``).
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.candidates import Candidate, best_first
from lightning_resilience.core.records import VERSION


if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_resilience.core.manifest import Manifest


__all__ = [
    "HPC_NAME",
    "Found",
    "Inspection",
    "Search",
    "described",
    "difference",
    "last_name",
    "may_describe",
    "override",
    "refusal",
    "searches",
    "sort_names",
]

HPC_NAME: Final = r"hpc_ckpt_\d+\.ckpt$"
"""Names of the checkpoints that Lightning writes when a scheduler ends a job."""

_MAX_CANDIDATES: Final = 16
"""More than anybody will inspect; keeps the shared record small."""
_MAX_NAMES: Final = 3


class Search(str, Enum):
    """What is looked for."""

    LAST = "last"
    HPC = "hpc"
    DEFAULT = "default"
    """What Lightning does where nothing is asked for: the best one where no model is given."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has seen at one place.

    Args:
        v: Version of the format.
        candidates: What has a name that was looked for.
        others: Names of some other checkpoints there.
        other_count: How many others there are.
        substitutes: The newest of these others; see ``core.fallback``.
    """

    v: int = VERSION
    candidates: tuple[Candidate, ...] = ()
    others: tuple[str, ...] = ()
    other_count: int = 0
    substitutes: tuple[Candidate, ...] = ()


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has seen of one candidate.

    Args:
        v: Version of the format.
        path: Where it is, as it is to be loaded.
        size_bytes: Its size; None for a directory, or where nobody has looked.
        digest: That of its table of contents; empty where its format has none, and where nobody has
            opened it.
        saved: That of all its bytes, as its manifest says, where that stands for a file that nobody
            has opened; empty otherwise.
        rejected: Why it cannot be loaded; empty where nothing is known against it.
        mark: Of a damaged one, what stands for it (``core.set_aside``); empty for one that stays
            where it is.
        is_committed: Whether it is what its manifest says.
        doubt: Why it cannot be told whether it is complete; empty where it can, or has a manifest.
        is_resumable: Whether it can be seen to hold more than weights, or its manifest says so.
        training: The training that its manifest names (``core.candidates``); empty for none.
    """

    v: int = VERSION
    path: str
    size_bytes: int | None = None
    digest: str = ""
    saved: str = ""
    rejected: str = ""
    mark: str = ""
    is_committed: bool = False
    doubt: str = ""
    is_resumable: bool = False
    training: str = ""


def searches(asked: str | None, *, on_slurm: bool, resumes_exceptions: bool) -> tuple[Search, ...]:
    """Return what to look for, in this order; nothing where storage need not be searched.

    Args:
        asked: The user's ``ckpt_path``.
        on_slurm: Whether the job was started by SLURM.
        resumes_exceptions: Whether a run that is not told otherwise goes on from a checkpoint that
            was saved on an exception.
    """
    if asked in {Search.LAST.value, Search.HPC.value}:
        return (Search(asked),)
    if asked is not None:
        return ()
    then = (Search.LAST,) if resumes_exceptions else ()
    if on_slurm:
        return (Search.HPC, *(then or (Search.DEFAULT,)))
    return then


def last_name(name: str, extension: str) -> str:
    """Return a pattern for the names of a checkpoint callback's last checkpoint.

    Args:
        name: The callback's name for it; fields in braces stand for anything.
        extension: What its files end with.
    """
    parts = (re.escape(part) for part in re.split(r"\{[^}]*\}", name))
    return f"{'.*'.join(parts)}.*{re.escape(extension)}$"


def sort_names(listed: Iterable[Candidate], *, pattern: str, extension: str) -> Found:
    """Tell which files of a directory were looked for, and which are checkpoints besides.

    Args:
        listed: Everything in the directory.
        pattern: Names that were looked for.
        extension: What names of checkpoints end with; empty to overlook the others.
    """
    candidates, others = [], []
    for item in listed:
        name = item.url.rpartition("/")[2]
        if re.match(pattern, name):
            candidates.append(item)
        elif extension and name.endswith(extension):
            others.append(item)
    names = sorted(item.url.rpartition("/")[2] for item in others)
    return Found(
        candidates=tuple(best_first(candidates)[:_MAX_CANDIDATES]),
        others=tuple(names[:_MAX_NAMES]),
        other_count=len(others),
        substitutes=tuple(best_first(others)[:_MAX_CANDIDATES]),
    )


def refusal(asked: str, found: Iterable[Found], rejected: Iterable[Inspection]) -> str:
    """Return why a run must not start from the beginning; empty where it may.

    Args:
        asked: What was looked for, as the user would write it.
        found: What was seen at each place.
        rejected: Candidates that were inspected; none of them can be loaded.
    """
    seen = _seen(found, rejected)
    if not seen:
        return ""
    return (
        f"ckpt_path={asked!r} finds no checkpoint that can be loaded, but the directory is not "
        f"empty: {seen}. Starting from the beginning would hide them. Name the one to start from "
        "as ckpt_path, or move these away; checkpoints={'allow_fresh_start': True} starts from the "
        "beginning all the same."
    )


def override(asked: str, found: Iterable[Found], rejected: Iterable[Inspection]) -> str:
    """Return what a run leaves unused that starts from the beginning where ``refusal`` would not.

    Args:
        asked: What was looked for, as the user would write it.
        found: What was seen at each place.
        rejected: Candidates that were inspected; none of them can be loaded.
    """
    return (
        f"ckpt_path={asked!r} finds no checkpoint that can be loaded, and allow_fresh_start is "
        f"set, so nothing of this is used: {_seen(found, rejected)}."
    )


def _seen(found: Iterable[Found], rejected: Iterable[Inspection]) -> str:
    places = list(found)
    damaged = [f"{each.path}: {each.rejected}" for each in rejected]
    count = sum(place.other_count for place in places)
    if count:
        names = ", ".join([name for place in places for name in place.others][:_MAX_NAMES])
        more = ", …" if count > _MAX_NAMES else ""
        damaged.append(f"{count} checkpoints with other names ({names}{more})")
    return "; ".join(damaged)


def may_describe(*, is_local: bool, is_doubted: bool) -> bool:
    """Tell whether the manifest of a file may stand for a look inside.

    Args:
        is_local: Whether it is on a filesystem, where a look costs little and shows more.
        is_doubted: Whether a load of it has found damage, so that a manifest says nothing new.
    """
    return not is_local and not is_doubted


def described(url: str, manifest: Manifest | None, *, size_bytes: int | None) -> Inspection | None:
    """Return what is known of a file that nobody opens; None where somebody has to.

    Args:
        url: Where it is.
        manifest: Its manifest; None where it has none, or none that can be read.
        size_bytes: Its length; None where its storage does not say.
    """
    if manifest is None or manifest.files or manifest.size_bytes != size_bytes:
        return None
    return Inspection(
        path=url,
        size_bytes=size_bytes,
        saved=manifest.digest,
        is_committed=True,
        # Named only for what a training can go on from.
        is_resumable=bool(manifest.training),
    )


def difference(
    expected: Inspection,
    *,
    size_bytes: int | None = None,
    digest: str | None = None,
    saved: str | None = None,
) -> str:
    """Return how a file differs from the one that rank 0 has chosen; empty where it does not.

    Args:
        expected: What rank 0 has seen.
        size_bytes: What this rank sees; None where its storage does not say.
        digest: That of the table of contents that this rank sees; None where it has not looked.
        saved: That of all bytes that this rank has; None where it has not read them.
    """
    if None not in {expected.size_bytes, size_bytes} and expected.size_bytes != size_bytes:
        return f"it has {size_bytes} bytes here and {expected.size_bytes} bytes on rank 0"
    if digest is not None and expected.digest and expected.digest != digest:
        return f"its content has digest {digest or 'none'} here and {expected.digest} on rank 0"
    if saved is not None and expected.saved and expected.saved != saved:
        return f"its bytes have digest {saved} here and {expected.saved} by the manifest of rank 0"
    return ""
