# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The command ``verify``: a directory of checkpoints, one line each, and what that means.

=========  =========================================================================================
exit code  when
=========  =========================================================================================
0          the newest checkpoint is good: verified, or unverified with nothing against it
1          it is corrupt, or there is none
2          it cannot be told: no such directory, no permission, storage that is away
=========  =========================================================================================
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Final

import typer

from lightning_resilience.adapters.guard import Guard
from lightning_resilience.adapters.storage import Storage, dependency_of
from lightning_resilience.adapters.verifying import Verification
from lightning_resilience.core.evidence import one_line, redacted
from lightning_resilience.core.verification import describe, newest_is_good
from lightning_resilience.runtime.calls import Token


if TYPE_CHECKING:
    from lightning_resilience.core.verification import Finding


__all__ = ["verify"]

_GOOD, _BAD, _UNKNOWN = 0, 1, 2
_MAX_ATTEMPTS: Final = 4
"""A blip is waited out; whoever types a command wants to know of an outage. More than the failures
that open a circuit."""


def verify(directory: str, *, as_json: bool, is_quick: bool) -> int:
    """Print what is known of the checkpoints of a directory.

    Args:
        directory: URL or path.
        as_json: Whether to print JSON instead of lines.
        is_quick: Whether to compare sizes only.

    Returns:
        The exit code.
    """
    shown = redacted(directory)
    try:
        guard = Guard(
            dependency_of(directory), retry={"max_attempts": _MAX_ATTEMPTS}, when_open="raise"
        )
        looking = Verification(
            # Nothing is staged by what only reads, so no directory is made for it.
            Storage({}, spool=str),
            directory,
            Token(),
            is_quick=is_quick,
            run=guard.call,
        )
        found = looking.findings()
    except Exception as error:  # noqa: BLE001 - whatever the library of the storage raises
        typer.echo(f"{shown} cannot be verified: {one_line(error)}", err=True)
        return _UNKNOWN
    if as_json:
        rows = [dataclasses.asdict(item) for item in found]
        typer.echo(json.dumps(rows, ensure_ascii=False, indent=2))
    else:
        for item in found:
            typer.echo(_line(item))
    typer.echo(f"{shown}: {describe(found)}", err=True)
    return _GOOD if newest_is_good(found) else _BAD


def _line(item: Finding) -> str:
    step = "-" if item.step is None else str(item.step)
    size = "-" if item.size_bytes is None else str(item.size_bytes)
    line = f"{item.state.value:<10}  step {step:>8}  {size:>14} bytes  {item.name}"
    return f"{line}: {item.reason}" if item.reason else line
