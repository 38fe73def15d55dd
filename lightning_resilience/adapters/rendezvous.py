# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The rendezvous backend ``resilient``: torch's own, behind a gate that all agents pass together.

Torch's agent calls a handler at five points, and what it does about an exception there is to end::

    next_rendezvous     the gate, then the handler within, with retries      (between two starts)
    num_nodes_waiting   the handler within, with a grace, and news of others (while all is well)
    is_closed           the same
    set_closed          the same
    shutdown            closes only what has ended for all

``SystemExit`` passes through torch's agent and launcher unchanged, so each agent leaves with the
status that the job's record says: the same on all of them.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch.distributed.elastic.rendezvous import RendezvousHandler

from lightning_resilience.adapters import rendezvous_inner as within
from lightning_resilience.adapters.agent_view import failing_with, stopped_by, worker_exits
from lightning_resilience.adapters.reason_file import forget_reason, leave_unstarted
from lightning_resilience.adapters.rendezvous_connection import RETRYABLE, Connection, failure_of
from lightning_resilience.adapters.rendezvous_end import leave, leave_alone, leave_told
from lightning_resilience.adapters.rendezvous_gate import dependencies_of, kept_ending, mirror_of
from lightning_resilience.adapters.rendezvous_options import RendezvousOptions
from lightning_resilience.adapters.rendezvous_reports import report_exits
from lightning_resilience.adapters.rendezvous_round import learn_name
from lightning_resilience.adapters.rendezvous_watching import Watching
from lightning_resilience.config import read_environment
from lightning_resilience.core.joining import JoinFailure, Joining, ending_of, text_of
from lightning_resilience.core.leaving import Apart, broken_off, unread, used_up
from lightning_resilience.core.restart import GoRecord, first_contact_s, missed
from lightning_resilience.errors import ConfigError
from lightning_resilience.protocols import restart_record
from lightning_resilience.protocols.incarnation import Part
from lightning_resilience.protocols.restart import (
    Gate,
    begins_anew,
    charge_missed,
    pass_first_gate,
    pass_gate,
)
from lightning_resilience.protocols.restart_record import Memory
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    import signal

    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

    from lightning_resilience.adapters.agent_store import AgentStore
    from lightning_resilience.core.quota import Ending
    from lightning_resilience.core.restart import IncarnationRecord


__all__ = ["BACKEND", "ResilientHandler", "create_handler"]

BACKEND: Final = "resilient"

_log = logging.getLogger(__name__)


def create_handler(parameters: RendezvousParameters) -> ResilientHandler:
    """Return the handler for what a launcher was given.

    Args:
        parameters: Endpoint, run id, numbers of nodes, and options.

    Raises:
        SystemExit: 64, where an option is not allowed; the log says which.
    """
    try:
        options = RendezvousOptions.read(parameters.config)
        environment = read_environment()
    except ConfigError as error:
        path = parameters.config.get("termination_log")
        leave_unstarted(error, path, run_id=parameters.run_id)
    if parameters.run_id in {"", "none"}:
        _log.warning(
            "This job has no name of its own (--rdzv-id is %r): another one without a name that "
            "uses the same store is taken for the same job. Give each job an --rdzv-id.",
            parameters.run_id,
        )
    forget_reason(options.termination_log)
    return ResilientHandler(parameters, options, store=environment.store)


