# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Remove what killed processes have left unfinished: staged files, and uploads in parts.

==============================  =====================================  =============================
where                           what                                   told from others by
==============================  =====================================  =============================
a directory of checkpoints      staged files beside their targets,     the name of a staged file
                                those of manifests included
the same, on object storage     uploads that were neither completed    their keys, which are below
                                nor aborted, and are paid for          that directory
the node's spool directory      staged files and directories of this   the name, and that they are
                                run                                    in there
those of this user's other      the same, spooled files that were not  that no living process holds
runs on this node               written to their end, and what is      the directory (``living``)
                                empty then
==============================  =====================================  =============================

A staged *directory* beside its target stays: it may be the older checkpoint, moved aside by a
process that was killed before the newer one was in its place. So does all that a living process of
another run may still need: a staged file is complete and untouched while its save waits for an ill
storage, and how long that waits is not known here. A run without a name has a directory of its own
for each start, so nobody else would ever clear up behind one that was killed.

What is old enough is decided in ``core.sweeping``. Where nothing is found, one listing was all.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_resilience.adapters.listings import modified_s
from lightning_resilience.adapters.living import held, unless_held
from lightning_resilience.adapters.object_store import find_info
from lightning_resilience.adapters.small_objects import put
from lightning_resilience.adapters.spool import SpoolDirectory
from lightning_resilience.adapters.staging import discard, is_staging_name, staging_name
from lightning_resilience.adapters.storage import probe_path
from lightning_resilience.adapters.unfinished_uploads import UnfinishedUploads
from lightning_resilience.core.manifest import DIRECTORY
from lightning_resilience.core.sweeping import Leftover, is_orphaned, orphans
from lightning_resilience.runtime.calls import Token


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["sweep_directory", "sweep_other_runs", "sweep_spool", "swept_spool"]

_log = logging.getLogger(__name__)


def sweep_directory(
    storage: Storage, url: str, token: CancelToken, *, nonce: Callable[[], str]
) -> list[str]:
    """Remove what killed processes have left in a directory of checkpoints.

    Args:
        storage: Clients of storage.
        url: The directory; one that does not exist has nothing in it.
        token: Of the call.
        nonce: Makes names.

    Returns:
        What was removed.

    Raises:
        Exception: What the storage raised.
    """
    place = storage.place(url)
    token.raise_if_cancelled()
    if place.store.is_local:
        directory = Path(place.path)
        swept = partial(_sweep_files, token=token, nonce=nonce, also_directories=False)
        return [*swept(directory), *swept(directory / DIRECTORY)]
    if UnfinishedUploads.are_known_to(place.fs):
        return _sweep_uploads(storage, url, token, nonce=nonce)
    return []


def sweep_spool(directory: str, token: CancelToken, *, nonce: Callable[[], str]) -> list[str]:
    """Remove what killed processes of earlier starts of this run have left on this node.

    Args:
        directory: The spool directory of this run.
        token: Of the call.
        nonce: Makes names.

    Returns:
        What was removed.

    Raises:
        OSError: What the filesystem raised.
    """
    return _sweep_files(Path(directory), token, nonce=nonce, also_directories=True)


def sweep_other_runs(directory: str, token: CancelToken, *, nonce: Callable[[], str]) -> list[str]:
    """Remove what killed processes of other runs have left on this node.

    Args:
        directory: The spool directory of this run; those of others are beside it.
        token: Of the call.
        nonce: Makes names.

    Returns:
        What was removed.

    Raises:
        OSError: What the filesystem raised.
    """
    own, removed = Path(directory), []
    for run in _listed(own.parent):
        # What begins with a dot belongs to all runs, as the node's cache does.
        if run == own or run.name.startswith(".") or not run.is_dir() or run.is_symlink():
            continue
        unfinished = SpoolDirectory(str(run)).unfinished()
        if not any(is_staging_name(item.name) for item in _listed(run)) and not unfinished:
            removed += _remove_if_empty(run, own, nonce=nonce)
            continue
        with unless_held(str(run)) as is_ours:
            if is_ours:
                removed += sweep_spool(str(run), token, nonce=nonce)
                removed += _sweep_unfinished(run, nonce=nonce)
    return removed


