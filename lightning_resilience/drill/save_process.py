# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One start of a simulated run: it chooses where to start, saves, removes, and may be killed.

What it does with its storage is shipped: the orders of ``core.pipeline`` and ``core.fallback``, the
decisions of ``core.retention``. Around them is what Lightning's ``ModelCheckpoint`` does: it saves,
then asks for the removal of what is one too many, and puts its books back where a save has failed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.core import pipeline
from lightning_resilience.core.fallback import choosing
from lightning_resilience.core.pipeline import Progress, Sent, Step
from lightning_resilience.core.resolution import Search
from lightning_resilience.core.retention import Decision, Removal, Retention, Stage
from lightning_resilience.core.shards import metadata_of
from lightning_resilience.drill.save_attempt import Attempt, Kind, Pending, question, troubles
from lightning_resilience.drill.save_hands import Hands
from lightning_resilience.drill.save_looks import Format, contents_of
from lightning_resilience.drill.save_plan import Names
from lightning_resilience.drill.save_storage import FOLDER
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.core.pipeline import Steps
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.drill.save_attempt import Hand, Op
    from lightning_resilience.drill.save_world import SaveWorld


__all__ = ["FailedError", "KilledError", "Process"]

_LAST = f"{FOLDER}/last.ckpt"

# How often nothing goes wrong where chance decides: most of what matters is about effects.
_CALM = 0.98
_CALM_AT_EFFECTS = 0.88
_EVEN = 0.5


class KilledError(Exception):
    """The process is gone."""


class FailedError(Exception):
    """An operation had no attempt left."""


