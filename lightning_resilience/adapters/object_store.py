# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whole checkpoint files on any fsspec filesystem: published at once, verified, removed.

==============  ==========================================  ========================================
storage         staged                                      published by
==============  ==========================================  ========================================
local           beside the target                           a rename, then fsync of the directory
``memory://``   in the spool directory                      one assignment
``s3://``       in the spool directory                      one streamed PutObject (up to 16 MiB)
``gs://``       in the spool directory                      one streamed upload (up to 16 MiB)
both            above that, in the spool directory          parts, and their completion
others          in the spool directory                      one ``put_file`` of their own
==============  ==========================================  ========================================

``put_file`` of s3fs reads up to 100 MiB into memory and sends larger files as a multipart upload
that knows nothing of its caller's timeout, and that of gcsfs sends pieces one after the other. One
request is atomic by the protocol: a connection that ends early leaves no object. What is longer is
sent in parts, several at once (``parted_upload``), which several connections carry faster than one;
the first ones, where the caller asks for it, while the rest of the file is still being staged. An
upload in parts that is gone when it is to be completed may be gone *because* it was completed, by a
request whose answer was lost; so the object is looked for before the upload counts as failed.

What S3, Google or a filesystem has called the file when it took it is compared with what is there
when its size is asked for next, and elsewhere the end of what is there with the end of what was
sent, so that a write is noticed that was dropped over an older one of the same length
(``receipts``).

A name is not used again before what was sent about it has ended (``landings``).

