# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What every known failure is: the tables here are the specification of ``core.outcome``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import http
import http.client
import pickle
import socket
import ssl
from typing import Any

import botocore.exceptions as boto
import fsspec.exceptions
import pytest
import s3fs.errors
import s3fs.utils

from lightning_resilience import errors
from lightning_resilience.core.outcome import (
    COUNTS_FOR_BREAKER,
    OK,
    SEVERITY,
    FailureClass,
    Outcome,
    classify,
    most_severe,
    operation_class,
    with_user_classifier,
)


F = FailureClass


def client_error(code: str, status: int | None = None, **headers: str) -> boto.ClientError:
    """What botocore raises for an error answer."""
    metadata: dict[str, Any] = {"HTTPHeaders": {k.replace("_", "-"): v for k, v in headers.items()}}
    if status is not None:
        metadata["HTTPStatusCode"] = status
    response = {"Error": {"Code": code, "Message": "text"}, "ResponseMetadata": metadata}
    return boto.ClientError(response, "PutObject")


def foreign(name: str, base: type[BaseException] = Exception, **attributes: Any) -> BaseException:
    """An exception of a library that need not be installed."""
    kind: type[BaseException] = type(name, (base,), attributes)
    return kind("text")


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    """``raise error from cause``."""
    error.__cause__ = cause
    return error


def raised_within(error: BaseException, context: BaseException) -> BaseException:
    """An error raised while another was handled."""
    error.__context__ = context
    return error


S3_CODES = [
    ("SlowDown", 503, F.THROTTLE),
    ("ServiceUnavailable", 503, F.THROTTLE),
    ("503", 503, F.THROTTLE),
    ("Throttling", 400, F.THROTTLE),
    ("ThrottlingOfAKindNotYetInvented", 400, F.THROTTLE),
    ("RequestLimitExceeded", 400, F.THROTTLE),
    ("TooManyRequests", 429, F.THROTTLE),
    ("InternalError", 500, F.TRANSIENT),
    ("500", 500, F.TRANSIENT),
    ("502", 502, F.TRANSIENT),
    ("504", 504, F.TRANSIENT),
    ("RequestTimeout", 400, F.TRANSIENT),
    ("OperationAborted", 409, F.TRANSIENT),
    ("409", 409, F.TRANSIENT),
    ("IncompleteBody", 400, F.TRANSIENT),
    ("BadDigest", 400, F.TRANSIENT),
    ("InvalidPart", 400, F.TRANSIENT),
    ("NoSuchUpload", 404, F.TRANSIENT),
    ("TemporaryRedirect", 307, F.TRANSIENT),
    ("ExpiredToken", 400, F.AUTH),
    ("InvalidToken", 400, F.AUTH),
    ("TokenRefreshRequired", 400, F.AUTH),
    ("RequestTimeTooSkewed", 403, F.AUTH),
    ("InvalidAccessKeyId", 403, F.AUTH),
    ("400", 400, F.AUTH),
    ("AccessDenied", 403, F.PERMANENT),
    ("403", 403, F.PERMANENT),
    ("SignatureDoesNotMatch", 403, F.PERMANENT),
    ("NoSuchBucket", 404, F.PERMANENT),
    ("NoSuchKey", 404, F.PERMANENT),
    ("404", 404, F.PERMANENT),
    ("PermanentRedirect", 301, F.PERMANENT),
    ("PreconditionFailed", 412, F.PERMANENT),
    ("InvalidBucketName", 400, F.PERMANENT),
    ("EntityTooLarge", 400, F.PERMANENT),
    ("NotImplemented", 501, F.PERMANENT),
    ("ACodeNotYetInvented", 400, F.PERMANENT),
    ("ACodeNotYetInvented", 500, F.TRANSIENT),
    ("ACodeNotYetInvented", 503, F.THROTTLE),
    ("XMinioStorageFull", 507, F.CAPACITY),
    ("QuotaExceeded", 403, F.CAPACITY),
]


