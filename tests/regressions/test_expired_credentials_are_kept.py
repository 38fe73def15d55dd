# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C14: the token expired in a long run; fresh credentials were there, and nobody read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import pytest

from lightning_resilience.adapters.private_filesystem import (
    private_filesystem,
    private_instance,
    renew_client,
)


if TYPE_CHECKING:
    from tests.s3_server import S3Server


def test_a_renewed_client_reads_the_environment_again(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``renew_client`` requests are signed with the credentials that are there now."""
    pytest.importorskip("s3fs")
    for name, value in {**s3_server.environment, "AWS_ACCESS_KEY_ID": "old"}.items():
        monkeypatch.setenv(name, value)
    fs, path = private_filesystem(f"s3://{bucket}/x")
    fs.pipe_file(path, b"x")
    assert "Credential=old/" in fs.sign(path).replace("%2F", "/") or "=old&" in fs.sign(path)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fresh")
    kept = fs.sign(path)
    renewed = renew_client(fs)

    assert "fresh" not in kept
    assert renewed
    assert "fresh" in fs.sign(path)
    assert fs.cat_file(path) == b"x"


def test_a_google_client_reads_its_token_again() -> None:
    """The way to the token is the user's; what is found there may have changed."""
    core = pytest.importorskip("gcsfs.core")
    fs = private_instance(core.GCSFileSystem, (), {"token": "anon"})
    fs.credentials.credentials = "stale"

    renewed = renew_client(fs)

    assert renewed
    assert fs.credentials.credentials != "stale"


def test_a_filesystem_without_credentials_says_so() -> None:
    """Then another attempt would only repeat the failure."""
    assert renew_client(fsspec.filesystem("memory", skip_instance_cache=True)) is False
