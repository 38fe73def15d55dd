# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Retries around retries multiply: here the requests are counted where they arrive."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import s3fs
from fsspec import get_filesystem_class
from fsspec.core import url_to_fs

from lightning_resilience import CircuitOpenError
from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem, private_instance
from lightning_resilience.core.outcome import FailureClass, classify
from tests.chained import fast, register
from tests.s3_server import failing_server
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsspec import AbstractFileSystem


EXPECTED = {
    "503": FailureClass.THROTTLE,
    "500": FailureClass.TRANSIENT,
    "reset": FailureClass.TRANSIENT,
    "403": FailureClass.PERMANENT,
    "expired": FailureClass.AUTH,
}

OPERATIONS: dict[str, Callable[[AbstractFileSystem], Any]] = {
    "pipe_file": lambda fs: fs.pipe_file("bucket/key", b"x"),
    "cat_file": lambda fs: fs.cat_file("bucket/key"),
    "info": lambda fs: fs.info("bucket/key"),
    "exists": lambda fs: fs.exists("bucket/key"),
    "ls": lambda fs: fs.ls("bucket/prefix"),
    "rm_file": lambda fs: fs.rm_file("bucket/key"),
}


def guarded_s3(options: dict[str, Any]) -> AbstractFileSystem:
    """A guarded filesystem without a guard: each call is one attempt."""
    return guarded(s3fs.S3FileSystem, (), options, run=None)


