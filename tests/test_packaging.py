# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is installed: version, script, type marker, licence. Also run against the built wheel."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_resilience


ROOT = Path(__file__).resolve().parent.parent
NAME = "lightning-resilience"
# Set by "make wheel": the file that is installed, and from which the package must come.
WHEEL = os.environ.get("WHEEL")
needs_wheel = pytest.mark.skipif(WHEEL is None, reason="the wheel is tested by 'make wheel'")


def version_in_pyproject() -> str:
    """Return the static version; there is no TOML reader in Python 3.10."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"$', text, flags=re.MULTILINE)
    assert found is not None
    return found.group(1)


def test_there_is_one_version() -> None:
    """The package, its metadata and pyproject.toml have the same version."""
    assert lightning_resilience.__version__ == version_in_pyproject()
    assert importlib.metadata.version(NAME) == version_in_pyproject()


def test_the_script_resolves_and_runs() -> None:
    """The installed entry point loads, and the script prints the version."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=NAME)
    script = Path(sys.executable).with_name(NAME)

    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)

    assert callable(entry.load())
    assert done.stdout.strip() == version_in_pyproject()


def test_the_package_runs_as_a_module() -> None:
    """``python -m lightning_resilience`` is the script."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_resilience", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == version_in_pyproject()


def test_the_types_are_marked() -> None:
    """The marker that lets type checkers read the package lies beside it."""
    assert Path(lightning_resilience.__file__).with_name("py.typed").is_file()


def test_the_licence_is_declared() -> None:
    """The metadata name the licence by its SPDX expression."""
    metadata = importlib.metadata.metadata(NAME)

    assert metadata["License-Expression"] == "Apache-2.0"


def test_torch_and_lightning_are_required() -> None:
    """The requirements of a plain installation are the seven libraries, each with a lower bound."""
    requirements = [
        line for line in importlib.metadata.requires(NAME) or [] if "extra ==" not in line
    ]

    names = sorted(re.split(r"[>=<! ]", line)[0] for line in requirements)
    assert names == ["fsspec", "lightning", "msgspec", "pyyaml", "torch", "typer", "xxhash"]
    assert all(">=" in line for line in requirements)


def test_the_name_of_the_filesystem_leads_to_its_class() -> None:
    """What pyproject.toml tells fsspec is a class that says the same name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split('[project.entry-points."fsspec.specs"]')[1].split("[")[0]
    name, home = re.findall(r'^(\w+) = "([^"]+)"$', section, flags=re.MULTILINE)[0]
    module, _, attribute = home.partition(":")

    kind = getattr(importlib.import_module(module), attribute)

    assert kind.protocol == name == "resilient"


@needs_wheel
def test_fsspec_finds_the_filesystem() -> None:
    """The installed entry point is all that fsspec needs; nothing is imported for it first."""
    code = (
        "import fsspec, sys\n"
        "assert 'lightning_resilience' not in sys.modules\n"
        "with fsspec.open('resilient::memory://a', 'w') as file:\n"
        "    file.write('x')\n"
        "print(fsspec.open('resilient::memory://a', 'r').open().read())"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    (entry,) = importlib.metadata.entry_points(group="fsspec.specs", name="resilient")
    assert done.stdout == "x\n"
    assert entry.load().protocol == "resilient"


@needs_wheel
def test_the_wheel_is_what_runs() -> None:
    """The package under test is the installed wheel, not the source tree."""
    home = Path(lightning_resilience.__file__).resolve().parent

    assert home != ROOT / "lightning_resilience"
    assert str(ROOT) not in sys.path
    assert home.is_relative_to(Path(sys.prefix).resolve())


@needs_wheel
def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    """Every module, the type marker and the licence are in the wheel; tests and tools are not."""
    assert WHEEL is not None
    with zipfile.ZipFile(WHEEL) as archive:
        names = set(archive.namelist())

    modules = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_resilience").rglob("*.py")
    }
    others = names - modules - {"lightning_resilience/py.typed"}
    assert modules <= names
    assert "lightning_resilience/py.typed" in names
    assert all(".dist-info/" in name for name in others), others
    assert any(name.endswith("licenses/LICENSE") for name in others)


def test_the_licence_is_the_whole_text() -> None:
    """LICENSE is the full Apache License 2.0, not a reference to it."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")

    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 190


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_explains_itself() -> None:
    """Plain ``make`` lists every target with one line, and runs none."""
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)

    listed = re.findall(r"^make (\w+) +\S", done.stdout, flags=re.MULTILINE)
    assert {"setup", "demo", "test", "check", "wheel", "lint", "type", "docs", "fmt"} <= set(listed)
