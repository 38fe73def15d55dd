# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All interleavings of two or three processes, with a fault at any point, for each protocol.

Every exploration states how far it goes, and how much it must have covered at least: one that
explores nothing fails. And each sees: with a bug planted in the protocol, it finds it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lightning_resilience.core import (
    admission as core_admission,
    breaker,
    slots as core_slots,
    waiting,
)
from lightning_resilience.core.breaker import BreakerState, ProbeClaimed
from lightning_resilience.core.records import encode
from lightning_resilience.drill import explorer_checks as checks
from lightning_resilience.drill.explored_process import Cast
from lightning_resilience.drill.explored_programs import KEYS
from lightning_resilience.drill.explored_world import Scene, moves, strikes, taken
from lightning_resilience.drill.explorer import explore, replay
from lightning_resilience.drill.explorer_scenes import (
    EVERYTHING,
    RECORD,
    claims,
    forgiveness,
    memories,
    outage,
    reports,
    slots,
    take_over,
    verdict,
)
from lightning_resilience.protocols import (
    admission,
    circuit,
    effects as fx,
    joint_fence,
    joint_verdict,
    permit,
    shared_cell,
)
from lightning_resilience.protocols.shared_cell import Written
from lightning_resilience.protocols.transform import transform
from tests.explorations import explored_well, found_broken


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.drill.explored_world import State
    from lightning_resilience.protocols.joint_terms import Arrival

    Patch = pytest.MonkeyPatch

# Each is bounded by its depth; on a machine that does much else, half a minute becomes two.
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Exploration:
    """A scene, and what must have been covered of it at least.

    Args:
        states: Different states.
        paths: Sequences of choices.
        is_whole: Whether all of it must have come to its end before the depth.
        events: What must have been reported in it.
    """

    scene: Scene
    states: int
    paths: int
    is_whole: bool = False
    events: set[str] = field(default_factory=set)


PROBED = {"ProbeStarted", "ProbeEnded", "BreakerChanged"}
BEATING, IDLE = {"beats": 1}, dict[str, Any]()
ILL = {"ills": 1}
LEFT, RIGHT = {"draw": 0.0}, {"draw": 0.75}