@pytest.mark.parametrize("mode", ["503", "500", "reset", "403"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_failed_call_is_one_request(mode: str, operation: str) -> None:
    """Neither botocore nor s3fs repeats anything below the guard."""
    with failing_server(mode) as failing:
        fs = guarded_s3(failing.storage_options)

        with pytest.raises(Exception) as caught:  # noqa: PT011 - one type for each mode
            OPERATIONS[operation](fs)

    assert len(failing.requests) == 1, failing.requests
    assert classify(caught.value, reading=True).failure is EXPECTED[mode]


@pytest.mark.parametrize("mode", EXPECTED)
def test_one_failed_publication_is_one_request(mode: str, tmp_path: Path) -> None:
    """A staged file is sent once per attempt, and Retry-After reaches the guard."""
    staged = tmp_path / "staged"
    staged.write_bytes(b"x" * 3_000_000)
    with failing_server(mode) as failing:
        fs, path = private_filesystem("s3://bucket/key", failing.storage_options)
        store = FsspecObjectStore(fs, spool_directory=str(tmp_path))

        with pytest.raises(Exception) as caught:  # noqa: PT011 - one type for each mode
            store.publish(str(staged), path, RecordingToken())

    outcome = classify(caught.value)
    assert failing.requests == ["PUT /bucket/key"]
    assert outcome.failure is EXPECTED[mode]
    assert outcome.retry_after_s == (7.0 if mode == "503" else None)
    assert staged.exists()


def test_the_counting_server_sees_what_plain_s3fs_does() -> None:
    """The counts above mean something: told to send twice, it is seen to send twice."""
    twice = {"retries": {"total_max_attempts": 2}}
    with failing_server("500") as failing:
        options = {**failing.storage_options, "config_kwargs": twice}
        fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)

        with pytest.raises(OSError, match="no"):
            fs.pipe_file("bucket/key", b"x")

    assert failing.requests == 2 * ["PUT /bucket/key"]


def test_an_expired_token_shows_in_a_head_by_its_status() -> None:
    """A HEAD has no body to say more than 400; botocore then asks for the bucket's region once."""
    with failing_server("expired") as failing:
        fs = guarded_s3(failing.storage_options)

        with pytest.raises(OSError, match="Bad Request") as caught:
            fs.info("bucket/key")

    assert failing.requests == ["HEAD /bucket/key", "HEAD /bucket"]
    assert classify(caught.value, reading=True).failure is FailureClass.AUTH


def test_a_users_config_kwargs_are_kept() -> None:
    """Only the number of attempts is ours; nothing that the user handed over is changed."""
    users = {"retries": {"mode": "standard", "max_attempts": 9}, "connect_timeout": 3}
    options = {"config_kwargs": users, "key": "k", "secret": "s", "default_block_size": 2**20}

    fs = private_instance(s3fs.S3FileSystem, (), options)

    assert fs.config_kwargs["connect_timeout"] == 3
    assert fs.config_kwargs["retries"]["mode"] == "standard"
    assert fs.config_kwargs["retries"]["total_max_attempts"] == 1
    assert fs.default_block_size == 2**20
    assert users == {"retries": {"mode": "standard", "max_attempts": 9}, "connect_timeout": 3}


def test_a_private_instance_is_nobody_elses() -> None:
    """What we set is not found on the instance that fsspec hands to others."""
    options = {"key": "k", "secret": "s"}
    fs, _ = private_filesystem("s3://bucket/key", options)

    others = s3fs.S3FileSystem(**options)

    assert others is not fs
    assert others.retries > 1
    assert fs.retries == 1


@pytest.mark.parametrize("name", ["core.GCSFileSystem", "GCSFileSystem"])
def test_gcsfs_repeats_nothing(name: str) -> None:
    """Its decorator is taken off the private instance, whichever class is the default."""
    gcsfs = pytest.importorskip("gcsfs")
    kind = operator.attrgetter(name)(gcsfs)
    with failing_server("503") as failing:
        options = {"token": "anon", "endpoint_url": failing.url}
        fs = private_instance(kind, (), options)
        know_the_bucket(fs)

        with pytest.raises(Exception) as caught:  # noqa: PT011 - gcsfs's own HttpError
            fs.pipe_file("bucket/key", b"x")

    assert len(failing.requests) == 1
    assert classify(caught.value).failure is FailureClass.THROTTLE


def know_the_bucket(fs: AbstractFileSystem) -> None:
    """Spare gcsfs's default class the question, for which it keeps a thread of gRPC."""
    if hasattr(fs, "_storage_layout_cache"):
        extended = pytest.importorskip("gcsfs.extended_gcsfs")
        fs._storage_layout_cache["bucket"] = extended.BucketType.NON_HIERARCHICAL


def test_gcsfs_asks_once_for_the_kind_of_bucket() -> None:
    """Its default class asks by another protocol, and would repeat that for a minute."""
    extended = pytest.importorskip("gcsfs.extended_gcsfs")
    unavailable = pytest.importorskip("google.api_core.exceptions").ServiceUnavailable
    asked: list[str] = []

    class Client:
        async def get_storage_layout(self, *, name: str, retry: Any, timeout: float) -> Any:
            async def ask() -> Any:
                asked.append(f"{name}, {timeout:g} s")
                message = "away"
                raise unavailable(message)

            return await retry(ask)()

    fs = private_instance(extended.ExtendedGcsFileSystem, (), {"token": "anon"})
    fs._storage_control_client = Client()

    kind = fs._sync_lookup_bucket_type("bucket")

    assert kind is extended.BucketType.UNKNOWN
    assert len(asked) == 1


@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_a_prefixed_url_sends_one_request_for_each_attempt(protocol: str, spool: Path) -> None:
    """Three attempts open the circuit, and three requests have reached the storage."""
    del spool
    register()
    with failing_server("503") as failing:
        options = {
            "gs": {"token": "anon", "endpoint_url": failing.url},
            "s3": failing.storage_options,
            "resilient": fast(when_open="raise", retry={"retry_after_max_s": 0}),
        }
        url = f"resilient::{protocol}://bucket/key"
        fs, path = url_to_fs(url, **{protocol: options[protocol]}, resilient=options["resilient"])
        know_the_bucket(fs)

        with pytest.raises(CircuitOpenError):
            fs.pipe_file(path, b"x")

    assert isinstance(fs, get_filesystem_class(protocol))
    assert len(failing.requests) == 3, failing.requests
