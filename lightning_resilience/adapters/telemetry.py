# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Events become log lines: one line an event, the same words every time.

Rank 0 speaks at INFO and the others at DEBUG, so that one outage is one story and not one per rank.
What happens on every save (a gate that lets through, a verdict that all is well) is DEBUG
everywhere. What a user should do something about, though training goes on, is a WARNING everywhere.

Nothing is set up at import. A program that has configured logging sees our lines where it put them;
for one that has not, :func:`audible` attaches a handler for as long as a run lasts, as Lightning
does for its own lines, because a job that waits for storage without a word looks like a job that
hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from lightning_resilience.core import events as ev
from lightning_resilience.core.spool import statement


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.core.events import Event


__all__ = ["LoggingSink", "audible", "describe", "hush_torch"]

_log = logging.getLogger("lightning_resilience")

_SHOWN = 200


def _seconds(value: float | None) -> str:
    return "never by itself" if value is None else f"in {value:.1f} s"


def _beginning(text: str) -> str:
    # What ranks tell each other of a sharded checkpoint is no line for people.
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} letters)"


_TEXTS: dict[type, Callable[[Any], str]] = {
    ev.BreakerChanged: lambda e: (
        f"circuit of {e.dependency}: {e.previous} -> {e.state} (epoch {e.epoch}, limit {e.limit}, "
        f"open wait {e.open_s:g} s): {e.reason}"
    ),
    ev.VoteCast: lambda e: (
        f"host {e.host} votes that {e.dependency} is ill ({e.votes} of {e.quorum} votes)"
    ),
    ev.ProbeStarted: lambda e: (
        f"probing {e.dependency} (epoch {e.epoch}{', taken over' if e.taken_over else ''})"
    ),
    ev.ProbeEnded: lambda e: (
        f"probe of {e.dependency} (epoch {e.epoch}) "
        f"{'succeeded' if e.succeeded else 'failed'}: {e.detail}"
        + ("" if e.succeeded else f"; next probe {_seconds(e.next_probe_in_s)}")
    ),
    ev.ResultDropped: lambda e: (
        f"a result for {e.dependency} came too late: epoch {e.epoch}, now {e.current_epoch}"
    ),
    ev.DependencyAwaited: lambda e: (
        f"{e.operation} waits for {e.dependency} ({e.state}) since {e.elapsed_s:.1f} s; "
        f"next probe {_seconds(e.next_probe_in_s)}"
    ),
    ev.SlotAwaited: lambda e: (
        f"{e.operation} waits for one of {e.limit} slots of {e.dependency} since "
        f"{e.elapsed_s:.1f} s"
    ),
    ev.SlotForgiven: lambda e: (
        f"slot {e.slot} of {e.dependency} was taken from a holder that was silent for its lease"
    ),
    ev.RetryDenied: lambda e: (
        f"another attempt at {e.operation} on {e.dependency} has to wait: the job has made "
        f"{e.used} of {e.quota} retries in {e.window_s:g} s; next try in {e.next_try_in_s:.1f} s"
    ),
    ev.HostIsolated: lambda e: f"host {e.host} alone stays away from {e.dependency}: {e.reason}",
    ev.HostRejoined: lambda e: f"host {e.host} is back at {e.dependency}",
    ev.LocalModeEntered: lambda e: (
        f"decides alone about {e.dependency} on {e.share:.3g} of every limit, because the shared "
        f"store is away: {e.error}"
    ),
    ev.LocalModeEnded: lambda e: (
        f"follows the shared circuit of {e.dependency} again: the store was away for "
        f"{e.lost_for_s:.1f} s"
    ),
    ev.SiteLost: lambda e: (
        f"goes by the job's own circuits: the site's store is away ({e.dependency}): {e.error}"
    ),
    ev.SiteReturned: lambda e: f"the site's store is back after {e.lost_for_s:.1f} s",
    ev.ViewTrusted: lambda e: (
        f"the shared store did not answer about {e.dependency}; what it said {e.age_s:.1f} s ago "
        f"serves until it is {e.longest_s:g} s old: {e.error}"
    ),
    ev.AttemptFailed: lambda e: (
        f"attempt {e.attempt} at {e.operation} of {e.target} on {e.dependency} failed "
        f"({e.failure}): {e.error}"
    ),
    ev.CallAbandoned: lambda e: (
        f"attempt {e.attempt} at {e.operation} of {e.target} on {e.dependency} was abandoned after "
        f"{e.timeout_s:g} s without progress{f' ({e.moved})' if e.moved else ''}"
    ),
    ev.CallStalled: lambda e: (
        f"{e.operation} of {e.target} on {e.dependency} has made no progress for "
        f"{e.stalled_s:.1f} s; it is abandoned after {e.timeout_s:g} s"
    ),
    ev.RetryScheduled: lambda e: (
        f"attempt {e.attempt} at {e.operation} of {e.target} on {e.dependency} follows in "
        f"{e.delay_s:.2f} s (after {e.failure})"
    ),
    ev.RetriesExhausted: lambda e: (
        f"{e.operation} of {e.target} on {e.dependency} given up after {e.attempts} attempts "
        f"({e.failure}; {e.reason}): {e.error}"
    ),
    ev.GateDecided: lambda e: (
        f"{e.op} {e.seq}: all ranks {e.verdict} (round {e.round_number}): {e.reason}"
    ),
    ev.WorkAwaited: lambda e: (
        f"{e.op} {e.seq}: waiting since {e.elapsed_s:.1f} s for rank "
        f"{', '.join(map(str, e.workers))}"
    ),
    ev.VerdictReached: lambda e: (
        f"{e.op} {e.seq} ended after {e.elapsed_s:.2f} s for all ranks: {e.outcome}"
        + (f", first on rank {e.first_rank}" if e.first_rank is not None else "")
        + (f": {_beginning(e.detail)}" if e.detail else "")
    ),
    ev.RanksLost: lambda e: (
        f"{e.op} {e.seq}: no sign of life from rank {', '.join(map(str, e.ranks))} for "
        f"{e.silent_s:.1f} s"
    ),
    ev.TrainingPaused: lambda e: (
        f"training pauses on all ranks after step {e.step}, for {e.dependency}: {e.reason}"
    ),
    ev.TrainingResumed: lambda e: (
        f"the pause after step {e.step}, for {e.dependency}, is over after {e.elapsed_s:.1f} s"
    ),
    ev.RankLeft: lambda e: (
        f"rank {e.first_rank} has left after step {e.step} ({e.kind}): {e.error}"
    ),
    ev.CollectivesEnded: lambda e: (
        f"{e.connections} connections of gloo were shut down"
        + (", NCCL was aborted" if e.nccl else "")
        + ", because another rank has left"
        if e.connections or e.nccl
        else "another rank has left, and nothing is known that would end a collective here: this "
        "rank stays in it until the group's timeout, or until its launcher ends it"
    ),
    ev.StoreLost: lambda e: (
        f"{e.op}: the shared store has not answered for {e.lost_for_s:.1f} s: {e.error}"
    ),
    ev.StoreReturned: lambda e: (
        f"{e.op}: the shared store answers again after {e.lost_for_s:.1f} s"
    ),
    ev.RestartsNotKept: lambda e: (
        "the record of restarts could not be read or written where `restarts` keeps it, so a new "
        f"launcher may not know of them: {e.error}"
    ),
    ev.OperationDeferred: lambda e: (
        f"{e.op} {e.seq} is left without a verdict, and training goes on: {e.reason}"
    ),
    ev.DeferralsSettled: lambda e: (
        f"the shared store is there again with {e.op} {e.seq}, and {e.number} "
        f"operation{'s' if e.number > 1 else ''} that had been left without it "
        f"{'are' if e.number > 1 else 'is'} settled"
    ),
    ev.RecordVanished: lambda e: (
        f"the record {e.key} is gone (epoch {e.epoch} was the last): the store came back empty, "
        "the record is rebuilt"
    ),
    ev.CheckpointPublished: lambda e: (
        f"{e.path} is in storage: {e.size_bytes} bytes, {e.digest}, verified after "
        f"{e.elapsed_s:.2f} s and {e.attempts} attempt{'s' if e.attempts > 1 else ''}"
    ),
    ev.CheckpointRemoved: lambda e: f"{e.path} is removed",
    ev.CheckpointRetained: lambda e: f"{e.path} is not removed: {e.reason}",
    ev.SaveTolerated: lambda e: (
        f"training goes on after a failed save at step {e.step}, number {e.number} in a row, of "
        f"which {e.limit} would end it; ModelCheckpoint remembers what is there: {e.error}"
    ),
    ev.CheckpointSpooled: lambda e: (
        f"{e.path} waits on this node {'for its turn' if e.is_paced else 'until storage is well'}, "
        f"and training goes on ({e.waiting} wait; {e.size_bytes} bytes at {e.file}): {e.reason}"
    ),
    ev.CheckpointSuperseded: lambda e: f"{e.path} is not published any more: {e.reason}",
    ev.CheckpointsUnpublished: lambda e: statement(tuple(zip(e.paths, e.files, strict=True))),
    ev.DiversionFailed: lambda e: (
        f"{e.operation} of {e.target} waits for {e.dependency}, which is ill: {e.error}"
    ),
    ev.SaveSkipped: lambda e: (
        f"the save point at step {e.step} is left out, and ModelCheckpoint remembers what is "
        f"there: {e.error}"
    ),
    ev.CheckpointSetAside: lambda e: f"{e.path} is set aside as {e.to}: {e.reason}",
    ev.DirectoryTried: lambda e: (
        f"{e.directory} was tried before the first step: {e.outcome}"
        + (f"; refused: {', '.join(e.refused)}" if e.refused else "")
    ),
}