EXPLORATIONS = {
    "two claim": Exploration(claims(ills=(0, 0), depth=90), 4_000, 10**6, True, PROBED),
    "two claim, and a probe fails": Exploration(
        claims(ills=(1, 0), depth=90), 10_000, 10**6, True, events=PROBED
    ),
    "two claim, stopped and interrupted": Exploration(
        claims(ills=(0, 0), faults=EVERYTHING, depth=22), 6_000, 10**5, events=PROBED
    ),
    "two claim, and the store comes back empty": Exploration(
        claims(ills=(0, 0), may_be_emptied=True, depth=14),
        5_000,
        10**5,
        events=PROBED | {"RecordVanished"},
    ),
    "three claim": Exploration(
        claims(ills=(0, 0, 0), depth=12), 8_000, 10**6, events={"ProbeStarted"}
    ),
    "two take over": Exploration(take_over(ills=(1, 0), depth=26), 4_000, 10**7, events=PROBED),
    "three take over": Exploration(take_over(ills=(0, 0, 0), depth=13), 5_000, 10**6),
    "two come through an outage": Exploration(
        outage(limit=1, ills=(0, 0), depth=17),
        8_000,
        10**5,
        events=PROBED | {"SlotAwaited", "SlotForgiven"},
    ),
    "two come through an outage, and ramp up": Exploration(
        outage(limit=2, ills=(0, 0), depth=15),
        4_000,
        10**5,
        events=PROBED | {"SlotAwaited", "SlotForgiven"},
    ),
    "three come through an outage": Exploration(
        outage(limit=2, ills=(0, 0, 0), depth=8), 2_000, 10**4, events=PROBED
    ),
    "one slot for two": Exploration(
        slots(limit=1, cast=(BEATING, IDLE), faults=EVERYTHING, depth=60),
        10_000,
        10**6,
        True,
        {"SlotAwaited", "SlotForgiven"},
    ),
    "one slot for two, two faults": Exploration(
        slots(limit=1, cast=(BEATING, IDLE), most_faults=2, depth=60),
        10_000,
        10**6,
        True,
        {"SlotAwaited", "SlotForgiven"},
    ),
    "one slot for two, any number of faults": Exploration(
        slots(limit=1, cast=(BEATING, BEATING), most_faults=10, store_patience_s=5.0, depth=10),
        10_000,
        10**5,
        events={"SlotForgiven", "StoreReturned"},
    ),
    "two slots for two, any number of faults": Exploration(
        slots(limit=2, cast=(LEFT, RIGHT), most_faults=9, store_patience_s=5.0, depth=9),
        2_000,
        10**5,
    ),
    "one slot for two, who come twice": Exploration(
        slots(limit=1, cast=(BEATING, IDLE), calls=2, depth=12), 3_000, 10**4
    ),
    "one slot for two, and the store comes back empty": Exploration(
        slots(limit=1, cast=(IDLE, IDLE), may_be_emptied=True, most_faults=0, depth=24),
        2_000,
        10**5,
        events={"RecordVanished"},
    ),
    "one slot for three": Exploration(slots(limit=1, cast=(IDLE,) * 3, depth=10), 4_000, 10**5),
    "two slots for three": Exploration(
        slots(limit=2, cast=(LEFT, RIGHT, IDLE), depth=12), 6_000, 10**5
    ),
    "two forgive one": Exploration(
        forgiveness(limit=1, cast=(BEATING, IDLE), depth=60),
        10_000,
        10**8,
        True,
        {"SlotForgiven"},
    ),
    "two forgive two, two faults": Exploration(
        forgiveness(limit=2, cast=(LEFT, RIGHT), most_faults=2, depth=60),
        8_000,
        10**8,
        True,
        {"SlotForgiven"},
    ),
    "three forgive one": Exploration(
        forgiveness(limit=1, cast=(IDLE,) * 3, depth=15), 6_000, 10**6, events={"SlotForgiven"}
    ),
    "one of two saves": Exploration(
        verdict(workers=(0,), cast=(BEATING | ILL, IDLE), depth=24),
        6_000,
        10**6,
        events={"RanksLost", "StoreReturned"},
    ),
    "one of two saves, two faults": Exploration(
        verdict(workers=(0,), cast=(IDLE, IDLE), faults=EVERYTHING, most_faults=2, depth=12),
        3_000,
        10**4,
    ),
    "one of two saves, and the store comes back empty": Exploration(
        verdict(
            workers=(0,),
            cast=(IDLE, IDLE),
            may_be_emptied=True,
            most_faults=0,
            end_checks=(),
            depth=16,
        ),
        4_000,
        10**4,
    ),
    "one of three saves, and the third never comes": Exploration(
        verdict(workers=(0,), cast=(BEATING, IDLE), absent=1, depth=17),
        4_000,
        10**5,
        events={"RanksLost"},
    ),
    "both save": Exploration(verdict(workers=(0, 1), cast=(ILL, IDLE), depth=24), 8_000, 10**6),
    "two of three save": Exploration(
        verdict(workers=(0, 1), cast=(ILL, IDLE, IDLE), depth=11), 6_000, 10**5
    ),
    "one of two saves at an open gate": Exploration(
        verdict(workers=(0,), cast=(IDLE, IDLE), is_gated=True, depth=21),
        4_000,
        10**6,
        events=PROBED | {"RanksLost"},
    ),
    "both save at an open gate": Exploration(
        verdict(workers=(0, 1), cast=(IDLE, IDLE), is_gated=True, depth=22),
        5_000,
        10**7,
        events=PROBED,
    ),
    "three remember": Exploration(
        memories(epochs=(6, 4, 2), depth=60), 3_000, 10**5, True, {"RecordVanished"}
    ),
    "two report, two faults": Exploration(
        reports(failures=(2, 1), most_faults=2, depth=60), 5_000, 10**5, True, {"RecordVanished"}
    ),
    "three report": Exploration(
        reports(failures=(1, 1, 0), depth=10), 8_000, 10**5, events={"RecordVanished"}
    ),
}


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_no_interleaving_breaks_a_promise(name: str) -> None:
    """Every promise holds after every step, and everybody who lives gets to the end."""
    exploration = EXPLORATIONS[name]

    report = explored_well(
        exploration.scene,
        states=exploration.states,
        paths=exploration.paths,
        is_whole=exploration.is_whole,
    )

    assert exploration.events <= set(report.events)
    assert set(report.choices) >= exploration.scene.faults or not exploration.scene.most_faults


# --- planted bugs --------------------------------------------------------------------------------


def same_nonces(scene: Scene) -> Scene:
    """The scene with processes whose nonces are all the same."""

    def perform(effect: fx.Effect) -> fx.Protocol[Any]:
        if isinstance(effect, fx.Nonce):
            return "a.b.c"
        return (yield effect)

    def with_same(program: Callable[[], fx.Protocol[Any]]) -> Callable[[], fx.Protocol[Any]]:
        return lambda: transform(program(), perform)

    cast = tuple(replace(who, program=with_same(who.program)) for who in scene.cast)
    return replace(scene, cast=cast)


