# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an exception says in the languages that programs write for programs.

Storage libraries put the same few facts in different places: the error code in ``response``
(botocore) or ``error_code`` (Azure), the HTTP status in ``response``, ``code``, ``status`` or
``status_code``, Retry-After in one of three mappings of headers. Here they are read, and only read:
what they mean is decided in ``core.outcome``. Nothing here raises, whatever the attributes of a
foreign exception hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


__all__ = [
    "inner_codes",
    "is_bare_refusal",
    "one_line",
    "retry_after_s",
    "statuses",
    "type_names",
    "without_credentials",
]

_MAX_ERROR_CHARS = 500
_STATUS_DIGITS = 3
_REFUSED = "Forbidden: "


def type_names(exc: BaseException) -> list[str]:
    """Return the names of the exception's type and of its bases, nearest first."""
    return [ancestor.__name__ for ancestor in type(exc).__mro__]


def inner_codes(exc: BaseException) -> Iterator[str]:
    """Yield the storage's own error codes of this exception, without those of its cause."""
    response = getattr(exc, "response", None)
    error = response.get("Error") if isinstance(response, Mapping) else None
    code = error.get("Code") if isinstance(error, Mapping) else None
    for candidate in (code, getattr(exc, "error_code", None)):
        if isinstance(candidate, (str, int)) and candidate != "":
            yield str(getattr(candidate, "value", candidate))


def statuses(exc: BaseException) -> Iterator[int]:
    """Yield every HTTP status that this exception holds, the storage's own word first."""
    response = getattr(exc, "response", None)
    metadata = response.get("ResponseMetadata") if isinstance(response, Mapping) else None
    candidates = [
        *inner_codes(exc),
        metadata.get("HTTPStatusCode") if isinstance(metadata, Mapping) else None,
        *(getattr(exc, name, None) for name in ("code", "status", "status_code")),
        *(getattr(response, name, None) for name in ("status_code", "status")),
    ]
    for candidate in candidates:
        text = str(int(candidate)) if isinstance(candidate, int) else candidate
        if isinstance(text, str) and len(text) == _STATUS_DIGITS and text.isdecimal():
            yield int(text)


def is_bare_refusal(exc: BaseException) -> bool:
    """Tell whether it is what gcsfs makes of a 403: ``OSError("Forbidden: <path>…")``, no errno."""
    if type(exc) is not OSError or exc.errno is not None:
        return False
    return isinstance(exc.args[0] if exc.args else None, str) and exc.args[0].startswith(_REFUSED)


def retry_after_s(causes: Iterable[BaseException]) -> float | None:
    """Return the first Retry-After of ``causes`` in seconds, None where there is none.

    The date form is ignored: it is an instant of another host's clock.
    """
    for link in causes:
        own = getattr(link, "retry_after_s", None)
        for value in (own, *_retry_after_headers(link)):
            try:
                seconds = float(value)
            except (TypeError, ValueError):
                continue
            if math.isfinite(seconds) and seconds >= 0:
                return seconds
    return None


def _retry_after_headers(exc: BaseException) -> Iterator[Any]:
    response = getattr(exc, "response", None)
    metadata = response.get("ResponseMetadata") if isinstance(response, Mapping) else None
    for headers in (
        metadata.get("HTTPHeaders") if isinstance(metadata, Mapping) else None,
        getattr(exc, "headers", None),
        getattr(response, "headers", None),
    ):
        items = getattr(headers, "items", None)
        if callable(items):
            yield from (value for key, value in items() if str(key).lower() == "retry-after")


_CREDENTIALS = (
    (re.compile(r"(?<=://)[^/?#\s]+@"), "***@"),
    (
        re.compile(
            r"(?i)((?:x-amz-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig"
            r"|access_token|token|secret|password|aws_secret_access_key)[\"']?\s*[=:]\s*[\"']?)"
            r"[^\s&\"',;)]+"
        ),
        r"\1***",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{8,}"), r"\1 ***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), "***"),
)


def without_credentials(text: str) -> str:
    """Return ``text`` with all that looks like a credential in a URL or header blanked out."""
    for pattern, replacement in _CREDENTIALS:
        text = pattern.sub(replacement, text)
    return text


def one_line(exc: BaseException) -> str:
    """Return ``TypeName: text`` in one line of at most 500 characters, credentials blanked out."""
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - a broken __str__ must not replace the failure
        text = "(its text cannot be read)"
    text = without_credentials(" ".join(text[: 4 * _MAX_ERROR_CHARS].split()))
    name = type(exc).__name__
    line = f"{name}: {text}" if text else name
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 1] + "…"
