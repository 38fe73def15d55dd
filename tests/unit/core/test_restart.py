# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Names, delays and progress between two starts of the workers; statuses at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import exit_codes
from lightning_resilience.core.exit_codes import ExitCode, may_start_again, words_of
from lightning_resilience.core.restart import (
    ProgressRecord,
    advanced,
    first_contact_s,
    incarnation_of,
    lost,
    mark_of_round,
    missed,
    next_incarnation,
    restart_delay_s,
    run_of_circuits,
    with_told,
)
from lightning_resilience.core.restart_config import RestartConfig


CONFIG = RestartConfig()


def test_starts_are_counted_and_told_apart_by_a_nonce() -> None:
    """A store that came back empty counts anew, and its starts are still others."""
    assert next_incarnation("", nonce="a") == "1-a"
    assert next_incarnation("1-a", nonce="b") == "2-b"
    assert next_incarnation("9-x", nonce="y") == "10-y"
    assert next_incarnation("nonsense", nonce="y") == "1-y"
    assert incarnation_of("1-a", nodes=4, nonce="b").incarnation == "2-b"


def test_rounds_that_have_one_name_in_the_store_have_marks_of_their_own() -> None:
    """By the store for their workers, or by the start before where all rounds have one store."""
    marks = [
        mark_of_round(workers, before=before, is_static=is_static)
        for is_static in (False, True)
        for workers in ("host0:1001", "host0:1002")
        for before in ("", "1-a")
    ]

    assert marks == ["host0:1001"] * 2 + ["host0:1002"] * 2 + ["", "1-a"] * 2


@pytest.mark.parametrize(
    ("before", "told", "expected"),
    [
        ((5, 4), (6, 4), (6, 4)),
        ((5, 4), (3, 5), (5, 5)),
        ((5, 4), (5, 4), None),
        ((5, 4), (2, -1), None),
        ((-1, -1), (0, -1), (0, -1)),
    ],
)
def test_progress_only_ever_goes_on(
    before: tuple[int, int], told: tuple[int, int], expected: tuple[int, int] | None
) -> None:
    """A rank that comes late takes nothing back."""
    found = ProgressRecord(step=before[0], checkpoint_step=before[1], writer="a")
    new = ProgressRecord(step=told[0], checkpoint_step=told[1], writer="b")

    record = advanced(found, new)

    assert (None if record is None else (record.step, record.checkpoint_step)) == expected
    assert record is None or record.writer == "b"


@given(number=st.integers(-1, 10**6), draw=st.floats(0.0, 1.0, exclude_max=True))
def test_a_delay_has_full_jitter_below_its_bounds(number: int, draw: float) -> None:
    """It grows with failures; without any there is none."""
    delay_s = restart_delay_s(CONFIG, number, draw=draw)
    exponent = min(max(number, 1) - 1, 60)
    bound_s = min(CONFIG.restart_max_delay_s, CONFIG.restart_base_delay_s * 2.0**exponent)

    assert delay_s == (draw * bound_s if number >= 1 else 0.0)


@given(nodes=st.integers(1, 10**6), draw=st.floats(0.0, 1.0, exclude_max=True))
def test_first_contact_is_spread_over_a_window_that_grows_with_the_nodes(
    nodes: int, draw: float
) -> None:
    """From torch's own 0.3 s to half a minute."""
    assert 0.0 <= first_contact_s(nodes, draw=draw) <= min(30.0, max(0.0, nodes * 0.02 - 0.3))


def test_a_scheduler_knows_by_the_number_whether_to_start_again() -> None:
    """Below 128 not, from there on it may; each has a name and says what to do next."""
    again = {code for code in ExitCode if may_start_again(code)}

    assert again == {ExitCode.PREEMPTED, ExitCode.OUTAGE}
    for code in ExitCode:
        name, next_ = words_of(code)
        assert name
        assert next_.endswith(".")


def test_the_readme_has_the_table_of_statuses() -> None:
    """The same number, name and words as the module's own table."""
    readme = Path(__file__).parents[3] / "README.md"
    shown = readme.read_text(encoding="utf-8").partition("<!-- statuses:begin -->")[2]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in shown.partition("<!-- statuses:end -->")[0].strip().splitlines()[2:]
    ]
    doc = " ".join((exit_codes.__doc__ or "").split())

    assert [(int(code), name) for code, name, _ in cells] == [
        (int(code), words_of(code)[0]) for code in ExitCode
    ]
    assert all(f"{code} {name} {when}" in doc for code, name, when in cells)


def test_directories_are_told_once_and_the_latest_are_kept() -> None:
    """A job whose every fit has a directory of its own does not make the record grow for ever."""
    first = with_told(None, ["s3://b/a", "s3://b/a"], run_id="", writer="1")
    assert first is not None
    assert first.urls == ("s3://b/a",)
    assert with_told(first, ["s3://b/a"], run_id="", writer="2") is None
    assert with_told(None, [], run_id="", writer="2") is None

    record = first
    for number in range(100):
        found = with_told(record, [f"s3://b/{number}"], run_id="", writer="3")
        assert found is not None
        record = found

    assert record.urls == tuple(f"s3://b/{number}" for number in range(68, 100))


def test_the_latest_name_of_the_workers_run_counts() -> None:
    """Where it is not the agents' own, circuits are looked for under it."""
    named = with_told(None, [], run_id="mine", writer="1")
    assert named is not None
    assert run_of_circuits(named, "job") == "mine"
    assert with_told(named, [], run_id="mine", writer="2") is None

    again = with_told(named, [], run_id="", writer="2")

    assert again is not None
    assert run_of_circuits(again, "job") == "job"


@pytest.mark.parametrize(("there", "gone"), [(3, 0), (2, 1), (0, 0), (None, 0)])
def test_a_rendezvous_that_knows_nobody_misses_nobody(there: int | None, gone: int) -> None:
    """Whoever asks at the gate is there itself: a state without it has come back empty."""
    over = incarnation_of("", nodes=3, nonce="a")

    assert missed(over, there) == gone
    assert missed(None, there) == 0


def test_whoever_watches_misses_all_when_nobody_is_known() -> None:
    """Then all have to join anew."""
    over = incarnation_of("", nodes=3, nonce="a")

    assert (lost(over, 0), lost(over, None)) == (3, 0)
