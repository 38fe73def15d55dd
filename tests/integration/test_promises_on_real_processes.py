# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Sixteen processes, faults by a seed, and the promises held against what the server has counted.

Twenty rounds on a real ``TCPStore`` and a real HTTP server, with SIGKILL, SIGSTOP and a store that
dies and comes back empty. Each round has records of its own. A schedule is its seed's, but not what
the kernel makes of it: a round that is run again strikes at the same instants, not the same lines.

The figures of each round are printed (``pytest -s``).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from lightning_resilience.core.records import BreakerRecord, FinalRecord, Transition
from tests.http_server import in_background
from tests.integration.contention_ranks import Crew, StoreServer
from tests.integration.promise_checks import (
    Absence,
    Claim,
    Loss,
    Recording,
    Served,
    Told,
    broken,
    is_forgiven,
    is_late,
    one_verdict,
)
from tests.integration.promise_ranks import (
    ADMISSION,
    CONFIG,
    HOSTS,
    RANKS,
    READ,
    WRITE,
    Storage,
    live,
)
from tests.integration.promise_rounds import STRIKES, Fault, Round, again, plan


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]

SEEDS = range(1, 21)


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Crew]:
    """The processes, for all rounds."""
    crew = Crew(RANKS, live)

    yield crew

    crew.end()


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    """The store's server, which rounds may kill."""
    running = StoreServer()

    yield running

    running.kill()


@pytest.fixture
def storage() -> Iterator[Storage]:
    """What all ranks depend on."""
    with Storage() as running, in_background(running, poll_s=0.02):
        try:
            yield running
        finally:
            running.stopped.clear()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed-{seed}-")
def test_every_promise_is_kept_whatever_strikes(
    sixteen: Crew, server: StoreServer, storage: Storage, seed: int
) -> None:
    """In a round of faults no promise is broken, and whoever lives comes to its end."""
    began_s = time.monotonic()
    played = Round(seed, sixteen, storage, server)
    recording = played.play()

    print(f"seed {seed}: {time.monotonic() - began_s:.1f} s, {figures(recording)}; {played.struck}")  # noqa: T201
    breaks = broken(recording)
    assert breaks == [], f"seed {seed}: {breaks}; faults: {played.struck}. {again(seed)}"


def figures(recording: Recording) -> dict[str, object]:
    """What was counted in a round."""
    calls = recording.calls(READ, "shared")
    admitted = [call for call in calls if call.claim is not None]
    inside = [[e for e in admitted if e.is_in_at(call.began_at_s)] for call in admitted]
    forgiven = [
        [each for each in calls if is_forgiven(recording, each, admitted, call.began_at_s)]
        for call, calls in zip(admitted, inside, strict=True)
    ]
    shared = [*recording.probes(READ, "shared"), *recording.probes(WRITE, "shared")]
    final = [record for name, record in recording.seen[-1] if name == READ]
    return {
        "calls": len(recording.served),
        "at once": max(map(len, inside)),
        "forgiven": max(map(len, forgiven)),
        "probes": len(shared),
        "late": sum(is_late(recording, probe) for probe in shared),
        "alone": dict(Counter((s.kind, s.way) for s in recording.served if s.way != "shared")),
        "history": "".join(entry.state[0] for record in final for entry in record.history),
        "operations": dict(
            Counter(
                each.error or (each.final.failure if each.final else "") or "ok"
                for each in recording.told
            )
        ),
    }


def test_the_schedules_have_every_fault() -> None:
    """Among the rounds is every way to strike, with and without the store being lost."""
    faults = [fault for seed in SEEDS for fault in plan(seed)]

    strikes = {(what, whom) for what, whom, _ in STRIKES}
    assert {(each.what, each.whom) for each in faults} == {("outage", ""), ("store", ""), *strikes}
    assert {fault.for_s > 0 for fault in faults if fault.what == "store"} == {True, False}


def test_a_rank_that_is_late_to_a_replaced_store_makes_up_no_verdict(
    sixteen: Crew, server: StoreServer, storage: Storage
) -> None:
    """One rank is stopped in an operation that ends without it, and finds the store empty.

    It cannot know how the operation ended, and nobody is left to tell it.
    """
    faults = [
        Fault(what="stop", at_s=0.0, whom="waiter", for_s=2.0),
        Fault(what="store", at_s=1.0),
    ]
    recording = Round(1, sixteen, storage, server, faults).play()

    assert list(one_verdict(recording)) == []


