# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every promise is kept in the worlds that tell a story: hard ones, and seeds that once failed.

A scenario is a file in ``scenarios/``. Its first line names the seeds that it is run with, and the
lines after it say what happens.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_resilience.drill.report import failure_lines
from lightning_resilience.drill.scenario_file import read_scenario
from lightning_resilience.drill.sweep import run_world


SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.yaml"))


def seeds_of(path: Path) -> range:
    """Return the seeds that a scenario is run with: its first line is ``# seeds: 0-19``."""
    first = path.read_text().splitlines()[0]
    found = re.fullmatch(r"# seeds: (\d+)(?:-(\d+))?", first)
    assert found is not None, f"{path} begins with {first!r} instead of '# seeds: 0-19'"
    return range(int(found[1]), int(found[2] or found[1]) + 1)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_promise_is_kept(path: Path) -> None:
    """No check fails with any of the scenario's seeds."""
    scenario = read_scenario(path)

    failed = [
        run_world(scenario, seed, tells=True)
        for seed in seeds_of(path)
        if run_world(scenario, seed).failure is not None
    ]

    assert not failed, "\n".join(failure_lines(failed[0], path=str(path)))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_says_what_it_is_about(path: Path) -> None:
    """After its seeds it says what happens, in words."""
    lines = path.read_text().splitlines()

    assert lines[1].startswith("# ")
    assert read_scenario(path).name
