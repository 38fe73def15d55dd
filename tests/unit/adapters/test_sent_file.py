# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Bodies that break off as long as nothing can come of what was sent, and not a byte later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.landings import Landing
from lightning_resilience.adapters.sent_file import Span, Whole
from lightning_resilience.errors import CallTimeoutError
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from pathlib import Path


MEBIBYTE = 2**20
DATA = b"a" * MEBIBYTE + b"b" * MEBIBYTE + b"the end"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three pieces."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


async def pieces(body: Span) -> list[bytes]:
    """Return what a client reads of a body."""
    return [piece async for piece in body]


def test_a_span_is_read_in_pieces_and_no_further(path: Path) -> None:
    """Each one is a mark of progress."""
    token = RecordingToken()
    with path.open("rb") as file:
        span = Span(file, 5, MEBIBYTE + 3, token=token)

        found = asyncio.run(pieces(span))

    assert b"".join(found) == DATA[5 : 5 + MEBIBYTE + 3]
    assert [len(piece) for piece in found] == [MEBIBYTE, 3]
    assert token.marks >= 2


def test_a_span_breaks_off_once_its_caller_has_given_up(path: Path) -> None:
    """Nothing comes of a part alone, however much of it was sent."""
    token = RecordingToken()
    with path.open("rb") as file:
        span = Span(file, 0, 3, token=token)
        span.read()
        token.cancelled = True

        with pytest.raises(CallTimeoutError):
            span.read()


def test_a_file_whose_end_was_sent_does_not_break_off(path: Path) -> None:
    """The client asks for more to find that there is none, and by then it may be an object."""
    token = RecordingToken()
    landing = Landing("key", token)
    with path.open("rb") as file:
        body = Whole(file, len(DATA), landing=landing)
        body.read(MEBIBYTE)
        is_sent_early = landing.is_sent
        body.read()
        token.cancelled = True

        assert body.read() == b""

    assert not is_sent_early
    assert landing.is_sent


def test_a_file_that_was_given_up_before_its_end_breaks_off(path: Path) -> None:
    """A connection that ends early leaves no object."""
    token = RecordingToken()
    landing = Landing("key", token)
    with path.open("rb") as file:
        body = Whole(file, len(DATA), landing=landing)
        body.read(MEBIBYTE)
        token.cancelled = True

        with pytest.raises(CallTimeoutError):
            body.read()

    assert not landing.is_sent


def test_a_file_that_is_sent_once_more_is_not_sent_yet(path: Path) -> None:
    """It was read for a checksum, say."""
    landing = Landing("key", RecordingToken())
    with path.open("rb") as file:
        body = Whole(file, len(DATA), landing=landing)
        body.read()

        body.seek(0)

        assert body.tell() == 0
        assert not landing.is_sent
        assert body.read() == DATA


def test_a_file_without_a_byte_is_sent_when_it_is_read(tmp_path: Path) -> None:
    """Its whole body is gone with the head of the request."""
    (tmp_path / "empty").touch()
    landing = Landing("key", RecordingToken())
    with (tmp_path / "empty").open("rb") as file:
        assert asyncio.run(pieces(Whole(file, 0, landing=landing))) == []

    assert landing.is_sent
