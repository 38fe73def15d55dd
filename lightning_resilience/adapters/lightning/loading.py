# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint in Lightning's own format gets out of storage: once per node, and checked.

Lightning's stock ``TorchCheckpointIO`` opens an unguarded filesystem of its own on every rank, and
hands the open file to ``torch.load``, which compares no checksum. Here one rank of a node reads, by
our private filesystem, past every listing: it copies the checkpoint to the node's cache, or checks
it where it is on a local disk (``core.node_cache`` says which), against its manifest or else the
checksums that its archive has. Nobody has made a tensor of it by then.

What is on this node then is mapped where that is possible, or read a piece at a time: each mark
keeps a long load from being taken for a stall.

``torch.load`` reads from C++, and what an open file raises there comes out as something else, for
example as a ``ValueError`` about a closed file, or not at all: it was seen to read on after a read
that had failed, and to return. So a load during which a read has failed has failed.
"""

from __future__ import annotations

import errno
import io
import os
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

import torch

from lightning_resilience.adapters.archives import examine
from lightning_resilience.adapters.contents import DAMAGED, contents_digest
from lightning_resilience.adapters.lightning.work import Work
from lightning_resilience.adapters.manifests import check_contents, check_in_place
from lightning_resilience.adapters.marked_file import MarkedFile
from lightning_resilience.adapters.mounts import filesystem_kind
from lightning_resilience.adapters.node_cache import NodeFile, make_room
from lightning_resilience.adapters.object_store import find_info
from lightning_resilience.adapters.private_filesystem import plain_url
from lightning_resilience.adapters.staging import stage
from lightning_resilience.adapters.storage import is_local
from lightning_resilience.adapters.trees import PIECE_BYTES, digest_of_open
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.fetching import Fetch, checking, examining, fetching
from lightning_resilience.core.node_cache import cache_key, is_copied
from lightning_resilience.core.pipeline import carry_out
from lightning_resilience.core.shards import Form
from lightning_resilience.core.verification import State, of_undescribed
from lightning_resilience.errors import CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.adapters.lightning.mappings import Mappings
    from lightning_resilience.adapters.staging import Staged, StagedWriter
    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.ports import CancelToken


__all__ = ["TorchLoad", "on_cpu"]

_BUFFER_BYTES: Final = 2**20


def on_cpu(storage: Any, location: str) -> Any:
    """Leave a tensor where ``torch.load`` has read it to: Lightning's own ``map_location``."""
    del location
    return storage


