# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Each example runs with ``--fast`` and ends with the lines that its header promises."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("[0-9]*.py"), *EXAMPLES.glob("[0-9]*/run.py")])

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.multiprocess]


def promised_lines(example: Path) -> list[str]:
    """Return the last indented block of an example's header: its last lines of output."""
    header = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    block = header.rsplit("::\n", 1)[-1]
    return [line.strip() for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("example", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_ends_with_the_lines_that_its_header_promises(
    example: Path, tmp_path: Path
) -> None:
    """A reader who runs an example sees what its header says, and exit code 0."""
    command = [sys.executable, str(example), "--fast"]

    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )

    promised = promised_lines(example)
    assert promised
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-len(promised) :] == promised
    assert done.stderr == ""
