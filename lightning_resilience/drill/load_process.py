# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated process: its threads, and attempts that are begun again under a timeout.

What an attempt that was abandoned has not done yet it may do at any later instant, as a thread does
that hangs; what is stopped stands still with all of its threads, and what is killed is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.drill.save_attempt import FAILURES, Attempt, Kind, Op
from lightning_resilience.errors import CallTimeoutError, CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.drill.load_node import Node
    from lightning_resilience.drill.load_world import LoadWorld
    from lightning_resilience.drill.save_attempt import Ops, Pending


__all__ = ["Actor", "OvertakenError", "Owner", "is_final", "nothing"]


class OvertakenError(CallTimeoutError):
    """Nobody wants any more what somebody has waited for."""


class Actor(Attempt):
    """A thread of a process.

    Attributes:
        owner: Its process.
        is_main: Whether it is the process's own; another one may be abandoned.
        begun_s: When it began.
        wakes_s: Until when it sleeps.
        looked_s: When it last looked for the file that it needs.
        marked_s: When it last marked a piece, as a reader.
        sees: The mark that it has seen last.
        watched: The mark that it has seen before its last pause, and since when.

    Args:
        name: What it does, for the story.
        owner: Its process.
        is_main: As above.
    """

    def __init__(self, name: str, owner: Owner, *, is_main: bool = False) -> None:
        super().__init__(name, owner.pending)
        self.owner = owner
        self.is_main = is_main
        self.begun_s = owner.world.now_s
        self.wakes_s = 0.0
        self.looked_s = 0.0
        self.marked_s = 0.0
        self.sees: int | None = None
        self.watched: tuple[int | None, float] = (None, 0.0)


class Owner:
    """A process on a node.

    Args:
        world: The world.
        node: Its node.
        name: Its name.
    """

    def __init__(self, world: LoadWorld, node: Node, name: str) -> None:
        self.world = world
        self.node = node
        self.name = name
        self.pending: list[Pending] = []
        self.is_alive = True
        self.stopped_until_s = 0.0
        self.main = Actor(name, self, is_main=True)

    def begin(self) -> None:
        """Begin to live."""
        self.world.actors.append(self.main)
        self.main.set_out(self.life())

    def life(self) -> Ops:
        """Do everything."""
        yield from nothing()

    @property
    def has_ended(self) -> bool:
        """Whether its own thread has come to its end, or it is gone."""
        return not self.is_alive or self.main.op is None

    def is_overtaken(self) -> bool:
        """Tell whether nobody wants what it does any more."""
        return False

    def series(self, name: str, begin: Callable[[Actor], object], *, has_slot: bool = False) -> Ops:
        """Make attempts until one succeeds.

        Args:
            name: What is attempted.
            begin: Sets an attempt out.
            has_slot: Whether each needs a slot of the storage.

        Raises:
            Exception: What the last attempt has raised.
        """
        left = self.world.plan.attempts
        while True:
            try:
                return (yield from self.once(name, begin, has_slot=has_slot))
            except OvertakenError:
                raise
            except FAILURES as raised:
                error = raised
            if is_final(error):
                raise error
            if self.world.is_away:
                # As behind a circuit that is open: that takes no attempt.
                yield from self.wait("storage", lambda: not self.world.is_away)
                continue
            left -= 1
            if not left:
                raise error

    def once(self, name: str, begin: Callable[[Actor], object], *, has_slot: bool = False) -> Ops:
        """Make one attempt.

        Args:
            name: What is attempted.
            begin: Sets it out.
            has_slot: Whether it needs a slot of the storage.

        Raises:
            CallTimeoutError: It was abandoned.
        """
        world = self.world
        if has_slot:
            yield from self.wait("a slot", world.has_slot)
        attempt = Actor(f"{self.name}: {name}", self)
        if has_slot:
            world.admitted.append(attempt)
        world.actors.append(attempt)
        begin(attempt)
        yield from self.wait(name, lambda: attempt.op is None or attempt.is_abandoned)
        if attempt.is_abandoned:
            message = f"{attempt.name} was abandoned"
            raise CallTimeoutError(message)
        if attempt.error is not None:
            world.tell(f"  {attempt.name}: {attempt.error!r}")
            raise attempt.error
        return attempt.value

    def wait(self, what: str, is_done: Callable[[], bool]) -> Ops:
        """Wait; who is overtaken leaves what it waits for alone.

        Raises:
            OvertakenError: It was overtaken.
        """

        def blocked() -> bool:
            return not is_done() and not self.is_overtaken()

        yield Op(kind=Kind.WAIT, what=f"wait for {what}", run=bool, blocked=blocked)
        if not is_done():
            self.leave()
            message = f"it is in vain to wait for {what}"
            raise OvertakenError(message)

    def leave(self) -> None:
        """Abandon what is still being attempted."""
        for actor in self.world.actors:
            if actor.owner is self and not actor.is_main:
                actor.is_abandoned = True


def is_final(error: Exception) -> bool:
    """Tell whether it is in vain to try again."""
    return isinstance(error, (FileNotFoundError, CorruptCheckpointError))


def nothing() -> Ops:
    """Do nothing."""
    yield from ()
