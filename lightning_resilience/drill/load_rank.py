# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A rank that resumes: what the nodes have left, the choice, the load, and one save after it.

The steps are shipped: ``core.spool`` plans what is published first, ``core.fallback`` chooses,
``core.fetching`` loads, ``core.joint`` merges what has become of the ranks' parts, and
``core.doubts`` has them search again where that was damaged. Joint operations themselves are in
other worlds; here the ranks share a list.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.core import pipeline
from lightning_resilience.core.carrying import carried_out
from lightning_resilience.core.doubts import MAX_STARTS, Doubts
from lightning_resilience.core.fallback import choosing
from lightning_resilience.core.fetching import Fetch, loading
from lightning_resilience.core.pipeline import Progress, Step
from lightning_resilience.core.records import OutcomeRecord
from lightning_resilience.core.resolution import Inspection, Search
from lightning_resilience.core.retention import Decision, Retention, Stage
from lightning_resilience.core.spool import is_outdated
from lightning_resilience.drill.load_process import OvertakenError, Owner
from lightning_resilience.drill.load_reading import Reading
from lightning_resilience.drill.save_attempt import FAILURES, Kind, Op, question
from lightning_resilience.drill.save_hands import Hands
from lightning_resilience.drill.save_storage import FOLDER
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.fallback import Choice
    from lightning_resilience.core.spooled import SpoolEntry
    from lightning_resilience.drill.load_job import Job, Load
    from lightning_resilience.drill.load_node import Node
    from lightning_resilience.drill.load_process import Actor
    from lightning_resilience.drill.load_world import LoadWorld
    from lightning_resilience.drill.save_attempt import Hand, Ops
    from lightning_resilience.drill.save_storage import Blob


__all__ = ["Rank", "Saver"]


class Saver(Owner):
    """A process that saves and removes checkpoints.

    Args:
        world: The world.
        node: Its node.
        name: Its name.
    """

    def __init__(self, world: LoadWorld, node: Node, name: str) -> None:
        super().__init__(world, node, name)
        self.retention = Retention()

    def save(self, path: str, number: int) -> Ops:
        """Save a checkpoint."""
        checks = self.world.checks
        checks.begins_to_save(path, self)
        self.retention = self.retention.overwritten(path).asked_to_save(path)
        yield from self._publish(path, number)
        self.retention = self.retention.ended(path, Stage.VERIFIED)
        checks.published(path, number, self)

    def _publish(self, path: str, number: int) -> Ops:
        known: Progress[str] = Progress()
        keeps_staged = not self.world.renames

        def begin(attempt: Actor) -> None:
            steps = pipeline.save(known, keeps_staged=keeps_staged)
            attempt.begin(steps, self.hands(attempt, path, number).of_a_save())

        yield from self.series(f"save {path}", begin)

    def remove(self, path: str) -> Ops:
        """Ask for the removal of a checkpoint, and carry it out where that may be."""
        decision = self.retention.decide(self.retention.removal(path), [FOLDER])
        if decision is not Decision.REMOVE:
            return
        self.world.checks.removes(path, self)

        def begin(attempt: Actor) -> None:
            attempt.begin(pipeline.removal(), self.hands(attempt, path).of_a_removal())

        yield from self.series(f"remove {path}", begin)

    def hands(self, attempt: Actor, path: str, number: int = 0) -> Hands:
        """Return what carries out the steps of a save or a removal."""
        return Hands(
            attempt=attempt,
            looks=self.world.looks,
            path=path,
            number=number,
            renames=self.world.renames,
            staged=self.world.staged,
        )


class Older(Saver):
    """A process of an earlier start that still lives, and does not know of the later one.

    Args:
        world: The world.
        node: Its node.
        name: Its name.
    """

    def life(self) -> Ops:
        """Save once more, and remove what is one too many then."""
        world, newest = self.world, self.world.plan.saved
        before = world.path_of(newest)
        self.retention = self.retention.asked_to_save(before).ended(before, Stage.VERIFIED)
        path, number = world.path_of(newest + 1), newest + 1
        yield from self.save(path, number)
        if path != before:
            yield from self.remove(before)


