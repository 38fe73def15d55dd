# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A search for two ranks that return different verdicts: stops, losses and empty stores at random.

The dice prefer the places at which a rank has looked at the store and is about to change it, and
let the store lose everything while somebody is stopped there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.errors import JointUnavailableError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.joint import perform
from tests.scenes import KEYS, Dependency, circuit, guarded, joint, member, part, patience
from tests.scripted_driver import STORE_EFFECTS, Away, Crash, Interrupt, Lost, Pause, World


if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Fault, Task


SEEDS: Final = 1000
JOINT_KEYS: Final = KEYS.joint("arrived", 0).removesuffix("arrived/0")
STOPS_S: Final = (0.01, 5.0, 60.0, 100.0, 150.0, 200.0, 350.0)
# Before the answer is asked for again, and a little later.
AFTER_A_LOSS_S: Final = (0.0016, 0.0016, 0.05, 5.0)


@dataclass(kw_only=True)
class Story:
    """One world, its ranks, and what its dice still have in store for them."""

    dice: random.Random
    world: World
    ranks: int
    workers: tuple[int, ...]
    saves: int
    goes_on: bool
    enlisted: bool
    lasts_s: float
    faults: int
    losses: int

    @classmethod
    def of(cls, seed: int) -> Story:
        """The story that a seed tells."""
        dice = random.Random(seed)
        ranks = dice.choice([2, 3, 3, 4])
        story = cls(
            dice=dice,
            world=World(seed=seed),
            ranks=ranks,
            workers=dice.choice([(0,), (0,), (0, 1), tuple(range(ranks))]),
            saves=dice.choice([1, 2, 3]),
            goes_on=dice.random() < 0.5,
            enlisted=dice.random() < 0.8,
            lasts_s=dice.choice([0.001, 0.5, 5.0, 50.0]),
            faults=dice.randint(1, 6),
            losses=dice.randint(1, 3),
        )
        story.world.fault = story.strike
        return story

    def strike(self, _task: Task, _index: int, effect: Effect) -> Fault | None:
        """What happens to an effect, if anything; the store may be lost on that occasion."""
        if self.faults <= 0 or self.dice.random() >= chance(effect):
            return None
        self.faults -= 1
        stop_s = self.dice.choice(STOPS_S)
        is_stop = not isinstance(effect, STORE_EFFECTS) or self.dice.random() < 0.6
        if self.losses and self.dice.random() < 0.5:
            self.losses -= 1
            after_s = self.dice.uniform(0, stop_s) if is_stop else self.dice.choice(AFTER_A_LOSS_S)
            self.world.at(self.world.now_s + after_s, self.world.values.clear)
        if is_stop:
            return Pause(stop_s)
        others: list[Fault] = [Lost(), Lost(), Away(), Crash(), Interrupt(KeyboardInterrupt())]
        return self.dice.choice(others)

    def rank(self, rank: int, returned: dict[int, list[FinalRecord]]) -> Protocol[None]:
        """A rank that saves some times, maybe also after it could not learn a verdict."""
        dependency = Dependency(self.world, lasts_s=self.lasts_s)
        # They have enlisted before the first of them begins.
        me = member(rank, world_size=self.ranks, last_seq=0 if self.enlisted else None)
        for seq in range(1, self.saves + 1):
            mine = circuit()
            operation = joint(mine, patience(dependency), seq=seq, workers=self.workers)
            work: Any = None
            if rank in self.workers:
                work = part(lambda mine=mine: guarded(mine, dependency), rank=rank)  # type: ignore[misc]
            try:
                result = yield from perform(me, operation, work)
            except (JointUnavailableError, KeyboardInterrupt):
                if not self.goes_on:
                    raise
            else:
                returned.setdefault(seq, []).append(result.final)

    def play(self) -> Iterator[list[FinalRecord]]:
        """What was returned, for each operation of which somebody has returned a verdict."""
        if self.enlisted:
            arrived = {KEYS.joint("arrived", rank): b"0" for rank in range(self.ranks)}
            self.world.values.update(arrived)
        returned: dict[int, list[FinalRecord]] = {}
        tasks = [
            self.world.spawn(self.rank(rank, returned), name=rank) for rank in range(self.ranks)
        ]
        self.world.run(limit_s=1e5, most_effects=200_000)
        known = JointUnavailableError, StoreUnavailableError, KeyboardInterrupt
        assert all(task.error is None or isinstance(task.error, known) for task in tasks)
        yield from returned.values()


def chance(effect: Effect) -> float:
    """How likely a fault strikes here."""
    if isinstance(effect, fx.Now | fx.Draw | fx.Nonce | fx.Emit):
        return 0.0
    keys = getattr(effect, "keys", (getattr(effect, "key", ""),))
    is_joint = any(key.startswith(JOINT_KEYS) for key in keys)
    if is_joint and isinstance(effect, fx.CompareAndSet):
        return 0.35
    return 0.1 if is_joint and isinstance(effect, fx.Get | fx.MultiGet) else 0.05


def test_no_two_ranks_return_different_verdicts() -> None:
    """Whoever is stopped, whatever is lost: those who return a verdict return one and the same."""
    operations = 0
    for seed in range(SEEDS):
        for finals in Story.of(seed).play():
            operations += len(finals) > 1
            assert all(final == finals[0] for final in finals), f"seed {seed}: {finals}"

    assert operations > SEEDS / 2
