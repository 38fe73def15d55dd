# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A sweep finds the first world that breaks a promise, and says how to see it again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.report import is_another_run, replay_command
from lightning_resilience.drill.scenario import Crash, Outage, Scenario
from lightning_resilience.drill.sweep import Tally, run_world, sweep, troubles


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_resilience"
# The quickest bug to find there is: everybody is let in.
FILE = "core/admission.py"
GOOD = "    return collective or record.state != BreakerState.CLOSED.value\n"
BAD = "    return False\n"
WAITING = Scenario(ranks=2, faults=(Outage(at_s=0, for_s=5),))


class Falls(Observer):
    """A check with a bug."""

    def happened(self, now_s: float, what: str) -> None:
        """Divide by zero."""
        raise ZeroDivisionError(f"{now_s} {what}")


def drill(
    *arguments: str, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh interpreter, with the package that is in ``folder``."""
    return subprocess.run(
        [sys.executable, "-P", "-m", f"{PACKAGE}.drill", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(folder), **variables},
    )


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with a copy of the package that has a bug in it."""
    shutil.copytree(
        ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__")
    )
    path = tmp_path / PACKAGE / FILE
    text = path.read_text()
    assert text.count(GOOD) == 1
    path.write_text(text.replace(GOOD, BAD))
    return tmp_path


def test_a_small_sweep_keeps_every_promise() -> None:
    """Twenty worlds run on two cores, and the table counts them."""
    done = drill("--seeds", "20", "--workers", "2")

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^all +20 ", done.stdout, re.MULTILINE)
    assert "Every promise was kept, by seeds 0 to 19." in done.stdout


def test_a_failure_can_be_seen_again(broken: Path) -> None:
    """What a sweep prints for a failure makes the same run fail in the same way, elsewhere."""
    swept = drill("--seeds", "30", "--workers", "2", folder=broken, PYTHONHASHSEED="1")
    seed, digest = re.findall(r"replay +make sim SEED=(\d+) DIGEST=(\w+)", swept.stderr)[0]
    replayed = drill("--seed", seed, "--digest", digest, folder=broken, PYTHONHASHSEED="2")

    assert (swept.returncode, replayed.returncode) == (1, 1)
    assert "check    I5 " in swept.stderr
    assert replayed.stderr == swept.stderr
    assert replayed.stdout.startswith(f"name: random world {seed}\n")


def test_a_run_that_is_another_one_by_now_is_told(broken: Path) -> None:
    """Where the digest is not that of the run, the code has changed, and that is said."""
    swept = drill("--seeds", "30", "--workers", "1", folder=broken)
    seed, digest = re.findall(r"replay +make sim SEED=(\d+) DIGEST=(\w+)", swept.stderr)[0]

    mended = drill("--seed", seed, "--digest", digest)

    assert mended.returncode == 2
    assert "This is not the run that was asked for" in mended.stderr
    assert digest in mended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--digest", "abc"), "--seed"),
        (("--seeds", "0"), "--seeds"),
        (("--workers", "0"), "--workers"),
        (("--seed", "many"), "--seed"),
        (("--scenario", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_a_wrong_question_is_an_error(arguments: tuple[str, ...], said: str) -> None:
    """What makes no sense ends with 2, names what it was, and prints nothing else."""
    done = drill(*arguments)

    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_scenario_file_is_swept_and_replayed(tmp_path: Path) -> None:
    """With a file, its world is what every seed runs."""
    path = tmp_path / "short.yaml"
    path.write_text("name: short\nranks: 3\nfaults:\n  - {kind: outage, at_s: 0, for_s: 3}\n")

    swept = drill("--scenario", str(path), "--seeds", "3", "--workers", "1")
    replayed = drill("--scenario", str(path), "--seed", "2")

    assert (swept.returncode, replayed.returncode) == (0, 0), swept.stderr + replayed.stderr
    assert "outage                   3" in swept.stdout
    assert replayed.stdout.startswith("name: short\n")
    assert "rank 2     started" in replayed.stdout


def test_the_story_changes_nothing() -> None:
    """A run that is told has the digest of the one that was not."""
    quiet, told = run_world(WAITING, 3), run_world(WAITING, 3, tells=True)

    assert (quiet.digest, quiet.entries) == (told.digest, told.entries)
    assert not quiet.story
    assert told.story


def test_who_does_not_end_is_named() -> None:
    """Where the bound of liveness passes, the failure says who lives and since when all is well."""
    late = Scenario(ranks=2, ends_at_s=0.5, faults=(Outage(at_s=0, for_s=5),))

    failure = run_world(late, 0).failure

    assert failure is not None
    assert failure.check.startswith("I3")


def test_an_unexpected_error_is_a_failure() -> None:
    """A bug that raises is reported with its place, not as a traceback of the sweep."""
    run = run_world(WAITING, 0, checks=lambda _world: [Falls()])

    assert run.failure is not None
    assert run.failure.check == "unexpected error: ZeroDivisionError"
    assert "test_sweep.py" in run.failure.what


def test_a_sweep_ends_with_the_first_failure() -> None:
    """The worlds after a failing one are not run."""
    late = Scenario(ranks=1, ends_at_s=0.5, faults=(Outage(at_s=0, for_s=5),))

    runs = list(sweep(range(5), late))

    assert len(runs) == 1
    assert runs[0].failure is not None


def test_a_tally_counts_what_went_wrong() -> None:
    """Each kind of trouble is counted once for each world that had it."""
    twice = Scenario(
        ranks=2,
        faults=(Outage(at_s=0, for_s=1), Outage(at_s=3, for_s=1), Crash(at_s=1, ranks=(0,))),
    )
    tally = Tally()

    for run in (run_world(twice, 0), run_world(WAITING, 0)):
        tally.add(run)

    assert troubles(twice) == {"outage", "crash"}
    assert tally.worlds_with == {"outage": 2, "crash": 1}
    assert (tally.worlds, tally.ranks) == (2, 4)
    assert tally.largest is not None


def test_the_replay_command_names_scenario_seed_and_digest() -> None:
    """It is what a person types."""
    run = run_world(WAITING, 4)

    assert replay_command(run) == f"make sim SEED=4 DIGEST={run.digest}"
    assert replay_command(run, path="a.yaml").startswith("make sim SCENARIO=a.yaml SEED=4 ")
    assert is_another_run(run, run.digest) == ""
    assert is_another_run(run, "") == ""