@pytest.mark.parametrize(("code", "status", "expected"), S3_CODES)
def test_an_s3_code_is_judged_alike_raw_and_translated(
    code: str, status: int, expected: FailureClass
) -> None:
    """s3fs folds many codes into few types; the code inside decides, reading or writing."""
    raw = client_error(code, status)
    translated = s3fs.errors.translate_boto_error(raw)

    assert classify(raw).failure is expected
    assert classify(translated).failure is expected
    assert classify(translated, reading=True).failure is expected


def test_every_code_that_s3fs_translates_has_a_class() -> None:
    """With the status that comes along, no code of s3fs's own table is unknown."""
    unknown = [
        code
        for code in s3fs.errors.ERROR_CODE_TO_EXCEPTION
        if classify(s3fs.errors.translate_boto_error(client_error(code, 400))).failure is F.UNKNOWN
    ]

    assert unknown == []


ERRNOS = [
    (errno.ESTALE, F.TRANSIENT),
    (errno.EIO, F.TRANSIENT),
    (errno.EBUSY, F.TRANSIENT),
    (errno.EAGAIN, F.TRANSIENT),
    (errno.EINTR, F.TRANSIENT),
    (errno.ETIMEDOUT, F.TRANSIENT),
    (errno.ECONNRESET, F.TRANSIENT),
    (errno.ECONNREFUSED, F.TRANSIENT),
    (errno.EPIPE, F.TRANSIENT),
    (errno.EHOSTUNREACH, F.TRANSIENT),
    (errno.ENETUNREACH, F.TRANSIENT),
    (errno.ENOTCONN, F.TRANSIENT),
    (errno.ENOLCK, F.TRANSIENT),
    (errno.EREMOTEIO, F.TRANSIENT),
    (errno.ENOSPC, F.CAPACITY),
    (errno.EDQUOT, F.CAPACITY),
    (errno.EROFS, F.PERMANENT),
    (errno.EACCES, F.PERMANENT),
    (errno.EPERM, F.PERMANENT),
    (errno.EISDIR, F.PERMANENT),
    (errno.ENOTDIR, F.PERMANENT),
    (errno.EEXIST, F.PERMANENT),
    (errno.ENAMETOOLONG, F.PERMANENT),
    (errno.EXDEV, F.PERMANENT),
    (errno.EFBIG, F.PERMANENT),
    (errno.ENOTSUP, F.PERMANENT),
    (errno.ENODEV, F.UNKNOWN),
    (errno.EMFILE, F.UNKNOWN),
]


@pytest.mark.parametrize(("number", "expected"), ERRNOS)
def test_an_errno_decides_where_nothing_else_does(number: int, expected: FailureClass) -> None:
    """An OSError without a cause is judged by its errno."""
    assert classify(OSError(number, "text")).failure is expected


