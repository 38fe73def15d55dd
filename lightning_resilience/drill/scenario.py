# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a drill is about: the world, what the ranks do in it, and what goes wrong when.

A scenario is data and nothing else. Together with a seed it decides a run: what it leaves open, as
which clock and how late, is drawn from the seed. Times are seconds of the virtual clock.

The range of a field is in its annotation, from where reading a file takes it. What fields have to
do with each other is checked whenever a scenario is made, also by a program.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec

from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import ScenarioError


if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = [
    "JOINT_KINDS",
    "Brownout",
    "BrownoutFailure",
    "Clocks",
    "Crash",
    "Fault",
    "GroupRestart",
    "Interrupt",
    "Kind",
    "Outage",
    "OutageFailure",
    "Pause",
    "Refusal",
    "RefusalError",
    "Scenario",
    "Storage",
    "StoragePartition",
    "Store",
    "StoreGone",
    "StorePartition",
    "Stray",
    "Workload",
]

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, extra={"unit": "s"})]
PerSecond: TypeAlias = Annotated[float, msgspec.Meta(ge=0, extra={"unit": "1/s"})]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
# A million is more than any job has, and less than what a typing error makes of a thousand.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Kind: TypeAlias = Literal["single", "collective", "joint", "load"]
OutageFailure: TypeAlias = Literal["reset", "timeout", "throttle", "unknown", "hang"]
BrownoutFailure: TypeAlias = Literal["reset", "timeout", "throttle", "unknown", "auth", "permanent"]
RefusalError: TypeAlias = Literal["auth", "permanent", "capacity"]

JOINT_KINDS: Final = frozenset({"joint", "load"})
"""Operations that all ranks enter, and leave with one verdict."""


class Clocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the hosts' clocks differ.

    Args:
        offset_s: Largest offset to either side, in seconds; each host draws its own.
        rate: Largest rate, ≥ 1; a host's is between ``1 / rate`` and it, two differ by ``rate²``.
    """

    offset_s: Seconds = 1000.0
    rate: Annotated[float, msgspec.Meta(ge=1, le=1.2)] = 1.0


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every rank does.

    Args:
        kinds: The operations of one round, in order: a call of its own, one that all ranks make at
            the same time, a joint save with one worker, or a joint load in which all work.
        rounds: How many rounds, ≥ 1.
        every_s: Time between two rounds, in seconds.
        spread_s: Each rank begins each operation up to this much later, in seconds.
        on_outage: What a joint operation does while storage is ill: ``wait`` or ``fail``.
        when_open: What a call does while the circuit is open: ``wait`` or ``raise``.
        joint_timeout_s: Silence after which a rank is lost, in seconds; 0.8 × half an hour.
        defer_after_s: After how long without a store a save is deferred, in seconds; 0 for never.
    """

    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(min_length=1)] = ("collective",)
    rounds: Count = 1
    every_s: Seconds = 30.0
    spread_s: Seconds = 0.05
    on_outage: Literal["wait", "fail"] = "wait"
    when_open: Literal["wait", "raise"] = "wait"
    joint_timeout_s: Annotated[float, msgspec.Meta(gt=0, extra={"unit": "s"})] = 1440.0
    defer_after_s: Seconds = 0.0

    @property
    def has_joint(self) -> bool:
        """True where ranks wait for each other's verdict."""
        return not JOINT_KINDS.isdisjoint(self.kinds)


