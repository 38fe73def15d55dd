# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The public names: complete, sorted, resolvable, and loaded only when they are used."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_resilience


HEAVY = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "fsspec", "numpy")
PACKAGE = Path(lightning_resilience.__file__).parent


def modules_after(code: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter has loaded after ``code``."""
    script = f"import json, sys\n{code}\nprint()\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def run_script(arguments: str) -> str:
    """Return code that runs the command line in this interpreter and survives its exit."""
    return (
        "from lightning_resilience.cli.main import app\n"
        "try:\n"
        f"    app({arguments.split()!r}, prog_name='lightning-resilience')\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import lightning_resilience",
        "from lightning_resilience import BreakerConfig, ConfigError, RetryPolicy",
        run_script("--help"),
        run_script("--version"),
        run_script("options"),
    ],
    ids=["import", "configs", "help", "version", "options"],
)
def test_heavy_libraries_stay_out(code: str) -> None:
    """Neither the package, its configs nor the command line loads torch, Lightning or fsspec."""
    loaded = modules_after(code)

    assert "lightning_resilience" in loaded
    assert not loaded.intersection(HEAVY)


def test_a_guard_loads_no_more_than_it_needs() -> None:
    """Its class comes without any framework, and without the protocols that its calls need."""
    loaded = modules_after("from lightning_resilience import Guard\nGuard('x')")

    assert "lightning_resilience.adapters.guard" in loaded
    assert not loaded.intersection((*HEAVY, "asyncio", "typer"))
    assert "lightning_resilience.runtime.driver" not in loaded


def test_the_import_is_cheap() -> None:
    """Importing the package costs under 50 ms more than importing msgspec, at the best of five."""
    code = (
        "import msgspec, time\n"
        "start_s = time.perf_counter()\n"
        "import lightning_resilience\n"
        "print(time.perf_counter() - start_s)"
    )

    costs_s = [
        float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(5)
    ]

    assert min(costs_s) < 0.05, costs_s


def test_the_list_of_names_is_sorted_and_has_no_doubles() -> None:
    """``__all__`` is in ASCII order, each name once."""
    names = lightning_resilience.__all__

    assert list(names) == sorted(set(names))


@pytest.mark.parametrize("name", lightning_resilience.__all__)
def test_every_name_resolves(name: str) -> None:
    """Every public name can be had from the package, and the package lists it."""
    value = getattr(lightning_resilience, name)

    assert value is not None
    assert name in dir(lightning_resilience)
    assert getattr(lightning_resilience, name) is value


def test_the_list_of_names_is_complete() -> None:
    """Every error that a user may meet is public; those that mean a bug of ours are not."""
    errors = importlib.import_module("lightning_resilience.errors")

    missing = set(errors.__all__) - set(lightning_resilience.__all__)

    assert missing == {"DrillFailedError", "InvalidTransitionError"}


def test_type_checkers_see_the_same_names() -> None:
    """The names that are imported for type checkers are those of ``__all__``."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name
        for node in guard.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert imported | {"__version__"} == set(lightning_resilience.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError, match="ResilientCallback"):
        _ = lightning_resilience.ResilientCallback
