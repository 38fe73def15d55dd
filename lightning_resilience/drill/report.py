# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a run looks like to a person: its world, its story, and the command that shows it again.

A replay names the digest of the run that it repeats. Where the code has changed since, or the draw
of worlds, the digest is another one, and then what is shown is not what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.scenario_file import scenario_text


if TYPE_CHECKING:
    from lightning_resilience.drill.sweep import Run


__all__ = ["LAST_LINES", "failure_lines", "is_another_run", "replay_command", "story_lines"]

LAST_LINES: Final = 40
"""How much of a story is shown with a failure: enough for what led to it, and one screen."""


def replay_command(run: Run, *, path: str = "") -> str:
    """Return the command that shows a run again.

    Args:
        run: The run.
        path: The file that its scenario was read from; empty where its seed has drawn it.
    """
    scenario = f"SCENARIO={path} " if path else ""
    return f"make sim {scenario}SEED={run.seed} DIGEST={run.digest}"


def failure_lines(run: Run, *, path: str = "") -> list[str]:
    """Return what is said about a run that has failed; nothing where it has not.

    Args:
        run: The run, with its story.
        path: As for ``replay_command``.
    """
    failure = run.failure
    if failure is None:
        return []
    last = run.story[-LAST_LINES:]
    return [
        f"A promise was not kept, by seed {run.seed}.",
        "",
        f"  check    {failure.check}",
        f"  instant  {failure.at_s:.6f} s, entry {failure.entry} of the agenda",
        f"  what     {failure.what}",
        "",
        f"The last {len(last)} of {len(run.story)} lines of its story:",
        "",
        *last,
        "",
        f"  digest   {run.digest}",
        f"  replay   {replay_command(run, path=path)}",
    ]


def story_lines(run: Run) -> list[str]:
    """Return a whole run: its scenario as a file would have it, its story, and how it ended.

    Args:
        run: The run, with its story.
    """
    end = (
        f"seed {run.seed}: {run.entries} entries of the agenda, {run.ended_at_s:.6f} s, digest "
        f"{run.digest}"
    )
    return [*scenario_text(run.scenario).splitlines(), "", *run.story, "", end]


def is_another_run(run: Run, digest: str) -> str:
    """Return why a run is not the one that was asked for, or nothing where it is.

    Args:
        run: The run.
        digest: Digest of the run that was asked for; empty for any.
    """
    if not digest or run.digest == digest:
        return ""
    return (
        f"This is not the run that was asked for: its digest is {run.digest}, not {digest}. The "
        "code, the scenario or the draw of worlds has changed since, so seed "
        f"{run.seed} is another run now. Go back to the commit of that run to see it again, or "
        "sweep anew to see whether the failure is still there."
    )
