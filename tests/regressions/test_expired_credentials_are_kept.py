# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C14: the token expired in a long run; fresh credentials were there, and nobody read them."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from lightning_resilience.adapters.lightning.breakers import Policy
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.private_filesystem import (
    private_filesystem,
    private_instance,
    renew_client,
)
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.outcome import classify
from lightning_resilience.errors import RetriesExhaustedError
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice
from tests.http_server import Answer, Request, Serving, s3_error, serving
from tests.real_guard import FAST, Rank, Sink
from tests.s3_server import S3Server
from tests.scenes import member


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightning_resilience.ports import CancelToken


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


def knows(*keys: str, refusal: str = "ExpiredToken") -> Callable[[Request], Answer]:
    """A server that takes requests signed with one of ``keys`` and refuses all others."""

    def answer(request: Request) -> Answer:
        signed = request.headers.get("Authorization", "")
        if any(f"Credential={key}/" in signed for key in keys):
            # An answer to a PUT with a body that is no XML is an error to botocore.
            body = b"weights" if request.method in {"GET", "HEAD"} else b""
            return Answer(headers={"ETag": '"1"'}, body=body)
        return s3_error(400 if refusal == "ExpiredToken" else 403, refusal)

    return answer


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Storage], None]:
    """Make a storage's client with an old key; after that the environment has a fresh one."""
    pytest.importorskip("s3fs")

    def rotate(url: str, storage: Storage) -> None:
        for name, value in S3Server(url=url).environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
        storage.place("s3://bucket/a.ckpt").fs.connect()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fresh")

    return rotate


def keys_seen(server: Serving) -> Iterator[str]:
    """The keys that requests were signed with, in the order in which they came into use."""
    signatures = (request.headers["Authorization"] for request in server.requests)
    keys = (text.partition("Credential=")[2].partition("/")[0] for text in signatures)
    yield from (key for key, _ in groupby(keys))


def publish(storage: Storage, staged: Path) -> Any:
    """Send an object under a guard that rebuilds the client as a save does."""

    def work(token: CancelToken) -> None:
        place = storage.place("s3://bucket/a.ckpt")
        place.store.publish(str(staged), place.path, token)

    rebuild = partial(storage.rebuild, "s3://bucket/a.ckpt")
    return Rank().call(work, rebuild=rebuild)


@pytest.mark.parametrize(
    ("known", "refusal", "keys"),
    [
        ("fresh", "ExpiredToken", ["old", "fresh"]),
        ("nobody", "ExpiredToken", ["old", "fresh"]),
        ("nobody", "AccessDenied", ["old"]),
    ],
    ids=["renewed", "refused again", "denied"],
)
def test_a_save_is_repeated_once_with_the_fresh_credentials(
    known: str,
    refusal: str,
    keys: list[str],
    rotated: Callable[[str, Storage], None],
    tmp_path: Path,
) -> None:
    """A fresh client is tried once; one that is denied as a person is not tried again at all."""
    (tmp_path / "staged").write_bytes(b"weights")
    storage = Storage({}, spool=lambda: str(tmp_path))
    with serving(knows(known, refusal=refusal)) as server:
        rotated(server.url, storage)
        if known == "fresh":
            publish(storage, tmp_path / "staged")
        else:
            with pytest.raises(RetriesExhaustedError, match=refusal):
                publish(storage, tmp_path / "staged")

    assert list(keys_seen(server)) == keys


def test_a_guarded_filesystem_renews_its_own_client(
    rotated: Callable[[str, Storage], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a client besides the storage's, and that is the one that was refused."""
    storage = Storage({}, spool=lambda: str(tmp_path))
    session = Session(
        member=member(0, world_size=1),
        policy=Policy(retry=FAST, breaker=BreakerConfig(), classify=classify),
        driver=Driver(store=MemoryStore(), clock=SystemClock(), dice=SystemDice(), sink=Sink()),
        storage=storage,
    )
    with serving(knows("fresh")) as server:
        rotated(server.url, storage)
        fs = session.alone.guarded_filesystem("s3://bucket")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")
        fs.connect()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fresh")

        data = fs.cat_file("bucket/a.ckpt")

    assert data == b"weights"
    assert list(keys_seen(server)) == ["old", "fresh"]


def test_a_filesystem_without_credentials_says_so() -> None:
    """Then another attempt would only repeat the failure."""
    assert renew_client(fsspec.filesystem("memory", skip_instance_cache=True)) is False
