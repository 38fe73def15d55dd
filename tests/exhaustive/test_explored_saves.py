# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Small runs that save, in every way that goes wrong once: at each effect, and at each operation.

The checks look after each effect, so a run in which nothing is killed has seen every instant at
which it could have been. Those that are killed show what the next start makes of it.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core import pipeline
from lightning_resilience.core.pipeline import Do, Step
from lightning_resilience.drill.job_kinds import SAVES
from lightning_resilience.drill.save_looks import Format
from lightning_resilience.drill.save_plan import Names, SavePlan, fits


if TYPE_CHECKING:
    from collections.abc import Iterator


# Each is bounded by its plan; on a machine that does much else, seconds become a minute.
pytestmark = pytest.mark.timeout(300)

POINTS = 3
KINDS = [
    (renames, form, names)
    for renames, form, names in product((True, False), Format, Names)
    if fits(names, form, renames=renames)
]


def explored(plan: SavePlan) -> int:
    """Run a plan in every way, and return in how many."""
    count = 0
    for run in SAVES.explore(plan):
        assert not run.check, "\n".join(SAVES.told(run))
        count += 1
    return count


@pytest.mark.parametrize(("renames", "form", "names"), KINDS)
@pytest.mark.parametrize(("trouble", "least"), [("faults", 60), ("crashes", 9)])
def test_one_trouble_at_any_place_breaks_no_promise(
    renames: Any, form: Format, names: Names, trouble: str, least: int
) -> None:
    """Each operation of three save points fails, is lost, dropped or abandoned; or is the last."""
    limits: dict[str, Any] = {trouble: 1}
    plan = SavePlan(renames=renames, form=form, names=names, points=POINTS, **limits)

    assert explored(plan) > least


@pytest.mark.parametrize("names", [Names.NUMBERED, Names.SAME, Names.BOTH])
@pytest.mark.parametrize("renames", [True, False])
def test_what_waits_on_the_node_breaks_no_promise(renames: Any, names: Names) -> None:
    """It is published at once, at the next save point, or by the next start."""
    plan = SavePlan(
        renames=renames, names=names, points=2, attempts=1, faults=1, crashes=1, spools=True
    )

    assert explored(plan) > 200


@pytest.mark.slow
@pytest.mark.parametrize("names", Names)
def test_one_failure_of_the_only_attempt_breaks_no_promise(names: Names) -> None:
    """A save or a link that has failed for good leaves what was there before."""
    plan = SavePlan(names=names, points=POINTS, attempts=1, faults=1, crashes=1)

    assert explored(plan) > 100


@pytest.mark.slow
@pytest.mark.parametrize("renames", [True, False])
def test_an_abandoned_attempt_beside_its_successor_breaks_no_promise(renames: Any) -> None:
    """It goes on by up to two operations, at any later instant."""
    plan = SavePlan(renames=renames, names=Names.SAME, points=2, faults=1, moves=2)

    assert explored(plan) > 1000


def test_the_explorer_sees_what_a_wrong_order_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that takes the checkpoint before its manifest is found without any fault."""

    def wrong() -> Iterator[Do]:
        yield Do(Step.REMOVE)
        yield Do(Step.UNMARK)

    monkeypatch.setattr(pipeline, "removal", wrong)

    runs = list(SAVES.explore(SavePlan(points=POINTS)))

    assert [run.check for run in runs] == ["I9 HonestMarks"]


def test_the_explorer_needs_an_abandoned_attempt_to_find_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody asks before it sends, only what was abandoned shows it."""
    monkeypatch.setattr("lightning_resilience.drill.save_attempt.BEFORE_SENDING", ())
    monkeypatch.setattr(
        "lightning_resilience.drill.save_attempt.blocks", lambda _earlier, _later: False
    )
    names: dict[str, Any] = {"names": Names.SAME, "points": 2}

    quiet = {run.check for run in SAVES.explore(SavePlan(**names, faults=1))}
    moved = {run.check for run in SAVES.explore(SavePlan(**names, faults=1, moves=1))}

    assert quiet == {""}
    assert moved > {""}
