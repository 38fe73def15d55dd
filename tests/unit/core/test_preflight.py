# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What follows from what the storage has refused before the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_resilience.core.outcome import FailureClass, Outcome
from lightning_resilience.core.preflight import (
    Needs,
    Refusal,
    Step,
    Trial,
    bounded,
    is_leftover,
    is_refusal,
    is_survived,
    moves,
    needs_of,
    refusal_text,
    warnings_of,
)
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.retry import RetryPolicy


MODEST = Needs(saves=True, asks=False, removes=False, searches=False)
DEMANDING = Needs(saves=True, asks=True, removes=True, searches=True)
DIRECTORY = "s3://bucket/run"


def trial(*steps: Step) -> Trial:
    """A trial in which these were refused."""
    refused = (Refusal(step=step.value, error=f"{step.value}: no (AccessDenied)") for step in steps)
    return Trial(refused=tuple(refused))


def options(**given: Any) -> Needs:
    """What a ModelCheckpoint does, with Lightning's defaults otherwise."""
    defaults: dict[str, Any] = {
        "save_top_k": 1,
        "save_last": None,
        "last_name": "last",
        "counts_versions": True,
        "asked": None,
    }
    return needs_of(**defaults | given)


TABLE = [
    (Step.ASK, "", "asking whether a name is taken"),
    (Step.WRITE, "writing", "writing"),
    (Step.CONFIRM, "asking for the size", "asking for the size"),
    (Step.READ, "", "reading back"),
    (Step.LIST, "", "listing"),
    (Step.REMOVE, "", ""),
]


@pytest.mark.parametrize(("step", "modest", "demanding"), TABLE)
def test_a_refusal_is_an_error_where_the_run_needs_it(
    step: Step, modest: str, demanding: str
) -> None:
    """What every save needs is always an error; the rest only in a run that does it."""
    for needs, what in ((MODEST, modest), (DEMANDING, demanding)):
        text = refusal_text(trial(step), needs, directory=DIRECTORY)

        assert bool(text) is bool(what)
        assert what in text


def test_every_step_is_in_the_table() -> None:
    """No step is forgotten."""
    assert [step for step, _, _ in TABLE] == list(Step)


@pytest.mark.parametrize("step", list(Step))
def test_an_error_says_where_what_and_what_to_do(step: Step) -> None:
    """It names the directory, the operation, and the storage's code, and gives advice."""
    text = refusal_text(trial(step), DEMANDING, directory=DIRECTORY)

    if step is not Step.REMOVE:
        assert f"preflight of {DIRECTORY} failed on all ranks" in text
        assert "(AccessDenied)" in text
        assert text.count(". ") >= 1


def test_what_could_not_be_written_comes_first() -> None:
    """Of a bucket that is not there everything is refused, and the write is what counts."""
    text = refusal_text(trial(Step.ASK, Step.WRITE), DEMANDING, directory=DIRECTORY)

    assert "writing there was refused to rank 0: write: no (AccessDenied)" in text
    assert "So was asking whether a name is taken." in text
    assert "bucket that does not exist is never made" in text


WARNINGS = [
    (Step.REMOVE, DEMANDING, ["retention cannot work"]),
    (Step.REMOVE, MODEST, []),
    (Step.READ, MODEST, ["no run can start from one"]),
    (Step.ASK, MODEST, []),
    (Step.LIST, MODEST, []),
]


@pytest.mark.parametrize(("step", "needs", "told"), WARNINGS)
def test_what_will_not_work_is_told(step: Step, needs: Needs, told: list[str]) -> None:
    """A right to remove or to read that is missing is a warning, where it will be missed."""
    warnings = warnings_of(trial(step), needs, directory=DIRECTORY)

    assert len(warnings) == len(told)
    for warning, words in zip(warnings, told, strict=True):
        assert words in warning
        assert DIRECTORY in warning


