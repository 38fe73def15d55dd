# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``lightning-resilience restarts``: what a job's record of restarts says, and its release.

=========  =========================================================================================
exit code  when
=========  =========================================================================================
0          the job may start
1          it has ended, and does not start as things are
2          nobody can tell: there is no record of such a run, or the place cannot be read
=========  =========================================================================================

Who mistypes a name is told what is there instead. Nothing is written but by a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import typer

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.adapters.rendezvous_gate import kept_runs, mirror_of
from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
from lightning_resilience.core.evidence import one_line, redacted
from lightning_resilience.core.exit_codes import ExitCode, words_of
from lightning_resilience.errors import ConfigError, ResilienceError
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.restart_record import Memory
from lightning_resilience.runtime.memory import MemoryStore


if TYPE_CHECKING:
    from lightning_resilience.core.quota import RestartRecord


__all__ = ["Place", "release", "show"]

_UNKNOWN: Final = 2
_NAMED_MAX: Final = 8
"""So many other runs are named; a directory may be that of a whole team."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a job's record is.

    Args:
        run_id: Name of the run.
        store: URL of the shared store; None for none, as when the job has ended.
        restarts: URL of the directory that the job was given as ``restarts``; None for none.
    """

    run_id: str
    store: str | None
    restarts: str | None

    def memory(self) -> tuple[AgentStore, Memory]:
        """Return the store, and a memory for the record.

        Raises:
            ConfigError: Neither place is named, or a URL has another form.
        """
        if self.store is None and self.restarts is None:
            message = (
                "Say where the record is: --store tcp://HOST:PORT or etcd://HOST:PORT/DIRECTORY, "
                "--restarts URL, or both."
            )
            raise ConfigError(message)
        if self.store is None:
            store = AgentStore(MemoryStore(), run_id=self.run_id)
        else:
            store = AgentStore.open(self.store, run_id=self.run_id, option="--store")
        mirror = mirror_of(RendezvousOptions(restarts=self.restarts), store, is_needed=True)
        return store, Memory(store.keys(""), mirror=mirror)

    def nothing(self, store: AgentStore) -> str:
        """Return that there is no record, and what there is instead, for a person.

        Raises:
            Exception: What the store or the storage raised.
        """
        named = [redacted(url) for url in (self.store, self.restarts) if url is not None]
        said = [f"there is no record of run {self.run_id} at {', nor at '.join(named)}"]
        owner = None if self.store is None else store.owner(is_host=False)
        if owner is not None and owner.run_id != self.run_id:
            said.append(f"{named[0]} is of run {owner.run_id}")
        if self.restarts is not None:
            said.append(f"at {named[-1]} there are {_others(kept_runs(self.restarts, store))}")
        return "; ".join(said)


def show(place: Place, *, as_json: bool) -> int:
    """Print the record; return 0 where the job may start, 1 where not, 2 where nobody can tell."""
    return _carried_out(place, as_json=as_json, releases=False)


def release(place: Place, *, as_json: bool) -> int:
    """Let a job start again that was left for a person, with all quotas refilled."""
    return _carried_out(place, as_json=as_json, releases=True)


def _carried_out(place: Place, *, as_json: bool, releases: bool) -> int:
    try:
        store, memory = place.memory()
        try:
            protocol = restart_record.release(memory) if releases else restart_record.find(memory)
            record = store.run(protocol)
            missing = place.nothing(store) if record is None else ""
        finally:
            store.close()
    except ResilienceError as error:
        typer.echo(f"{error}", err=True)
        return _UNKNOWN
    except Exception as error:  # noqa: BLE001 - whatever the library of the storage raises
        typer.echo(one_line(error), err=True)
        return _UNKNOWN
    if record is None:
        typer.echo(missing, err=True)
        return _UNKNOWN
    typer.echo(_json(record) if as_json else _words(record))
    return 0 if record.ending is None else 1


def _others(runs: list[str]) -> str:
    if not runs:
        return "none of any other run: a job leaves one with its first restart, or as it ends"
    more = len(runs) - _NAMED_MAX
    tail = f" and {more} more" if more > 0 else ""
    return f"records of: {', '.join(runs[:_NAMED_MAX])}{tail}"


def _json(record: RestartRecord) -> str:
    return msgspec.json.format(msgspec.json.encode(record)).decode()


def _words(record: RestartRecord) -> str:
    lines = [f"{record.restarts} restarts charged, {len(record.charges)} of them within the window"]
    lines += [
        f"  {each.incarnation}  {each.cause}  step {each.step}  {each.age_s:.0f} s before the last"
        for each in record.charges
    ]
    if record.ending is None:
        return "\n".join([*lines, "the job may start"])
    name, next_ = words_of(ExitCode(record.ending.code))
    ended = f"ended: {record.ending.code} ({name}). {record.ending.reason}"
    return "\n".join([*lines, ended, next_])
