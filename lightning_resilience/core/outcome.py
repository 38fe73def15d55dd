# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What failed, and what may be done about it: every exception becomes one of nine classes.

An error is judged by what programs wrote for programs, not by its message, which changes with
language and version: the storage's own error code, the HTTP status, the exception's type *name*
along its MRO (an optional library is never imported to compare types), and the errno. errno is last
because libraries fold many codes into few numbers: s3fs makes EBUSY of SlowDown and of a conflict,
and EINVAL of a damaged body and of a bad argument.

The evidence of an exception is weighed on its own before its cause is looked at. One group differs:
``PermissionError``, ``FileNotFoundError`` and plain ``OSError`` are what libraries translate
*into*, so they decide only where no explicit cause says more. The implicit context is asked only
where the exception itself says nothing at all, since it may be about something else.

Choices that are not obvious:

* ``TypeError``, ``AttributeError``, ``NotImplementedError`` and their like are bugs: permanent. A
  ``ValueError`` may be one too, but gcsfs raises it for any answer whose body has "invalid" in it,
  and parsers raise it for a body that a proxy cut, so it is unknown: a small limit of its own.
* ``KeyError``, ``RuntimeError``, ``EOFError`` and ``UnpicklingError`` are what a torn read looks
  like through ``torch.load``, and what a bug looks like as well: unknown.
* gcsfs turns a 403 into an ``OSError`` with neither errno nor status. Its first word is gcsfs's own
  and not the server's, and the only thing that tells a refusal from anything: permanent.
* A missing object is permanent while reading. While writing, a plain ``FileNotFoundError`` means
  that the directory went away between two calls (every attempt makes it anew) or that the bucket
  does not exist: unknown.
* Code ``400`` alone is what S3 answers to a ``HEAD`` with an expired token, which has no body to
  say so. It is treated as auth: the client is rebuilt once, after that the failure is permanent.
* ``NoSuchUpload`` and a failed verification are transient: the whole operation is done again.
* A native panic is a ``BaseException`` that is no request to stop: permanent, and reported.

Sources: the errors of botocore, aiohttp, s3fs, gcsfs, google-auth, requests and urllib3, and the
error code lists of S3 and Azure Blob Storage.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightning_resilience.core.evidence import (
    inner_codes,
    is_bare_refusal,
    one_line,
    retry_after_s,
    statuses,
    type_names,
)
from lightning_resilience.core.failures import (
    CANCELLED_NAMES,
    CODES,
    COUNTS_FOR_BREAKER,
    ERRNOS,
    NAMES,
    SEVERITY,
    STATUS_FAMILIES,
    STATUSES,
    FailureClass,
)


__all__ = [
    "COUNTS_FOR_BREAKER",
    "OK",
    "READ_OPERATIONS",
    "SEVERITY",
    "Classifier",
    "FailureClass",
    "Outcome",
    "classify",
    "most_severe",
    "operation_class",
    "with_user_classifier",
]


READ_OPERATIONS: frozenset[str] = frozenset(
    {"info", "exists", "lexists", "ls", "listdir", "glob", "find", "walk", "du", "disk_usage"}
    | {"isdir", "isfile", "islink", "size", "sizes", "modified", "created", "checksum", "ukey"}
    | {"stat", "cat", "cat_file", "cat_ranges", "read_block", "head", "tail", "read_bytes"}
    | {"read_text", "get", "get_file", "download", "expand_path", "open", "read", "tree"}
)
"""Operations, by their fsspec names, that change nothing in storage. All others are writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one attempt ended.

    Args:
        failure: Class of the failure, None for a success.
        retry_after_s: Seconds that the storage asked us to stay away, 0 or more, if it did.
        code: The code that decided (``SlowDown``, ``503``, ``ESTALE``) or the type's name.
        error: One line ``TypeName: text`` without credentials, at most about 500 characters.
    """

    failure: FailureClass | None = None
    retry_after_s: float | None = None
    code: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """True for a success."""
        return self.failure is None

    @property
    def counts(self) -> bool:
        """True if the breaker counts it as a failure of the dependency."""
        return self.failure in COUNTS_FOR_BREAKER


OK = Outcome()
"""A success."""

Classifier: TypeAlias = Callable[[BaseException], "FailureClass | str | None"]
"""A user's own judgement: a class, its value as text, or None to leave it to us."""

_MAX_CAUSES = 8


_Evidence: TypeAlias = tuple[FailureClass, str]


def most_severe(failures: Iterable[FailureClass | None]) -> FailureClass | None:
    """Return the most severe of ``failures``; None (success) is the least."""
    return min((f for f in failures if f is not None), key=SEVERITY.index, default=None)


