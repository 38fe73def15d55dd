# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The dependency of a simulated world: so many requests at a time, a queue, and bad days.

It knows nothing of breakers and slots. It serves ``slots`` requests at once and lets the others
queue; in an outage it fails them all or never answers; in a brown-out it fails some and is slow
with the rest; some ranks it may refuse; above a rate it throttles. Its count of what reaches it is
what the promises are measured by.
"""

from __future__ import annotations

import errno
from collections import deque
from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.scenario import Brownout, Outage, Refusal


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.drill.observer import Observers
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.scenario import Storage
    from lightning_resilience.drill.virtual import Agenda, SeededDice


__all__ = ["Request", "StorageModel"]

_THROTTLE_WINDOW_S: Final = 1.0


class SlowDown(Exception):  # noqa: N818 - the name is the storage's own code
    """Storage asks to come less often."""

    def __init__(self) -> None:
        super().__init__("please reduce your request rate")
        self.response = {"Error": {"Code": "SlowDown"}}


class AccessDenied(Exception):  # noqa: N818 - as above
    """Storage refuses, and will always."""

    def __init__(self) -> None:
        super().__init__("access denied")
        self.response = {"Error": {"Code": "AccessDenied"}}


class ExpiredToken(Exception):  # noqa: N818 - as above
    """Credentials have expired."""

    def __init__(self) -> None:
        super().__init__("the token has expired")
        self.response = {"Error": {"Code": "ExpiredToken"}}


_ERRORS: Final[dict[str, Callable[[], Exception]]] = {
    "reset": lambda: ConnectionResetError("connection reset by storage"),
    "timeout": lambda: TimeoutError("storage did not answer in time"),
    "throttle": SlowDown,
    "unknown": lambda: RuntimeError("storage answered with something odd"),
    "auth": ExpiredToken,
    "permanent": AccessDenied,
    "capacity": lambda: OSError(errno.ENOSPC, "no space left in storage"),
}


class Request:
    """One request, from its arrival at storage to its end.

    Attributes:
        kind: ``call`` or ``probe``.
        process: Who sent it.
        operation: What it is made for.
        attempt: Which attempt of that it is; 1 for the first.
        began_at_s: When it reached storage, on the virtual clock.
        ended_at_s: When storage was done with it, or None.
        failed: How it failed; None for a success, and for one that still runs.
        is_abandoned: Whether its caller waits no longer.
        is_served: Whether it has one of storage's slots now.
        on_end: Told when it ends.
    """

    __slots__ = (
        "attempt",
        "began_at_s",
        "ended_at_s",
        "failed",
        "is_abandoned",
        "is_served",
        "kind",
        "on_end",
        "operation",
        "process",
        "reached",
    )

    def __init__(self, kind: str, process: Process, operation: Operation, *, attempt: int) -> None:
        self.kind = kind
        self.process = process
        self.operation = operation
        self.attempt = attempt
        self.began_at_s = 0.0
        self.ended_at_s: float | None = None
        self.failed: Exception | None = None
        self.is_abandoned = False
        self.is_served = False
        self.reached = False
        self.on_end: Callable[[Request], None] | None = None


class StorageModel:
    """Storage, and the network before it.

    Args:
        agenda: The virtual clock.
        config: How much it can do.
        dice: Decide how long a request takes, and which fail in a brown-out.
        observers: Are told of each request.

    Attributes:
        in_flight: Requests that it is busy with, queued ones included.
    """

    def __init__(
        self, agenda: Agenda, config: Storage, *, dice: SeededDice, observers: Observers
    ) -> None:
        self.in_flight = 0
        self._agenda = agenda
        self._config = config
        self._dice = dice
        self.observers = observers
        self._free = config.slots
        self._queue: deque[Request] = deque()
        self._faults: list[Outage | Brownout | Refusal] = []
        self._hanging: list[Request] = []
        self._arrived_at_s: deque[float] = deque()

    @property
    def is_ill(self) -> bool:
        """True while it fails some of what it is asked for, or is slow."""
        return bool(self._faults)

    def begin(self, fault: Outage | Brownout | Refusal) -> None:
        """Let a bad time begin."""
        self._faults.append(fault)

    def end(self, fault: Outage | Brownout | Refusal) -> None:
        """Let it end; requests that have hung since are served now."""
        self._faults.remove(fault)
        if not self._has_hang():
            hanging, self._hanging = self._hanging, []
            for request in hanging:
                if request.ended_at_s is None:
                    self._serve(request)

    def submit(self, request: Request) -> None:
        """Let a request come."""
        now_s = self._agenda.now_s
        request.began_at_s = now_s
        if request.process.host.is_cut_off_from_storage(now_s):
            # It never arrives, so nobody counts it.
            request.failed = ConnectionError("no route to storage")
            self._agenda.after(self._config.failing_s, self._end, request)
            return
        request.reached = True
        self.in_flight += 1
        for began in self.observers.began:
            began(now_s, request)
        if self._has_hang():
            self._hanging.append(request)
            return
        error = self._error(request) or self._throttle(now_s)
        if error is not None:
            request.failed = error
            self._agenda.after(self._config.failing_s, self._end, request)
        else:
            self._serve(request)

    def abort(self, request: Request) -> None:
        """Let a request end because its process is gone: its connection was closed."""
        request.on_end = None
        if request.ended_at_s is None:
            request.failed = ConnectionAbortedError("the caller is gone")
            self._end(request)
            self._leave(request)

    def _has_hang(self) -> bool:
        return any(isinstance(f, Outage) and f.error == "hang" for f in self._faults)

    def _error(self, request: Request) -> Exception | None:
        for fault in self._faults:
            if self._fails(fault, request):
                return _ERRORS[fault.error]()
        return None

    def _fails(self, fault: Outage | Brownout | Refusal, request: Request) -> bool:
        if isinstance(fault, Refusal):
            return request.process.rank in fault.ranks
        return isinstance(fault, Outage) or self._dice.draw() < fault.share

    def _throttle(self, now_s: float) -> Exception | None:
        if not self._config.per_s:
            return None
        arrived = self._arrived_at_s
        while arrived and arrived[0] <= now_s - _THROTTLE_WINDOW_S:
            arrived.popleft()
        if len(arrived) >= self._config.per_s * _THROTTLE_WINDOW_S:
            return SlowDown()
        arrived.append(now_s)
        return None

    def _serve(self, request: Request) -> None:
        if self._free:
            self._free -= 1
            self._start(request)
        else:
            self._queue.append(request)

    def _start(self, request: Request) -> None:
        config = self._config
        lasts_s = config.service_s
        if config.jitter:
            lasts_s *= 1 + config.jitter * (2 * self._dice.draw() - 1)
        for fault in self._faults:
            if isinstance(fault, Brownout):
                lasts_s *= fault.slowdown
        request.is_served = True
        self._agenda.after(lasts_s, self._served, request)

    def _served(self, request: Request) -> None:
        if request.ended_at_s is not None:
            return
        self._leave(request)
        if self._has_hang():
            # The outage has begun meanwhile; and so has another one below.
            self._hanging.append(request)
            return
        for fault in self._faults:
            if isinstance(fault, Outage):
                request.failed = _ERRORS[fault.error]()
        self._end(request)

    def _leave(self, request: Request) -> None:
        """Give a request's slot to the next in the queue that still wants it."""
        if not request.is_served:
            return
        request.is_served = False
        while self._queue:
            following = self._queue.popleft()
            if following.ended_at_s is None:
                self._start(following)
                return
        self._free += 1

    def _end(self, request: Request) -> None:
        if request.ended_at_s is not None:
            return
        request.ended_at_s = self._agenda.now_s
        if request.reached:
            self.in_flight -= 1
            for ended in self.observers.ended:
                ended(self._agenda.now_s, request)
        if request.on_end is not None:
            request.on_end(request)