LIBRARY_ERRORS = [
    (boto.EndpointConnectionError(endpoint_url="http://host"), F.TRANSIENT),
    (boto.ConnectTimeoutError(endpoint_url="http://host"), F.TRANSIENT),
    (boto.ReadTimeoutError(endpoint_url="http://host"), F.TRANSIENT),
    (boto.ConnectionClosedError(endpoint_url="http://host"), F.TRANSIENT),
    (boto.ProxyConnectionError(proxy_url="http://host"), F.TRANSIENT),
    (boto.SSLError(endpoint_url="http://host", error="x"), F.TRANSIENT),
    (boto.HTTPClientError(error="x"), F.TRANSIENT),
    (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), F.TRANSIENT),
    (boto.ResponseStreamingError(error="x"), F.TRANSIENT),
    (boto.NoCredentialsError(), F.AUTH),
    (boto.CredentialRetrievalError(provider="p", error_msg="x"), F.AUTH),
    (boto.ParamValidationError(report="x"), F.PERMANENT),
    (boto.NoRegionError(), F.PERMANENT),
    (boto.ProfileNotFound(profile="x"), F.PERMANENT),
    (s3fs.utils.FileExpired("name", "tag"), F.STALE),
    (fsspec.exceptions.FSTimeoutError(), F.TRANSIENT),
    (ConnectionResetError(), F.TRANSIENT),
    (BrokenPipeError(), F.TRANSIENT),
    (TimeoutError(), F.TRANSIENT),
    (asyncio.TimeoutError(), F.TRANSIENT),
    (concurrent.futures.TimeoutError(), F.TRANSIENT),
    (socket.gaierror(socket.EAI_NONAME, "no such name"), F.TRANSIENT),
    (http.client.IncompleteRead(b""), F.TRANSIENT),
    (http.client.RemoteDisconnected("x"), F.TRANSIENT),
    (http.client.BadStatusLine("x"), F.TRANSIENT),
    (ssl.SSLError(1, "x"), F.TRANSIENT),
    (ssl.SSLCertVerificationError(1, "x"), F.PERMANENT),
    (foreign("ServerDisconnectedError"), F.TRANSIENT),
    (foreign("ClientPayloadError"), F.TRANSIENT),
    (foreign("ClientConnectorDNSError"), F.UNKNOWN),
    (foreign("ClientConnectorCertificateError"), F.PERMANENT),
    (foreign("ChunkedEncodingError", OSError), F.TRANSIENT),
    (foreign("ProxyError", OSError), F.TRANSIENT),
    (foreign("DistNetworkError", RuntimeError), F.TRANSIENT),
    (foreign("OutOfMemoryError", RuntimeError), F.CAPACITY),
    (foreign("DefaultCredentialsError"), F.PERMANENT),
    (foreign("RefreshError", retryable=False), F.PERMANENT),
    (foreign("RefreshError", retryable=True), F.TRANSIENT),
    (foreign("HttpError", code=401), F.AUTH),
    (foreign("HttpError", code="429"), F.THROTTLE),
    (foreign("HttpError", code=http.HTTPStatus.BAD_GATEWAY), F.TRANSIENT),
    (foreign("HttpError", code=400), F.PERMANENT),
    (foreign("ClientResponseError", status=503), F.THROTTLE),
    (foreign("ClientResponseError", status=408), F.TRANSIENT),
    (foreign("HttpResponseError", status_code=507), F.CAPACITY),
    (foreign("HttpResponseError", error_code="ServerBusy"), F.THROTTLE),
    (foreign("HTTPError", response=type("Response", (), {"status_code": 500})()), F.TRANSIENT),
    (foreign("Exit", code=3), F.UNKNOWN),
    (foreign("RpcError", code=lambda: 503), F.UNKNOWN),
    (MemoryError(), F.CAPACITY),
    (TypeError("x"), F.PERMANENT),
    (AttributeError("x"), F.PERMANENT),
    (NotImplementedError(), F.PERMANENT),
    (NameError("x"), F.PERMANENT),
    (ModuleNotFoundError("x"), F.PERMANENT),
    (pickle.PicklingError("x"), F.PERMANENT),
    (FileExistsError("x"), F.PERMANENT),
    (IsADirectoryError("x"), F.PERMANENT),
    (PermissionError("x"), F.PERMANENT),
    (ValueError("x"), F.UNKNOWN),
    (KeyError("x"), F.UNKNOWN),
    (RuntimeError("x"), F.UNKNOWN),
    (EOFError(), F.UNKNOWN),
    (pickle.UnpicklingError("x"), F.UNKNOWN),
    (OSError("Forbidden: https://host"), F.PERMANENT),
    (OSError("Forbidden fruit"), F.UNKNOWN),
    (OSError(errno.EIO, "Forbidden: https://host"), F.TRANSIENT),
    (OSError(), F.UNKNOWN),
    (Exception("x"), F.UNKNOWN),
    (foreign("PanicException", BaseException), F.PERMANENT),
    (KeyboardInterrupt(), F.CANCELLED),
    (SystemExit(1), F.CANCELLED),
    (GeneratorExit(), F.CANCELLED),
    (asyncio.CancelledError(), F.CANCELLED),
    (concurrent.futures.CancelledError(), F.CANCELLED),
    (foreign("SIGTERMException", SystemExit), F.CANCELLED),
    (foreign("SignalException", Exception), F.CANCELLED),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    LIBRARY_ERRORS,
    ids=[f"{n}-{type(error).__name__}" for n, (error, _) in enumerate(LIBRARY_ERRORS)],
)
def test_a_type_is_judged_by_its_name_or_status(
    error: BaseException, expected: FailureClass
) -> None:
    """Type names along the MRO and statuses decide; nothing optional is imported."""
    assert classify(error).failure is expected


