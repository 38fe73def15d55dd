# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Torch's rendezvous handler and our own connection: made when needed, and again when they broke.

Torch's client of a store never connects again, and its handler is made once. Here both are dropped
when the store has gone, and made anew for the next attempt. The store's server is in torch's
handler too, where this agent hosts it; that one stays, and what the job keeps there: a client that
has failed says nothing against the server, and all other agents would lose theirs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from lightning_resilience.adapters import rendezvous_etcd as in_etcd, rendezvous_inner as within
from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.adapters.reason_file import leave_unstarted
from lightning_resilience.adapters.rendezvous_calls import call
from lightning_resilience.adapters.rendezvous_held import HeldHandler
from lightning_resilience.adapters.site_store import open_site
from lightning_resilience.adapters.worker_environment import WorkerEnvironment
from lightning_resilience.core.incident import is_stop
from lightning_resilience.core.joining import JoinFailure, foreign_text
from lightning_resilience.core.restart import mark_of_round
from lightning_resilience.errors import CorruptRecordError, StoreError
from lightning_resilience.protocols.circuit_memory import KnownSite
from lightning_resilience.protocols.incarnation import RoundGivenUpError


if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
    )

    from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
    from lightning_resilience.core.joining import OwnerRecord
    from lightning_resilience.ports import CancelToken


__all__ = ["RETRYABLE", "Connection", "ForeignStoreError", "failure_of"]

_log = logging.getLogger(__name__)


class ForeignStoreError(Exception):
    """The store belongs to another job."""


RETRYABLE: Final = (RendezvousError, StoreError, ForeignStoreError, RuntimeError, OSError)
"""What an attempt to join may raise and is looked at by ``failure_of``."""


def failure_of(error: Exception) -> JoinFailure | None:
    """Return what an exception means for joining; None where it is none of its business."""
    if isinstance(error, (RendezvousGracefulExitError, CorruptRecordError)):
        return None
    if isinstance(error, RendezvousClosedError):
        return JoinFailure.CLOSED
    if isinstance(error, RendezvousTimeoutError):
        return JoinFailure.LATE
    return JoinFailure.FOREIGN if isinstance(error, ForeignStoreError) else JoinFailure.UNREACHABLE