class TorchLoad(Work):
    """A load by our own pipeline.

    Args:
        storage: Clients of storage.
        url: The checkpoint.
        nonce: Makes names for what is fetched.
        options: ``map_location`` and ``weights_only`` of ``torch.load``.
        expected: What rank 0 has seen of it; None where nobody has looked.
        common: A text that all ranks have in common for this load, and no other load has; empty for
            a load that this rank makes by itself, which shares nothing with the others of its node.
        mappings: Lets go of what is mapped, later; None where nobody would.
    """

    has_steps = True

    def __init__(
        self,
        storage: Storage,
        url: str,
        *,
        nonce: Callable[[], str],
        options: Mapping[str, Any],
        expected: Inspection | None = None,
        common: str = "",
        mappings: Mappings | None = None,
    ) -> None:
        super().__init__(storage, url)
        self._nonce = nonce
        self._expected = expected
        self._common = common
        self._mappings = mappings
        self._options = dict(options)
        self._is_web = plain_url(url).startswith("http")
        if self._is_web and self._options["weights_only"] is None:
            # As Lightning does: what comes from a web server is trusted unless somebody says no.
            self._options["weights_only"] = False
        self._path = ""
        self._checked = ""
        self._file: NodeFile | None = None

    @property
    def needs_storage(self) -> bool:
        """Whether this rank has to read, or to look whether another one has."""
        return not self._path

    def prepare(self, token: CancelToken) -> None:
        """Wait until another rank of the node has fetched it, or it is this one's turn.

        Raises:
            CorruptCheckpointError: Another one has found it damaged.
        """
        # What is a file has to be looked at first, and that is for the guard to repeat.
        if not is_local(self.url):
            file = self._copy_of()
            if file.settle(token, check=self._recheck):
                self._path = file.path

    def attempt(self, token: CancelToken) -> str:
        """Have it on this node, known to be what was saved; return where.

        Raises:
            FileNotFoundError: The storage says that it is not there.
            CorruptCheckpointError: It is not what its manifest says, or damaged by itself.
            OSError: What the filesystem or the storage raised.
        """
        token.raise_if_cancelled()
        place = self.storage.place(self.url)
        kind = filesystem_kind(place.path) if place.store.is_local else None
        if is_copied(kind):
            copy = self._copy_of()
            copy.obtain(partial(self._fetch, place), token, check=self._recheck)
            return copy.path
        found = self._find(place)
        self._checked = _identity(place.path)
        if not self._common or found["type"] == "directory":
            self._check(place, token)
            return place.path
        # What an earlier attempt has may be another file's by now.
        self.give_up()
        self._file = self._file_of(self._checked, expected=None)
        self._file.obtain(partial(self._mark_checked, place), token)
        return place.path

    def finish(self, value: Any, token: CancelToken) -> Any:
        """Load what is on this node."""
        token.raise_if_cancelled()
        path = str(value or self._path)
        if self._mappings is not None and self._mappings.may_map(path, self._options):
            return self._mappings.load(path, self._options)
        with Path(path).open("rb") as file:
            return _load(file, token, self._options)

    def confirm(self) -> None:
        """Look whether a file that was read where it is was replaced since it was checked.

        Raises:
            OSError: It was, or is gone.
        """
        if self._checked and _identity(self.storage.place(self.url).path) != self._checked:
            self._disagree("it was replaced after it had been checked, and before it was read")

    def give_up(self) -> None:
        """Let another rank of the node read."""
        if self._file is not None:
            self._file.release()

    def close(self) -> None:
        """Let go of what others wait for, and remove what nobody else will look for."""
        if self._file is not None:
            self._file.release()
            if not self._common:
                self._file.remove()

    # A copy on this node --------------------------------------------------------------------------

    def _copy_of(self) -> NodeFile:
        if self._file is None:
            self._file = self._file_of("", expected=self._expected)
        return self._file

    def _file_of(self, identity: str, *, expected: Inspection | None) -> NodeFile:
        # Order: without a text in common, nobody else may find it.
        load = self._common or self._nonce()
        seen = self._expected if self._common else None
        key = cache_key(f"{self.url}{identity}", expected=None if identity else seen, common=load)
        return NodeFile(
            self.storage.cache_directory,
            key,
            expected=expected,
            load=load,
            patience_s=self.storage.patience_s,
            nonce=self._nonce,
            shown=redacted(self.url),
        )

    def _fetch(self, place: Place, path: str, token: CancelToken) -> None:
        """Copy it to this node, and check the copy."""
        hands: dict[Fetch, Callable[[Any], object]] = {
            Fetch.FIND: lambda _: self._find(place).get("size"),
            Fetch.MANIFEST: lambda _: check_in_place(place, token, digests=False),
            Fetch.ROOM: lambda size: make_room(self.storage.cache_directory, incoming_bytes=size),
            Fetch.COPY: lambda _: _contents(stage(partial(_copy, place, token), path, token)),
            Fetch.CONTENTS: lambda of: check_contents(place, *of, token=token),
        }
        # A web server need not answer questions.
        steps = fetching(self._expected, may_ask=not self._is_web, shown=redacted(self.url))
        carry_out(steps, {**hands, **_Inside(path, token, self.url).hands()})

    def _recheck(self, path: str, token: CancelToken) -> None:
        """Look into what an earlier load has left on this node."""
        inside, shown = _Inside(path, token, self.url), redacted(self.url)
        steps = examining(self._expected, inside.size_bytes(), is_described=False, shown=shown)
        carry_out(steps, inside.hands())

    # A file on a local disk -----------------------------------------------------------------------

    def _find(self, place: Place) -> Mapping[str, Any]:
        found: Mapping[str, Any] | None = find_info(place.fs, place.path)
        if found is None and self._expected is not None:
            self._disagree("it is not there on this rank")
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", redacted(self.url))
        return found

    def _mark_checked(self, place: Place, path: str, token: CancelToken) -> None:
        make_room(self.storage.cache_directory, incoming_bytes=0)
        self._check(place, token)
        Path(path).touch(exist_ok=False)

    def _check(self, place: Place, token: CancelToken) -> None:
        """Read it through where it is."""
        steps = checking(self._expected, shown=redacted(self.url))
        inside = _Inside(place.path, token, self.url)
        hands: dict[Fetch, Callable[[Any], object]] = {
            Fetch.MANIFEST: lambda _: check_in_place(place, token, digests=True),
            Fetch.READ: lambda _: inside.size_bytes(),
        }
        carry_out(steps, {**hands, **inside.hands()})

    def _disagree(self, how: str) -> NoReturn:
        # As a handle that went stale: a network filesystem may show this rank an older state, and
        # a later attempt may see what rank 0 sees.
        message = f"this is not the checkpoint that rank 0 has chosen: {how}"
        raise OSError(errno.ESTALE, message, redacted(self.url))


