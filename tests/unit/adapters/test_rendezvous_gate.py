# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent asks of the job's storage at the gate."""

from __future__ import annotations

import pytest

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.adapters.rendezvous_gate import dependencies_of
from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
from lightning_resilience.adapters.storage import dependency_of
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import BreakerRecord, encode
from lightning_resilience.protocols.reports import tell_start
from lightning_resilience.protocols.restart import let_through
from lightning_resilience.runtime.memory import MemoryStore


URL = "memory://checkpoints"


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

    dependencies = dependencies_of(RendezvousOptions(), agent, keys)

    assert len(dependencies) == 2
    assert not agent.run(let_through(dependencies))
    agent.close()
