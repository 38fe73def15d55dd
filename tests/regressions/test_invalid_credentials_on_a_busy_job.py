# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C15: Google's storage said 401 to a job that ran for an hour, and the job died.

``fsspec/gcsfs#627``, ``#32``: the token is old or is being refreshed; a client made anew has
a good one. A 403 is another matter, and gcsfs's error for it has no errno.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.private_filesystem import private_instance, renew_client
from lightning_resilience.core.events import RetryScheduled
from lightning_resilience.errors import RetriesExhaustedError
from tests.http_server import Answer, Request, Serving, serving
from tests.real_guard import Rank


if TYPE_CHECKING:
    from collections.abc import Callable


core = pytest.importorskip("gcsfs.core")


def refusing(status: int, *, times: int) -> Callable[[Request], Answer]:
    """A server that refuses so many requests and takes those that follow."""
    words = {401: "Invalid Credentials", 403: "the caller has no storage.objects.create access"}
    left = [status] * times

    def answer(_request: Request) -> Answer:
        if not left:
            return Answer(body=b"{}")
        code = left.pop()
        body = json.dumps({"error": {"code": code, "message": words[code]}}).encode()
        return Answer(status=code, body=body)

    return answer


def save(server: Serving, mine: Rank) -> tuple[Any, list[int]]:
    """Write an object by real gcsfs under a guard; return how it ended, and the rebuilds."""
    fs = private_instance(core.GCSFileSystem, (), {"token": "anon", "endpoint_url": server.url})
    rebuilt: list[int] = []

    def rebuild() -> None:
        rebuilt.append(1)
        renew_client(fs)

    try:
        done = mine.call(lambda _token: fs.pipe_file("bucket/a.ckpt", b"weights"), rebuild=rebuild)
    except RetriesExhaustedError as error:
        return error, rebuilt
    return done, rebuilt


def test_invalid_credentials_once_are_survived() -> None:
    """The client is rebuilt, at once, and the second attempt succeeds."""
    mine = Rank()
    with serving(refusing(401, times=1)) as server:
        done, rebuilt = save(server, mine)

    assert (done.attempts, rebuilt, len(server.requests)) == (2, [1], 2)
    assert mine.sink.emitted(RetryScheduled) == []


def test_invalid_credentials_twice_are_permanent() -> None:
    """A rebuilt client that is refused as well ends it, though a third attempt would succeed."""
    with serving(refusing(401, times=2)) as server:
        error, rebuilt = save(server, Rank())

    assert isinstance(error, RetriesExhaustedError)
    assert (error.failure, error.attempts) == ("auth", 2)
    assert (rebuilt, len(server.requests)) == ([1], 2)
    assert "Invalid Credentials" in str(error)


def test_forbidden_is_no_matter_of_fresh_credentials() -> None:
    """A 403 is permanent: one request, no rebuild, and the refusal in words."""
    with serving(refusing(403, times=1)) as server:
        error, rebuilt = save(server, Rank())

    assert type(error.__cause__) is OSError
    assert error.__cause__.errno is None
    assert (error.failure, error.attempts) == ("permanent", 1)
    assert (rebuilt, len(server.requests)) == ([], 1)
    assert "storage.objects.create" in str(error)