def test_real_aiohttp_errors_are_transient() -> None:
    """Network errors of aiohttp are no OSErrors, or only some of them."""
    aiohttp = pytest.importorskip("aiohttp")
    key: Any = type("Key", (), {"host": "h", "port": 1, "ssl": True, "is_ssl": True})()

    network = [
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError(),
        aiohttp.ClientOSError(errno.ECONNRESET, "x"),
        aiohttp.ClientConnectorDNSError(key, OSError(1, "x")),
        aiohttp.ServerTimeoutError(),
    ]

    assert {classify(error).failure for error in network} == {F.TRANSIENT}
    assert classify(aiohttp.InvalidURL("x")).failure is F.PERMANENT


GCSFS = [
    (401, F.AUTH),
    (403, F.PERMANENT),
    (408, F.TRANSIENT),
    (412, F.PERMANENT),
    (429, F.THROTTLE),
    (500, F.TRANSIENT),
    (502, F.TRANSIENT),
    (503, F.THROTTLE),
]


@pytest.mark.parametrize(("status", "expected"), GCSFS)
def test_what_gcsfs_makes_of_a_status_is_judged_like_the_status(
    status: int, expected: FailureClass
) -> None:
    """Six types of exception come out of gcsfs for its statuses."""
    retry = pytest.importorskip("gcsfs.retry")

    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what differs
        retry.validate_response(status, b'{"error": {"message": "m"}}', "path")

    assert classify(caught.value).failure is expected


OUR_ERRORS = [
    (errors.ConfigError("x"), F.PERMANENT),
    (errors.CallTimeoutError("x"), F.TRANSIENT),
    (errors.StoreUnavailableError("x"), F.TRANSIENT),
    (errors.CheckpointError("x"), F.TRANSIENT),
    (errors.CorruptRecordError("x"), F.PERMANENT),
    (errors.InvalidTransitionError("x"), F.PERMANENT),
    (errors.JointError("x", outcome="capacity"), F.CAPACITY),
    (errors.JointUnavailableError("x"), F.LOST),
    (raised_from(errors.RetriesExhaustedError("x"), client_error("AccessDenied")), F.PERMANENT),
]


@pytest.mark.parametrize(
    ("error", "expected"), OUR_ERRORS, ids=[type(error).__name__ for error, _ in OUR_ERRORS]
)
def test_our_own_errors_have_a_class(error: BaseException, expected: FailureClass) -> None:
    """Errors of this package are judged too, since guards are nested."""
    assert classify(error).failure is expected


# One row of the documented table after the other: what the storage libraries make of each example.
DOCUMENTED = [
    (ConnectionResetError(), F.TRANSIENT),
    (TimeoutError(), F.TRANSIENT),
    (OSError(errno.ESTALE, "x"), F.TRANSIENT),
    (s3fs.errors.translate_boto_error(client_error("NoSuchUpload", 404)), F.TRANSIENT),
    (socket.gaierror(socket.EAI_AGAIN, "not yet"), F.TRANSIENT),
    (s3fs.errors.translate_boto_error(client_error("SlowDown", 503)), F.THROTTLE),
    (foreign("HttpError", code=429), F.THROTTLE),
    (client_error("503", 503, retry_after="3"), F.THROTTLE),
    (s3fs.errors.translate_boto_error(client_error("ExpiredToken", 400)), F.AUTH),
    (foreign("HttpError", code=401), F.AUTH),
    (raised_from(foreign("HttpError", code=401), foreign("RefreshError")), F.AUTH),
    (OSError(errno.ENOSPC, "x"), F.CAPACITY),
    (OSError(errno.EDQUOT, "x"), F.CAPACITY),
    (s3fs.utils.FileExpired("name", "tag"), F.STALE),
    (s3fs.errors.translate_boto_error(client_error("AccessDenied", 403)), F.PERMANENT),
    (s3fs.errors.translate_boto_error(client_error("NoSuchBucket", 404)), F.PERMANENT),
    (s3fs.errors.translate_boto_error(client_error("NoSuchKey", 404)), F.PERMANENT),
    (raised_from(foreign("NonRetryableError"), foreign("RefreshError")), F.PERMANENT),
    (errors.ConfigError("x"), F.PERMANENT),
    (Exception("x"), F.UNKNOWN),
    (KeyboardInterrupt(), F.CANCELLED),
    (SystemExit(), F.CANCELLED),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    DOCUMENTED,
    ids=[f"{n}-{type(error).__name__}" for n, (error, _) in enumerate(DOCUMENTED)],
)
def test_the_documented_examples_are_what_the_table_says(
    error: BaseException, expected: FailureClass
) -> None:
    """Reading or writing, each example has its row's class, and counts as its row says."""
    for reading in (False, True):
        outcome = classify(error, reading=reading)
        assert outcome.failure is expected
        assert outcome.counts is (expected in {F.TRANSIENT, F.THROTTLE, F.UNKNOWN})