def test_a_trial_without_refusals_says_nothing() -> None:
    """Where all went well, there is neither an error nor a warning."""
    assert refusal_text(trial(), DEMANDING, directory=DIRECTORY) == ""
    assert warnings_of(trial(), DEMANDING, directory=DIRECTORY) == []


def test_a_trial_survives_the_shared_record() -> None:
    """All ranks decide on what rank 0 has written."""
    tried = trial(Step.REMOVE, Step.LIST)

    assert decode(Trial, encode(tried), key="detail") == tried


@pytest.mark.parametrize(
    ("given", "saves", "removes"),
    [
        ({}, True, True),
        ({"save_top_k": -1}, True, False),
        ({"save_top_k": 0}, False, False),
        ({"save_top_k": 0, "save_last": True}, True, False),
        ({"save_top_k": -1, "save_last": True, "last_name": "last-{epoch}"}, True, True),
        ({"save_top_k": 0, "save_last": "link"}, True, False),
    ],
)
def test_what_a_run_needs(given: dict[str, Any], *, saves: bool, removes: bool) -> None:
    """Whether it saves and removes follows from the options of ``ModelCheckpoint``."""
    needs = options(**given)

    assert (needs.saves, needs.removes) == (saves, removes)


@pytest.mark.parametrize(
    ("asked", "searches"), [("last", True), ("s3://b/x.ckpt", False), ("hpc", False), (None, False)]
)
def test_only_a_search_for_last_looks_into_the_directory(
    asked: str | None, *, searches: bool
) -> None:
    """What is named, or searched for elsewhere, is nothing that is needed here."""
    assert options(asked=asked).searches is searches


def test_a_trial_takes_a_tenth_of_the_deadline() -> None:
    """The first save waits for all of it, and nothing was computed yet that would be lost."""
    policy = RetryPolicy()

    found = bounded(policy)

    assert found == replace(policy, deadline_s=180.0)
    # Three attempts that hang open the circuit within it.
    assert 3 * found.stall_timeout_s <= found.deadline_s


def test_one_attempt_that_hangs_is_within_the_bound() -> None:
    """An attempt is abandoned before the time of the whole trial is over twice."""
    policy = RetryPolicy(stall_timeout_s=60, deadline_s=100)

    assert bounded(policy).stall_timeout_s == 10


@pytest.mark.parametrize("failure", [None, *FailureClass])
def test_only_a_final_answer_is_a_refusal(failure: FailureClass | None) -> None:
    """Everything else is raised, and repeated as any attempt."""
    assert is_refusal(Outcome(failure=failure)) is (failure is FailureClass.PERMANENT)


@pytest.mark.parametrize("failure", list(FailureClass))
def test_an_ill_storage_ends_no_run_that_would_wait(failure: FailureClass) -> None:
    """An outage is survived under ``wait``; other failures, and any under ``fail``, are not."""
    ill = failure in {FailureClass.TRANSIENT, FailureClass.THROTTLE, FailureClass.STALE}

    assert is_survived(failure.value, on_outage="wait") is ill
    assert not is_survived(failure.value, on_outage="fail")


def test_an_object_of_a_running_trial_is_no_leftover() -> None:
    """What is younger than any trial may take is left alone, also where deadlines are long."""
    short = bounded(RetryPolicy())
    long = bounded(RetryPolicy(deadline_s=100_000))

    assert not is_leftover(3600, policy=short)
    assert is_leftover(3601, policy=short)
    assert not is_leftover(10_060, policy=long)
    assert is_leftover(10_061, policy=long)


@pytest.mark.parametrize(
    ("dirpath", "version", "asked", "told"),
    [
        (None, 3, "last", True),
        (None, "run-7", "last", False),
        (None, None, "last", False),
        ("s3://bucket/run", 3, "last", False),
        (None, 3, None, False),
    ],
)
def test_a_directory_of_each_start_hides_the_last_checkpoint(
    dirpath: str | None, version: object, asked: str | None, *, told: bool
) -> None:
    """It is told where ``"last"`` is looked for in a directory that a counting logger has named."""
    assert moves(dirpath=dirpath, version=version, asked=asked) is told
