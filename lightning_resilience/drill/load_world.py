# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated job that resumes on several nodes, until it has: a storage, nodes, and one clock.

One thread of one process does one thing after the other; before each, anything may go wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.manifest import manifest_path
from lightning_resilience.core.node_cache import cache_key
from lightning_resilience.core.spooled import SpoolEntry
from lightning_resilience.drill.checks_loads import LoadChecks
from lightning_resilience.drill.load_job import Job
from lightning_resilience.drill.load_node import WHOLE_BYTES, Node, digest_inside, is_whole
from lightning_resilience.drill.load_plan import Place
from lightning_resilience.drill.load_rank import Older, Rank
from lightning_resilience.drill.save_attempt import Kind, Op
from lightning_resilience.drill.save_looks import (
    Format,
    Looks,
    contents_of,
    manifest_blob,
    parts_of,
)
from lightning_resilience.drill.save_storage import FOLDER, SaveStorage


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.drill.load_plan import LoadPlan
    from lightning_resilience.drill.load_process import Actor, Owner
    from lightning_resilience.drill.save_plan import Chance


__all__ = ["LoadWorld"]

_STEP_S: Final = 0.01
_SHORT_S, _LONG_S = 4.0, 40.0
_AWAY_S: Final = 15.0
_UNTIL_NEXT_S: Final = 1000.0
_CALM: Final = 0.97
_CALM_TURN: Final = 0.4
_EVEN: Final = 0.6
_MOST_STEPS: Final = 60_000


@dataclass(frozen=True, kw_only=True)
class _Looks(Looks):
    """As a search of the package looks, which sees the table of contents of a file it opens.

    Args:
        opens: Told what is opened.
    """

    opens: Callable[[str], None]

    def inspect(self, path: str) -> Inspection:
        """Look at a candidate."""
        seen = super().inspect(path)
        if seen.saved:
            return seen
        self.opens(path)
        blob = self.storage.files[path]
        return type(seen)(
            path=path,
            size_bytes=blob.size_bytes,
            digest=digest_inside(blob),
            rejected="" if is_whole(blob) else "it was not written to its end",
        )


