# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Each event is one line in the log, at the level of its rank."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.telemetry import LoggingSink, audible, describe
from lightning_resilience.core import events
from lightning_resilience.core.waiting import VOICE_S


if TYPE_CHECKING:
    from collections.abc import Iterator


LOGGER = logging.getLogger("lightning_resilience")
KINDS = [getattr(events, name) for name in events.__all__ if name != "Event"]
ROUTINE = {
    *("CheckpointPublished", "CheckpointRemoved", "DirectoryTried"),
    *("GateDecided", "VerdictReached"),
}
SAMPLES: dict[str, Any] = {
    "str": "text",
    "int": 3,
    "float": 2.5,
    "bool": True,
    "float | None": 2.5,
    "int | None": 3,
    "tuple[int, ...]": (0, 3),
    "tuple[str, ...]": ("remove",),
}


def sample(kind: type, **given: Any) -> Any:
    """Make an event of this kind."""
    fields = {field.name: SAMPLES[str(field.type)] for field in dataclasses.fields(kind)}
    return kind(**fields | given)


def routine(kind: type) -> Any:
    """Make the event as it is on every save that goes well."""
    names = {field.name for field in dataclasses.fields(kind)}
    well = {"attempts": 1, "outcome": "ok", "verdict": "proceed"}
    return sample(kind, **{name: value for name, value in well.items() if name in names})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Catch everything that is logged."""
    with caplog.at_level(logging.DEBUG, logger=LOGGER.name):
        yield caplog


@pytest.mark.parametrize("kind", KINDS)
def test_each_event_is_one_line_in_words(kind: type) -> None:
    """None is shown as its fields: somebody has written a sentence for it."""
    text = describe(sample(kind))

    assert "\n" not in text
    assert not text.startswith(kind.__name__)


def test_an_event_that_is_new_is_shown_all_the_same() -> None:
    """A kind without a sentence is shown with its fields."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Unheard(events.Event):
        cause: str

    assert describe(Unheard(cause="x")) == "Unheard(cause='x')"


# A removal is never worth telling by itself: the failure of one is told by the attempt.
WARNED = {events.CheckpointsUnpublished, events.SaveSkipped, events.SaveTolerated}
TOLD = [kind for kind in KINDS if kind not in {events.CheckpointRemoved, *WARNED}]


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize(("rank", "level"), [(0, logging.INFO), (1, logging.DEBUG)])
def test_rank_zero_speaks_and_the_others_mumble(
    kind: type, rank: int, level: int, lines: pytest.LogCaptureFixture
) -> None:
    """One line an event: INFO on rank 0, DEBUG on the others."""
    LoggingSink(rank=rank).emit(sample(kind, **notable(kind)))

    assert [(record.levelno, record.name) for record in lines.records] == [(level, LOGGER.name)]
    assert lines.records[0].getMessage().startswith(f"[rank {rank}] ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_failed_is_a_warning_of_every_rank(
    rank: int, lines: pytest.LogCaptureFixture
) -> None:
    """Training goes on without that checkpoint, and each log says so once, with the numbers."""
    LoggingSink(rank=rank).emit(sample(events.SaveTolerated, number=2, limit=5, step=40))

    assert [record.levelno for record in lines.records] == [logging.WARNING]
    assert "at step 40, number 2 in a row, of which 5 would end it" in lines.messages[0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in WARNED])
def test_what_costs_a_checkpoint_is_a_warning(kind: type, lines: pytest.LogCaptureFixture) -> None:
    """Whatever rank says it."""
    LoggingSink(rank=1).emit(sample(kind))

    assert [record.levelno for record in lines.records] == [logging.WARNING]


def notable(kind: type) -> dict[str, Any]:
    """Return what makes an event worth telling, where it is so by its values."""
    return {"attempts": 2} if kind is events.CheckpointPublished else {}


@pytest.mark.parametrize("name", sorted(ROUTINE))
def test_what_happens_on_every_save_is_not_told(name: str, lines: pytest.LogCaptureFixture) -> None:
    """A gate that lets through, and a save that went well at once, are DEBUG everywhere."""
    LoggingSink(rank=0).emit(routine(getattr(events, name)))

    assert [record.levelno for record in lines.records] == [logging.DEBUG]


def test_a_sink_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken handler does not end a save."""

    class Broken(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            message = "a full disk"
            raise OSError(message)

    handler = Broken()
    LOGGER.addHandler(handler)
    monkeypatch.setattr(LOGGER, "propagate", False)
    try:
        LoggingSink(rank=0).emit(sample(events.StoreLost))
    finally:
        LOGGER.removeHandler(handler)


def test_a_percent_sign_in_an_error_is_only_that(lines: pytest.LogCaptureFixture) -> None:
    """Texts of others are no format strings."""
    LoggingSink(rank=0).emit(sample(events.StoreLost, error="100 %s %d"))

    assert "100 %s %d" in lines.records[0].getMessage()


def test_a_program_without_logging_hears_rank_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a run lasts, and not after it."""
    monkeypatch.setattr(LOGGER, "propagate", False)
    before = (LOGGER.level, list(LOGGER.handlers))

    with audible():
        LoggingSink(rank=0).emit(sample(events.StoreLost, error="during"))
    LoggingSink(rank=0).emit(sample(events.StoreLost, error="after"))

    said = capsys.readouterr().err
    assert said.count("during") == 1
    assert "[rank 0] text: the shared store does not answer: after" not in said.split("during")[0]
    assert (LOGGER.level, LOGGER.handlers) == before


def test_a_program_with_logging_hears_each_line_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a handler is set up already, none is added."""
    handler = logging.StreamHandler(sys.stderr)
    LOGGER.addHandler(handler)
    monkeypatch.setattr(LOGGER, "propagate", False)
    LOGGER.setLevel(logging.INFO)
    try:
        with audible():
            LoggingSink(rank=0).emit(sample(events.StoreLost))
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.NOTSET)

    assert capsys.readouterr().err.count("has not answered") == 1


def test_a_line_comes_at_least_every_thirty_seconds() -> None:
    """Rank 0 looks up in the middle of a wait early enough for the line to come in time."""
    longest_piece_s = 0.2

    assert VOICE_S + longest_piece_s < 30.0