class Store(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared store and the way to it.

    Args:
        latency_s: Time of a message one way, in seconds.
        service_s: Time that its one thread needs for an operation, in seconds.
        timeout_s: How long a client waits for an answer, in seconds.
        lost_requests: Share of requests that never arrive.
        lost_answers: Share of answers that never arrive, of operations that were performed.
        late_requests: Share of requests that arrive up to ``late_s`` late.
        late_s: How late, in seconds; after ``timeout_s`` their client waits no longer.
    """

    latency_s: Seconds = 0.0005
    service_s: Seconds = 0.000_025
    timeout_s: Seconds = 5.0
    lost_requests: Share = 0.0
    lost_answers: Share = 0.0
    late_requests: Share = 0.0
    late_s: Seconds = 10.0


class Storage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dependency.

    Args:
        slots: Requests that it serves at once, ≥ 1; the others queue.
        service_s: Time that one takes, in seconds.
        jitter: Share by which that time varies to either side.
        failing_s: Time after which one fails while storage is ill, in seconds.
        per_s: Requests per second above which it throttles; 0 for never.
    """

    slots: Count = 16
    service_s: Seconds = 0.05
    jitter: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    failing_s: Seconds = 0.05
    per_s: PerSecond = 0.0


class _Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    at_s: Seconds


class Outage(_Fault, frozen=True, kw_only=True, tag="outage"):
    """Storage fails every request.

    Args:
        at_s: When, in seconds.
        for_s: For how long, in seconds.
        error: How requests fail; ``hang`` never answers.
    """

    for_s: Seconds
    error: OutageFailure = "reset"


class Brownout(_Fault, frozen=True, kw_only=True, tag="brownout"):
    """Storage fails some requests, and is slow with the others.

    Args:
        at_s: When, in seconds.
        for_s: For how long, in seconds.
        share: Share of requests that fail.
        slowdown: Factor of the time that a request takes, ≥ 1.
        error: How requests fail.
    """

    for_s: Seconds
    share: Share = 0.3
    slowdown: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    error: BrownoutFailure = "reset"


class Refusal(_Fault, frozen=True, kw_only=True, tag="refusal"):
    """Storage refuses what some ranks ask for, and serves the others.

    Such a failure is for good: of those that work together some fail, and each in its own way.

    Args:
        at_s: When, in seconds.
        for_s: For how long, in seconds.
        ranks: Whose requests.
        error: How they fail.
    """

    for_s: Seconds
    ranks: tuple[Rank, ...]
    error: RefusalError = "permanent"


class Stray(_Fault, frozen=True, kw_only=True, tag="stray"):
    """Ranks leave out their next joint operation, or make it twice, and so leave lock-step.

    Args:
        at_s: From when, in seconds.
        ranks: Whose.
        twice: Whether they make it twice.
    """

    ranks: tuple[Rank, ...]
    twice: bool = False


class _Strike(_Fault, frozen=True, kw_only=True):
    ranks: tuple[Rank, ...]
    effects: Annotated[int, msgspec.Meta(ge=0)] = 0


class Crash(_Strike, frozen=True, kw_only=True, tag="crash"):
    """Processes are killed. Nobody starts them again but a ``GroupRestart``.

    Args:
        at_s: When, in seconds.
        ranks: Whose.
        effects: How many effects a process still performs from then on.
    """


class Pause(_Strike, frozen=True, kw_only=True, tag="pause"):
    """Processes stand still, and wake up late.

    Args:
        at_s: When, in seconds.
        ranks: Whose.
        effects: As for ``Crash``.
        for_s: For how long, in seconds.
    """

    for_s: Seconds


class Interrupt(_Strike, frozen=True, kw_only=True, tag="interrupt"):
    """Processes are interrupted as by Ctrl-C, say their last words, and end.

    Args:
        at_s: When, in seconds.
        ranks: Whose.
        effects: As for ``Crash``.
    """


class StorePartition(_Fault, frozen=True, kw_only=True, tag="store_partition"):
    """Hosts are cut off from the shared store.

    Args:
        at_s: When, in seconds.
        for_s: For how long, in seconds.
        hosts: Which.
    """

    for_s: Seconds
    hosts: tuple[Rank, ...]


class StoragePartition(_Fault, frozen=True, kw_only=True, tag="storage_partition"):
    """Hosts are cut off from storage.

    Args:
        at_s: When, in seconds.
        for_s: For how long, in seconds.
        hosts: Which.
    """

    for_s: Seconds
    hosts: tuple[Rank, ...]


class StoreGone(_Fault, frozen=True, kw_only=True, tag="store_gone"):
    """The shared store's server is gone for a while.

    Args:
        at_s: When, in seconds.
        for_s: For how long, in seconds.
        comes_back_empty: Whether it has lost everything.
    """

    for_s: Seconds
    comes_back_empty: bool = False


class GroupRestart(_Fault, frozen=True, kw_only=True, tag="group_restart"):
    """All processes are killed, and new ones begin as the next incarnation.

    Args:
        at_s: When, in seconds.
    """


Fault: TypeAlias = (
    Outage
    | Brownout
    | Refusal
    | Stray
    | Crash
    | Pause
    | Interrupt
    | StorePartition
    | StoragePartition
    | StoreGone
    | GroupRestart
)


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A world, and what goes wrong in it.

    Args:
        name: What it is about.
        ranks: Processes of the job, ≥ 1.
        hosts: Hosts that they are spread over, ≥ 1 and at most as many as ranks.
        ends_at_s: When the checks of liveness must hold at the latest, after the last fault, in
            seconds; None takes the bound that follows from the configuration.
        clocks: How the hosts' clocks differ.
        workload: What every rank does.
        store: The shared store.
        storage: The dependency.
        breaker: Its breaker.
        retry: The retry policy of every call.
        budget: The job's retry budget.
        admission: How slots are kept.
        may_go_alone: Whether calls outside joint operations go on without the store.
        faults: What goes wrong.

    Raises:
        ScenarioError: There are more hosts than ranks, or permits than slots, or a fault strikes
            nobody, or somebody twice, or who is not there.
    """

    name: str = ""
    ranks: Count = 8
    hosts: Count = 1
    ends_at_s: Seconds | None = None
    clocks: Clocks = Clocks()
    workload: Workload = Workload()
    store: Store = Store()
    storage: Storage = Storage()
    breaker: BreakerConfig = BreakerConfig()
    retry: RetryPolicy = RetryPolicy()
    budget: BudgetConfig = BudgetConfig()
    admission: AdmissionConfig = AdmissionConfig()
    may_go_alone: bool = True
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts > self.ranks:
            message = (
                f"hosts={self.hosts} must be at most ranks={self.ranks}: a host without a rank "
                "takes no part in anything. Lower the first or raise the second."
            )
            raise ScenarioError(message, field="hosts")
        permits, slots = self.breaker.max_concurrent, self.storage.slots
        if permits > slots:
            message = (
                f"breaker.max_concurrent={permits} must be at most storage.slots={slots}: the job "
                "would let in more calls than the dependency serves at once. Lower the first or "
                "raise the second."
            )
            raise ScenarioError(message, field="breaker.max_concurrent")
        for path, struck, there in _struck(self):
            _check_struck(path, struck, there)


def _struck(scenario: Scenario) -> Iterator[tuple[str, tuple[int, ...], int]]:
    for index, fault in enumerate(scenario.faults):
        if isinstance(fault, _Strike | Refusal | Stray):
            yield f"faults[{index}].ranks", fault.ranks, scenario.ranks
        elif isinstance(fault, StorePartition | StoragePartition):
            yield f"faults[{index}].hosts", fault.hosts, scenario.hosts


def _check_struck(path: str, struck: tuple[int, ...], there: int) -> None:
    noun = path.rpartition(".")[2]
    absent = next((number for number in struck if number not in range(there)), None)
    if not struck:
        problem = "is empty, so it strikes nobody"
    elif absent is not None:
        problem = f"has {absent}, which is not there"
    elif len(set(struck)) < len(struck):
        problem = f"has {Counter(struck).most_common(1)[0][0]} twice"
    else:
        return
    message = (
        f"{path} {problem}: it must be at least one of the {noun}, which are from 0 to "
        f"{there - 1}, each once."
    )
    raise ScenarioError(message, field=path)
