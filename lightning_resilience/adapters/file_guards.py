# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The guard behind a filesystem that is used alone, without a Trainer.

A :class:`FileGuard` holds options only. What it works with belongs to the *process*, and is made
when it is first needed there (``adapters.standalone``), so that a guard may be pickled, and a
forked child begins with connections of its own.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fsspec.core import has_magic

from lightning_resilience.adapters.guard_options import check_travels
from lightning_resilience.adapters.guarded_call import working_for
from lightning_resilience.adapters.guarded_open import object_store
from lightning_resilience.adapters.object_store import find_info, protocols, strip_protocol
from lightning_resilience.adapters.private_filesystem import plain_url, renew_client
from lightning_resilience.adapters.standalone import STORE_PATIENCE_S, standalone
from lightning_resilience.adapters.storage import (
    Place,
    dependency_of,
    parent_of,
    probe_by_writing,
    probe_path,
)
from lightning_resilience.core.outcome import operation_class, with_user_classifier
from lightning_resilience.core.waiting import VOICE_S
from lightning_resilience.protocols.guard import GuardedCall
from lightning_resilience.protocols.probe import Patience


if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

    from lightning_resilience.adapters.guard_options import GuardOptions
    from lightning_resilience.ports import CancelToken


__all__ = ["FileGuard"]

T = TypeVar("T")

# A store operation is a round trip of less than a millisecond; longer than this it is lost.
_STORE_TIMEOUT_S: Final = 5.0
# Ranks that share a store are one run, unless somebody has named it.
_RUN_ID: Final = "files"


class FileGuard:
    """Runs the operations of filesystems; a ``Runner``. Any thread.

    Args:
        options: How to retry, break and classify.
    """

    travels = True

    def __init__(self, options: GuardOptions) -> None:
        self.options = options
        self._classify = partial(with_user_classifier(options.classify), reading=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the options along; the guard works with what the other process has."""
        check_travels(self.options, what="a filesystem")
        return FileGuard, (self.options,)

    def __call__(  # noqa: PLR0917 - a Runner
        self, fs: AbstractFileSystem, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        """Run one operation: see ``run``."""
        return self.run(fs, operation, path, work)

    def run(  # noqa: PLR0917 - a Runner
        self, fs: AbstractFileSystem, operation: str, path: str, work: Callable[[CancelToken], T], /
    ) -> T:
        """Run one operation under the breaker of its storage and the retry policy.

        Args:
            fs: The filesystem, guarded by this.
            operation: Its name, as fsspec has it.
            path: What it is about.
            work: One attempt.

        Returns:
            What ``work`` returned.

        Raises:
            RetriesExhaustedError: A series of attempts was given up; its cause is the last failure.
            CircuitOpenError: The circuit is open, and ``when_open`` is ``raise`` or the deadline
                has passed.
            StoreUnavailableError: The shared store did not answer, under ``strict``.
            BaseException: The filesystem's own, where repeating is no option: a missing file, a
                denial, a full disk.
        """
        url = plain_url(path)
        if "file" not in protocols(fs):
            url = str(fs.unstrip_protocol(url))
        kind = operation_class(operation)
        options = self.options
        place = standalone(options.store, run_id=options.run_id)
        call = GuardedCall(
            work=work,
            operation=operation,
            target=url,
            policy=options.retry,
            patience=self._patience(fs, url, kind),
            may_go_alone=not options.strict,
            store_patience_s=STORE_PATIENCE_S,
            rebuild=lambda: _renew(fs),
            drop_caches=fs.invalidate_cache,
        )
        value: T = place.run(place.circuit(f"{dependency_of(url)}:{kind}", options), call)
        return value

    def _patience(self, fs: AbstractFileSystem, url: str, kind: str) -> Patience:
        return Patience(
            probe=partial(_ask if kind == "read" else _write, fs, url),
            # Here a missing file is an answer to a write as well: only a save makes its folder
            # anew with each attempt.
            classify=self._classify,
            when_open=self.options.when_open,
            voice_s=VOICE_S,
        )


def _renew(fs: AbstractFileSystem) -> None:
    renew_client(fs)


def _ask(fs: AbstractFileSystem, url: str, token: CancelToken) -> None:
    with working_for(token):
        find_info(fs, url)


def _write(fs: AbstractFileSystem, url: str, token: CancelToken) -> None:
    nonce = uuid.uuid4().hex
    # A pattern is no place; what is before it is.
    known = url if not has_magic(url) else url[: url.index(next(filter(has_magic, url)))]
    path = strip_protocol(fs, probe_path(parent_of(known), nonce))
    with working_for(token):
        probe_by_writing(Place(store=object_store(fs), fs=fs, path=path), nonce, token)