class LoadWorld:
    """A storage, nodes, and the starts of one job, one after the other.

    Args:
        plan: The job.
        chance: Who decides what goes wrong.

    Attributes:
        now_s: The time, in seconds.
        actors: All threads that may go on.
        admitted: Attempts that were let in, the latest last.
        reading: Who reads which file from storage.
    """

    def __init__(self, plan: LoadPlan, chance: Chance) -> None:
        self.plan = plan
        self.now_s = 1.0
        self.steps = 0
        self.storage = SaveStorage()
        self.checks = LoadChecks(self)
        self.renames = plan.place is not Place.OBJECTS
        self.looks = _Looks(
            storage=self.storage,
            form=Format.FILE,
            is_local=self.renames,
            opens=self.checks.looks_inside,
        )
        self.looks_through = replace(self.looks, is_doubted=True, opens=lambda _: None)
        room_bytes = plan.room * 2 * WHOLE_BYTES
        self.nodes = [Node(number=each, room_bytes=room_bytes) for each in range(plan.nodes)]
        self.actors: list[Actor] = []
        self.admitted: list[Actor] = []
        self.reading: dict[Actor, str] = {}
        self.staged = count(1)
        self.story: list[str] = []
        self.left = {
            each: getattr(plan, each)
            for each in ("faults", "crashes", "stops", "outages", "flips", "damages", "turns")
        }
        self.job = Job(self, 0)
        self.older: Older | None = None
        self._chance = chance
        self._away_until_s = 0.0
        self._numbers = count(plan.saved + plan.spooled + 2)
        self._set_up()
        self.storage.seen = self._seen

    # Its history ----------------------------------------------------------------------------------

    def path_of(self, number: int) -> str:
        """Return the name of a checkpoint."""
        return f"{FOLDER}/last.ckpt" if self.plan.is_renewed else f"{FOLDER}/last-{number}.ckpt"

    def next_number(self) -> int:
        """Return how many training steps the next checkpoint of the job is of."""
        return next(self._numbers)

    def _set_up(self) -> None:
        plan = self.plan
        for number in range(1, plan.saved + 1):
            path = self.path_of(number)
            self.storage.put(path, parts_of(Format.FILE, number)[""])
            contents = contents_of(Format.FILE, number)
            self.storage.put(manifest_path(path), manifest_blob(path, contents, number))
            self.checks.published(path, number, self)
        for number in range(plan.saved + 1, plan.saved + 1 + plan.spooled):
            size_bytes, digest = contents_of(Format.FILE, number)[""]
            self.nodes[number % plan.nodes].spool[f"left-{number}"] = SpoolEntry(
                path=self.path_of(number),
                size_bytes=size_bytes,
                digest=digest,
                number=number,
                step=number,
            )
        if plan.is_cached and plan.saved:
            self._fill_caches(self.path_of(plan.saved))
        if plan.has_older:
            self.older = Older(self, self.nodes[0], "a process of an earlier start")
            self.older.begin()
            self.older.main.wakes_s = self.now_s + _UNTIL_NEXT_S + plan.older_s

    def _fill_caches(self, path: str) -> None:
        key = cache_key(path, expected=self.looks.inspect(path), common="earlier")
        for node in self.nodes:
            node.put(f"{key}.ckpt", self.storage.files[path], self.now_s)
            node.put(f"{key}-earlier.checked", parts_of(Format.FILE, 0)[""], self.now_s)

    # Its life -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Let the job be started until it has resumed, whatever happens.

        Raises:
            DrillFailedError: A promise was not kept.
        """
        for number in range(1, self.plan.starts + 1):
            # Before the next start a scheduler takes its time.
            self.now_s += _UNTIL_NEXT_S
            self._may_be_damaged()
            self.job = Job(self, number)
            self.checks.starts(self.job)
            for rank in self.job.ranks:
                rank.begin()
            self._run_job()
            self.checks.ends(self.job)
            is_done = self.job.has_resumed or self.checks.is_refused_rightly(self.job)
            self._end_job()
            if is_done:
                return
        self.checks.never_resumes()

    def _run_job(self) -> None:
        for _ in range(_MOST_STEPS):
            self.job.decide()
            if self.job.is_over:
                return
            ready = [actor for actor in self.actors if self._is_ready(actor)]
            if ready:
                actor = self._whose_turn(ready)
                self._go_on(actor, actor.op)
            elif not self._time_passes():
                break
        names = ", ".join(rank.name for rank in self.job.ranks if not rank.has_ended)
        self.checks.never_ends(names)

    def _end_job(self) -> None:
        for rank in self.job.ranks:
            self._kill(rank)
        self.actors = [actor for actor in self.actors if actor.op is not None]

    def _is_ready(self, actor: Actor) -> bool:
        op, owner = actor.op, actor.owner
        stands_still = max(actor.wakes_s, owner.stopped_until_s) > self.now_s
        return op is not None and owner.is_alive and not stands_still and not op.blocked()

    def _time_passes(self) -> bool:
        living = [actor for actor in self.actors if actor.op is not None and actor.owner.is_alive]
        times = [max(actor.wakes_s, actor.owner.stopped_until_s) for actor in living]
        times += [self._away_until_s, self.job.lost_at_s, self.job.heard_at_s]
        later = [at_s for at_s in times if at_s > self.now_s]
        self.now_s = min(later, default=self.now_s)
        return bool(later)

    def _whose_turn(self, ready: list[Actor]) -> Actor:
        names = {f"{at}: {actor.name}": actor for at, actor in enumerate(ready)}
        first, *others = names
        options = [(first, ""), *((name, "turns") for name in others)]
        actor = names[self.choose(options, calm=_CALM_TURN, is_told=False)]
        # The usual one is who has waited for the longest time.
        self.actors.remove(actor)
        self.actors.append(actor)
        return actor

    # What goes wrong ------------------------------------------------------------------------------

    def _go_on(self, actor: Actor, op: Op | None) -> None:
        if op is None:
            return
        self.now_s += _STEP_S
        self.steps += 1
        self.tell(f"{actor.name}: {op.what}")
        asks_storage = op.kind in {Kind.QUESTION, Kind.EFFECT}
        how = self.choose(self._options(actor, op), calm=_CALM)
        if how in {"is stopped", "is stopped for long"}:
            actor.owner.stopped_until_s = self.now_s + (_SHORT_S if how[-1] == "d" else _LONG_S)
        elif how == "is killed":
            self._kill(actor.owner)
        elif how == "is abandoned":
            actor.is_abandoned = True
        elif how == "storage goes away":
            self._away_until_s = self.now_s + _AWAY_S
        else:
            is_away = asks_storage and self.is_away
            self.job.troubles += is_away
            actor.perform("fail" if is_away else how)
            if actor.op is None and actor in self.admitted:
                self.admitted.remove(actor)

    def _options(self, actor: Actor, op: Op) -> list[tuple[str, str]]:
        options = [("go", "")]
        if op.kind in {Kind.ASK, Kind.WAIT, Kind.SAY}:
            return options
        options += [("is killed", "crashes"), ("fail", "faults")]
        options += [("is stopped", "stops"), ("is stopped for long", "stops")]
        if not actor.is_main and not actor.is_abandoned:
            options.append(("is abandoned", "faults"))
        if op.kind is Kind.EFFECT:
            options.append(("lost", "faults"))
        if op.kind in {Kind.QUESTION, Kind.EFFECT}:
            options.append(("storage goes away", "outages"))
        return options

    def _kill(self, owner: Owner) -> None:
        owner.is_alive = False
        owner.node.died(owner)
        for actor in [each for each in self.actors if each.owner is owner]:
            actor.end()
            self.reading.pop(actor, None)
            if actor in self.admitted:
                self.admitted.remove(actor)
        if isinstance(owner, Rank):
            self.job.dies()

    def _may_be_damaged(self) -> None:
        whole = [path for path in self.checks.standing if self.looks.number_of(path) is not None]
        options = [("nothing is damaged", "")]
        for path in whole[-1:]:
            options += [(f"{path}: a bit flips", "damages"), (f"{path}: it is cut", "damages")]
        for node in self.nodes:
            for name in node.files:
                if name.endswith(".ckpt") and self.plan.place is not Place.LOCAL:
                    where = f"{name} on node {node.number}"
                    options += [(f"{where}: a bit flips", "damages")]
                    options += [(f"{where}: it is cut", "damages")]
        chosen, _, how = self.choose(options, calm=_EVEN).partition(": ")
        name, _, at = chosen.partition(" on node ")
        if at:
            self.nodes[int(at)].damage(name, cuts=how == "it is cut")
        elif name in whole:
            self.checks.damages(name)
            self.storage.damage(name, cuts=how == "it is cut")

    # What others ask ------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether the storage does not answer."""
        return self.now_s < self._away_until_s

    def has_slot(self) -> bool:
        """Tell whether the storage has a slot: those of abandoned attempts are free."""
        held = [each for each in self.admitted if not each.is_abandoned]
        return len(held) < self.plan.slots

    def choose(self, options: list[tuple[str, str]], *, calm: float, is_told: bool = True) -> str:
        """Return what happens next.

        Args:
            options: What may, and what of it there is a limited number of; the first is the usual.
            calm: How often it should be the first, where chance decides.
            is_told: Whether it is a trouble, and part of the story.
        """
        open_ = [name for name, kind in options if not kind or self.left[kind] > 0]
        if len(open_) == 1:
            return open_[0]
        chosen = open_[self._chance.choose(open_, calm=calm)]
        kind = next(kind for name, kind in options if name == chosen)
        if kind:
            self.left[kind] -= 1
        if kind and is_told:
            self.job.troubles += 1
            self.tell(f"* {chosen}")
        return chosen

    def tell(self, what: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.now_s:9.2f}  {what}")

    def _seen(self, what: str) -> None:
        self.tell(f"  {what}")
        self.checks.happened(what)
