# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The command line prints what the code knows."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import lightning_resilience
from lightning_resilience import config
from lightning_resilience.cli.main import app


def test_the_version_is_the_package_s() -> None:
    """``--version`` prints the version alone and ends with 0."""
    result = CliRunner().invoke(app, ["--version"])

    assert result.exit_code == 0
    assert result.stdout == f"{lightning_resilience.__version__}\n"


def test_the_options_are_a_markdown_table() -> None:
    """``options`` prints the table and nothing else."""
    result = CliRunner().invoke(app, ["options"])

    assert result.exit_code == 0
    assert result.stdout == f"{config.options_markdown()}\n"


def test_the_options_are_json_on_demand() -> None:
    """``options --json`` prints the same rows for programs."""
    result = CliRunner().invoke(app, ["options", "--json"])

    rows = [config.Option(**row) for row in json.loads(result.stdout)]
    assert result.exit_code == 0
    assert tuple(rows) == config.option_table()


def test_a_misspelt_command_is_a_usage_error() -> None:
    """An unknown command ends with 2 and leaves stdout to data."""
    result = CliRunner().invoke(app, ["option"])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "option" in result.stderr