class Process:
    """One start of the run.

    Args:
        world: The world.
    """

    def __init__(self, world: SaveWorld) -> None:
        self._world = world
        self._plan = world.plan
        self._pending: list[Pending] = []
        self._abandoned: list[Attempt] = []
        self._retention = Retention()
        self._removals: list[Removal] = []
        self._kept: list[str] = []
        self._later: Callable[[], None] | None = None

    # Its life -------------------------------------------------------------------------------------

    def live(self) -> None:
        """Start from what is there, and save at each point."""
        self._may_be_damaged()
        first = self._start()
        for number in range(first + 1, self._plan.points + 1):
            self._world.tell(f"step {number}")
            self._may_be_damaged()
            self._save_point(number)
        self._write_what_is_left()
        self._clear_up()

    def die(self) -> None:
        """Be gone; what was sent may be carried out all the same."""
        for attempt in self._abandoned:
            op = attempt.op
            if op is not None and op.kind is Kind.EFFECT:
                lands = self._world.choose(
                    [("is not carried out", ""), ("lands", "moves")], calm=_EVEN
                )
                if lands == "lands":
                    self._world.checks.came_late()
                    op.run()
            attempt.end()
        self._world.checks.died()

    def _start(self) -> int:
        steps = choosing(Search.LAST, 1, allow_fresh_start=False)
        hands: Mapping[Step, Callable[[Any], Any]] = {
            Step.LIST: lambda _: self._once("list", question("list", self._world.looks.listed)),
            Step.JUDGE: self._judge,
            Step.LEAVE: self._leave,
        }
        try:
            choice = pipeline.carry_out(steps, hands)
        except CheckpointError:
            path = self._named_by_a_person()
        else:
            path = "" if choice.seen is None else choice.seen.path
            if path and not self._is_there(path):
                # It cannot be loaded, which nobody could tell before.
                path = self._named_by_a_person()
        self._world.checks.started(path)
        if not path:
            return 0
        for name in (path, self._world.storage.real(path)):
            self._retention = self._retention.starting_from(name)
        number = self._world.looks.number_of(path) or 0
        self._kept = [each for each in [self._numbered(number)] if self._is_there(each)]
        self._world.tell(f"starts from step {number} of {path}")
        return number

    def _named_by_a_person(self) -> str:
        looks = self._world.looks
        found = {looks.number_of(path) or 0: path for path in looks.checkpoints()}
        newest = max(found, default=0)
        # Where there is none, they start anew, with allow_fresh_start.
        return found[newest] if newest else ""

    def _is_there(self, path: str) -> bool:
        return self._world.looks.number_of(path) is not None

    def _judge(self, path: str) -> Inspection:
        def begin(attempt: Attempt) -> Attempt:
            steps, hands = self._world.looks.judging(path)
            asked = {step: question(step.value, hand) for step, hand in hands.items()}
            return attempt.begin(steps, asked)

        seen: Inspection = self._series(f"judge {path}", begin)
        return seen

    def _leave(self, damaged: Inspection) -> None:
        self._world.tell(f"{damaged.path} is not loaded: {damaged.rejected}")
        if not damaged.mark:
            return

        def begin(attempt: Attempt) -> Attempt:
            steps = pipeline.setting_aside(renames=self._plan.renames)
            return attempt.begin(steps, self._hands(attempt, damaged.path).of_a_move_aside(damaged))

        self._series(f"set {damaged.path} aside", begin)

    # A save point ---------------------------------------------------------------------------------

    def _numbered(self, number: int) -> str:
        kind = "last-" if self._plan.names is Names.NUMBERED else "step="
        return f"{FOLDER}/{kind}{number}.ckpt"

    def _save_point(self, number: int) -> None:
        names = self._plan.names
        try:
            if names is not Names.SAME:
                self._save_numbered(number)
            if names in {Names.SAME, Names.BOTH}:
                self._save(_LAST, number)
            if names is Names.LINKED and self._kept[-1:] == [self._numbered(number)]:
                self._link(self._numbered(number))
        except FailedError as error:
            self._world.tell(f"step {number} was not saved: {error}")
        self._clear_up()

    def _save_numbered(self, number: int) -> None:
        path = self._numbered(number)
        if self._plan.in_background:
            self._write_what_is_left()
            self._later = self._asked_to_save(path, number)
        else:
            self._save(path, number)
        self._kept = [*(each for each in self._kept if each != path), path]
        while len(self._kept) > self._plan.keep:
            self._ask_to_remove(self._kept.pop(0))
        self._clear_up()

    def _save(self, path: str, number: int) -> None:
        self._asked_to_save(path, number)()

    def _asked_to_save(self, path: str, number: int) -> Callable[[], None]:
        # What is about to be written is not removed any more.
        self._removals = [each for each in self._removals if each.path != path]
        self._retention = self._retention.overwritten(path).asked_to_save(path)
        save = next(self._world.saves)
        self._world.checks.asked(save, path)
        return partial(self._write, save, path, number)

    def _write(self, save: int, path: str, number: int) -> None:
        try:
            self._write_by_form(path, number)
        except FailedError:
            if self._keeps(save, path, number):
                return
            self._retention = self._retention.ended(path, Stage.FAILED)
            self._world.checks.ended(save, "failed", number)
            raise
        self._retention = self._retention.ended(path, Stage.VERIFIED)
        self._world.checks.ended(save, "published", number)

    def _keeps(self, save: int, path: str, number: int) -> bool:
        """Keep what could not be saved; whether that was done."""
        del self, save, path, number
        return False

    def _write_what_is_left(self) -> None:
        later, self._later = self._later, None
        if later is None:
            return
        try:
            later()
        except FailedError as error:
            self._world.tell(f"what was handed over was not saved: {error}")
        self._clear_up()

    def _link(self, target: str) -> None:
        def linked() -> None:
            # Also by an attempt that was abandoned: it says what it has done.
            self._retention = self._retention.linked(_LAST, target)

        self._world.checks.linked(_LAST)
        self._retention = self._retention.linking(_LAST, target)
        self._series(
            f"link {_LAST}",
            lambda attempt: attempt.begin(
                pipeline.linking(), self._hands(attempt, _LAST).of_a_link(target, linked)
            ),
        )

    # Saves, by what a checkpoint is made of -------------------------------------------------------

    def _write_by_form(self, path: str, number: int) -> None:
        if self._plan.form is Format.SHARDS:
            self._write_shards(path, number)
            return
        known: Progress[str] = Progress()
        sent = Sent()

        def begin(attempt: Attempt) -> Attempt:
            hands = self._hands(attempt, path, number)
            is_tree = self._plan.form is Format.TREE
            steps = pipeline.save(
                known,
                keeps_staged=not self._plan.renames,
                publish=hands.publication(sent) if is_tree else None,
            )
            return attempt.begin(steps, hands.of_a_save())

        self._series(f"save {path}", begin)

    def _write_shards(self, path: str, number: int) -> None:
        renames = self._plan.renames
        target = f"staged/{next(self._world.staged)}" if renames else path
        if not renames:
            self._remove(path)
        names = list(contents_of(Format.SHARDS, number))
        shards = [name for name in names if name not in metadata_of(dict.fromkeys(names, 0))]
        sent = Sent(is_cleared=True)
        self._series(
            f"publish the shards of {path}",
            lambda attempt: attempt.begin(
                pipeline.publication(sent, shards, renames=False),
                self._hands(attempt, path, number, target=target).of_a_save(),
            ),
        )
        known: Progress[Any] = Progress()
        self._series(
            f"assemble {path}",
            lambda attempt: attempt.begin(
                pipeline.assembly(known, path, renames=renames),
                self._hands(attempt, path, number, target=target).of_an_assembly(),
            ),
        )

    # Removals -------------------------------------------------------------------------------------

    def _ask_to_remove(self, path: str) -> None:
        self._world.checks.removal_asked(path)
        self._removals.append(self._retention.removal(path))

    def _clear_up(self) -> None:
        for removal in list(self._removals):
            decision = self._retention.decide(removal, [FOLDER])
            if decision.is_never:
                self._removals.remove(removal)
            if decision is not Decision.REMOVE:
                continue
            try:
                self._remove(removal.path)
            except FailedError as error:
                self._world.tell(f"{removal.path} was not removed: {error}")
                return
            self._retention = self._retention.removed(removal.path)
            self._removals.remove(removal)

    def _remove(self, path: str) -> None:
        is_shards = self._plan.form is Format.SHARDS
        order = pipeline.removal_of_shards if is_shards else pipeline.removal
        self._series(
            f"remove {path}",
            lambda attempt: attempt.begin(order(), self._hands(attempt, path).of_a_removal()),
        )

    # Attempts -------------------------------------------------------------------------------------

    def _hands(self, attempt: Attempt, path: str, number: int = 0, *, target: str = "") -> Hands:
        return Hands(
            attempt=attempt,
            looks=self._world.looks,
            path=path,
            number=number,
            renames=self._plan.renames,
            target="" if target == path else target,
            staged=self._world.staged,
        )

    def _once(self, name: str, hand: Hand) -> Any:  # noqa: ANN401 - whatever is asked for
        def begin(attempt: Attempt) -> Attempt:
            return attempt.begin(_one_step(), {Step.LIST: hand})

        return self._series(name, begin)

    def _series(self, name: str, begin: Callable[[Attempt], Attempt]) -> Any:  # noqa: ANN401 - likewise
        for number in range(1, self._plan.attempts + 1):
            attempt = Attempt(f"attempt {number} to {name}", self._pending)
            self._world.tell(attempt.name)
            begin(attempt)
            while attempt.op is not None and not attempt.is_abandoned:
                self._next(attempt, attempt.op)
            if attempt.is_abandoned:
                self._abandoned.append(attempt)
            elif attempt.error is None:
                return attempt.value
            else:
                self._world.tell(f"  {attempt.error}")
        message = f"{name}: {self._plan.attempts} attempts"
        raise FailedError(message)

    def _next(self, attempt: Attempt, op: Op) -> None:
        is_blocked = op.blocked()
        options = [
            ("fail" if is_blocked else "go", ""),
            *troubles(op, is_blocked=is_blocked),
        ]
        moving = {f"{other.name} goes on": other for other in self._movable()}
        options += [(name, "moves") for name in moving]
        calm = _CALM_AT_EFFECTS if op.kind is Kind.EFFECT else _CALM
        chosen = self._world.choose(options, calm=calm)
        if chosen == "crash":
            raise KilledError
        if chosen == "abandon":
            attempt.is_abandoned = True
        elif chosen in moving:
            self._move(moving[chosen])
        else:
            attempt.perform(chosen)

    def _movable(self) -> list[Attempt]:
        return [
            attempt
            for attempt in self._abandoned
            if attempt.op is not None and not attempt.op.blocked()
        ]

    def _move(self, attempt: Attempt) -> None:
        if attempt.op is not None and attempt.op.kind is Kind.EFFECT:
            self._world.checks.came_late()
        attempt.perform()

    def _may_be_damaged(self) -> None:
        world, looks = self._world, self._world.looks
        # What has no manifest is not known to have been different.
        marked = [path for path in looks.checkpoints() if looks.manifest(path) is not None]
        whole = [path for path in marked if self._is_there(path)]
        options = [("all stays as it is", "")]
        options += [(f"{path} is damaged", "damages") for path in whole[-2:]]
        chosen = world.choose(options, calm=_EVEN)
        path = chosen.removesuffix(" is damaged")
        if path not in whole:
            return
        real = world.storage.real(path)
        tree = world.storage.tree(real)
        name = min(tree)
        world.checks.damage(real)
        at = f"{real}/{name}" if name else real
        world.storage.damage(at, cuts=not world.looks.digests or self._plan.names is Names.LINKED)


def _one_step() -> Steps[Any]:
    return (yield pipeline.Do(Step.LIST))