def take_over_in_the_same_epoch(patch: Patch) -> None:
    """Whoever takes a probe over writes its name, and leaves the epoch."""
    right = breaker.TABLE[BreakerState.HALF_OPEN][ProbeClaimed]

    def wrong(ctx: Any, record: Any, event: Any) -> Any:
        stepped = right(ctx, record, event)
        kept = msgspec.structs.replace(stepped.record, epoch=record.epoch)
        return replace(stepped, record=kept)

    patch.setitem(breaker.TABLE[BreakerState.HALF_OPEN], ProbeClaimed, wrong)


def claim_before_it_is_due(patch: Patch) -> None:
    """A claim asks nobody how long the circuit has been open."""
    right = breaker.step

    def wrong(config: Any, record: Any, event: Any, **names: Any) -> Any:
        if isinstance(event, ProbeClaimed):
            event = replace(event, unchanged_s=1e9)
        return right(config, record, event, **names)

    patch.setattr(breaker, "step", wrong)
    patch.setattr(waiting, "is_probe_due", lambda view, *_, **__: not breaker.passes(view.record))


def late_results_count(patch: Patch) -> None:
    """A probe's result is applied to whatever is there, and whosever claim that is."""
    patch.setattr(breaker, "_is_stale", lambda *_: False)

    def wrong(mine: Any, view: Any, event: Any) -> fx.Protocol[bool]:
        if isinstance(event, ProbeClaimed):
            return (yield from circuit.apply_to(mine, view, event))
        yield from circuit.apply(mine, event)
        return True

    patch.setattr("lightning_resilience.protocols.probing.apply_to", wrong)


def nobody_takes_over(patch: Patch) -> None:
    """A half-open circuit is left to its prober, dead or not."""
    right = waiting.is_probe_due

    def wrong(view: Any, config: Any, *, now_s: float) -> bool:
        return view.record.state == "open" and right(view, config, now_s=now_s)

    patch.setattr(waiting, "is_probe_due", wrong)


def vanished_is_unchanged(patch: Patch) -> None:
    """A compare-and-set that returns the expectation is taken for one that was not needed."""

    def wrong(key: str, expected: bytes, desired: bytes) -> fx.Protocol[Written]:
        returned: bytes = yield fx.CompareAndSet(key, expected, desired)
        return Written(won=returned in {desired, expected}, raw=desired)

    for module in (shared_cell, circuit, admission):
        patch.setattr(module, "write", wrong)


def nobody_overrules(patch: Patch) -> None:
    """A record that somebody rebuilt from less is taken as it is."""
    patch.setattr(breaker, "outranks", lambda *_: False)


def rebuilt_at_the_same_epoch(patch: Patch) -> None:
    """A record is rebuilt as it was seen."""
    right = breaker.rebuilt

    def wrong(seen: Any, **names: Any) -> Any:
        return msgspec.structs.replace(right(seen, **names), epoch=max(1, seen.epoch - 1))

    patch.setattr(breaker, "rebuilt", wrong)


def leave_whoever_is_in(patch: Patch) -> None:
    """A holder that leaves frees its slot, whoever is in it by now."""

    def wrong(permit: Any, free: bytes) -> fx.Protocol[None]:
        yield fx.Set(permit.key, free)

    patch.setattr(permit, "_give_back", wrong)


def beat_whoever_is_in(patch: Patch) -> None:
    """A holder's beat is a plain write."""

    def wrong(self: Any, nonce: str) -> Any:
        self._unanswered = core_slots.renewed(self.record, writer=nonce)
        return fx.Set(self.key, encode(self._unanswered))

    patch.setattr(permit.Permit, "request", wrong)
    patch.setattr(permit.Permit, "answered", lambda *_: None)


def forgive_at_once(patch: Patch) -> None:
    """A holder is taken for dead at the first look."""
    patch.setattr(core_admission, "_is_silent", lambda *_, **__: True)


def nobody_is_forgiven(patch: Patch) -> None:
    """A dead holder keeps its slot."""
    patch.setattr(core_admission, "_is_silent", lambda *_, **__: False)


def stay_when_unanswered(patch: Patch) -> None:
    """A holder whose last beat was not answered does not find its own slot."""
    patch.setattr(permit.Permit, "expectations", lambda self: (self.raw,))


