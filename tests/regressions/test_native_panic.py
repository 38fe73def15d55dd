# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C66: a native client panicked, with an exception that is no ``Exception``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.staging import StagedWriter, stage
from lightning_resilience.core.outcome import FailureClass, classify
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from pathlib import Path


class PanicException(BaseException):
    """What a Rust extension raises when it panics."""


class Panicking(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """A filesystem with a native client that panics."""

    def cat_file(self, *_: object, **__: object) -> bytes:
        """Panic."""
        raise PanicException("called `Option::unwrap()` on a `None` value")


def test_a_panic_is_permanent_and_passes_the_filesystem_unchanged() -> None:
    """It is neither repeated nor swallowed, and it does not look like a request to stop."""
    fs = guarded(Panicking, run=None)

    with pytest.raises(PanicException) as caught:
        fs.cat_file("/x")

    outcome = classify(caught.value)
    assert outcome.failure is FailureClass.PERMANENT
    assert outcome.error.startswith("PanicException: called `Option::unwrap()`")


def test_a_panic_while_staging_leaves_no_file(tmp_path: Path) -> None:
    """Clean-up does not depend on the exception's base."""

    def write(file: StagedWriter) -> None:
        file.write(b"x")
        raise PanicException

    with pytest.raises(PanicException):
        stage(write, str(tmp_path / "staged"), RecordingToken())

    assert list(tmp_path.iterdir()) == []
