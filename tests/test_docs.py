# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents show is true: code runs, links lead somewhere, tables are those of the code.

A fenced ``python`` block is run; the blocks of one page run one after the other in one process,
in an empty folder. A block that cannot run alone has the word ``compile`` after its language, and
must still compile.

A table between ``<!-- name:begin -->`` and ``<!-- name:end -->`` is compared with the code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest
from markdown_it import MarkdownIt

import lightning_resilience
from lightning_resilience import (
    AdmissionConfig,
    BreakerConfig,
    BudgetConfig,
    Guard,
    ResilienceCallback,
    ResilientCheckpointIO,
    ResilientReader,
    ResilientWriter,
    RetryPolicy,
    config,
    errors,
)
from lightning_resilience.adapters.guard_options import OPTIONS as OPTIONS_OF_GUARDS, GuardOptions
from lightning_resilience.core import events, keys as key_names
from lightning_resilience.core.breaker import BreakerState
from lightning_resilience.core.outcome import COUNTS_FOR_BREAKER, SEVERITY
from lightning_resilience.core.verification import State
from lightning_resilience.drill.checks import all_checks
from lightning_resilience.drill.checks_gate import RESTART_CHECKS
from lightning_resilience.drill.checks_loads import LOAD_CHECKS
from lightning_resilience.drill.checks_saves import SAVE_CHECKS
from lightning_resilience.drill.checks_site import SITE_CHECKS
from lightning_resilience.drill.facts import Check
from lightning_resilience.drill.scenario import Scenario
from lightning_resilience.drill.scenario_fields import field_rows
from lightning_resilience.drill.scenario_file import parse_scenario
from lightning_resilience.drill.world import World
from lightning_resilience.protocols import effects
from lightning_resilience.topology import job_end_s, job_to_requeue, kill_delay_s, read_topology


if TYPE_CHECKING:
    from markdown_it.token import Token


ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lightning_resilience"
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CORRECTNESS = ROOT / "docs" / "correctness.md"
DRILL = ROOT / "docs" / "drill.md"
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OPTIONS = re.compile(r"<!-- options:begin -->\n(.*?)\n?<!-- options:end -->", flags=re.DOTALL)


def name_of(page: Path) -> str:
    """Return a page's path within the repository."""
    return page.relative_to(ROOT).as_posix()


def tokens_of(page: Path) -> list[Token]:
    """Return the parsed page, tables included."""
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))


def python_blocks(page: Path, *, compiled_only: bool) -> list[Token]:
    """Return the fenced Python blocks of a page that are only compiled, or those that are run."""
    infos = [(token, token.info.split()) for token in tokens_of(page) if token.type == "fence"]
    return [
        token
        for token, words in infos
        if words[:1] == ["python"] and ("compile" in words[1:]) is compiled_only
    ]


def script_of(page: Path) -> str:
    """Return the blocks that are run, on the very lines on which the page has them."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in python_blocks(page, compiled_only=False):
        assert block.map is not None
        content = block.content.splitlines()
        lines[block.map[0] + 1 : block.map[0] + 1 + len(content)] = content
    return "\n".join(lines)


def links_of(page: Path) -> list[str]:
    """Return the targets of all links and pictures of a page."""
    inline = [child for token in tokens_of(page) for child in token.children or []]
    targets = [str(child.attrGet("href") or child.attrGet("src") or "") for child in inline]
    return [target for target in targets if target]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that a page's headings get when it is shown."""
    tokens = tokens_of(page)
    headings = [
        following.content
        for token, following in itertools.pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if script_of(page).strip()], ids=name_of)
