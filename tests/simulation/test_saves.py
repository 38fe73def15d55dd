# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated runs that save: what a seed decides, and what a failure says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.testing import CliRunner

from lightning_resilience.core import pipeline
from lightning_resilience.core.pipeline import Do, Step
from lightning_resilience.drill.__main__ import app
from lightning_resilience.drill.save_sweep import saves_of_seed, sweep_saves, told_of_saves


if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def wrong_removal() -> Iterator[Do]:
    """Remove the checkpoint before its manifest."""
    yield Do(Step.REMOVE)
    yield Do(Step.UNMARK)


def test_no_promise_is_broken_in_many_runs() -> None:
    """Four hundred runs, with everything that goes wrong at the same time."""
    runs = list(sweep_saves(range(400)))

    assert [told_of_saves(run) for run in runs if run.check] == []
    assert sum(run.effects for run in runs) > 5000


def test_the_runs_are_not_quiet() -> None:
    """Each kind of trouble, and each way out of it, is in some of them."""
    stories = "\n".join("\n".join(saves_of_seed(seed).story) for seed in range(200))

    for what in (
        "* crash",
        "* fail",
        "* lost",
        "* drop",
        "* abandon",
        "goes on",
        "is damaged",
        "is not loaded",
        "attempt 1 to set run/last-",
        "points to",
        "waits on the node",
        "attempt 1 to publish step",
        "starts from step 3",
    ):
        assert what in stories, what


def test_a_seed_decides_all_of_a_run() -> None:
    """The same seed has the same story, another one has another."""
    assert saves_of_seed(7) == saves_of_seed(7)
    assert saves_of_seed(7).story != saves_of_seed(8).story


def test_a_failure_ends_the_sweep_and_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command that is printed tells the same story, and ends with 1."""
    monkeypatch.setattr(pipeline, "removal", wrong_removal)

    *before, failed = sweep_saves(range(100))
    replayed = CliRunner().invoke(app, ["--saves", str(failed.seed)])

    assert not any(run.check for run in before)
    assert failed.check == "I9 HonestMarks"
    assert told_of_saves(failed)[-1].endswith(f"make sim SAVES={failed.seed}")
    assert replayed.exit_code == 1
    assert "I9 HonestMarks does not hold" in replayed.output


def test_a_run_can_be_told_without_a_failure() -> None:
    """Its story, and that every promise was kept."""
    done = CliRunner().invoke(app, ["--saves", "4"])

    assert done.exit_code == 0
    assert "step 1" in done.output
    assert "every promise was kept" in done.output