def operation_class(operation: str) -> str:
    """Return ``read`` or ``write`` for an fsspec operation; an unknown one is a write."""
    return "read" if operation in READ_OPERATIONS else "write"


def classify(exc: BaseException, *, reading: bool = False) -> Outcome:
    """Judge an exception. Never raises, and never imports the library that it comes from.

    Args:
        exc: What an attempt raised.
        reading: True if the operation only reads, where a missing object is permanent.

    Returns:
        The class, the code that decided, Retry-After and a line for people.
    """
    failure, code = _judge(exc, reading=reading)
    error = one_line(exc)
    if code not in error and code not in type_names(exc):
        error += f" ({code})"
    return Outcome(
        failure=failure, retry_after_s=retry_after_s(_causes(exc)), code=code, error=error
    )


def with_user_classifier(user: Classifier | None) -> Callable[..., Outcome]:
    """Return ``classify`` that asks ``user`` first.

    A classifier that raises, or returns what is no class, is overruled by ours, and the outcome's
    text says so: a bug in it must not turn an outage into a crash. It is not asked about requests
    to stop, which nobody may reclassify.

    Args:
        user: The user's classifier; None gives plain ``classify``.

    Returns:
        A function with the signature of ``classify``.
    """
    if user is None:
        return classify

    def classify_with_user(exc: BaseException, *, reading: bool = False) -> Outcome:
        ours = classify(exc, reading=reading)
        if ours.failure is FailureClass.CANCELLED:
            return ours
        try:
            theirs = user(exc)
            if theirs is None:
                return ours
            return replace(ours, failure=FailureClass(theirs))
        except Exception as error:  # noqa: BLE001 - the user's bug must not replace the failure
            note = f"{ours.error} (the classify option failed, ignored: {one_line(error)})"
            return replace(ours, error=note)

    return classify_with_user


def _judge(exc: BaseException, *, reading: bool) -> _Evidence:
    if not CANCELLED_NAMES.isdisjoint(type_names(exc)):
        return FailureClass.CANCELLED, type(exc).__name__
    members = getattr(exc, "exceptions", None)
    if isinstance(members, tuple) and members:
        return min(
            (_judge(member, reading=reading) for member in members),
            key=lambda evidence: SEVERITY.index(evidence[0]),
        )
    weak: _Evidence | None = None
    for link in _causes(exc):
        decided = _code_evidence(link) or _status_evidence(link) or _name_evidence(link)
        if decided is not None:
            return decided
        weak = weak or _weak_evidence(link, reading=reading)
    return weak or (FailureClass.UNKNOWN, type(exc).__name__)


def _code_evidence(exc: BaseException) -> _Evidence | None:
    """The storage's own code, also in the dialects that spell throttling their own way."""
    for code in inner_codes(exc):
        if code in CODES:
            return CODES[code], code
        if code.startswith("Throttl"):
            return FailureClass.THROTTLE, code
    return None


def _status_evidence(exc: BaseException) -> _Evidence | None:
    for status in statuses(exc):
        failure = STATUSES.get(status) or STATUS_FAMILIES.get(status // 100)
        if failure is not None:
            return failure, str(status)
    return None


def _name_evidence(exc: BaseException) -> _Evidence | None:
    name = type(exc).__name__
    if "JointError" in type_names(exc):
        outcome = getattr(exc, "outcome", "")
        return next(((failure, name) for failure in SEVERITY if failure.value == outcome), None)
    for ancestor in type_names(exc):
        if ancestor in NAMES:
            # google-auth says itself whether a refresh that failed may be tried again.
            if getattr(exc, "retryable", None) is True:
                return FailureClass.TRANSIENT, name
            return NAMES[ancestor], name
    return None


def _weak_evidence(exc: BaseException, *, reading: bool) -> _Evidence | None:
    """What libraries translate into: believed only where no explicit cause says more."""
    names = type_names(exc)
    if "FileNotFoundError" in names:
        failure = FailureClass.PERMANENT if reading else FailureClass.UNKNOWN
        return failure, type(exc).__name__
    if "PermissionError" in names:
        return FailureClass.PERMANENT, type(exc).__name__
    if is_bare_refusal(exc):
        return FailureClass.PERMANENT, "403"
    number = getattr(exc, "errno", None)
    symbol = errno.errorcode.get(number, "") if isinstance(number, int) else ""
    return (ERRNOS[symbol], symbol) if symbol in ERRNOS else None


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, at most ``_MAX_CAUSES`` links."""
    link: BaseException | None = exc
    for _ in range(_MAX_CAUSES):
        if link is None:
            return
        yield link
        silent = not link.__suppress_context__ and _weak_evidence(link, reading=True) is None
        link = link.__cause__ or (link.__context__ if silent else None)
