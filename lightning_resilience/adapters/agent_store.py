# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An agent's own connection to the store of its job, and the protocols that it runs there.

The rendezvous has a client of its own, which a heartbeat uses from another thread. Ours is another
connection, so that neither ever waits for the other.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Final, TypeVar

from lightning_resilience.adapters.store_discovery import open_url
from lightning_resilience.adapters.telemetry import LoggingSink
from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.core.joining import OwnerRecord
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import decode, encode
from lightning_resilience.protocols.effects import Get
from lightning_resilience.protocols.shared_cell import create
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from torch.distributed import Store

    from lightning_resilience.ports import SharedStore
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["AgentStore"]

_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


class AgentStore:
    """One agent's connection to a store.

    Args:
        store: The store.
        run_id: Name of the run.

    Note:
        The agent's main thread.
    """

    def __init__(self, store: SharedStore, *, run_id: str) -> None:
        self.driver = Driver(
            store=store,
            clock=SystemClock(),
            dice=SystemDice(rank=os.getpid()),
            sink=LoggingSink(rank=0),
        )
        self.run_id = run_id

    @classmethod
    def at(cls, host: str, port: int, *, run_id: str) -> AgentStore:
        """Connect to a server; nothing is sent yet."""
        return cls(TorchStore.connect(host, port, timeout_s=_TIMEOUT_S), run_id=run_id)

    @classmethod
    def open(
        cls, url: str, *, run_id: str, option: str = "LIGHTNING_RESILIENCE_STORE"
    ) -> AgentStore:
        """Connect to the store that a URL names; nothing is sent yet.

        Raises:
            ConfigError: The URL has another form; ``option`` is where it was given.
        """
        return cls(open_url(url, timeout_s=_TIMEOUT_S, option=option), run_id=run_id)

    @classmethod
    def of(cls, store: Store, *, run_id: str) -> AgentStore:
        """Open a second connection to a store of torch's.

        Raises:
            ConfigError: It is of a kind that a second connection cannot reach.
        """
        return cls(TorchStore.wrap(store, timeout_s=_TIMEOUT_S), run_id=run_id)

    def keys(self, incarnation: str) -> Keys:
        """Return the names of the keys of a start of the workers."""
        return Keys(run_id=self.run_id, incarnation=incarnation)

    def run(self, protocol: Protocol[T], *, hurry: bool = False) -> T:
        """Run a protocol to its end.

        Args:
            protocol: A fresh protocol.
            hurry: Whether this agent is leaving, and waits only shortly for each answer.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        return self.driver.run(protocol, hurry=hurry)

    def now_s(self) -> float:
        """Seconds on this process's monotonic clock."""
        return self.driver.clock.now_s()

    def draw(self) -> float:
        """A uniform number in [0, 1) that no other agent has."""
        return self.driver.dice.draw()

    def owner(self, *, is_host: bool) -> OwnerRecord | None:
        """Return whose store this is; the agent that hosts it writes its own name first.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        key = self.keys("").owner
        if not is_host:
            raw = self.driver.run(_read(key))
            return None if raw is None else decode(OwnerRecord, raw, key=key)
        mine = OwnerRecord(
            run_id=self.run_id,
            host=platform.node(),
            pid=os.getpid(),
            writer=self.driver.dice.nonce(),
        )
        return decode(OwnerRecord, self.driver.run(create(key, encode(mine))).raw, key=key)

    def close(self) -> None:
        """Let the connection go. Idempotent."""
        self.driver.close()
        self.driver.store.close()


def _read(key: str) -> Protocol[bytes | None]:
    raw: bytes | None = yield Get(key)
    return raw