def verdicts_are_overwritten(patch: Patch) -> None:
    """A late report becomes the verdict."""
    right = shared_cell.write

    def wrong(key: str, expected: bytes, desired: bytes) -> fx.Protocol[Written]:
        if "/final/" not in key:
            return (yield from right(key, expected, desired))
        yield fx.Set(key, desired)
        return Written(won=True, raw=desired)

    patch.setattr(joint_fence, "write", wrong)


def verdicts_are_made_up(patch: Patch) -> None:
    """Each rank goes by what it wanted the verdict to be."""
    right = shared_cell.write

    def wrong(key: str, expected: bytes, desired: bytes) -> fx.Protocol[Written]:
        written = yield from right(key, expected, desired)
        return Written(won=True, raw=desired) if "/final/" in key else written

    patch.setattr(joint_fence, "write", wrong)


def no_roll_is_called(patch: Patch) -> None:
    """A rank that finds another store than it arrived in goes on as if nothing were."""

    def wrong(_member: Any, _joint: Any, arrival: Arrival) -> fx.Protocol[None]:
        yield from ()
        arrival.has_called_roll = True

    patch.setattr(joint_fence, "_call_the_roll", wrong)


def silent_ranks_are_awaited(patch: Patch) -> None:
    """A rank that is silent is never lost."""

    def wrong(*_: Any, **__: Any) -> fx.Protocol[tuple[int, ...]]:
        yield from ()
        return ()

    patch.setattr(joint_verdict, "_lost", wrong)


def nobody_is_missed(patch: Patch) -> None:
    """A success is told to those who are there."""

    def wrong(*_: Any) -> fx.Protocol[tuple[int, ...]]:
        yield from ()
        return ()

    patch.setattr(joint_verdict, "muster", wrong)


def nothing(_patch: Patch) -> None:
    """The bug is in the scene."""


@dataclass(frozen=True)
class Planted:
    """A bug, where it is to be seen, and what is said of it."""

    plant: Callable[[Patch], None]
    scene: Scene
    complaint: str


def only(scene: Scene, *said: Any) -> Scene:
    """The scene with these checks alone: a bug that breaks several promises is seen by each."""
    return replace(scene, checks=said)


CLAIMING = claims(ills=(0, 0), depth=30)
TAKING_OVER = take_over(ills=(0, 0), depth=30)
WAITING = slots(limit=1, cast=(BEATING, IDLE), depth=40)
FORGIVING = forgiveness(limit=1, cast=(IDLE, IDLE), depth=40)
SAVING = verdict(workers=(0,), cast=(ILL, IDLE), depth=40)
BOTH_SAVING = verdict(workers=(0, 1), cast=(ILL, IDLE), depth=40)
SLOT = slots(limit=1, cast=(IDLE, IDLE), depth=40)

