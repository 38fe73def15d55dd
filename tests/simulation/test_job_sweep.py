# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs of every kind: no promise is broken, a seed decides all, and a failure is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from lightning_resilience.core import fetching, node_cache, pipeline, quota, site
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.drill.__main__ import app
from lightning_resilience.drill.job_kinds import KINDS, LOADS, RESTARTS, SAVES, SITES
from lightning_resilience.drill.parallel import jobs_on_cores
from lightning_resilience.drill.restart_plan import FateKind


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.drill.job_sweep import JobKind, JobRun

    Patch = pytest.MonkeyPatch


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is asked of one kind.

    Args:
        kind: The kind.
        jobs: How many of its jobs have to keep every promise.
        least: What they have to add up to at least, by name.
        troubles: Lines that are in some of their stories.
        plant: Puts a bug into the package.
        found_by: The check that finds it.
        told: What is in the story of its fourth job.
    """

    kind: JobKind[Any, Any]
    jobs: int
    least: dict[str, int]
    troubles: tuple[str, ...]
    plant: Callable[[Patch], None]
    found_by: str
    told: str


def removed_in_the_wrong_order(patch: Patch) -> None:
    """A checkpoint is removed before its manifest."""

    def wrong() -> Iterator[pipeline.Do]:
        yield pipeline.Do(pipeline.Step.REMOVE)
        yield pipeline.Do(pipeline.Step.UNMARK)

    patch.setattr(pipeline, "removal", wrong)


def loaded_without_a_look(patch: Patch) -> None:
    """What is in the cache is used as it is."""

    def impatient(*, is_there: bool, has_lock: bool, **_: object) -> node_cache.Step:
        if is_there:
            return node_cache.Step.USE
        return node_cache.Step.READ if has_lock else node_cache.Step.WAIT

    patch.setattr(fetching, "next_step", impatient)


def charged_by_each(patch: Patch) -> None:
    """Nobody looks whether a failure was charged."""
    patch.setattr(quota, "charged", lambda *_: False)


def called_without_a_look(patch: Patch) -> None:
    """Nobody asks the site before a call."""
    patch.setattr(site, "needs_look", lambda *_, **__: False)


CASES = (
    Case(
        kind=SAVES,
        jobs=400,
        least={"effects": 5_000},
        troubles=(
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
        ),
        plant=removed_in_the_wrong_order,
        found_by="I9 HonestMarks",
        told="step 1",
    ),
    Case(
        kind=LOADS,
        jobs=300,
        least={"steps": 30_000},
        troubles=(
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
        ),
        plant=loaded_without_a_look,
        found_by="I3 ReplacedReaders",
        told="wait for the verdict",
    ),
    Case(
        kind=RESTARTS,
        jobs=150,
        least={"starts": 300},
        troubles=(
            "* outage",
            "* crash",
            "* pause",
            "* store_partition",
            "* store_gone",
            "has lost everything",
            "is launched anew",
            "is late in the round",
            "given up",
            *(f"nodes: {kind.value}" for kind in FateKind),
        ),
        plant=charged_by_each,
        found_by="I4 OneCharge",
        told="is at: gate",
    ),
    Case(
        kind=SITES,
        jobs=150,
        least={"jobs": 300, "entries": 10_000},
        troubles=(
            "outage begins",
            "crash begins",
            "pause begins",
            "storage_partition begins",
            "the site's store goes",
            "has lost everything",
            "@site', epoch=2, previous='closed', state='open'",
            "the circuit of the site is",
            "SiteLost",
            "SiteReturned",
            "the site's probe succeeded",
            "the site's probe failed",
            "the policy is not to wait",
        ),
        plant=called_without_a_look,
        found_by="I11 HeldBySite",
        told="begins call 1",
    ),
)
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.name)


@cache
def swept(kind: JobKind[Any, Any], jobs: int) -> tuple[JobRun[Any], ...]:
    """Return how the first jobs of a kind go; those who look at them share them."""
    return tuple(kind.sweep(range(jobs)))


@pytest.fixture
def runs(case: Case) -> tuple[JobRun[Any], ...]:
    """How the jobs of a kind go."""
    return swept(case.kind, case.jobs)


def test_every_kind_is_asked() -> None:
    """What the sweep runs is looked at here."""
    assert tuple(case.kind for case in CASES) == KINDS


@EACH
def test_no_promise_is_broken_in_many_jobs(case: Case, runs: tuple[JobRun[Any], ...]) -> None:
    """With everything that goes wrong, several things of it in the same job."""
    assert [case.kind.told(run) for run in runs if run.check] == []
    assert len(runs) == case.jobs
    for name, least in case.least.items():
        assert sum(run.counts[name] for run in runs) > least


@EACH
def test_the_jobs_are_not_quiet(case: Case, runs: tuple[JobRun[Any], ...]) -> None:
    """Each kind of trouble, and each way out of it, is in some of them."""
    stories = "\n".join("\n".join(run.story) for run in runs)

    assert [what for what in case.troubles if what not in stories] == []


@EACH
def test_a_seed_decides_all_of_a_job(case: Case, runs: tuple[JobRun[Any], ...]) -> None:
    """The same seed has the same story, another one has another."""
    assert case.kind.of_seed(7) == runs[7]
    assert runs[7].story != runs[8].story


@EACH
def test_a_failure_ends_the_sweep_and_says_how_to_see_it_again(
    case: Case, monkeypatch: Patch
) -> None:
    """The command that is printed tells the same story, and ends with 1."""
    kind = case.kind
    case.plant(monkeypatch)

    *before, failed = kind.sweep(range(100))
    replayed = CliRunner().invoke(app, [f"--{kind.name}", str(failed.seed)])

    assert not any(run.check for run in before)
    assert failed.check == case.found_by
    assert kind.told(failed)[-1].endswith(f"make sim {kind.name.upper()}={failed.seed}")
    assert replayed.exit_code == 1
    assert f"{case.found_by} does not hold" in replayed.output


@EACH
def test_a_job_can_be_told_without_a_failure(case: Case) -> None:
    """Its story, and that every promise was kept."""
    done = CliRunner().invoke(app, [f"--{case.kind.name}", "4"])

    assert done.exit_code == 0
    assert case.told in done.output
    assert "every promise was kept" in done.output


@EACH
def test_jobs_on_several_cores_are_those_on_one(case: Case, runs: tuple[JobRun[Any], ...]) -> None:
    """In the order of their seeds, without their stories."""
    jobs = range(12 * case.kind.per_seed)
    alone = [replace(run, story=()) for run in runs[: len(jobs)]]

    assert list(jobs_on_cores(case.kind, jobs, workers=2)) == alone
    assert list(jobs_on_cores(case.kind, jobs, workers=1)) == alone


def test_agents_leave_with_every_status_in_some_job() -> None:
    """Done, given up for each of the reasons that there are, and for want of what they need."""
    statuses = {status for run in swept(RESTARTS, 150) for status in run.statuses}

    assert {ExitCode.DONE, *(78, 86, 160)} <= statuses
