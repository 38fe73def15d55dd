# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent asks of the job's storage at the gate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.adapters.rendezvous_gate import dependencies_of, kept_runs, mirror_of
from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
from lightning_resilience.adapters.storage import dependency_of
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.quota import created
from lightning_resilience.core.records import BreakerRecord, encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.circuit_memory import KnownSite
from lightning_resilience.protocols.reports import tell_start
from lightning_resilience.protocols.restart import let_through, may_grow
from lightning_resilience.runtime.memory import MemoryStore


if TYPE_CHECKING:
    from pathlib import Path


URL = "memory://checkpoints"


def connected(agent: AgentStore) -> Any:
    """Return what is asked of an agent's connection at the gate."""
    return SimpleNamespace(store=lambda: agent, site=KnownSite())


@pytest.mark.parametrize("run_id", ["job", "a name of the user's own"])
def test_circuits_are_found_where_the_workers_keep_them(run_id: str) -> None:
    """The callback may be given a run id that is none of the launcher's."""
    agent = AgentStore(MemoryStore(), run_id="job")
    keys = agent.keys("1-n")
    agent.run(tell_start(keys, [URL], run_id=run_id))
    for kind in ("read", "write"):
        record = BreakerRecord(
            epoch=3, generation=1, state="open", limit=16, open_s=9.0, reason="x", writer="w"
        )
        key = Keys(run_id=run_id, incarnation="").breaker(f"{dependency_of(URL)}:{kind}")
        agent.driver.store.set(key, encode(record))

    dependencies = dependencies_of(RendezvousOptions(), connected(agent), keys)

    assert len(dependencies) == 2
    assert not agent.run(let_through(dependencies))
    agent.close()


class AwaySite(MemoryStore):
    """A site's store that does not answer, and counts who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get(self, key: str) -> bytes | None:
        """Fail."""
        self.asked += 1
        text = f"{key} was not answered"
        raise StoreUnavailableError(text)


def test_a_site_that_is_away_is_left_alone_by_one_look_after_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each look makes the job's circuits anew, and keeps what is known of the site."""
    caplog.set_level("DEBUG", "lightning_resilience")
    agent = AgentStore(MemoryStore(), run_id="job")
    keys, connection = agent.keys("1-n"), connected(agent)
    away = agent.driver.site = AwaySite()
    agent.run(tell_start(keys, [URL], run_id="job"))

    for _ in range(3):
        needed = dependencies_of(RendezvousOptions(), connection, keys)
        assert agent.run(may_grow(needed))

    assert away.asked == 1
    assert sum("the site's store is away" in record.message for record in caplog.records) == 1
    agent.close()


@pytest.mark.parametrize("run_id", ["job1", "team/job", "../up", "50% of it"])
def test_what_is_kept_of_a_run_lies_in_the_directory_that_was_named(
    run_id: str, tmp_path: Path
) -> None:
    """Whatever the run is called; and it is found again."""
    folder = tmp_path / "deep" / "kept"
    agent = AgentStore(MemoryStore(), run_id=run_id)
    mirror = mirror_of(RendezvousOptions(restarts=str(folder)), agent)
    assert mirror is not None
    record = created(writer="w")

    agent.run(mirror.saved(record))

    assert agent.run(mirror.loaded()) == record
    assert len([path for path in tmp_path.rglob("*.json") if path.parent == folder]) == 1
    assert kept_runs(str(folder), agent) == [run_id]