# --- the checks themselves: each finds what it is there for -----------------------------------

STORE = "first"
PATH = [
    ("closed", "created"),
    ("open", "4 of 16 hosts voted"),
    ("half_open", "a probe was claimed"),
    ("recovering", "the probe was answered"),
    ("closed", "a call succeeded"),
]


def a_history(path: Sequence[tuple[str, str]] = PATH, store: str = STORE) -> list[BreakerRecord]:
    """The records of a breaker that goes this path, one epoch after the other."""
    entries = [
        Transition(epoch=epoch, state=state, reason=reason)
        for epoch, (state, reason) in enumerate(path, start=1)
    ]
    return [
        BreakerRecord(
            store_id=store,
            epoch=entry.epoch,
            generation=0,
            state=entry.state,
            holder=f"holder-{entry.epoch}" if entry.state == "half_open" else "",
            limit=4,
            open_s=2.1,
            history=tuple(entries[: entry.epoch]),
            writer="w",
        )
        for entry in entries
    ]


def a_probe(rank: int, epoch: int, at_s: float, **fields: Any) -> Served:
    """A probe by a claim that was made right before."""
    claim = Claim(store_id=STORE, number=epoch, holder=f"{rank}-{epoch}", sent_at_s=at_s - 0.01)
    common = {"kind": "probe", "dependency": READ, "rank": rank, "claim": claim}
    served = {"began_at_s": at_s, "ended_at_s": at_s + 0.02, "went_well": True}
    return Served(**{**common, **served, **fields})


def a_call(rank: int, slot: int, at_s: float, **fields: Any) -> Served:
    """A call that a slot has let in, of half a second."""
    claim = Claim(number=slot, holder=f"{rank} at {at_s}", sent_at_s=at_s - 0.01)
    common = {"kind": "collective", "dependency": READ, "rank": rank, "claim": claim}
    return Served(**{**common, "began_at_s": at_s, "ended_at_s": at_s + 0.5, **fields})


def a_verdict(rank: int, **fields: Any) -> Told:
    """What a rank is told of an operation that went well."""
    final = FinalRecord(op="save", detail="by 0", workers=(0,), writer="w")
    common = {"rank": rank, "seq": 1, "worker": 0, "began_at_s": 0.0, "ended_at_s": 0.1}
    return Told(**{**common, "final": final, **fields})


def a_recording(**fields: Any) -> Recording:
    """A round in which all went as promised; what is given replaces its part."""
    usual = {
        "served": [a_probe(3, 3, 5.0), *(a_call(rank, rank, 9.0) for rank in range(4))],
        "seen": {rank: [(READ, record) for record in a_history()] for rank in range(2)},
        "told": [a_verdict(rank) for rank in range(RANKS)],
    }
    kept = {"config": CONFIG, "admission": ADMISSION, "ranks": RANKS, "hosts": HOSTS}
    return Recording(**{**kept, **usual, **fields})


def seen(path: Sequence[tuple[str, str]], store: str = STORE) -> dict[str, Any]:
    """What one rank has seen, where the path is this one."""
    probes = [a_probe(3, epoch, 5.0 * epoch) for epoch in range(1, len(path) + 1)]
    return {"seen": {0: [(READ, each) for each in a_history(path, store)]}, "served": probes}