_ROUTINE = (
    *(ev.CheckpointPublished, ev.CheckpointRemoved, ev.DirectoryTried),
    *(ev.GateDecided, ev.VerdictReached),
)


_WARNINGS = (ev.CheckpointsUnpublished, ev.SaveSkipped, ev.SaveTolerated)


def describe(event: Event) -> str:
    """Return an event in one line of text."""
    text = _TEXTS.get(type(event))
    if text is not None:
        return text(event)
    fields = ", ".join(f"{name}={value!r}" for name, value in dataclasses.asdict(event).items())
    return f"{type(event).__name__}({fields})"


def _is_routine(event: Event) -> bool:
    if not isinstance(event, _ROUTINE):
        return False
    notable = getattr(event, "outcome", getattr(event, "verdict", "ok"))
    return notable in {"ok", "proceed"} and getattr(event, "attempts", 1) <= 1


class LoggingSink:
    """Writes events to the logger ``lightning_resilience``. Any thread; never raises.

    Args:
        rank: Rank 0 speaks at INFO, the others at DEBUG.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._level = logging.DEBUG if rank else logging.INFO

    def emit(self, event: Event) -> None:
        """Write one line."""
        level = logging.DEBUG if _is_routine(event) else self._level
        if isinstance(event, _WARNINGS):
            level = logging.WARNING
        if _log.isEnabledFor(level):
            # A sink that raises would end a save for the sake of a log line.
            with contextlib.suppress(Exception):
                _log.log(level, "[rank %d] %s", self._rank, describe(event))


@contextlib.contextmanager
def audible() -> Iterator[None]:
    """Make INFO lines visible where the program has not configured logging at all."""
    if _log.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    level = _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.INFO if level == logging.NOTSET else level)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)


def hush_torch() -> None:
    """Let torch's C++ say nothing of a store that is away, unless the user has said what it may.

    It says with two stack traces what our error says in a line. Torch reads the variable as it is
    imported, so there is nothing to be done once it is.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