def test_fenced_python_runs(page: Path, tmp_path: Path) -> None:
    """The Python blocks of a page run in their order in an empty folder."""
    code = f"exec(compile({script_of(page)!r}, {str(page)!r}, 'exec'), {{'__name__': '__main__'}})"

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fenced_python_compiles(page: Path) -> None:
    """A block that is marked as compiled only is at least Python."""
    for block in python_blocks(page, compiled_only=True):
        compile(block.content, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    """A link within the repository leads to a file, and its anchor to a heading."""
    broken = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        anchored = not anchor or target.suffix != ".md" or anchor in anchors_of(target)
        if not target.exists() or not anchored:
            broken.append(link)

    assert broken == []


def test_the_readme_has_the_option_table_of_the_code() -> None:
    """The README's table is what ``lightning-resilience options`` prints."""
    found = OPTIONS.findall(README.read_text(encoding="utf-8"))

    assert found == [config.options_markdown()]


# Tables of the code ---------------------------------------------------------------------------


def table_of(page: Path, name: str) -> list[list[str]]:
    """Return the cells of the table between the markers of ``name``, without its heading."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, flags=re.DOTALL)
    assert len(found) == 1, f"{name_of(page)} has {len(found)} tables named {name}"
    rows = [line for line in found[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def names_in(cell: str) -> tuple[str, ...]:
    """Return everything that a cell has in backticks."""
    return tuple(re.findall(r"`([^`]+)`", cell))


def column(page: Path, name: str) -> list[str]:
    """Return the names in the first column of a table."""
    return [names_in(row[0])[0] for row in table_of(page, name)]


def fields_by_name(name: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the second column of a table of the reference, by those of the first."""
    return {names_in(row[0])[0]: names_in(row[1]) for row in table_of(REFERENCE, name)}


def docstring_of(path: Path) -> str:
    """Return the docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def holds_code(path: Path) -> bool:
    """Tell whether a file has more than a docstring."""
    return len(ast.parse(path.read_text(encoding="utf-8")).body) > 1


def test_the_reading_map_lists_the_files_of_the_package() -> None:
    """Every file with code is in the reading map, with the first line of its docstring."""
    expected = [
        [
            f"[`{name}`](../lightning_resilience/{name})",
            docstring_of(path).splitlines()[0].replace("``", "`").rstrip("."),
        ]
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in [path.relative_to(PACKAGE).as_posix()]
        if holds_code(path)
    ]

    assert table_of(ARCHITECTURE, "files") == expected


def test_the_architecture_lists_the_effects() -> None:
    """Every effect that a protocol may yield is explained, in the order of their union."""
    assert column(ARCHITECTURE, "effects") == [kind.__name__ for kind in get_args(effects.Effect)]


def test_the_reference_lists_the_states_of_a_checkpoint() -> None:
    """The table of states has the command's, in their order."""
    assert column(REFERENCE, "checkpoint-states") == [state.value for state in State]


def test_the_readme_lists_the_states_of_the_breaker() -> None:
    """Every state of the breaker has its line."""
    assert column(README, "states") == [state.value for state in BreakerState]


def test_the_reference_lists_the_public_names() -> None:
    """Every public name is listed, and nothing else."""
    assert column(REFERENCE, "names") == lightning_resilience.__all__


def test_the_reference_lists_the_arguments_of_the_callback() -> None:
    """Every argument of the callback is listed with its default."""
    parameters = inspect.signature(ResilienceCallback).parameters.values()

    listed = [(names_in(row[0])[0], row[1]) for row in table_of(REFERENCE, "arguments")]

    assert listed == [
        (parameter.name, str(parameter.default))
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def test_the_reference_lists_the_arguments_of_the_checkpoint_io() -> None:
    """Every argument of the ``CheckpointIO`` is listed with its default."""
    parameters = inspect.signature(ResilientCheckpointIO).parameters.values()

    listed = [(names_in(row[0])[0], row[1]) for row in table_of(REFERENCE, "io-arguments")]

    assert listed == [
        (parameter.name, str(parameter.default))
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize(
    ("table", "kind"),
    [("writer-arguments", ResilientWriter), ("reader-arguments", ResilientReader)],
)
def test_the_reference_lists_the_arguments_for_torchs_checkpoints(table: str, kind: Any) -> None:
    """Every argument of the writer and the reader is listed with its default."""
    parameters = inspect.signature(kind).parameters.values()

    listed = [(names_in(row[0])[0], row[1]) for row in table_of(REFERENCE, table)]

    assert listed == [
        (parameter.name, "" if parameter.default is parameter.empty else str(parameter.default))
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def test_the_reference_lists_the_arguments_of_the_guard() -> None:
    """Every argument of the guard is listed with its default."""
    parameters = inspect.signature(Guard).parameters.values()

    listed = [(names_in(row[0])[0], row[1]) for row in table_of(REFERENCE, "guard-arguments")]

    assert listed == [
        (parameter.name, "" if parameter.default is parameter.empty else str(parameter.default))
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def test_the_reference_lists_the_options_of_resilient_urls() -> None:
    """Every option is listed with its default; a config object's are in the option table."""
    kinds = (RetryPolicy, BudgetConfig, BreakerConfig, AdmissionConfig)
    shown: dict[object, str] = {kind(): "its defaults" for kind in kinds}
    values = {name: getattr(GuardOptions(), name) for name in OPTIONS_OF_GUARDS}

    listed = {names_in(row[0])[0]: row[1] for row in table_of(REFERENCE, "guard")}

    assert listed == {name: shown.get(value, str(value)) for name, value in values.items()}


def test_the_reference_lists_every_event_with_its_keys() -> None:
    """Every event class is listed, with its fields in their order."""
    kinds: list[type[Any]] = events.Event.__subclasses__()

    assert fields_by_name("events") == {
        kind.__name__: tuple(field.name for field in dataclasses.fields(kind)) for kind in kinds
    }


class Asked(dict[str, str]):
    """An environment that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Note the name."""
        self.names.add(name)
        return super().get(name, default)


def test_the_reference_lists_the_environment_variables() -> None:
    """Every variable that is read is listed, and nothing else."""
    environ = Asked()

    config.read_environment(environ)
    read_topology(environ)
    job_end_s(environ)
    kill_delay_s(environ)
    job_to_requeue(environ)

    listed = [name for row in table_of(REFERENCE, "environment") for name in names_in(row[0])]
    assert sorted(listed) == sorted(environ.names)


def test_the_reference_lists_the_failure_classes() -> None:
    """Every class is listed, most severe first, and whether the breaker counts it."""
    listed = [(names_in(row[0])[0], row[1]) for row in table_of(REFERENCE, "failures")]

    assert listed == [
        (failure.value, "yes" if failure in COUNTS_FOR_BREAKER else "no") for failure in SEVERITY
    ]


def test_the_reference_lists_the_errors_with_their_bases() -> None:
    """Every error class is listed with the classes that it is derived from."""
    listed = fields_by_name("errors")

    assert listed == {
        name: tuple(base.__name__ for base in getattr(errors, name).__bases__)
        for name in errors.__all__
    }


def test_the_reference_lists_the_keys_of_the_store() -> None:
    """The keys are those that ``core.keys`` lists, and those are the ones that are used."""
    keys = column(REFERENCE, "keys")
    of_names = re.findall(r"^``(lr/\S+)``", key_names.__doc__ or "", flags=re.MULTILINE)
    used = {
        part
        for path in (PACKAGE / "protocols").glob("*.py")
        for part in re.findall(r"\.joint\(\s*\"(\w+)\"", path.read_text(encoding="utf-8"))
    }

    assert keys == of_names
    assert used <= {key.split("/")[3] for key in keys if "/i<inc>/" in key}


def test_the_reference_lists_the_records_with_their_fields() -> None:
    """Every record is listed, with its fields in their order."""
    modules = [
        importlib.import_module(f"lightning_resilience.core.{path.stem}")
        for path in sorted((PACKAGE / "core").glob("[!_]*.py"))
    ]
    kinds = [
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
        if value.__module__ == module.__name__ and name in module.__all__ and name != "Keys"
    ]

    listed = fields_by_name("records") | fields_by_name("manifests")
    assert listed == {kind.__name__: kind.__struct_fields__ for kind in kinds}


def test_the_drill_page_lists_the_fields_of_a_scenario() -> None:
    """Every field and every fault's is listed with unit, range and default, and with a reason."""
    listed = [*table_of(DRILL, "fields"), *table_of(DRILL, "faults")]

    rows = field_rows()
    assert sorted(row[:4] for row in listed) == sorted(
        [f"`{row.name}`", row.unit, row.allowed, row.default] for row in rows
    )
    assert all(len(row) == 5 and row[4] for row in listed)


def test_the_drill_page_shows_a_scenario_that_can_be_read() -> None:
    """A fenced YAML block is a scenario file, and not that of the defaults."""
    blocks = [token for token in tokens_of(DRILL) if token.type == "fence" and token.info == "yaml"]

    read = [parse_scenario(block.content, source=name_of(DRILL)) for block in blocks]

    assert len(read) == 1
    assert len({type(fault) for fault in read[0].faults}) == 4


def test_the_correctness_page_names_every_check_at_its_promise() -> None:
    """Every promise has its line, with the checks that hold it, and nothing else."""
    expected: dict[str, set[str]] = {f"I{number}": set() for number in range(1, 12)}
    for check in all_checks(World(Scenario(), 0)):
        if isinstance(check, Check):
            expected.setdefault(check.promise, set()).add(type(check).__name__)
    for promise, names in (
        *SAVE_CHECKS.items(),
        *LOAD_CHECKS.items(),
        *RESTART_CHECKS.items(),
        *SITE_CHECKS.items(),
    ):
        expected[promise].update(names)

    rows = table_of(CORRECTNESS, "promises")
    assert [names_in(row[0])[0] for row in rows[:11]] == list(expected)[:11]
    assert {names_in(row[0])[0]: set(names_in(row[2])) for row in rows} == expected
    assert all(row[1] and row[2] for row in rows)


def test_the_correctness_page_has_a_section_for_every_promise() -> None:
    """Each promise is explained under a heading that begins with its name."""
    headings = re.findall(r"^## (I\d+):", CORRECTNESS.read_text(encoding="utf-8"), re.MULTILINE)

    assert headings == [f"I{number}" for number in range(1, 12)]
