# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The script ``lightning-resilience``.

Data goes to stdout, everything meant for a person to stderr. Neither torch nor Lightning is
imported for a command that does not need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer


__all__ = ["app"]

app = typer.Typer(
    name="lightning-resilience",
    help="Keeps training alive through outages of what a job shares.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        from lightning_resilience import __version__  # noqa: PLC0415 - reads the installed metadata

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Keep training alive through outages of what a job shares."""


@app.command()
def options(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of Markdown.")
    ] = False,
) -> None:
    """Print every option with its default and the reason for it."""
    from lightning_resilience import config  # noqa: PLC0415 - no other command needs it

    if as_json:
        rows = [dataclasses.asdict(row) for row in config.option_table()]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=2))
    else:
        typer.echo(config.options_markdown())


@app.command()
def verify(
    directory: Annotated[
        str, typer.Argument(help="URL or path of the directory that holds the checkpoints.")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    is_quick: Annotated[
        bool,
        typer.Option("--quick", help="Compare sizes only; nothing is read through or verified."),
    ] = False,
) -> None:
    """List every checkpoint of a directory, the newest first, and say which are damaged.

    Ends with 0 where the newest is good (verified, or without a manifest and not damaged), with 1
    where it is corrupt or there is none, with 2 where that cannot be told. Nothing is changed.
    """
    from lightning_resilience.cli import verifying  # noqa: PLC0415 - no other command needs it

    raise typer.Exit(verifying.verify(directory, as_json=as_json, is_quick=is_quick))