PLANTED = {
    "claims without a nonce": Planted(
        nothing,
        only(same_nonces(CLAIMING), checks.one_probe_a_claim(RECORD)),
        "its claim is not in the store",
    ),
    "claims before they are due": Planted(claim_before_it_is_due, CLAIMING, "claimed the probe"),
    "writers do not sign": Planted(nothing, same_nonces(CLAIMING), "with the nonce"),
    "late results count": Planted(late_results_count, CLAIMING, "applied a result"),
    "a take-over keeps the epoch": Planted(
        take_over_in_the_same_epoch, TAKING_OVER, "epoch 3 was half_open, and is half_open"
    ),
    "two probes for one epoch": Planted(
        take_over_in_the_same_epoch,
        only(TAKING_OVER, checks.one_probe_a_claim(RECORD)),
        "has done so",
    ),
    "nobody takes over": Planted(nobody_takes_over, TAKING_OVER, "not over"),
    "a vanished record is unchanged": Planted(
        vanished_is_unchanged,
        claims(ills=(0, 0), may_be_emptied=True, depth=14),
        "its claim is not in the store",
    ),
    "nobody overrules": Planted(nobody_overrules, memories(epochs=(6, 4), depth=40), "has seen"),
    "a rebuilt record goes back": Planted(
        rebuilt_at_the_same_epoch, reports(failures=(1, 0), depth=40), "a rebuilt record of epoch"
    ),
    "slots without a nonce": Planted(
        nothing,
        only(same_nonces(SLOT), *SLOT.checks[1:]),
        "so does",
    ),
    "whoever leaves frees the slot of another": Planted(
        leave_whoever_is_in, WAITING, "freed the slot"
    ),
    "whoever beats takes the slot of another": Planted(
        beat_whoever_is_in, WAITING, "took the slot"
    ),
    "an unanswered beat is forgotten": Planted(stay_when_unanswered, WAITING, "for ever"),
    "holders are forgiven at once": Planted(forgive_at_once, FORGIVING, "took the slot"),
    "nobody is forgiven": Planted(nobody_is_forgiven, FORGIVING, "does not get through"),
    "verdicts are overwritten": Planted(verdicts_are_overwritten, SAVING, "changed the verdict"),
    "verdicts are made up": Planted(verdicts_are_made_up, BOTH_SAVING, "the store says"),
    "no roll is called": Planted(
        no_roll_is_called,
        only(
            verdict(
                workers=(0,),
                cast=(IDLE, IDLE),
                may_be_emptied=True,
                most_faults=0,
                end_checks=(),
                depth=20,
            ),
            checks.verdict_is_written_once(KEYS.joint("final", 1), arrived=()),
        ),
        "returned",
    ),
    "nobody is missed": Planted(nobody_is_missed, SAVING, "told a success without"),
    "silent ranks are awaited": Planted(
        silent_ranks_are_awaited, replace(SAVING, depth=4), "not over"
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_and_replayed(name: str, monkeypatch: Patch) -> None:
    """The exploration finds the bug, and its list of choices shows it again."""
    planted = PLANTED[name]
    planted.plant(monkeypatch)

    failure = found_broken(planted.scene, planted.complaint)

    story = replay(planted.scene, choices_of(str(failure)))
    assert story[-1] == f"BROKEN: {failure.complaint}"


def choices_of(text: str) -> list[tuple[str, str]]:
    """The choices in a failure's text, as a person copies them."""
    (line,) = (line for line in text.splitlines() if line.startswith("choices = "))
    found: list[tuple[str, str]] = ast.literal_eval(line.removeprefix("choices = "))
    return found


# --- the explorer itself -------------------------------------------------------------------------


def writer(times: int) -> Callable[[], fx.Protocol[None]]:
    """A program that writes so many times."""

    def program() -> fx.Protocol[None]:
        for number in range(times):
            yield fx.Set("key", b"%d" % number)

    return program


def test_all_orders_are_counted() -> None:
    """Two that write three times each can do so in 20 orders."""
    cast = tuple(Cast(name=name, program=writer(3)) for name in ("a", "b"))

    report = explore(Scene(name="orders", cast=cast, values={}, depth=9, most_faults=0))

    assert (report.paths, report.is_whole, report.choices) == (20, True, {"answered": report.steps})


@pytest.mark.parametrize(
    "scene",
    [
        claims(ills=(1, 0), may_be_emptied=True, faults=EVERYTHING, depth=6),
        slots(limit=1, cast=(BEATING, IDLE), most_faults=2, depth=7),
        verdict(workers=(0,), cast=(BEATING | ILL, IDLE), depth=8),
    ],
    ids=["claims", "slots", "verdict"],
)
def test_what_is_continued_once_is_counted_as_often_as_it_is_reached(scene: Scene) -> None:
    """Sequences of choices without any merging of states are as many as the explorer counts."""

    def sequences(state: State, depth: int) -> int:
        ways = list(moves(state))
        if not ways or depth == scene.depth:
            return 1
        return sum(
            sequences(taken(state, choice).after, depth + 1)
            for choice in (*ways, *strikes(scene, state))
        )

    assert explore(scene).paths == sequences(scene.start(), 0)


def test_a_stopped_holder_comes_back_to_find_its_slot_gone() -> None:
    """The one sequence that slots are about, move by move: it beats, and leaves, in vain."""
    looks = [("b", "waited"), ("b", "answered")] * 4
    choices = [
        *[("a", "answered")] * 2,  # a looks, and takes the slot
        *[("b", "answered")] * 2,  # b looks, and draws a ticket
        *looks,
        ("b", "answered"),  # b has watched for a lease, and takes the slot over
        ("a", "beat"),
        ("a", "answered"),
        ("a", "well"),
    ]
    story = replay(slots(limit=1, cast=(BEATING, IDLE), depth=40), choices)

    assert "SlotForgiven" in story[12]
    assert story[15].startswith(" 16 a well")
    assert "Over(name='a', how='ended'" in story[15]
    assert "b well" in story[16]
    assert not any("BROKEN" in line for line in story)


def test_choices_of_another_scene_are_refused() -> None:
    """A list of choices that does not fit says at which it stops to."""
    scene = slots(limit=1, cast=(IDLE, IDLE), depth=9)

    with pytest.raises(ValueError, match=r"choice 2, \('b', 'well'\), cannot be taken there"):
        replay(scene, [("a", "answered"), ("b", "well")])