class Rank(Saver):
    """One rank of a job.

    Args:
        world: The world.
        job: Its job.
        number: Which rank it is.
    """

    def __init__(self, world: LoadWorld, job: Job, number: int) -> None:
        ranks = world.plan.ranks
        super().__init__(world, world.nodes[number // ranks], f"rank {number} of {job.name}")
        self.job = job
        self.number = number
        self.is_first = number % ranks == 0
        self.loaded: Blob | None = None
        self.choice: Choice | None = None
        self.load: Load | None = None
        self._doubts = Doubts()
        self._asked = 0

    def life(self) -> Ops:
        """Resume, and save once."""
        yield from self._unspool()
        path = yield from self._start_from()
        if path and self.number == 0:
            yield from self._train(path)

    def _start_from(self) -> Ops:
        for number in range(MAX_STARTS):
            self.choice = yield from self._choose()
            self.world.checks.chose(self, number)
            seen = self.choice.seen
            if seen is None:
                return ""
            load = self.load = self.job.load(number)
            yield from self._load(seen, load)
            self.load = None
            if load.error is None:
                return seen.path
            if not self._doubts.adds(seen.path, load.error):
                raise CheckpointError(str(load.error)) from load.error
            self.loaded = None
            self.world.tell(f"{self.name}: choose again")
        return ""

    def is_overtaken(self) -> bool:
        """Tell whether a rank is lost, or another one has failed for good."""
        return self.job.is_lost if self.load is None else self.load.verdict is not None

    # What earlier starts have left ----------------------------------------------------------------

    def _unspool(self) -> Ops:
        node, job = self.node, self.job
        if self.is_first:
            for name in job.plan.drop.get(node.number, ()):
                self._drop(name)
            for name in job.plan.publish.get(node.number, ()):
                yield from self._publish_left(name, node.spool[name])
            job.unspooled.add(node.number)
        yield from self.wait("other nodes", lambda: len(job.unspooled) == self.world.plan.nodes)

    def _publish_left(self, name: str, entry: SpoolEntry) -> Ops:
        looks, number = self.world.looks, entry.step or 0
        try:
            there = yield from self._answer(
                "read a manifest", question("read a manifest", lambda _: looks.manifest(entry.path))
            )
            if not is_outdated(entry, there):
                self.world.checks.begins_to_save(entry.path, self, number)
                yield from self._publish(entry.path, number)
                self.world.checks.published(entry.path, number, self)
        except OvertakenError:
            raise
        except FAILURES as error:
            self.world.tell(f"{name} stays on node {self.node.number}: {error}")
        else:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.world.checks.drops(self.node.spool.pop(name))

    # The choice -----------------------------------------------------------------------------------

    def _choose(self) -> Ops:
        if self.number == 0:
            self.world.checks.searches()
        hands = {step: partial(self._shared, step) for step in (Step.LIST, Step.JUDGE, Step.LEAVE)}
        return carried_out(choosing(Search.LAST, 1, allow_fresh_start=False), hands)

    def _shared(self, step: Step, of: Any) -> Ops:  # noqa: ANN401 - whatever the step is about
        """Have an answer of rank 0's."""
        job, at = self.job, self._asked
        self._asked += 1
        if self.number == 0:
            try:
                job.answers.append((yield from self._asked_of_storage(step, of)))
            except FAILURES as error:
                job.answers.append(error)
        yield from self.wait("rank 0", lambda: len(job.answers) > at)
        answer = job.answers[at]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _asked_of_storage(self, step: Step, of: Any) -> Ops:  # noqa: ANN401 - likewise
        looks = self.world.looks
        if step is Step.LIST:
            return (yield from self._answer("list", question("list", looks.listed)))
        if step is Step.LEAVE:
            return (yield from self._leave(of))

        # What a load has found damaged is read through.
        through = self.world.looks_through if of in self._doubts else looks

        def begin(attempt: Actor) -> None:
            steps, hands = through.judging(of)
            attempt.begin(steps, {each: question(each.value, hands[each]) for each in hands})

        return (yield from self.series(f"judge {of}", begin))

    def _leave(self, damaged: Inspection) -> Ops:
        self.world.tell(f"{damaged.path} is not loaded: {damaged.rejected}")
        if not damaged.mark:
            return None

        def begin(attempt: Actor) -> None:
            steps = pipeline.setting_aside(renames=self.world.renames)
            attempt.begin(steps, self.hands(attempt, damaged.path).of_a_move_aside(damaged))

        return (yield from self.series(f"set {damaged.path} aside", begin))

    def _answer(self, name: str, hand: Hand) -> Ops:
        return (yield from self.series(name, lambda attempt: attempt.set_out(hand(None))))

    # The load -------------------------------------------------------------------------------------

    def _load(self, seen: Inspection, load: Load) -> Ops:
        reading = Reading(self, seen, load)
        hands: dict[Fetch, Callable[[Any], Ops]] = {
            Fetch.PREPARE: lambda _: self._prepare(reading),
            Fetch.ATTEMPTS: lambda _: self.series(
                "read", lambda attempt: attempt.set_out(reading.attempt(attempt)), has_slot=True
            ),
            Fetch.GIVE_UP: lambda _: self._at_once("give up", reading.release),
            Fetch.FINISH: lambda path: self._at_once("open it", partial(reading.open, path)),
            Fetch.CONFIRM: lambda _: self._at_once("look again", reading.confirm),
        }
        report: OutcomeRecord | None = OutcomeRecord(rank=self.number)
        try:
            self.loaded = yield from carried_out(loading(), hands)
        except OvertakenError:
            report = None
        except FAILURES as error:
            text = f"{type(error).__name__}: {error}"
            report = OutcomeRecord(rank=self.number, failure="unknown", error=text)
        if report is not None:
            load.reported(report, self.world.now_s)
        yield from self._at_once("let go", reading.release)
        yield Op(
            kind=Kind.WAIT,
            what="wait for the verdict",
            run=bool,
            blocked=lambda: load.verdict is None,
        )
        self.world.checks.returns(self, load)

    def _prepare(self, reading: Reading) -> Ops:
        if reading.waits_first:
            yield from self.once("settle", lambda attempt: attempt.set_out(reading.settle(attempt)))
        return not reading.path

    def _at_once(self, what: str, run: Callable[[], Any]) -> Ops:
        return (yield Op(kind=Kind.ASK, what=what, run=run))

    # Training -------------------------------------------------------------------------------------

    def _train(self, started_from: str) -> Ops:
        """Save one checkpoint, and ask for the removal of what the run has started from."""
        self.retention = self.retention.starting_from(started_from)
        number = self.world.next_number()
        path = self.world.path_of(number)
        try:
            yield from self.save(path, number)
            if path != started_from:
                yield from self.remove(started_from)
        except FAILURES as error:
            self.world.tell(f"step {number} is not saved: {error}")