class Connection:
    """One agent's handler within, and its connection to the job's store. The agent's main thread.

    Args:
        parameters: What the launcher was given.
        options: Checked options.
        named_store: URL of the store for our records; None for the one of the rendezvous.

    Attributes:
        site: What this agent knows of the job's site, whichever connections it has had.
        environment: What the workers are told of them.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        options: RendezvousOptions,
        *,
        named_store: str | None,
    ) -> None:
        self._parameters = parameters
        self._options = options
        self._named_store = named_store
        self._etcd = in_etcd.address_in(
            parameters.endpoint,
            run_id=parameters.run_id,
            inner=options.inner,
            options=options.forwarded,
        )
        self._held: HeldHandler | None = None
        self._store: AgentStore | None = None
        self._server: Store | None = None
        self.site = KnownSite()
        self.environment = WorkerEnvironment()

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._parameters.run_id

    @property
    def is_early(self) -> bool:
        """Whether the job's store is there before the first round is."""
        return self._named_store is not None or self._options.inner != "static"

    def handler(self) -> RendezvousHandler:
        """Return torch's own handler.

        Raises:
            RendezvousConnectionError: The store does not answer.
            SystemExit: 64, where an option is one that torch does not take.
        """
        return self._hold().handler

    def _hold(self) -> HeldHandler:
        if self._held is None:
            silent_s = self._options.silent_s
            try:
                found = call(self._made, within_s=silent_s)
            except (ValueError, TypeError, KeyError) as error:
                leave_unstarted(error, self._options.termination_log, run_id=self.run_id)
            # Order: before the handler's first look at the nodes.
            within.judge_by_own_sight(found, grace_s=self._options.grace_s)
            if self._etcd is not None:
                within.own_rounds(found, in_etcd.rounds_of(self._etcd).directory)
            self._held = HeldHandler(found, silent_s=silent_s)
        return self._held

    def _made(self, token: CancelToken) -> RendezvousHandler:
        with in_etcd.understood():
            return within.make_inner(
                self._parameters,
                self._options.inner,
                self._options.forwarded,
                check=token.raise_if_cancelled,
            )

    def store(self) -> AgentStore:
        """Return our own connection to the job's store.

        Raises:
            RendezvousConnectionError: As ``handler``.
            StoreUnavailableError: Etcd does not answer.
            SystemExit: 64, where what answers is not the etcd that is needed.
        """
        if self._store is None:
            self._store = self._connected()
            self._store.driver.site = open_site(self._options.site_store)
        return self._store

    def _connected(self) -> AgentStore:
        run_id = self._parameters.run_id
        if self._named_store is not None:
            return AgentStore.open(self._named_store, run_id=run_id)
        if self._etcd is not None:
            return AgentStore(in_etcd.opened(self._etcd), run_id=run_id)
        address = self._address
        if address is not None:
            return AgentStore.at(*address, run_id=run_id)
        store = within.store_of(self.handler())
        if store is None:
            message = "the store of the rendezvous is not there yet"
            raise RendezvousConnectionError(message)
        return AgentStore.of(store, run_id=run_id)

    def names(self, info: RendezvousInfo, *, before: str) -> AgentStore:
        """Return a connection to the store of one round, in which node 0 names it.

        Args:
            info: What joining has returned.
            before: The incarnation before, as this agent knows it; empty for the first.
        """
        if self._etcd is None:
            place = PrefixStore(f"lr/{self._mark_of(info, before)}", info.store)
            return AgentStore.of(place, run_id=self.run_id)
        address, prefix = in_etcd.place_of_names(self.handler(), info, self._etcd)
        store = in_etcd.opened(address, prefix=prefix, keep_s=in_etcd.ROUNDS_KEEP_S)
        return AgentStore(store, run_id=self.run_id)

    def _mark_of(self, info: RendezvousInfo, before: str) -> str:
        workers = info.bootstrap_store_info
        address = "" if workers is None else f"{workers.master_addr}:{workers.master_port}"
        return mark_of_round(address, before=before, is_static=self._options.inner == "static")

    @property
    def _address(self) -> tuple[str, int] | None:
        return within.address_of(self.handler())

    @property
    def url(self) -> str | None:
        """Where workers find the job's store; None where they cannot reach it by an address."""
        if self._etcd is not None:
            return self._etcd.url
        address = self._address
        if address is None:
            return None
        host, port = address
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    @property
    def hosts_store(self) -> bool:
        """Whether the store's server is in this process."""
        return self._held is not None and within.hosts_store(self._held.handler)

    def join(self) -> RendezvousInfo:
        """Join the next round.

        Raises:
            ForeignStoreError: The store is another job's.
            RendezvousError: What torch's handler raises.
        """
        held = self._hold()
        text = foreign_text(self._owner(), self.run_id, endpoint=self._parameters.endpoint)
        if text:
            raise ForeignStoreError(text)
        within.renew_workers_store(held.handler)
        if self._etcd is not None:
            in_etcd.opened(in_etcd.rounds_of(self._etcd), keep_s=in_etcd.ROUNDS_KEEP_S).close()
        return held.join()

    def _owner(self) -> OwnerRecord | None:
        """Return whose store the rendezvous is in; None where that is for all."""
        address = self._address if self._options.inner == "c10d" else None
        if address is None:
            return None
        if self._named_store is None:
            return self.store().owner(is_host=self.hosts_store)
        # Our records are elsewhere: this one is asked once for each round.
        store = AgentStore.at(*address, run_id=self.run_id)
        try:
            return store.owner(is_host=self.hosts_store)
        finally:
            store.close()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join; it raises whatever torch does."""
        return self._hold().num_nodes_waiting()

    def is_closed(self) -> bool:
        """Tell whether the rendezvous is closed; not, as long as nobody can be asked."""
        try:
            return self._hold().is_closed()
        except Exception as error:
            # Torch's agent ends for any of them.
            if is_stop(error):
                raise
            _log.info("is_closed was not answered: %s", error)
            return False

    def set_closed(self) -> None:
        """Close the rendezvous for all, where it can be reached."""
        try:
            self._hold().set_closed()
        except Exception as error:
            # As above.
            if is_stop(error):
                raise
            _log.warning("the rendezvous could not be closed: %s", error)

    def shut_down(self) -> bool:
        """Leave, and close the rendezvous for all; it raises whatever torch does."""
        return self._hold().shut_down()

    def renew(self) -> bool:
        """Give torch's handler a new client, where its own broke and the server is there.

        Returns:
            Whether it has one.
        """
        return self._held is not None and self._held.renew()

    def failed(self, error: Exception) -> None:
        """Let go of what has broken, so that the next use makes it anew.

        A handler is kept where nothing is wrong with it: where nodes were missed in a round, and
        over etcd, which it finds again by itself, where only our own store has not answered. It has
        its place in the round, and leaves that at once; for a new one all would wait until the old
        one is forgotten.

        Args:
            error: Why the last attempt to join has failed.
        """
        kept = RoundGivenUpError if self._etcd is None else StoreError
        if not isinstance(error, kept):
            self.drop()

    def drop(self) -> None:
        """Let go of everything but a server, so that the next use makes it anew. Idempotent."""
        held, self._held = self._held, None
        store, self._store = self._store, None
        self.environment.restore()
        if held is not None:
            if within.hosts_store(held.handler):
                # Torch takes a server of this process for the next store at the same port.
                self._server = within.store_of(held.handler)
            held.let_go()
        if store is not None:
            store.close()

    def close(self) -> None:
        """Let go of everything, for good. Idempotent."""
        self.drop()
        self._server = None