def test_a_missing_file_is_permanent_only_while_reading() -> None:
    """While writing, the directory may have gone away between two calls."""
    missing = FileNotFoundError(errno.ENOENT, "text")

    assert classify(missing, reading=True).failure is F.PERMANENT
    assert classify(missing).failure is F.UNKNOWN


def test_an_explicit_cause_speaks_for_an_error_that_says_nothing() -> None:
    """A library's wrapper is judged by what it wraps."""
    wrapped = raised_from(RuntimeError("save failed"), ConnectionResetError())

    assert classify(wrapped).failure is F.TRANSIENT


def test_the_context_does_not_overrule_what_the_error_says() -> None:
    """A denial that arises while a throttled call is handled is a denial."""
    denied = raised_within(PermissionError("text"), client_error("SlowDown"))

    assert classify(denied).failure is F.PERMANENT


def test_the_context_is_asked_where_the_error_says_nothing() -> None:
    """s3fs raises a bare ValueError while it handles botocore's ParamValidationError."""
    bad = raised_within(ValueError("text"), boto.ParamValidationError(report="x"))

    assert classify(bad).failure is F.PERMANENT


def test_an_endless_chain_of_causes_ends() -> None:
    """Causes may form a ring."""
    first, second = RuntimeError("1"), RuntimeError("2")
    first.__cause__, second.__cause__ = second, first

    assert classify(first).failure is F.UNKNOWN


def test_a_group_is_as_severe_as_its_worst_member() -> None:
    """Task groups raise groups; a request to stop inside one is not lost."""
    group = foreign("ExceptionGroup", exceptions=(ConnectionResetError(), KeyboardInterrupt()))

    assert classify(group).failure is F.CANCELLED


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (client_error("SlowDown", 503, retry_after="7"), 7.0),
        (s3fs.errors.translate_boto_error(client_error("SlowDown", 503, retry_after="7")), 7.0),
        (foreign("ClientResponseError", status=429, headers={"Retry-After": "0.5"}), 0.5),
        (foreign("X", response=type("R", (), {"headers": {"RETRY-AFTER": "3"}})()), 3.0),
        (errors.CircuitOpenError("x", retry_after_s=2.0), 2.0),
        (client_error("SlowDown", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), None),
        (client_error("SlowDown", retry_after="-1"), None),
        (client_error("SlowDown", retry_after="inf"), None),
        (client_error("SlowDown", retry_after="nan"), None),
        (client_error("SlowDown"), None),
        (foreign("X", headers="no mapping"), None),
    ],
)
def test_retry_after_is_read_in_seconds(error: BaseException, expected: float | None) -> None:
    """Dates, negative numbers and what is no number are ignored."""
    assert classify(error).retry_after_s == expected


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("no route to https://user:hunter2@host/path", "hunter2"),
        ("GET https://h/k?X-Amz-Signature=abc123def&X-Amz-Date=1", "abc123def"),
        ("GET https://h/k?sv=1&sig=abc%2Fdef&se=2", "abc%2Fdef"),
        ("Authorization: Bearer ya29.abcdefgh", "ya29.abcdefgh"),
        ("key AKIAIOSFODNN7EXAMPLE is not known", "AKIAIOSFODNN7EXAMPLE"),
        ("{'secret': 'hunter2'}", "hunter2"),
        ("password=hunter2", "hunter2"),
    ],
)
def test_the_text_holds_no_credentials(text: str, secret: str) -> None:
    """What people read in logs gives nothing away."""
    outcome = classify(OSError(errno.EIO, text))

    assert secret not in outcome.error
    assert "***" in outcome.error