Nothing here makes a bucket, and nothing here repeats anything: the caller's guard does.
"""

from __future__ import annotations

import errno
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.google_storage import compare_crc32c, raise_if_no_bucket
from lightning_resilience.adapters.google_upload import NotTakenError, note_refusal
from lightning_resilience.adapters.landings import landing, removing
from lightning_resilience.adapters.local_files import fsync_directory, remove, seen, seen_in
from lightning_resilience.adapters.parted_upload import parted_upload
from lightning_resilience.adapters.protocol_names import is_google, protocols, strip_protocol
from lightning_resilience.adapters.receipts import (
    acknowledge,
    compare,
    forget,
    receipt_by_tail,
    with_tail,
)
from lightning_resilience.adapters.sending import put_file, requests_of, send_at_once
from lightning_resilience.adapters.staging import staging_name
from lightning_resilience.core.evidence import inner_codes
from lightning_resilience.core.parts import Lengths, cut
from lightning_resilience.core.receipts import Receipt, tag_of


if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.landings import Landing
    from lightning_resilience.adapters.parted_upload import PartedUpload
    from lightning_resilience.ports import CancelToken


__all__ = [
    "FsspecObjectStore",
    "find_info",
    "list_files",
    "protocols",
    "strip_protocol",
]

_LENGTHS = Lengths(single_bytes=16 * 2**20, shortest_bytes=5 * 2**20, longest_bytes=16 * 2**20)
# What "there is no such object" looks like inside a FileNotFoundError; no code at all is what
# filesystems raise that found out by themselves. NoSuchBucket is not an answer about the object.
_ABSENT_CODES = frozenset({"404", "NoSuchKey", "NoSuchVersion", "BlobNotFound"})
_UPLOAD_IS_GONE = "NoSuchUpload"
# Half of the default stall_timeout_s, for who has no policy.
_PATIENCE_S = 30.0


class FsspecObjectStore:
    """``ObjectStore`` on an fsspec filesystem.

    The filesystem should be a private instance without retries of its own
    (``adapters.private_filesystem``), and not a guarded one: each step would be guarded by itself.
    Any thread may call; fsspec's own rules apply after a fork.

    Args:
        fs: The filesystem.
        spool_directory: Where files are staged that are not staged beside their target; made by
            ``adapters.staging.spool_directory``. Not used for a local filesystem.
        patience_s: How long a name is waited for about which something was sent that has not ended,
            in seconds; see ``core.landings``.
    """

    def __init__(
        self, fs: AbstractFileSystem, *, spool_directory: str = "", patience_s: float = _PATIENCE_S
    ) -> None:
        self._fs = fs
        self._spool_directory = spool_directory
        self._patience_s = patience_s
        self._protocols = protocols(fs)
        self.is_local = "file" in self._protocols

    def staging_path(self, path: str, nonce: str) -> str:
        """Return where to stage ``path``: a name that says nothing of the target's name."""
        name = staging_name(nonce)
        if self.is_local:
            return str(Path(strip_protocol(self._fs, path)).parent / name)
        return str(Path(self._spool_directory) / name)

    def publish(
        self,
        staged_path: str,
        path: str,
        token: CancelToken,
        *,
        upload: PartedUpload | None = None,
    ) -> None:
        """Make the staged file appear under ``path``, whole or not at all.

        On a local filesystem the staged file is gone afterwards; elsewhere it stays, so that this
        can be repeated, and is removed with ``staging.discard``.

        Args:
            staged_path: The file, whole.
            path: Where it is to appear.
            token: The caller's token.
            upload: What has sent parts of it meanwhile, from the method of that name.

        Raises:
            CallTimeoutError: The caller has given up; nothing appears.
            OSError: What the filesystem or the storage raised.
        """
        forget(self._key(path))
        if self.is_local:
            self._publish_by_rename(staged_path, path, token)
            return
        with self.landing(path, token) as landing:
            try:
                receipt = self._send(staged_path, path, landing=landing, upload=upload)
            except NotTakenError as error:
                note_refusal(self._fs, path, error)
                receipt = put_file(self._fs, staged_path, path, landing=landing)
            if is_google(self._fs):
                compare_crc32c(find_info(self._fs, path), staged_path, token)
        is_told = receipt != Receipt() or "memory" in self._protocols
        acknowledge(self._key(path), receipt if is_told else receipt_by_tail(staged_path))
        token.progress()
        self._fs.invalidate_cache(path)

    def landing(self, path: str, token: CancelToken) -> AbstractContextManager[Landing]:
        """Return what to write ``path`` in; see ``adapters.landings.landing``."""
        return landing(self._key(path), token, patience_s=self._patience_s)

    def _key(self, path: str) -> str:
        return f"{self._protocols[0]}://{strip_protocol(self._fs, path).rstrip('/')}"

    def _send(
        self, staged_path: str, path: str, *, landing: Landing, upload: PartedUpload | None
    ) -> Receipt:
        """Send a file; return what the storage calls it, empty where it does not say."""
        size_bytes = _size(staged_path)
        if upload is not None and upload.is_begun and upload.plan.holds(size_bytes):
            return self._complete(upload, staged_path, path, landing=landing)
        if size_bytes <= _LENGTHS.single_bytes:
            return send_at_once(self._fs, staged_path, path, landing=landing)
        with self.upload(staged_path, path, landing.token, expected_bytes=size_bytes) as parts:
            if parts is not None:
                return self._complete(parts, staged_path, path, landing=landing)
        return put_file(self._fs, staged_path, path, landing=landing)

    def size(self, path: str) -> int | None:
        """Return the size that the storage itself reports now; None only if there is no object.

        Raises:
            CheckpointError: It is something else than this process has last published there.
            IsADirectoryError: A local directory has that name.
            OSError: It cannot be told, for example because the bucket does not exist.
        """
        if self.is_local:
            there = seen(strip_protocol(self._fs, path))
        else:
            found = find_info(self._fs, path)
            # To the storage a prefix of other objects' names, to fsspec a directory, is no object.
            is_absent = found is None or found["type"] == "directory"
            there = None if found is None or is_absent else self._seen_in(found, path)
        compare(self._key(path), there or Receipt())
        return None if there is None else there.size_bytes

    def _seen_in(self, found: Mapping[str, Any], path: str) -> Receipt:
        seen = Receipt(
            tag=tag_of(found.get("ETag")),
            generation=str(found.get("generation") or ""),
            size_bytes=int(found["size"]),
        )
        return with_tail(self._key(path), seen, partial(self._fs.cat_file, path))

    def remove(self, path: str, token: CancelToken | None = None) -> None:
        """Remove the file, or the directory with all that is in it. Absent is success.

        Raises:
            CallTimeoutError: The caller has given up; nothing is removed.
            OSError: What the filesystem or the storage raised.
        """
        with removing(self._key(path), token, patience_s=self._patience_s):
            self._remove(path)

    def _remove(self, path: str) -> None:
        if self.is_local:
            remove(Path(strip_protocol(self._fs, path)))
            return
        found = find_info(self._fs, path)
        if found is None:
            return
        try:
            if found["type"] == "directory":
                self._fs.rm(path, recursive=True)
            else:
                self._fs.rm_file(path)
        except FileNotFoundError as error:
            if not _is_absence(error):
                raise
        self._fs.invalidate_cache(path)

    def unlink(self, path: str, token: CancelToken | None = None) -> None:
        """Remove one file in one request; as ``remove`` otherwise."""
        with removing(self._key(path), token, patience_s=self._patience_s):
            try:
                self._unlink(path)
            except FileNotFoundError as error:
                if not _is_absence(error):
                    raise

    def _unlink(self, path: str) -> None:
        if self.is_local:
            remove(Path(strip_protocol(self._fs, path)))
        else:
            self._fs.rm_file(path)

    def _publish_by_rename(self, staged_path: str, path: str, token: CancelToken) -> None:
        target = Path(strip_protocol(self._fs, path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.landing(path, token) as landing:
            landing.send()
            taken = seen_in(Path(staged_path).stat())
            # A link under the target's name is replaced itself, not the file that it points to.
            Path(staged_path).replace(target)
        acknowledge(self._key(path), taken)
        fsync_directory(target.parent)
        token.progress()

    def upload(
        self, staged_path: str, path: str, token: CancelToken, *, expected_bytes: int
    ) -> AbstractContextManager[PartedUpload | None]:
        """Return what sends a file while it is still being written; None where nothing can.

        Args:
            staged_path: Where it is staged.
            path: Where it is to appear, by ``publish``.
            token: The caller's token.
            expected_bytes: About how long it will be.
        """
        requests = requests_of(self._fs, path)
        if requests is None:
            return nullcontext()
        plan = cut(expected_bytes, _LENGTHS)
        return parted_upload(requests, staged_path, token=token, plan=plan)

    def _complete(
        self, upload: PartedUpload, staged_path: str, path: str, *, landing: Landing
    ) -> Receipt:
        size_bytes = _size(staged_path)
        before = find_info(self._fs, path)
        try:
            return upload.complete(size_bytes, landing)
        except FileNotFoundError as error:
            if _UPLOAD_IS_GONE not in _codes(error):
                raise
            after = find_info(self._fs, path)
            # One of the same size that has been there before is not the one that was sent.
            if after is None or after == before or int(after["size"]) != size_bytes:
                raise
            return Receipt()


def find_info(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """Return what the storage says about ``path`` now, or None if it says that it does not exist.

    Three answers: it is there, it is not, and an exception where that cannot be told. fsspec's own
    ``exists`` answers False to any error, and from listings that are out of date.

    Raises:
        OSError: It cannot be told: no route, no permission, no such bucket.
    """
    fs.invalidate_cache(path)
    try:
        return dict(fs.info(path))
    except NotADirectoryError:
        return None
    except FileNotFoundError as error:
        if _is_bucket(fs, path):
            # A bucket that is not there is a mistake, and no folder that is still empty.
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket", path) from error
        if not _is_absence(error):
            raise
        if is_google(fs):
            raise_if_no_bucket(fs, path)
        return None


def list_files(fs: AbstractFileSystem, path: str) -> dict[str, int | None]:
    """Return the files below a directory: size in bytes, where the storage says it, by their names.

    fsspec's own ``find`` leaves out what it could not list, and says nothing.

    Raises:
        OSError: It cannot be told what is there.
    """
    root = path.rstrip("/")
    files: dict[str, int | None] = {}
    folders = [root]
    while folders:
        folder = folders.pop()
        fs.invalidate_cache(folder)
        for item in fs.ls(folder, detail=True):
            name = str(item["name"]).rstrip("/")
            # Object storage may list a directory's own mark in it.
            if name == folder:
                continue
            if item["type"] == "directory" and not item.get("islink"):
                folders.append(name)
            else:
                files[name[len(root) + 1 :]] = item.get("size")
    return files


def _is_absence(error: FileNotFoundError) -> bool:
    return _ABSENT_CODES.issuperset(_codes(error))


def _codes(error: BaseException) -> list[str]:
    link: BaseException | None = error
    codes: list[str] = []
    while link is not None and not codes:
        codes = list(inner_codes(link))
        link = link.__cause__
    return codes


def _is_bucket(fs: AbstractFileSystem, path: str) -> bool:
    return "s3" in protocols(fs) and "/" not in strip_protocol(fs, path)


def _size(path: str) -> int:
    return Path(path).stat().st_size
