# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The nine classes of failure, and which words of programs mean which: codes, types and numbers.

``core.outcome`` says in which order an exception's words are weighed; here is what each means.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "CANCELLED_NAMES",
    "CODES",
    "COUNTS_FOR_BREAKER",
    "ERRNOS",
    "NAMES",
    "SEVERITY",
    "STATUSES",
    "STATUS_FAMILIES",
    "FailureClass",
]


class FailureClass(str, enum.Enum):
    """What kind of failure it is; records and events hold the value."""

    CANCELLED = "cancelled"
    """A request to stop. Never caught, never repeated."""
    PERMANENT = "permanent"
    """Repeating cannot help: one attempt."""
    CAPACITY = "capacity"
    """Full: no blind repetition, another place at most."""
    AUTH = "auth"
    """Credentials that may have been renewed: rebuild the client once."""
    UNKNOWN = "unknown"
    """Anything else; may be a bug, so it has a small limit of its own."""
    LOST = "lost"
    """A rank fell silent. Nothing that an exception says: joint operations find it out."""
    THROTTLE = "throttle"
    """Asked to come less often: repeat from a higher base, not before Retry-After."""
    TRANSIENT = "transient"
    """Expected to pass: repeat."""
    STALE = "stale"
    """What was cached is out of date: drop the cache and repeat at once."""

    def __str__(self) -> str:
        """The value, so that texts read the same on every supported Python."""
        return self.value


SEVERITY: tuple[FailureClass, ...] = (
    FailureClass.CANCELLED,
    FailureClass.PERMANENT,
    FailureClass.CAPACITY,
    FailureClass.AUTH,
    FailureClass.UNKNOWN,
    FailureClass.LOST,
    FailureClass.THROTTLE,
    FailureClass.TRANSIENT,
    FailureClass.STALE,
)
"""Most severe first; success comes after all of them."""

COUNTS_FOR_BREAKER: frozenset[FailureClass] = frozenset(
    {FailureClass.TRANSIENT, FailureClass.THROTTLE, FailureClass.UNKNOWN}
)
"""The failures that say something about the dependency's health."""


def _table(rows: Mapping[FailureClass, str]) -> dict[str, FailureClass]:
    return {word: failure for failure, words in rows.items() for word in words.split()}


CODES = _table({
    FailureClass.PERMANENT: (
        "AccessDenied AccessDeniedException AllAccessDisabled AccountProblem NoSuchBucket "
        "NoSuchKey NoSuchVersion SignatureDoesNotMatch InvalidBucketName InvalidArgument "
        "InvalidRequest InvalidObjectState InvalidPartOrder InvalidRange EntityTooLarge "
        "EntityTooSmall KeyTooLongError NotImplemented MethodNotAllowed PermanentRedirect "
        "PreconditionFailed AuthorizationHeaderMalformed BucketAlreadyExists BlobNotFound "
        "ContainerNotFound"
    ),
    FailureClass.CAPACITY: "QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded",
    FailureClass.AUTH: (
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken InvalidAccessKeyId "
        "InvalidClientTokenId UnrecognizedClientException RequestExpired RequestTimeTooSkewed "
        "AuthFailure Unauthorized UnauthorizedAccess 400"
    ),
    FailureClass.THROTTLE: (
        "SlowDown SlowDownRead SlowDownWrite ServiceUnavailable Throttling ThrottlingException "
        "ThrottledException RequestThrottled RequestThrottledException TooManyRequests "
        "TooManyRequestsException RequestLimitExceeded BandwidthLimitExceeded "
        "ProvisionedThroughputExceededException PriorRequestNotComplete ServerBusy "
        "XMinioServerNotInitialized"
    ),
    FailureClass.TRANSIENT: (
        "RequestTimeout RequestTimeoutException InternalError InternalFailure InternalServerError "
        "OperationAborted ConditionalRequestConflict IncompleteBody BadDigest "
        "XAmzContentSHA256Mismatch XAmzContentChecksumMismatch NoSuchUpload InvalidPart "
        "TemporaryRedirect OperationTimedOut ClientDisconnected ServiceFailure"
    ),
})  # fmt: skip

