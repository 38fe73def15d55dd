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


store_app = typer.Typer(help="A shared store that lives longer than any job.", no_args_is_help=True)
app.add_typer(store_app, name="store")
restarts_app = typer.Typer(help="A job's record of restarts.", no_args_is_help=True)
app.add_typer(restarts_app, name="restarts")


@store_app.command()
def serve(
    *,
    host: Annotated[
        str | None,
        typer.Option(help="Name or address under which clients reach this host; its own name."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port; 0 for any that is free.", min=0, max=65535)] = 0,
) -> None:
    """Serve a store until this process is told to end, and start it again where it dies.

    Prints its URL whenever it begins to serve. It has no password: serve it on a private network.
    """
    import platform  # noqa: PLC0415 - no other command needs it

    from lightning_resilience.cli import serving  # noqa: PLC0415 - it needs torch

    raise typer.Exit(serving.serve(host or platform.node(), port))


RunId = Annotated[str, typer.Option("--run-id", help="Name of the run (--rdzv-id).")]
Store = Annotated[
    str | None,
    typer.Option(help="URL of the shared store, tcp://HOST:PORT or etcd://HOST:PORT/DIRECTORY."),
]
Restarts = Annotated[
    str | None, typer.Option(help="URL of the directory that the job was given as restarts.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")]


@restarts_app.command()
def show(
    *, run_id: RunId, store: Store = None, restarts: Restarts = None, as_json: AsJson = False
) -> None:
    """Print what a job's record of restarts says.

    Ends with 0 where the job may start, with 1 where it has ended, with 2 where that cannot be
    told, or there is no record of such a run.
    """
    from lightning_resilience.adapters import telemetry  # noqa: PLC0415 - no other command needs it

    # Order: before torch is imported.
    telemetry.hush_torch()
    from lightning_resilience.cli import releasing  # noqa: PLC0415 - it needs torch

    place = releasing.Place(run_id=run_id, store=store, restarts=restarts)
    raise typer.Exit(releasing.show(place, as_json=as_json))


@restarts_app.command()
def release(
    *, run_id: RunId, store: Store = None, restarts: Restarts = None, as_json: AsJson = False
) -> None:
    """Let a job start again that was left for a person (86), with all quotas refilled.

    Look at the cause first. Ends with 0, or with 2 where the record could not be changed, or
    there is none of such a run.
    """
    from lightning_resilience.adapters import telemetry  # noqa: PLC0415 - no other command needs it

    # Order: before torch is imported.
    telemetry.hush_torch()
    from lightning_resilience.cli import releasing  # noqa: PLC0415 - it needs torch

    place = releasing.Place(run_id=run_id, store=store, restarts=restarts)
    raise typer.Exit(releasing.release(place, as_json=as_json))
