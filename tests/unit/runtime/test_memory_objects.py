# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store in memory publishes at once, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_resilience.errors import CallTimeoutError
from lightning_resilience.ports import CancelToken
from lightning_resilience.runtime.memory import MemoryObjectStore


class Token(CancelToken):
    """A caller who has, or has not, given up."""

    def __init__(self, *, cancelled: bool = False) -> None:
        self._cancelled = cancelled

    @property
    def cancelled(self) -> bool:
        """As made."""
        return self._cancelled

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Nobody times this."""

    def raise_if_cancelled(self) -> None:
        """Raise as the port says."""
        if self._cancelled:
            text = "abandoned"
            raise CallTimeoutError(text)


def test_what_is_staged_appears_when_it_is_published() -> None:
    """Before it is absent, after it is whole, and the staged file is gone."""
    objects = MemoryObjectStore()
    staged = objects.staging_path("s3://bucket/run/last.ckpt", "nonce")
    Path(staged).write_bytes(b"12345")
    before = objects.size("s3://bucket/run/last.ckpt")

    objects.publish(staged, "s3://bucket/run/last.ckpt", Token())

    assert before is None
    assert objects.size("s3://bucket/run/last.ckpt") == 5
    assert objects.read("s3://bucket/run/last.ckpt") == b"12345"
    assert not Path(staged).exists()


def test_two_nonces_stage_beside_each_other() -> None:
    """Two attempts at one object never write into one file."""
    objects = MemoryObjectStore()

    assert objects.staging_path("a/b", "1") != objects.staging_path("a/b", "2")


def test_an_abandoned_call_publishes_nothing() -> None:
    """What was there before is there still."""
    objects = MemoryObjectStore()
    staged = objects.staging_path("k", "nonce")
    Path(staged).write_bytes(b"1")

    with pytest.raises(CallTimeoutError):
        objects.publish(staged, "k", Token(cancelled=True))

    assert objects.size("k") is None


def test_removing_is_idempotent() -> None:
    """Absent is success; reading what is absent says what there is."""
    objects = MemoryObjectStore()
    staged = objects.staging_path("k", "nonce")
    Path(staged).write_bytes(b"")
    objects.publish(staged, "k", Token())
    assert objects.size("k") == 0

    objects.remove("k")
    objects.remove("k")

    assert objects.size("k") is None
    with pytest.raises(FileNotFoundError, match="'k'"):
        objects.read("k")
