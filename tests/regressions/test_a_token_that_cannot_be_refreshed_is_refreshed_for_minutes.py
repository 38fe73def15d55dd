# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C16: a raw token has nothing to be refreshed with, and was refreshed for over a minute.

``fsspec/gcsfs#674``: an exponential series around a refresh that cannot work only delays the news.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.private_filesystem import private_instance, renew_client
from lightning_resilience.core.events import AttemptFailed, CallAbandoned, RetryScheduled
from lightning_resilience.errors import RetriesExhaustedError
from tests.http_server import Answer, serving
from tests.real_guard import FAST, Rank


if TYPE_CHECKING:
    from collections.abc import Callable


core = pytest.importorskip("gcsfs.core")
credentials = pytest.importorskip("google.oauth2.credentials")
exceptions = pytest.importorskip("google.auth.exceptions")

REFUSED = json.dumps({"error": {"code": 401, "message": "Invalid Credentials"}}).encode()


class ExpiredTokenError(PermissionError):
    """What s3fs makes of an expired token, the code included."""

    response = {"Error": {"Code": "ExpiredToken"}}  # noqa: RUF012 - as botocore has it


def refused(mine: Rank, rebuild: Callable[[], Any]) -> tuple[RetriesExhaustedError, int]:
    """Make a call that is refused for ever; return its end and the number of its attempts."""
    attempts: list[int] = []

    def work(_token: Any) -> None:
        attempts.append(1)
        message = "the token has expired"
        raise ExpiredTokenError(message)

    with pytest.raises(RetriesExhaustedError) as caught:
        mine.call(work, rebuild=rebuild)

    return caught.value, len(attempts)


def test_a_raw_token_of_google_is_given_up_at_once() -> None:
    """One request, no wait: google-auth itself says that there is nothing to refresh it with."""
    mine = Rank()
    with serving(lambda _request: Answer(status=401, body=REFUSED)) as server:
        token = credentials.Credentials("raw")
        fs = private_instance(core.GCSFileSystem, (), {"token": token, "endpoint_url": server.url})

        with pytest.raises(RetriesExhaustedError) as caught:
            mine.call(
                lambda _token: fs.pipe_file("bucket/a.ckpt", b"x"),
                rebuild=lambda: renew_client(fs),
            )

    error = caught.value
    assert len(server.requests) == 1
    assert (error.failure, error.attempts) == ("permanent", 1)
    assert "RefreshError" in str(error)
    assert "Invalid Credentials" in str(error.__cause__)
    assert mine.sink.emitted(RetryScheduled) == []


@pytest.mark.parametrize(
    ("problem", "named", "failure"),
    [
        (exceptions.RefreshError("invalid_grant: no account"), "RefreshError: inv", "permanent"),
        # gcsfs's own word on a raw token that has expired.
        (ValueError("Provided token is either not valid, or expired."), "ValueError: Pro", "auth"),
    ],
    ids=["refused", "unknown"],
)
def test_a_refresh_that_fails_for_good_ends_the_call(
    problem: Exception, named: str, failure: str
) -> None:
    """The rebuild is tried once; the refusal stays the cause, and the rebuild's error is named."""
    mine = Rank()

    def rebuild() -> None:
        raise problem

    error, attempts = refused(mine, rebuild)

    told = [event.operation for event in mine.sink.emitted(AttemptFailed)]
    assert attempts == 1
    assert told == ["save", "rebuild of the client for save"]
    assert isinstance(error.__cause__, ExpiredTokenError)
    assert error.failure == failure
    assert named in str(error)
    assert named in error.last_error
    assert mine.sink.emitted(RetryScheduled) == []


def test_a_refresh_that_google_would_repeat_is_repeated() -> None:
    """An issuer of tokens that is ill for a moment ends nothing."""
    left = [exceptions.RefreshError("backend error", retryable=True)]
    served: list[int] = []

    def rebuild() -> None:
        if left:
            raise left.pop()

    def work(_token: Any) -> str:
        served.append(1)
        if len(served) == 1:
            raise ExpiredTokenError
        return "saved"

    done = Rank().call(work, rebuild=rebuild)

    assert (done.value, done.attempts) == ("saved", 2)


def test_a_refresh_that_hangs_is_abandoned() -> None:
    """It has the time of any silence, and the error says that it was the rebuild."""
    mine = Rank(policy=replace(FAST, stall_timeout_s=0.3, max_attempts=2))
    release = threading.Event()

    error, attempts = refused(mine, lambda: release.wait(60.0))
    release.set()

    (abandoned,) = mine.sink.emitted(CallAbandoned)
    assert attempts == 1
    assert abandoned.operation == "rebuild of the client for save"
    assert isinstance(error.__cause__, ExpiredTokenError)
    assert "CallTimeoutError" in str(error)