def test_the_text_is_one_short_line_that_names_type_and_code() -> None:
    """A stack of HTML in an error does not flood the log."""
    denied = s3fs.errors.translate_boto_error(client_error("AccessDenied"), "a\n\tb " + "x" * 9999)

    outcome = classify(denied)

    assert outcome.error.startswith("PermissionError: a b xxx")
    assert outcome.error.endswith(" (AccessDenied)")
    assert "\n" not in outcome.error
    assert len(outcome.error) <= 520


def test_an_error_whose_text_cannot_be_read_is_classified() -> None:
    """A broken ``__str__`` does not hide the failure."""

    class BrokenError(ConnectionError):
        def __str__(self) -> str:
            raise RuntimeError("broken")

    outcome = classify(BrokenError())

    assert outcome.failure is F.TRANSIENT
    assert outcome.error == "BrokenError: (its text cannot be read)"


def test_only_failures_of_the_dependency_count() -> None:
    """Transient, throttle and unknown failures count for the breaker, and no others."""
    counting = {failure for failure in F if Outcome(failure=failure).counts}

    assert counting == COUNTS_FOR_BREAKER == {F.TRANSIENT, F.THROTTLE, F.UNKNOWN}
    assert OK.ok
    assert not OK.counts


def test_severity_orders_every_class_once() -> None:
    """The most severe failure wins; success only where nothing failed."""
    order = "cancelled permanent capacity auth unknown lost throttle transient stale"

    assert " ".join(SEVERITY) == order
    assert set(SEVERITY) == set(F)
    assert most_severe([F.STALE, None, F.LOST, F.AUTH]) is F.AUTH
    assert most_severe([None, None]) is None
    assert most_severe([]) is None


@pytest.mark.parametrize("operation", ["info", "exists", "ls", "open", "cat_file", "find", "get"])
def test_looking_and_fetching_are_reads(operation: str) -> None:
    """Reads have a breaker of their own."""
    assert operation_class(operation) == "read"


@pytest.mark.parametrize("operation", ["put_file", "pipe", "rm", "mv", "makedirs", "save", "?"])
def test_everything_else_is_a_write(operation: str) -> None:
    """An operation that nobody knows is taken for the more careful class."""
    assert operation_class(operation) == "write"


def test_a_user_classifier_is_asked_first() -> None:
    """It may answer with a class, with a class's name, or leave it to us."""
    by_class = with_user_classifier(lambda _: F.CAPACITY)
    by_name = with_user_classifier(lambda _: "stale")
    neither = with_user_classifier(lambda _: None)

    assert by_class(ValueError("x")).failure is F.CAPACITY
    assert by_name(ValueError("x")).failure is F.STALE
    assert neither(FileNotFoundError("x"), reading=True).failure is F.PERMANENT
    assert with_user_classifier(None) is classify


def test_a_user_classifier_is_not_asked_about_requests_to_stop() -> None:
    """Ctrl-C stays Ctrl-C."""
    asked = with_user_classifier(lambda _: F.TRANSIENT)

    assert asked(KeyboardInterrupt()).failure is F.CANCELLED


def test_a_user_classifier_that_fails_is_overruled_and_named() -> None:
    """A bug in it does not turn an outage into a crash, and is not kept silent."""

    def broken(_: BaseException) -> FailureClass:
        raise ZeroDivisionError("its bug")

    failed = with_user_classifier(broken)(ConnectionResetError("x"))
    nonsense = with_user_classifier(lambda _: "nonsense")(ConnectionResetError("x"))

    assert failed.failure is F.TRANSIENT
    assert "classify option failed" in failed.error
    assert "ZeroDivisionError: its bug" in failed.error
    assert nonsense.failure is F.TRANSIENT
    assert "nonsense" in nonsense.error
