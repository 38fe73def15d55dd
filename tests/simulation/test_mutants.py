# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The planted bugs are what they say, and a few of them are found.

Five that show at once are hunted here. That every one is found is what ``make mutants`` says.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation import mutants, mutate


CHEAP = (
    "collective calls pass while the circuit is closed",
    "no retry is charged",
    "a worker at work is taken for lost",
    "each agent charges for itself",
    "who waits in vain gives up at once",
)
ENOUGH = 30


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_compiles(mutant: Any) -> None:
    """Each replacement finds its text exactly once, changes it, and leaves Python."""
    texts: dict[str, str] = {}

    for edit in mutant.edits:
        before = texts.get(edit.file) or (mutate.PACKAGE / edit.file).read_text()
        texts[edit.file] = mutate.patched(before, edit.old, edit.new)

    assert texts
    for file, text in texts.items():
        assert text != (mutate.PACKAGE / file).read_text()
        compile(text, file, "exec")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_names_what_finds_it(mutant: Any) -> None:
    """It says what somebody has thought, which promise it breaks, and scenarios that are there."""
    assert mutant.story
    assert mutant.found_by
    assert all(found_by[0] == "I" and found_by[1:].isdigit() for found_by in mutant.found_by)
    assert all((mutate.SCENARIOS / f"{name}.yaml").exists() for name in mutant.scenarios)


def test_names_are_unique_and_there_are_enough() -> None:
    """A table row belongs to one mutant."""
    names = [mutant.name for mutant in mutants.MUTANTS]

    assert len(set(names)) == len(names)
    assert len(names) >= ENOUGH


def test_what_is_replaced_twice_is_refused() -> None:
    """A patch that is not exact is an error, not a guess."""
    with pytest.raises(ValueError, match="2 times"):
        mutate.patched("a a", "a", "b")


@pytest.mark.parametrize("name", CHEAP)
def test_a_mutant_is_found_and_the_package_is_not(name: str) -> None:
    """The worlds that find a bug find nothing without it."""
    (mutant,) = mutate.chosen([name])

    found = mutate.hunt(mutant, worlds=60)

    assert found.check.startswith(mutant.found_by), found.row()
    assert not mutate.fails_without(
        {"path": found.path, "seed": found.seed},
        of_restarts=mutant.of_restarts,
        of_sites=mutant.of_sites,
    )


def test_a_survivor_is_told() -> None:
    """A bug that no world shows ends the hunt with a row that says so."""
    harmless = mutants.Mutant(
        name="a comment",
        story="nothing",
        edits=(
            mutants.Edit(file="drill/__init__.py", old="Nothing here is", new="Nothing there is"),
        ),
        found_by=("I1",),
    )

    found = mutate.hunt(harmless, worlds=2)

    assert found.has_survived
    assert "SURVIVED" in found.row()


def test_an_unknown_name_is_refused() -> None:
    """Who asks for a mutant that is not there is told where they are."""
    with pytest.raises(ValueError, match=r"mutants\.py"):
        mutate.chosen(["no such thing"])
    assert mutate.main(["no such thing"]) == 2


def test_a_package_that_does_not_run_is_no_find() -> None:
    """A syntax error is not found by a check, so it is not counted as found."""
    nonsense = mutants.Mutant(
        name="nonsense",
        story="nothing",
        edits=(mutants.Edit(file="drill/sweep.py", old="def sweep(", new="def sweep)"),),
        found_by=("I1",),
    )

    with pytest.raises(mutate.BrokenPackageError, match="SyntaxError"):
        mutate.hunt(nonsense, worlds=1)
