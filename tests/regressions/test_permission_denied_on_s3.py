# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C02: storage denies the write of a checkpoint; repeating it cannot help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.core.outcome import FailureClass, classify
from tests.s3_server import failing_server


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


s3fs = pytest.importorskip("s3fs")


def direct(_fs: Any, _operation: str, _path: str, work: Callable[[Any], Any], /) -> Any:
    """One attempt."""

    class Token:
        cancelled = False

        def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
            """Nobody listens."""

        def raise_if_cancelled(self) -> None:
            """Never."""

    return work(Token())


def test_permission_denied_is_one_request_and_permanent(tmp_path: Path) -> None:
    """The denial reaches the guard as what it is, after one request and no wait."""
    with failing_server("403") as failing:
        fs = guarded(
            s3fs.S3FileSystem, (), failing.storage_options, run=direct, spool=str(tmp_path)
        )
        file = fs.open("bucket/epoch=1.ckpt", "wb")
        file.write(b"weights")

        with pytest.raises(PermissionError) as caught:
            file.close()

    outcome = classify(caught.value)
    assert failing.requests == ["PUT /bucket/epoch%3D1.ckpt"]
    assert outcome.failure is FailureClass.PERMANENT
    assert outcome.code == "AccessDenied"
    assert "AccessDenied" in outcome.error
    assert not outcome.counts


def test_an_expired_token_is_not_a_denial(tmp_path: Path) -> None:
    """Both arrive as PermissionError; only the code inside tells them apart (C14)."""
    with failing_server("expired") as failing:
        fs = guarded(
            s3fs.S3FileSystem, (), failing.storage_options, run=direct, spool=str(tmp_path)
        )

        with pytest.raises(PermissionError) as caught:
            fs.pipe_file("bucket/epoch=1.ckpt", b"weights")

    assert classify(caught.value).failure is FailureClass.AUTH