LOST = FinalRecord(op="save", failure="lost", lost_ranks=(0,), first_rank=0, writer="other")
ABSENT = structs.replace(LOST, lost_ranks=(2,), first_rank=2)
STOPPED = Absence(rank=3, at_s=5.0, until_s=8.0)
RESTART = Loss(at_s=4.0, until_s=4.5)
BREAKS: dict[str, tuple[str, dict[str, Any]]] = {
    "two probes at once": (
        "I1: ranks 3 and 4 probe",
        {"served": [a_probe(3, 3, 5.0, ended_at_s=9.0), a_probe(4, 4, 8.0)]},
    ),
    "two probes of one epoch": (
        "I1: 2 probes of storage:read in epoch 3",
        {"served": [a_probe(3, 3, 5.0), a_probe(4, 3, 9.0)]},
    ),
    "a probe of every rank": (
        "I1: two claims of storage:read within",
        {"served": [a_probe(rank, rank, 5.0 + 0.1 * rank) for rank in range(RANKS)]},
    ),
    "a probe without a claim": (
        "I1: rank 3 probes storage:read without a claim",
        {"served": [a_probe(3, 3, 5.0), a_probe(3, 4, 9.0, claim=None)]},
    ),
    "one stop, and two others probe": (
        "I1: ranks 4 and 5 probe",
        {
            "served": [
                a_probe(3, 3, 5.0, began_at_s=8.0, ended_at_s=8.4),
                a_probe(4, 4, 8.0, ended_at_s=12.0),
                a_probe(5, 5, 11.0),
            ],
            "absences": [STOPPED],
        },
    ),
    "a probe alone, with the store there": (
        "I1: rank 3 probes storage:read alone",
        {"served": [a_probe(3, 3, 5.0, way="lost")]},
    ),
    "all of those that are alone probe": (
        "I1: 16 probes of storage:read without the store",
        {
            "served": [a_probe(rank, 3, 5.0, way="lost") for rank in range(RANKS)],
            "losses": [RESTART],
        },
    ),
    "two probes by one claim of one's own": (
        "I1: rank 3, alone, has sent 2 probes",
        {"served": [a_probe(3, 3, at_s, way="isolated") for at_s in (5.0, 5.1)]},
    ),
    "all hosts are isolated": (
        "I1: 16 hosts probe storage:read for themselves",
        {"served": [a_probe(rank, 3, 5.0, way="isolated") for rank in range(RANKS)]},
    ),
    "a transition that does not exist": (
        "I2: storage:read goes from closed to half_open",
        seen([PATH[0], PATH[2]]),
    ),
    "two tales of one epoch": (
        "I2: epoch 2 of storage:read in store first is told in 2 ways",
        {
            "seen": {
                0: [(READ, a_history()[1])],
                1: [(READ, a_history([PATH[0], ("forced_open", "by an operator")])[1])],
            }
        },
    ),
    "two holders of one epoch": (
        "I2: epoch 3 of storage:read in store first is told in 2 ways",
        {
            "seen": {
                rank: [(READ, structs.replace(a_history()[2], holder=f"h{rank}"))]
                for rank in range(2)
            }
        },
    ),
    "back to an earlier epoch": (
        "goes from epoch 2 back to 1",
        {"seen": {0: [(READ, a_history()[1]), (READ, a_history()[0])]}},
    ),
    "back to the store before": (
        "comes back after second",
        {
            "seen": {
                0: [
                    (READ, a_history(store=name)[epoch])
                    for epoch, name in enumerate((STORE, "second", STORE))
                ]
            }
        },
    ),
    "what one decided alone is shared": (
        "I2: what storage:read",
        seen(PATH[:1], store="local"),
    ),
    "closed by nobody's probe": (
        "I2: storage:read recovers in epoch 4, and no probe of it went well",
        {"served": [a_probe(3, 3, 5.0, went_well=False)]},
    ),
    "one more than the limit": (
        "I5: 5 calls of storage:read at once",
        {"served": [a_probe(3, 3, 5.0), *(a_call(rank, rank, 9.0) for rank in range(5))]},
    ),
    "a slot that was taken from one who lives": (
        "I5: 5 calls of storage:read at once",
        {
            "served": [
                a_probe(3, 3, 5.0),
                *(a_call(rank, rank, 9.0) for rank in range(4)),
                a_call(7, 0, 9.3),
            ],
            "absences": [Absence(rank=0, at_s=9.0, until_s=9.2)],
        },
    ),
    "a collective call without a slot": (
        "I5: rank 3 calls storage:read without a slot",
        {"served": [a_probe(3, 3, 5.0), a_call(3, 0, 9.0, claim=None)]},
    ),
    "two calls by one claim": (
        "I5: 2 calls of storage:read by one claim",
        {"served": [a_probe(3, 3, 5.0), *(a_call(3, 0, 9.0) for _ in range(2))]},
    ),
    "two calls at once of one that is alone": (
        "I5: rank 3, alone, has 2 calls",
        {
            "served": [
                a_probe(3, 3, 5.0),
                *(a_call(3, 0, at_s, way="lost", claim=None) for at_s in (9.0, 9.2)),
            ]
        },
    ),
    "two verdicts": (
        "I8: 2 verdicts of operation 1",
        {"told": [a_verdict(0), a_verdict(1, final=LOST)], "absences": [Absence(rank=0, at_s=0)]},
    ),
    "an error that names nobody": (
        "I8: rank 1 is not named",
        {
            "told": [a_verdict(0), a_verdict(1, final=None, error="JointUnavailableError")],
            "losses": [Loss(at_s=0.0, until_s=0.1)],
        },
    ),
    "another error": (
        "I8: rank 1 raised ValueError",
        {"told": [a_verdict(0), a_verdict(1, final=None, error="ValueError")]},
    ),
    "a worker that is not named": (
        "I8: operation 1 went on without its worker 0",
        {
            "told": [
                a_verdict(0, final=None, error="JointUnavailableError", lost_ranks=(0,)),
                a_verdict(1, final=structs.replace(LOST, lost_ranks=(5,), first_rank=5)),
            ],
            "losses": [Loss(at_s=0.0, until_s=0.1)],
        },
    ),
    "a worker that was well is taken for lost": (
        "operation 1, whose worker 0 was well, ended with ['lost']",
        {"told": [a_verdict(rank, final=LOST) for rank in range(2)]},
    ),
    "a rank that was well is taken for absent": (
        "operation 1 names [2] as lost, who were well",
        {"told": [a_verdict(0, final=ABSENT)], "absences": [Absence(rank=3, at_s=0.0)]},
    ),
    "a call that failed": ("a call failed: why", {"errors": ["why"]}),
}


