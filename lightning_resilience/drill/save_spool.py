# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated run that spools: what could not be saved waits on the node, and is published later.

What is decided about it is shipped: ``core.spool`` says what waits, what is superseded, what comes
next and what the next start makes of it, ``core.pipeline`` in which order it is published. The
node's disk outlives the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core import pipeline
from lightning_resilience.core.pipeline import Progress
from lightning_resilience.core.retention import Stage
from lightning_resilience.core.spool import (
    Item,
    Spool,
    SpoolConfig,
    is_outdated,
    plan_for,
    refusal,
)
from lightning_resilience.core.spooled import SpoolEntry
from lightning_resilience.drill.save_looks import contents_of
from lightning_resilience.drill.save_process import FailedError, Process


if TYPE_CHECKING:
    from lightning_resilience.drill.save_attempt import Attempt
    from lightning_resilience.drill.save_world import SaveWorld


__all__ = ["SpoolingProcess"]

_ROOMY = 10**9
_EVEN = 0.5


class SpoolingProcess(Process):
    """One start of a run that spools.

    Args:
        world: The world.
    """

    def __init__(self, world: SaveWorld) -> None:
        super().__init__(world)
        self._spool = Spool()

    # What an earlier start has left ---------------------------------------------------------------

    def _start(self) -> int:
        node = self._world.node
        plan = plan_for([(0, name, entry) for name, entry in node.items()])
        for name in plan.drop.get(0, ()):
            self._drop(name, "superseded")
        for name in plan.publish.get(0, ()):
            entry = node[name]
            if is_outdated(entry, self._world.looks.manifest(entry.path)):
                self._drop(name, "superseded")
                continue
            try:
                self._send(entry)
            except FailedError as error:
                self._world.tell(f"{name} stays on the node: {error}")
                continue
            self._drop(name, "published")
        return super()._start()

    # A save ---------------------------------------------------------------------------------------

    def _save_point(self, number: int) -> None:
        self._publish_what_waits()
        super()._save_point(number)

    def _write(self, save: int, path: str, number: int) -> None:
        super()._write(save, path, number)
        if not self._spool.holds(path):
            return
        self._supersede(path, before=self._retention.number_of(path))

    def _keeps(self, save: int, path: str, number: int) -> bool:
        config = SpoolConfig()
        if refusal(self._spool, config, path, free_bytes=_ROOMY, now_s=0.0):
            return False
        ordinal = self._retention.number_of(path)
        size_bytes, digest = contents_of(self._plan.form, number)[""]
        name = f"spooled/{next(self._world.staged)}"
        self._world.node[name] = SpoolEntry(
            path=path, size_bytes=size_bytes, digest=digest, number=ordinal, step=number
        )
        item = Item(name=name, path=path, number=ordinal, size_bytes=size_bytes, since_s=0.0)
        self._spool = self._spool.added(item)
        self._world.checks.ended(save, "spooled", number)
        self._world.checks.waits(name, path, number)
        self._supersede(path, before=ordinal)
        self._retention = self._retention.ended(path, Stage.SPOOLED)
        self._world.tell(f"  step {number} waits on the node for {path}")
        return True

    def _ask_to_remove(self, path: str) -> None:
        super()._ask_to_remove(path)
        if self._retention.is_replaced(path):
            self._supersede(path, before=self._retention.number_of(path) + 1)

    def _supersede(self, path: str, *, before: int) -> None:
        for item in self._spool.superseded(path, before=before):
            self._spool = self._spool.without(item)
            self._drop(item.name, "superseded")

    # Its publication ------------------------------------------------------------------------------

    def _write_what_is_left(self) -> None:
        super()._write_what_is_left()
        self._publish_what_waits()

    def _publish_what_waits(self) -> None:
        while (item := self._spool.first()) is not None:
            options = [("the node publishes", ""), ("the node waits", "")]
            if self._world.choose(options, calm=_EVEN) != options[0][0]:
                return
            entry = self._world.node[item.name]
            self._spool = self._spool.sending(item, is_sent=True)
            try:
                self._send(entry)
            except FailedError as error:
                self._world.tell(f"{item.name} waits on: {error}")
                self._spool = self._spool.sending(item, is_sent=False)
                return
            self._retention = self._retention.published(entry.path, entry.number)
            self._spool = self._spool.without(item)
            self._drop(item.name, "published")

    def _send(self, entry: SpoolEntry) -> None:
        number = entry.step or 0
        known: Progress[str] = Progress()

        def begin(attempt: Attempt) -> Attempt:
            hands = self._hands(attempt, entry.path, number)
            steps = pipeline.save(known, keeps_staged=not self._plan.renames)
            return attempt.begin(steps, hands.of_a_save())

        self._world.checks.sends(entry.path, number)
        self._series(f"publish step {number} as {entry.path}", begin)

    def _drop(self, name: str, how: str) -> None:
        self._world.checks.waited(name, how)
        del self._world.node[name]
