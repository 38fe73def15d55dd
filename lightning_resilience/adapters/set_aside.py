# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Move a damaged checkpoint to where no search finds it; ``core.set_aside`` says where and why.

==============  ===================================================================================
storage         in this order
==============  ===================================================================================
local           the note, with the text of the manifest in it; one rename; the manifest is removed
others          the note; a copy by the storage itself, verified by its size; only then the
                checkpoint is removed; the manifest is removed
==============  ===================================================================================

The manifest goes last: a damaged checkpoint that had lost it would be loaded unverified. Where this
is interrupted, the next start inspects the checkpoint again and goes on; one that has already been
moved leaves at most its old manifest, which the next save of that name removes.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.local_files import fsync_directory
from lightning_resilience.adapters.manifests import raw_manifest, remove_manifest
from lightning_resilience.adapters.object_store import find_info, list_files
from lightning_resilience.adapters.small_objects import check_size, put
from lightning_resilience.adapters.trees import below, put_in_place
from lightning_resilience.core.evidence import one_line, redacted
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.pipeline import Step, carry_out, setting_aside
from lightning_resilience.core.set_aside import (
    Moved,
    Note,
    aside_path,
    encode_note,
    is_final,
    mark_of,
    note_path,
)


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.ports import CancelToken


__all__ = ["identify", "set_aside"]


def identify(storage: Storage, url: str, token: CancelToken) -> str:
    """Return the mark of what is at ``url`` now.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
        token: Of the call.

    Returns:
        Empty for what is never set aside: nothing, a link, or a directory without a manifest.

    Raises:
        OSError: It cannot be told what is there.
    """
    place = storage.place(url)
    found = find_info(place.fs, place.path)
    if found is None or found.get("islink"):
        return ""
    manifest = (raw_manifest(place, token) or b"").decode(errors="replace")
    if found["type"] != "directory":
        written = storage.stamp(url, token)
        return mark_of(f"{written}, {found.get('size')} bytes", manifest)
    # Not its times: removing one of its files changes them, and that may be where a move has ended.
    return mark_of(f"{found.get('ino', '')}", manifest) if manifest else ""


def set_aside(storage: Storage, token: CancelToken, *, damaged: Inspection, nonce: str) -> Moved:
    """Set one damaged checkpoint aside; an attempt goes on where one ended.

    Args:
        storage: Clients of storage.
        token: Of the call.
        damaged: What was seen of it, with its mark.
        nonce: Names the staged note.

    Returns:
        Where it is now, or why it stays where it was.

    Raises:
        CheckpointError: The storage reports another size of the copy; the original is there.
        OSError: What the filesystem or the storage raised, where another attempt may help.
    """
    token.raise_if_cancelled()
    try:
        return _attempt(storage, token, damaged=damaged, nonce=nonce)
    except Exception as error:
        if not is_final(classify(error).failure):
            raise
        return Moved(path=damaged.path, problem=one_line(error))


def _attempt(storage: Storage, token: CancelToken, *, damaged: Inspection, nonce: str) -> Moved:
    url = damaged.path
    place = storage.place(url)
    aside = aside_path(place.path, damaged.mark)
    hands: dict[Step, Callable[[Any], object]] = {
        Step.ASK: lambda _: token.raise_if_cancelled(),
        Step.IS_THERE: lambda _: find_info(place.fs, place.path) is not None,
        Step.IS_SAME: lambda _: identify(storage, url, token) == damaged.mark,
        Step.IS_ASIDE: lambda _: find_info(place.fs, aside) is not None,
        Step.NOTE: lambda _: _write_note(place, aside, damaged, nonce=nonce, token=token),
        Step.MOVE: lambda _: _rename(place, aside, token),
        Step.NAMES: lambda _: _names(place),
        Step.COPY: lambda name: _copy(
            place, below(place.path, name), below(aside, name), token=token
        ),
        Step.REMOVE_FILE: lambda name: _unlink(place, name, token),
        Step.TIDY: lambda _: _tidy(place, token),
        Step.UNMARK: lambda _: remove_manifest(place, token),
    }
    problem = carry_out(setting_aside(renames=place.store.is_local), hands)
    return Moved(path=url, to="" if problem else aside_path(url, damaged.mark), problem=problem)


def _write_note(
    place: Place, aside: str, damaged: Inspection, *, nonce: str, token: CancelToken
) -> None:
    manifest = (raw_manifest(place, token) or b"").decode(errors="replace")
    name = PurePosixPath(place.path).name
    data = encode_note(Note(path=name, reason=redacted(damaged.rejected), manifest=manifest))
    put(place.store, note_path(aside), data, nonce=nonce, token=token)


def _rename(place: Place, aside: str, token: CancelToken) -> None:
    source = Path(place.path)
    target = type(place)(store=place.store, fs=place.fs, path=aside)
    put_in_place(str(source), target, aside=f"{aside}.replaced", token=token)
    fsync_directory(source.parent)


def _names(place: Place) -> list[str]:
    """Return the files of a directory by their paths below it; a file has the empty name."""
    found = find_info(place.fs, place.path)
    if found is None or found["type"] != "directory":
        return [""]
    return list(list_files(place.fs, place.path))


def _unlink(place: Place, name: str, token: CancelToken) -> None:
    path = below(place.path, name)
    place.store.unlink(path, token)
    place.fs.invalidate_cache(path)


def _tidy(place: Place, token: CancelToken) -> None:
    found = find_info(place.fs, place.path)
    # A directory may have a mark of its own, which is there although it is empty.
    if found is not None and found["type"] == "directory" and not list_files(place.fs, place.path):
        place.store.remove(place.path, token)


def _copy(place: Place, source: str, target: str, *, token: CancelToken) -> None:
    size = place.store.size(source)
    if place.store.size(target) != size:
        with place.store.landing(target, token) as landing:
            landing.send()
            place.fs.cp_file(source, target)
        place.fs.invalidate_cache(target)
    check_size(place.store, target, size)
    token.raise_if_cancelled()
    token.progress()