class ResilientHandler(RendezvousHandler):
    """One agent's handler. The agent's main thread.

    Args:
        parameters: What the launcher was given.
        options: Checked options.
        store: URL of the store that the workers use; None for the one of the rendezvous.
    """

    def __init__(
        self, parameters: RendezvousParameters, options: RendezvousOptions, *, store: str | None
    ) -> None:
        self._options = options
        self._run_id = parameters.run_id
        self._nodes, self._endpoint = parameters.max_nodes, parameters.endpoint
        self._named_store = store
        self._connection = Connection(parameters, options, named_store=store)
        self._clock, self._dice = SystemClock(), SystemDice(rank=os.getpid())
        self._watching: Watching | None = None
        self._memory: Memory | None = None
        self._round: IncarnationRecord | None = None
        self._part: Part | None = None
        self._is_called = False  # Whether the workers are restarted because of other agents.
        self._left: Ending | None = None
        self._passed: tuple[Gate, GoRecord] | None = None
        self._members: frozenset[tuple[str, int]] = frozenset()

    def get_backend(self) -> str:
        """Return the name under which torch has found this."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the name of the run.

        Raises:
            SystemExit: A signal has told this agent to stop; with its status.
        """
        sign = stopped_by()
        if sign is not None:
            self._stop(sign)
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store of the agents, as the handler within says."""
        return bool(self._connection.handler().use_agent_store)

    # Between two starts of the workers ------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Pass the gate, join, and name the start of the workers that begins.

        Raises:
            SystemExit: The job has ended; with its status.
            RendezvousError: What the handler within raises about a state that nobody understands.
        """
        self._watching = None
        if self._round is None:
            self._clock.sleep(first_contact_s(self._nodes, draw=self._dice.draw()))
        joining = Joining(join_s=self._options.join_s, started_at_s=self._clock.now_s())
        info = self._attempt(joining)
        while info is None:
            # Bounded: ``joining`` ends the job where it was enough.
            info = self._attempt(joining)
        return info

    def _attempt(self, joining: Joining) -> RendezvousInfo | None:
        came_at_s = self._clock.now_s()
        try:
            self._pass_gate()
        except RETRYABLE as error:
            if self._memory is not None:
                answered_at_s, now_s = self._memory.answered_at_s, self._clock.now_s()
                joining.held(came_at_s=came_at_s, answered_at_s=answered_at_s, now_s=now_s)
            self._pause(joining, error)
            return None
        joining.passed(came_at_s=came_at_s, now_s=self._clock.now_s())
        try:
            info = self._connection.join()
            self._enter(info)
        except RETRYABLE as error:
            self._pause(joining, error)
            return None
        return info

    def _pause(self, joining: Joining, error: Exception) -> None:
        """Wait before the next attempt; end the job where there is none."""
        failure = failure_of(error)
        if failure is None:
            raise error
        if failure in {JoinFailure.CLOSED, JoinFailure.UNREACHABLE}:
            self._look_how_it_has_ended(is_closed=failure is JoinFailure.CLOSED)
        now_s = self._clock.now_s()
        pause_s = joining.pause_s(failure, now_s=now_s, draw=self._dice.draw())
        if pause_s is None:
            self._end(
                ending_of(
                    failure,
                    text_of(error),
                    is_first=self._round is None,
                    elapsed_s=now_s - joining.started_at_s,
                    endpoint=self._endpoint,
                )
            )
        _log.warning("joining again in %.1f s: %s", pause_s, text_of(error))
        if failure is JoinFailure.UNREACHABLE:
            self._connection.failed(error)
        self._clock.sleep(pause_s)

    def _look_how_it_has_ended(self, *, is_closed: bool) -> None:
        if is_closed and self._memory is not None:
            # Whoever ends the job for all closes the rendezvous, for those who wait in it.
            try:
                self._remember(self._memory.keys.incarnation)
            except RETRYABLE as silent:
                _log.info("why the rendezvous is closed could not be read: %s", silent)
            else:
                return
        kept = kept_ending(self._options, run_id=self._run_id)
        if kept is not None:
            self._left = kept
            leave_alone(kept, options=self._options, run_id=self._run_id)

    def _pass_gate(self) -> None:
        over = self._round
        if over is None:
            if self._connection.is_early:
                self._begin()
            return
        memory, store = self._remember(over.incarnation), self._connection.store()
        if not self._is_called:
            report_exits(store, memory.keys)
        there = within.participants(self._connection.handler())
        gate = self._gate(memory, left=missed(over, there), is_failure=not self._is_called)
        passed = store.run(pass_gate(gate))
        if not isinstance(passed, GoRecord):
            self._leave(passed)
        self._passed = gate, passed
        _log.info(
            "joining again, %.1f s after it was agreed: %s (failures without progress: %d)",
            passed.delay_s,
            passed.cause,
            passed.number,
        )

    def _gate(self, memory: Memory, **seen: Any) -> Gate:
        needed = dependencies_of(self._options, self._connection, memory.keys)
        return Gate(memory=memory, config=self._options.restart, dependencies=needed, **seen)

    def _remember(self, incarnation: str) -> Memory:
        """Return what this agent remembers of restarts, for a start of the workers.

        Raises:
            SystemExit: The job has ended.
        """
        store = self._connection.store()
        memory = self._memory = self._memory_of(incarnation, store)
        record = store.run(restart_record.read(memory))
        if record.ending is not None:
            self._leave(record.ending)
        return memory

    def _memory_of(self, incarnation: str, store: AgentStore) -> Memory:
        keys, mirror = store.keys(incarnation), mirror_of(self._options, store)
        before = self._memory or Memory(keys)
        return before.followed_by(keys, mirror=mirror)

    def _begin(self) -> None:
        """Look, before the first round, whether a person has to release the job first."""
        store = self._connection.store()
        memory = self._memory = self._memory_of("", store)
        ending = store.run(pass_first_gate(self._gate(memory)))
        if ending is not None:
            self._leave(ending)

    def _enter(self, info: RendezvousInfo) -> None:
        """Learn the name of this start of the workers, and hand it on to them."""
        store = self._connection.store()
        before = "" if self._round is None else self._round.incarnation
        # Order: before the round is named, so that all read an end that follows, and none waits.
        here = self._look_who_is_here(store)
        names = self._connection.names(info, before=before)
        found = learn_name(info, store, names, options=self._options, before=before)
        # Order: its number first, for who leaves at the next look; the round last, for who fails in
        # it, and would tell at the gate how other workers have ended as if they were of this start.
        self._part = Part(start=found, node=info.rank)
        memory = self._remember(found.incarnation)
        self._round, self._members, self._is_called = found, here, False
        self._watching = Watching(
            self._connection, self._options, memory=memory, begun=found, dice=self._dice
        )
        url = None if self._named_store is not None else self._connection.url
        self._connection.environment.tell(
            incarnation=found.incarnation, store=url, site_store=self._options.site_store
        )

    def _look_who_is_here(self, store: AgentStore) -> frozenset[tuple[str, int]]:
        """Have nodes of the last start charged that have left, and were not missed at the gate."""
        here = within.members(self._connection.handler())
        if self._passed is not None:
            gate, go = self._passed
            store.run(charge_missed(gate, go, gone=len(self._members - here)))
        self._passed = None
        return here

    # While all is well ----------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join; more than none restarts the workers.

        Raises:
            SystemExit: The job has ended; with its status.
        """
        if self._watching is None:
            return 0
        news = self._watching.look()
        if news.ending is not None:
            self._leave(news.ending)
        waiting = 1 if news.is_over else self._watching.waiting()
        self._is_called = self._is_called or bool(waiting)
        return waiting

    def is_closed(self) -> bool:
        """Tell whether the rendezvous is closed; not, as long as nobody can be asked."""
        return self._connection.is_closed()

    def set_closed(self) -> None:
        """Close the rendezvous for all."""
        self._connection.set_closed()

    # The end --------------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """Leave; close the rendezvous where the job has ended for all.

        Raises:
            SystemExit: The job has ended otherwise than well; with its status.
        """
        if self._left is not None:
            # ``SystemExit`` is on its way through torch's launcher, which calls this once more.
            self._connection.close()
            return False
        # Order: before this handles an exception of its own.
        error, ending = failing_with(), None
        try:
            ending = self._ending() or broken_off(error)
        except RETRYABLE as silent:
            _log.warning("how the job has ended could not be told: %s", silent)
            # Without any record there is one status that may be wrong and does no harm.
            ending = None if error is None else unread(text_of(silent))
        if ending is not None:
            self._leave(ending)
        try:
            return self._shut_down()
        except RETRYABLE as error:
            _log.info("the store has gone before this agent: %s", error)
            return False
        finally:
            self._connection.close()

    def _shut_down(self) -> bool:
        handler = self._connection.handler()
        memory = self._memory
        is_left = memory is not None and self._connection.store().run(begins_anew(memory.keys))
        if is_left or failing_with() is not None:
            # This agent alone has come to its end: the others form again without it.
            within.stop(handler)
            return True
        return self._connection.shut_down()

    def _ending(self) -> Ending | Apart | None:
        """Return how the job has ended; None where it has ended well, or not for all."""
        memory, part = self._memory, self._part
        if memory is None or part is None:
            return None
        store = self._connection.store()
        record = store.run(restart_record.read(memory))
        if record.ending is not None or not worker_exits():
            return record.ending
        # Torch's own limit is reached: it asks for no other rendezvous.
        self._pass_gate()
        ending = used_up(part.node, incarnation=part.start.incarnation)
        return store.run(restart_record.end(memory, ending))

    def _end(self, ending: Ending) -> NoReturn:
        """End the job for all, where it is this agent's to end, and leave."""
        how: Ending | Apart = ending
        if self._memory is not None:
            try:
                how = self._connection.store().run(restart_record.end(self._memory, ending))
            except RETRYABLE as error:
                _log.warning("the other agents could not be told of the end: %s", error)
        self._leave(how)

    def _leave(self, how: Ending | Apart) -> NoReturn:
        """Leave with a status, and say why."""
        self._left = how.ending if isinstance(how, Apart) else how
        leave(self._connection, how, options=self._options, part=self._part)

    def _stop(self, sign: signal.Signals) -> NoReturn:
        """Leave because a signal says so; with the job's own status where this has left already."""
        if self._left is not None:
            raise SystemExit(int(self._left.code))
        memory = None if self._watching is None else self._memory
        keys = None if memory is None else memory.keys
        leave_told(self._connection, sign, options=self._options, keys=keys)