@pytest.mark.parametrize("broke", BREAKS)
def test_a_broken_promise_is_found(broke: str) -> None:
    """A made-up recording that breaks a promise is caught, by the check that is there for it."""
    expected, fields = BREAKS[broke]

    found = broken(a_recording(**fields))

    assert any(expected in each for each in found), found


EXCUSED: dict[str, dict[str, Any]] = {
    "nothing special": {},
    "a probe that its stop has made late": {
        "served": [
            a_probe(3, 3, 5.0, began_at_s=8.0),
            a_probe(4, 4, 8.0),
            *(a_call(rank, rank, 9.0) for rank in range(4)),
        ],
        "absences": [STOPPED],
    },
    "a slot that was forgiven": {
        "served": [
            a_probe(3, 3, 5.0),
            *(a_call(rank, rank, 9.0, ended_at_s=12.0) for rank in range(4)),
            a_call(7, 0, 10.5),
        ],
        "absences": [Absence(rank=0, at_s=9.2, until_s=11.0)],
    },
    "slots that went with the store": {
        "served": [
            a_probe(3, 3, 5.0),
            *(a_call(rank, rank, 9.0) for rank in range(4)),
            *(a_call(rank, rank - 4, 9.3) for rank in range(4, 8)),
        ],
        "losses": [Loss(at_s=9.1, until_s=9.2)],
    },
    "a store that came back empty": {
        "seen": {
            0: [
                *((READ, record) for record in a_history()),
                (
                    READ,
                    a_history([*PATH, ("closed", "rebuilt after the store was lost")], "new")[5],
                ),
            ]
        },
        "losses": [RESTART],
    },
    "one probe of sixteen that are alone": {
        "served": [a_probe(3, 3, 5.0), a_probe(5, 1, 5.0, way="lost")],
        "losses": [RESTART],
    },
    "a rank without work that was killed, and has not come": {
        "told": [a_verdict(rank, final=ABSENT) for rank in (0, 1, 3)],
        "absences": [Absence(rank=2, at_s=0.0)],
    },
    "a rank that cannot know": {
        "told": [
            a_verdict(0),
            a_verdict(1, final=None, error="JointUnavailableError", lost_ranks=(1,)),
        ],
        "losses": [Loss(at_s=0.0, until_s=0.1)],
    },
}


@pytest.mark.parametrize("excuse", EXCUSED)
def test_what_is_promised_is_no_break(excuse: str) -> None:
    """What the promises allow is not taken for a break."""
    assert broken(a_recording(**EXCUSED[excuse])) == []