class _Inside:
    """What looks into a file on this node."""

    def __init__(self, path: str, token: CancelToken, url: str) -> None:
        self._path = Path(path)
        self._token = token
        self._url = url

    def hands(self) -> dict[Fetch, Callable[[Any], object]]:
        """Return what carries out the steps that do so."""
        return {
            Fetch.DIGEST: lambda _: self._digest(),
            Fetch.SUM: lambda _: self._sum(),
            Fetch.EXAMINE: lambda _: self._examine(),
        }

    def size_bytes(self) -> int:
        """Return its length."""
        return self._path.stat().st_size

    def _open(self) -> IO[bytes]:
        try:
            return self._path.open("rb")
        except FileNotFoundError as error:
            # Of the copy, not of the checkpoint: what is not there is final, and this is not.
            message = "another reader has taken over, and removed what this one had copied"
            raise OSError(errno.ESTALE, message, redacted(self._url)) from error

    def _digest(self) -> tuple[str, str]:
        with self._open() as file:
            marked = MarkedFile(file, self._token)
            try:
                return contents_digest(io.BufferedReader(marked)), ""
            except DAMAGED as error:
                if marked.error is not None:
                    raise marked.error from error
                return "", f"it is damaged on this rank: {error}"

    def _sum(self) -> str:
        with self._open() as file:
            return digest_of_open(file, self._token)[1]

    def _examine(self) -> None:
        with self._open() as file:
            seen = examine(file, self._token)
        state, reason = of_undescribed(Form.FILE, {"": seen})
        if state is State.CORRUPT:
            message = (
                f"{redacted(self._url)} cannot be loaded: {reason}. Name another checkpoint as "
                "ckpt_path, or move this one out of its directory and start again."
            )
            raise CorruptCheckpointError(message)


def _identity(path: str) -> str:
    """Return what a local file does not keep when it is written or replaced."""
    found = os.stat(path)  # noqa: PTH116 - the numbers of the kernel are what is meant
    numbers = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return "".join(f"\0{number}" for number in numbers)


def _copy(place: Place, token: CancelToken, file: StagedWriter) -> None:
    with place.fs.open(place.path, "rb") as remote:
        # Each write asks the token as well, but that is a request too late.
        while piece := remote.read(PIECE_BYTES):
            token.progress(read=len(piece))
            file.write(piece)
            token.raise_if_cancelled()


def _contents(copied: Staged) -> dict[str, tuple[int, str | None]]:
    return {"": (copied.size_bytes, copied.digest)}


def _load(file: Any, token: CancelToken, options: Mapping[str, Any]) -> Any:
    marked = MarkedFile(file, token)
    failure: BaseException | None = None
    loaded: Any = None
    try:
        loaded = torch.load(io.BufferedReader(marked, _BUFFER_BYTES), **options)
    except Exception as error:  # noqa: BLE001 - raised again, or what led to it
        failure = error
    failure = marked.error or failure
    if failure is not None:
        raise failure
    return loaded
