# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``make mutants``: plant one bug after the other, and see that the simulated worlds find each.

Each mutant gets a copy of the package and an interpreter of its own. Worlds are run until a check
of the promise that the bug breaks has seen it, or until there are no more: then the mutant has
survived, and the checks or the worlds are what has to be mended.

Ends with 0 where every mutant was found, 1 where one has survived, and 2 where a name is unknown
or the package does not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_resilience.drill.job_kinds import KINDS
from tests.simulation.mutants import MUTANTS, Mutant


if TYPE_CHECKING:
    from collections.abc import Sequence


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = ROOT / "lightning_resilience"
SCENARIOS = HERE / "scenarios"
# More worlds than `make sim` runs: what a night finds, a mutant may need.
WORLDS = 3000
SEEDS_PER_SCENARIO = 20
# The largest world takes three seconds.
LONGEST_WORLD_S = 30.0
# In which worlds a mutant is hunted: in those of jobs where none of these holds.
NO_KIND = {f"of_{kind.name}": False for kind in KINDS}
CRASHED = "unexpected error"
NEVER_ENDS = f"{CRASHED}: it never ends"


class BrokenPackageError(Exception):
    """The package cannot even be run, so that nothing is known about a mutant of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunt:
    """What came of one mutant.

    Args:
        mutant: The mutant.
        check: The check that has found it; empty where none has.
        what: What that said.
        path: The scenario file that it was found with, or empty for a random world.
        seed: The seed of that world.
        ran: Worlds that it took.
        others: How often other checks have failed before.
    """

    mutant: Mutant
    check: str = ""
    what: str = ""
    path: str = ""
    seed: int = 0
    ran: int = 0
    others: dict[str, int] = field(default_factory=dict)

    @property
    def has_survived(self) -> bool:
        """True where nothing has found it."""
        return not self.check

    def row(self) -> str:
        """Return it as a line of the table."""
        where = f"seed {self.seed}"
        if self.path:
            where += f" of {Path(self.path).stem}"
        others = ", ".join(f"{check} ({times})" for check, times in self.others.items())
        found = self.check or "SURVIVED"
        line = f"{self.mutant.name:<60} {found:<18} {self.ran:>6}  {where}"
        return f"{line}  also: {others}" if others else line


def patched(text: str, old: str, new: str) -> str:
    """Return a text with one replacement made.

    Raises:
        ValueError: What is to be replaced occurs never, or more than once.
    """
    times = text.count(old)
    if times != 1:
        message = f"it occurs {times} times instead of once: {old!r}"
        raise ValueError(message)
    return text.replace(old, new)


def plant(mutant: Mutant, folder: Path) -> None:
    """Make a copy of the package with one bug in it.

    Args:
        mutant: The bug.
        folder: Where the copy goes.
    """
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in mutant.edits:
        path = copy / edit.file
        path.write_text(patched(path.read_text(), edit.old, edit.new))


def run_worlds(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Run worlds with the package that is in a folder, and return what was found.

    Args:
        folder: Its parent.
        task: As ``hunt.py`` takes it.

    Raises:
        BrokenPackageError: The interpreter ends with an error.
    """
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "hunt.py")],
        input=json.dumps({"longest_s": LONGEST_WORLD_S, **task}),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.stderr.startswith("Timeout"):
        return {"check": NEVER_ENDS, "what": f"a world takes more than {LONGEST_WORLD_S:g} s"}
    if done.returncode:
        raise BrokenPackageError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fails_without(found: dict[str, Any], **kind: bool) -> bool:
    """Tell whether the package itself, with no bug in it, fails in the world of a find."""
    task = {
        **NO_KIND,
        **kind,
        "scenarios": [found["path"]] if found["path"] else [],
        "seeds": [found["seed"]] if found["path"] else [],
        "worlds": [] if found["path"] else [found["seed"]],
        "spared": [],
        "found_by": [""],
    }
    return bool(run_worlds(ROOT, task)["check"])


def hunt(mutant: Mutant, *, worlds: int = WORLDS) -> Hunt:
    """Plant a bug and run worlds until a check has found it.

    A world in which the package fails without the bug says nothing about it, and is passed over.

    Args:
        mutant: The bug.
        worlds: How many random worlds to run at most.

    Raises:
        BrokenPackageError: The package does not run at all.
    """
    spared: list[tuple[str, int]] = []
    kind = {name: getattr(mutant, name) for name in NO_KIND}
    task = {
        **kind,
        "scenarios": [str(SCENARIOS / f"{name}.yaml") for name in mutant.scenarios],
        "seeds": list(range(SEEDS_PER_SCENARIO)),
        "worlds": list(range(worlds)),
        "spared": spared,
        "found_by": [*mutant.found_by, CRASHED],
    }
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        plant(mutant, Path(folder))
        while True:
            found = run_worlds(Path(folder), task)
            if "path" not in found or not fails_without(found, **kind):
                return Hunt(mutant=mutant, **found)
            spared.append((found["path"], found["seed"]))


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose names contain one of some texts; all where there is none.

    Raises:
        ValueError: A text is in no name.
    """
    for name in names:
        if not any(name in mutant.name for mutant in MUTANTS):
            message = f"no mutant's name contains {name!r}; they are in {HERE / 'mutants.py'}"
            raise ValueError(message)
    return [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt the mutants, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").strip())
    parser.add_argument("names", nargs="*", help="hunt only those whose names contain this")
    parser.add_argument("--worlds", type=int, default=WORLDS, help="random worlds for each")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    try:
        mutants = chosen(options.names)
    except ValueError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a program's own words
        return 2
    print(f"{'mutant':<60} {'found by':<18} {'worlds':>6}  where")  # noqa: T201 - as above
    try:
        survivors = _hunt_all(mutants, workers=options.workers, worlds=options.worlds)
    except BrokenPackageError as error:
        print(f"The package does not run:\n{error}", file=sys.stderr)  # noqa: T201 - as above
        return 2
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} were found.")  # noqa: T201 - as above
    for mutant in survivors:
        print(f"SURVIVED: {mutant.name} ({mutant.story})", file=sys.stderr)  # noqa: T201 - as above
    return 1 if survivors else 0


def _hunt_all(mutants: Sequence[Mutant], *, workers: int, worlds: int) -> list[Mutant]:
    survivors = []
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(lambda mutant: hunt(mutant, worlds=worlds), mutants):
            print(found.row(), flush=True)  # noqa: T201 - as above
            if found.has_survived:
                survivors.append(found.mutant)
    return survivors


if __name__ == "__main__":
    sys.exit(main())
