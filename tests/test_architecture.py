# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The rules of the code that a machine can check: imports, sizes, names, the single clock."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_resilience"
CORE = PACKAGE / "core"
ADAPTERS = PACKAGE / "adapters"
# The only file that reads the clock and rolls dice.
VIRTUAL = PACKAGE / "drill" / "virtual.py"
SYSTEM = PACKAGE / "runtime" / "system.py"
FOLDERS = [ROOT / name for name in ("lightning_resilience", "tests", "examples", "benchmarks")]

LONGEST_FILE = 400
LONGEST_FUNCTION = 50
LONGEST_FUNCTION_IN_CORE = 40
HEADER = (
    "# SPDX-FileCopyrightText: The lightning-resilience authors",
    "# SPDX-License-Identifier: Apache-2.0",
)
EMPTY_NAMES = {"common", "helpers", "manager", "misc", "utils"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    def __str__(self) -> str:
        return self.path.relative_to(ROOT).as_posix()


@cache
def sources() -> tuple[Source, ...]:
    """Return every Python file of the repository."""
    paths = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return tuple(
        Source(path=path, text=text, tree=ast.parse(text))
        for path, text in zip(paths, texts, strict=True)
    )


def within(folder: Path) -> list[Source]:
    """Return the files below a folder."""
    found = [source for source in sources() if source.path.is_relative_to(folder)]
    assert found, f"no files in {folder}"
    return found


def functions(source: Source) -> list[Function]:
    """Return all functions of a file, nested ones included."""
    return [node for node in ast.walk(source.tree) if isinstance(node, Function)]


def length_of(function: Function) -> int:
    """Return a function's lines, without its docstring: that is text, not code."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def names_bound_to(source: Source, module: str) -> dict[str, str]:
    """Return the local names for a module and for what is imported from it."""
    bound = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == module:
                    bound[alias.asname or alias.name] = ""
        elif isinstance(node, ast.ImportFrom) and node.module == module:
            bound.update({alias.asname or alias.name: alias.name for alias in node.names})
    return bound


def calls_of(source: Source, module: str) -> list[tuple[int, str]]:
    """Return line and name of every call of something that belongs to a module."""
    bound = names_bound_to(source, module)
    found = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            if bound.get(called.value.id) == "":
                found.append((node.lineno, called.attr))
        elif isinstance(called, ast.Name) and bound.get(called.id):
            found.append((node.lineno, bound[called.id]))
    return found


def test_imports_keep_the_contracts() -> None:
    """Every import contract of pyproject.toml is kept."""
    script = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run(
        [script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_files_are_short() -> None:
    """No file of the package is longer than 400 lines."""
    lengths = {str(source): len(source.text.splitlines()) for source in within(PACKAGE)}

    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_functions_are_short() -> None:
    """No function of the package has more than 50 lines besides its docstring, in core 40."""
    too_long = [
        f"{source}:{function.lineno} {function.name} has {length_of(function)} lines"
        for source in within(PACKAGE)
        for function in functions(source)
        if length_of(function)
        > (LONGEST_FUNCTION_IN_CORE if source.path.is_relative_to(CORE) else LONGEST_FUNCTION)
    ]

    assert too_long == []


def test_there_is_one_clock() -> None:
    """Only ``runtime/system.py`` calls anything of the module ``time``."""
    calls = [
        f"{source}:{line} time.{name}"
        for source in within(PACKAGE)
        if source.path != SYSTEM
        for line, name in calls_of(source, "time")
    ]

    assert calls == []


def test_there_is_one_source_of_chance() -> None:
    """A process's is built in ``runtime/system.py``, a simulated world's in ``drill/virtual.py``.

    Nothing uses the module-level one.
    """
    calls = [
        f"{source}:{line} {module}.{name}"
        for source in within(PACKAGE)
        if source.path not in {SYSTEM, VIRTUAL}
        for module in ("random", "numpy.random")
        for line, name in calls_of(source, module)
    ]

    assert calls == []


def test_the_clock_rule_sees_every_way_to_call() -> None:
    """The rule above is not blind: it sees plain, renamed and member imports."""
    text = (
        "import time\nimport time as t\nfrom time import sleep as nap\n"
        "time.monotonic()\nt.time()\nnap(1)\nother.sleep(1)\n"
    )
    source = Source(path=SYSTEM, text=text, tree=ast.parse(text))

    assert calls_of(source, "time") == [(4, "monotonic"), (5, "time"), (6, "sleep")]


def test_adapters_compare_with_no_numbers_but_0_and_1() -> None:
    """A threshold is a decision, and decisions are made in core."""
    literals = [
        f"{source}:{node.lineno} {literal.value!r}"
        for source in within(ADAPTERS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare)
        for literal in [node.left, *node.comparators]
        if isinstance(literal, ast.Constant)
        and isinstance(literal.value, int | float)
        and literal.value not in {0, 1}
    ]

    assert literals == []


def test_files_say_what_they_are() -> None:
    """Every Python file opens with the licence header, and with a docstring on line 3."""
    nameless = [
        str(source)
        for source in sources()
        if tuple(source.text.splitlines()[:2]) != HEADER
        or not source.text.splitlines()[2].startswith(('"""', 'r"""'))
        or not ast.get_docstring(source.tree)
    ]

    assert nameless == []


def test_no_module_has_an_empty_name() -> None:
    """A module's name says what is in it."""
    empty = [str(source) for source in sources() if source.path.stem in EMPTY_NAMES]

    assert empty == []


def test_the_environment_is_read_in_one_place() -> None:
    """Below the adapters, only ``config.py`` and ``topology.py`` read environment variables."""
    readers = [
        str(source)
        for source in within(PACKAGE)
        if not source.path.is_relative_to(ADAPTERS) and "environ" in names_of(source)
    ]

    assert readers == ["lightning_resilience/config.py", "lightning_resilience/topology.py"]


def names_of(source: Source) -> set[str]:
    """Return every attribute and name that a file uses."""
    nodes = list(ast.walk(source.tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.parametrize("name", ["core", "protocols"])
def test_pure_folders_hold_no_type_ignores(name: str) -> None:
    """What decides is fully typed."""
    ignores = [str(source) for source in within(PACKAGE / name) if "type: ignore" in source.text]

    assert ignores == []