STATUSES: dict[int, FailureClass] = {
    301: FailureClass.PERMANENT,
    307: FailureClass.TRANSIENT,
    401: FailureClass.AUTH,
    408: FailureClass.TRANSIENT,
    409: FailureClass.TRANSIENT,
    425: FailureClass.TRANSIENT,
    429: FailureClass.THROTTLE,
    501: FailureClass.PERMANENT,
    503: FailureClass.THROTTLE,
    507: FailureClass.CAPACITY,
}

STATUS_FAMILIES: dict[int, FailureClass] = {4: FailureClass.PERMANENT, 5: FailureClass.TRANSIENT}

CANCELLED_NAMES = frozenset((
    "KeyboardInterrupt", "SystemExit", "GeneratorExit", "SIGTERMException", "CancelledError",
    "PeerInterruption", "SignalException",
))  # fmt: skip

NAMES = _table({
    FailureClass.PERMANENT: (
        "ConfigError CorruptRecordError CorruptCheckpointError InvalidTransitionError "
        "PanicException TypeError AttributeError NameError ImportError NotImplementedError "
        "SyntaxError AssertionError RecursionError PicklingError "
        "FileExistsError IsADirectoryError NotADirectoryError "
        "ParamValidationError NoRegionError ProfileNotFound InvalidRegionError InvalidConfigError "
        "ConfigParseError UnknownEndpointError UnsupportedSignatureVersionError "
        "SSLCertVerificationError CertificateError ClientConnectorCertificateError "
        "InvalidURL InvalidUrlClientError MissingSchema InvalidSchema "
        "DefaultCredentialsError RefreshError ReauthFailError MalformedError"
    ),
    FailureClass.CAPACITY: "MemoryError OutOfMemoryError",
    FailureClass.AUTH: (
        "NoCredentialsError PartialCredentialsError CredentialRetrievalError TokenRetrievalError "
        "SSOTokenLoadError UnauthorizedSSOTokenError NoAuthTokenError LoginRefreshRequired "
        "ClientAuthenticationError"
    ),
    FailureClass.TRANSIENT: (
        "StoreUnavailableError ConflictError CheckpointError CircuitOpenError "
        "ConnectionError TimeoutError BlockingIOError InterruptedError gaierror herror SSLError "
        "HTTPClientError EndpointConnectionError ConnectTimeoutError ReadTimeoutError "
        "ConnectionClosedError ProxyConnectionError ResponseStreamingError IncompleteReadError "
        "ResponseParserError FlexibleChecksumError ChecksumError MetadataRetrievalError "
        "ClientConnectionError ServerDisconnectedError ServerTimeoutError ClientPayloadError "
        "ClientOSError ClientConnectorError ContentTypeError "
        "IncompleteRead RemoteDisconnected BadStatusLine ProtocolError NewConnectionError "
        "MaxRetryError NameResolutionError HTTPException "
        "ChunkedEncodingError ContentDecodingError ReadTimeout ConnectTimeout Timeout ProxyError "
        "RetryError TransportError ServiceRequestError ServiceResponseError "
        "FSTimeoutError DistNetworkError DistStoreError"
    ),
    FailureClass.STALE: "FileExpired",
})  # fmt: skip

ERRNOS = _table({
    FailureClass.PERMANENT: (
        "EROFS EACCES EPERM EINVAL EISDIR ENOTDIR EEXIST ENOTEMPTY ENAMETOOLONG ELOOP EXDEV EFBIG "
        "EMSGSIZE ENOSYS ENOTSUP EOPNOTSUPP EBADF EREMCHG"
    ),
    FailureClass.CAPACITY: "ENOSPC EDQUOT ENOMEM",
    FailureClass.TRANSIENT: (
        "ESTALE EIO EREMOTEIO EBUSY EAGAIN EWOULDBLOCK EINTR ETIMEDOUT ECONNRESET ECONNREFUSED "
        "ECONNABORTED EPIPE ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH ENOTCONN "
        "ESHUTDOWN ENOLCK ETIME ECOMM EPROTO"
    ),
})  # fmt: skip
