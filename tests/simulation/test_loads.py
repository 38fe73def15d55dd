# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs that resume: what a seed decides, what a failure says, and that the checks see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.testing import CliRunner

from lightning_resilience.core import fetching
from lightning_resilience.core.node_cache import Step
from lightning_resilience.drill import load_world
from lightning_resilience.drill.__main__ import app
from lightning_resilience.drill.load_sweep import loads_of_seed, sweep_loads, told_of_loads


if TYPE_CHECKING:
    import pytest


def test_no_promise_is_broken_in_many_jobs() -> None:
    """Three hundred jobs, with everything that goes wrong at the same time."""
    runs = list(sweep_loads(range(300)))

    assert [told_of_loads(run) for run in runs if run.check] == []
    assert sum(run.steps for run in runs) > 30_000


def test_the_jobs_are_not_quiet() -> None:
    """Each kind of trouble, and each way out of it, is in some of them."""
    stories = "\n".join("\n".join(loads_of_seed(seed).story) for seed in range(250))

    for what in (
        "* is killed",
        "* fail",
        "* lost",
        "* is abandoned",
        "* is stopped for long",
        "* storage goes away",
        "a bit flips on the way",
        "* it is cut",
        "on node 1: a bit flips",
        "ckpt: it is cut",
        "is not loaded",
        "set run/last",
        "of start 1: choose again",
        "check a piece",
        "refuse it",
        "make room",
        "a process of an earlier start: remove run/last",
        "stays on node",
        "start 4: open it",
    ):
        assert what in stories, what


def test_a_seed_decides_all_of_a_job() -> None:
    """The same seed has the same story, another one has another."""
    assert loads_of_seed(7) == loads_of_seed(7)
    assert loads_of_seed(7).story != loads_of_seed(8).story


def test_a_failure_ends_the_sweep_and_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command that is printed tells the same story, and ends with 1."""

    def impatient(*, is_there: bool, has_lock: bool, **_: object) -> Step:
        return Step.USE if is_there else Step.READ if has_lock else Step.WAIT

    monkeypatch.setattr(fetching, "next_step", impatient)

    *before, failed = sweep_loads(range(100))
    replayed = CliRunner().invoke(app, ["--loads", str(failed.seed)])

    assert not any(run.check for run in before)
    assert failed.check == "I3 ReplacedReaders"
    assert told_of_loads(failed)[-1].endswith(f"make sim LOADS={failed.seed}")
    assert replayed.exit_code == 1
    assert "I3 ReplacedReaders does not hold" in replayed.output


def test_more_reads_at_once_than_slots_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everybody is let in, the check of the bound is what says so."""
    monkeypatch.setattr(load_world.LoadWorld, "has_slot", lambda _: True)

    *_, failed = sweep_loads(range(100))

    assert failed.check == "I5 AdmittedLoads"


def test_a_job_that_never_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for what nobody does is named."""
    monkeypatch.setattr(load_world.LoadWorld, "has_slot", lambda _: False)

    *_, failed = sweep_loads(range(100))

    assert failed.check == "I3 EndedLoads"
    assert "do not come to an end" in failed.what


def test_a_job_can_be_told_without_a_failure() -> None:
    """Its story, and that every promise was kept."""
    done = CliRunner().invoke(app, ["--loads", "4"])

    assert done.exit_code == 0
    assert "wait for the verdict" in done.output
    assert "every promise was kept" in done.output
