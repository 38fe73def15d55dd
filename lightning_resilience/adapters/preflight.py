# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One checkpoint directory is tried with a small object: asked for, written, read, listed, removed.

The object lies in ``<directory>/.resilience/preflight/`` under a name of its own, so that several
jobs may try one directory at the same time, and an attempt that was abandoned is in nobody's way.
A directory is made where there are any; a bucket never is.

Where the job is killed in between, the object stays: some bytes under a name that nothing else
looks at. The next trial of the directory removes it once it is old, by the storage's own clock,
which is the only one that both know.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.object_store import protocols
from lightning_resilience.adapters.small_objects import check_size, put
from lightning_resilience.core.manifest import DIRECTORY
from lightning_resilience.core.preflight import Refusal, Step, Trial, is_leftover, is_refusal
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.storage import Place, Storage
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken


__all__ = ["DirectoryTrial"]

# More than that many of earlier jobs are left to the trials that follow.
_LEFTOVERS_MAX: Final = 16
# What looks like a folder there is gone with the last object under it.
_WITHOUT_DIRECTORIES: Final = frozenset({
    *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"),
})  # fmt: skip


class DirectoryTrial:
    """A trial of one directory, in one attempt of several. One thread at a time.

    Args:
        storage: Clients of storage.
        directory: URL or path; it need not exist.
        nonce: Makes names.
        classify: Makes an outcome of an exception.
        policy: How the trial is bounded.

    Attributes:
        cause: What the storage has raised where it has refused something; the first of the last
            attempt.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        nonce: Callable[[], str],
        classify: Callable[[BaseException], Outcome],
        policy: RetryPolicy,
    ) -> None:
        self.cause: Exception | None = None
        self._storage = storage
        self._folder = f"{directory.rstrip('/')}/{DIRECTORY}/preflight"
        self._nonce = nonce
        self._classify = classify
        self._policy = policy
        self._refused: list[Refusal] = []
        self._written: list[Place] = []

    def attempt(self, token: CancelToken) -> Trial:
        """Try all of it.

        Returns:
            What was refused.

        Raises:
            CheckpointError: What is there is not what was written.
            Exception: What the storage raised, where that is no refusal: repeating may help.
        """
        self.cause, self._refused = None, []
        nonce = self._nonce()
        place = self._storage.place(f"{self._folder}/{nonce}")
        data = nonce.encode()
        try:
            self._try(Step.ASK, lambda: place.store.size(place.path), token)
            self._try(Step.WRITE, lambda: self._write(place, nonce, token), token)
            if place in self._written:
                self._try(
                    Step.CONFIRM, lambda: check_size(place.store, place.path, len(data)), token
                )
                self._try(Step.READ, lambda: _read_back(place, data), token)
                self._try(Step.LIST, lambda: self._clear_leftovers(place), token)
                self._try(Step.REMOVE, self._remove_ours, token)
        finally:
            _remove_empty_folders(place)
        return Trial(refused=tuple(self._refused))

    def _try(self, step: Step, work: Callable[[], Any], token: CancelToken) -> None:
        token.raise_if_cancelled()
        try:
            work()
        except Exception as error:
            outcome = self._classify(error)
            if not is_refusal(outcome):
                raise
            self.cause = self.cause or error
            self._refused.append(Refusal(step=step.value, error=outcome.error))
        token.progress()

    def _write(self, place: Place, nonce: str, token: CancelToken) -> None:
        put(place.store, place.path, nonce.encode(), nonce=nonce, token=token)
        self._written.append(place)

    def _remove_ours(self) -> None:
        # Also what an attempt before has written, and has not come to remove.
        while self._written:
            place = self._written[-1]
            place.store.unlink(place.path)
            self._written.pop()

    def _clear_leftovers(self, place: Place) -> None:
        folder = place.path.rpartition("/")[0]
        place.fs.invalidate_cache(folder)
        mine = {_name(written.path) for written in self._written}
        listed = (str(path) for path in place.fs.ls(folder, detail=False))
        others = [path for path in listed if _name(path) not in mine]
        for path in others[:_LEFTOVERS_MAX]:
            # Another job may have removed its own by now, and what cannot be removed stays.
            with contextlib.suppress(OSError, NotImplementedError):
                self._clear(place, path)

    def _clear(self, place: Place, path: str) -> None:
        age = place.fs.modified(place.path) - place.fs.modified(path)
        if is_leftover(age.total_seconds(), policy=self._policy):
            place.store.unlink(path)


def _read_back(place: Place, data: bytes) -> None:
    place.fs.invalidate_cache(place.path)
    found = bytes(place.fs.cat_file(place.path))
    if found != data:
        message = (
            f"{len(data)} bytes were written to try the directory, and {len(found)} others are read"
        )
        raise CheckpointError(message)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _remove_empty_folders(place: Place) -> None:
    if not _WITHOUT_DIRECTORIES.isdisjoint(protocols(place.fs)):
        return
    folder = place.path.rpartition("/")[0]
    # Another job may be trying the same directory: then they stay. And so they do where this fails
    # for another reason: an empty folder is in nobody's way.
    with contextlib.suppress(Exception):
        place.fs.rmdir(folder)
        place.fs.rmdir(folder.rpartition("/")[0])