def _sweep_unfinished(run: Path, *, nonce: Callable[[], str]) -> list[str]:
    spool = SpoolDirectory(str(run))
    found = [
        Leftover(name=str(item), touched_s=touched_s)
        for item in spool.unfinished()
        if (touched_s := _touched_s(item)) is not None
    ]
    old = orphans(found, now_s=_time_of(run, nonce())) if found else []
    if not old or not spool.claim():
        return []
    try:
        return _remove(old, _remove_local, Token())
    finally:
        spool.release()


def _remove_if_empty(run: Path, own: Path, *, nonce: Callable[[], str]) -> list[str]:
    touched_s = _touched_s(run)
    if touched_s is None or _listed(run) or not is_orphaned(_time_of(own, nonce()) - touched_s):
        return []
    with unless_held(str(run)) as is_ours, contextlib.suppress(OSError):
        if is_ours:
            run.rmdir()
            return [str(run)]
    return []


def swept_spool(make: Callable[[], str], *, nonce: Callable[[], str]) -> str:
    """Make the node's spool directory, hold it, and sweep it; that this fails is nobody's problem.

    Args:
        make: Makes the spool directory of this run.
        nonce: Makes names.

    Returns:
        The directory.

    Raises:
        BaseException: What ``make`` raises.
    """
    directory = held(make)
    try:
        removed = [
            *sweep_spool(directory, Token(), nonce=nonce),
            *sweep_other_runs(directory, Token(), nonce=nonce),
        ]
    except OSError as error:
        _log.warning("what killed processes have left on this node was not removed: %s", error)
    else:
        if removed:
            _log.info("removed what killed processes have left: %s", ", ".join(removed))
    return directory


def _sweep_files(
    directory: Path, token: CancelToken, *, nonce: Callable[[], str], also_directories: bool
) -> list[str]:
    found = [
        item
        for item in _listed(directory)
        if is_staging_name(item.name) and (also_directories or item.is_file())
    ]
    leftovers = [
        Leftover(name=str(item), touched_s=touched_s)
        for item in found
        if (touched_s := _touched_s(item)) is not None
    ]
    if not leftovers:
        return []
    return _remove(orphans(leftovers, now_s=_time_of(directory, nonce())), _remove_local, token)


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _touched_s(item: Path) -> float | None:
    """Return when it was last touched, or anything in it; None where it is gone by now."""
    try:
        return max(each.lstat().st_mtime for each in (item, *item.rglob("*")))
    except FileNotFoundError:
        return None


def _time_of(directory: Path, nonce: str) -> float:
    """Return what the filesystem takes for now: a file server has a clock of its own."""
    name = directory / staging_name(nonce)
    try:
        name.touch(exist_ok=False)
        return name.stat().st_mtime
    finally:
        discard(str(name))


def _remove_local(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        discard(name)


def _remove(
    leftovers: Iterable[Leftover], remove: Callable[[str], object], token: CancelToken
) -> list[str]:
    removed = []
    for leftover in leftovers:
        token.raise_if_cancelled()
        remove(leftover.name)
        token.progress()
        removed.append(leftover.name)
    return removed


# Uploads in parts ---------------------------------------------------------------------------------


def _sweep_uploads(
    storage: Storage, url: str, token: CancelToken, *, nonce: Callable[[], str]
) -> list[str]:
    place = storage.place(url)
    bucket, prefix, _ = place.fs.split_path(place.path)
    if not prefix:
        # Whose the uploads of a whole bucket are cannot be told from their keys.
        return []
    uploads = UnfinishedUploads(place.fs, bucket)
    found = {upload.upload_id: upload for upload in uploads.below(f"{prefix.rstrip('/')}/", token)}
    if not found:
        return []
    leftovers = [Leftover(name=name, touched_s=each.begun_s) for name, each in found.items()]
    now_s = _time_of_storage(storage.place(probe_path(url, nonce())), nonce(), token)
    old = orphans(leftovers, now_s=now_s)
    return [found[name].key for name in _remove(old, lambda n: uploads.abort(found[n]), token)]


def _time_of_storage(place: Place, nonce: str, token: CancelToken) -> float:
    """Return what the storage takes for now: the time of an object that was made there just now."""
    put(place.store, place.path, nonce.encode(), nonce=nonce, token=token)
    found = find_info(place.fs, place.path) or {}
    place.store.remove(place.path)
    return modified_s(found) or 0.0
