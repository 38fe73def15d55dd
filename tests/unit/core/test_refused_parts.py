# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A refusal that says that there will be no upload in parts, and what says nothing of it."""

from __future__ import annotations

import pytest

from lightning_resilience.core.refused_parts import refuses_parts


class HttpError(Exception):
    """What gcsfs raises."""

    def __init__(self, code: int) -> None:
        super().__init__(f"no, {code}")
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        *(HttpError(code) for code in (400, 405, 501)),
        FileNotFoundError("https://host/bucket/key?uploads"),
        OSError("Forbidden: https://host/bucket/key?uploads\nno"),
        ValueError("Bad Request: https://host/bucket/key?uploads\nan invalid argument"),
    ],
    ids=repr,
)
def test_a_refusal_is_one(error: Exception) -> None:
    """However gcsfs has put it."""
    assert refuses_parts(error)


@pytest.mark.parametrize(
    "error",
    [
        *(HttpError(code) for code in (401, 408, 409, 429, 500, 502, 503, 504)),
        OSError("the network is down"),
        ConnectionResetError("reset"),
        TimeoutError(),
        ValueError("anything"),
    ],
    ids=repr,
)
def test_a_failure_is_none(error: Exception) -> None:
    """The next attempt may find all well."""
    assert not refuses_parts(error)
