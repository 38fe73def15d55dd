# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A call of foreign code in a simulated world: it lasts, beats, renews its lease, and is abandoned.

It does what the blocking driver does with a ``Call``. The work is not run in a thread but hands
back the request that it has sent to storage; the call lasts as long as that. Meanwhile the caller
wakes for whatever is due next. While it speaks to the store it hears of nothing else: as in the
blocking driver, a call that has ended is noticed when the store has answered, or has not.

A call without a timeout occupies its caller; a helper renews the lease, and a caller whose work has
ended waits for a renewal that is under way, but not for longer than last words may take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.events import StoreLost
from lightning_resilience.drill.storage_model import Request
from lightning_resilience.errors import CallTimeoutError, DrillFailedError
from lightning_resilience.protocols import effects as fx


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.drill.process import Process
    from lightning_resilience.drill.simulator import Simulator


__all__ = ["LAST_WORDS_S", "RunningCall", "Token"]

LAST_WORDS_S: Final = 0.5
"""As in the blocking driver: last words are for a store that answers. In seconds."""

_NEVER_S: Final = float("inf")


class Token:
    """The cancel token of a simulated call.

    Attributes:
        cancelled: Whether its caller has abandoned it.
    """

    __slots__ = ("cancelled",)

    def __init__(self) -> None:
        self.cancelled = False

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Nothing: one request is one step."""

    def raise_if_cancelled(self) -> None:
        """Raise once the call was abandoned."""
        if self.cancelled:
            raise CallTimeoutError("the call was abandoned")


@dataclass(slots=True)
class _Duty:
    """Something to be done again and again while the call lasts."""

    every_s: float
    act: Callable[[], None]
    due_at_s: float


class RunningCall:
    """One call that is under way.

    Args:
        simulator: Who drives the process.
        process: Who calls.
        effect: What.
        answer: Takes what came of it.
    """

    __slots__ = (
        "_answer",
        "_began_at_s",
        "_duties",
        "_effect",
        "_ended_with",
        "_gives_up_at_s",
        "_has_ended",
        "_heard_late",
        "_is_asking",
        "_is_due",
        "_is_inline",
        "_is_over",
        "_process",
        "_request",
        "_simulator",
        "_token",
    )

    def __init__(
        self,
        simulator: Simulator,
        process: Process,
        effect: fx.Call,
        *,
        answer: Callable[[Any], None],
    ) -> None:
        self._simulator = simulator
        self._process = process
        self._effect = effect
        self._answer = answer
        self._token = Token()
        self._request: Request | None = None
        self._began_at_s = simulator.agenda.now_s
        self._is_inline = effect.timeout_s is None
        self._heard_late: Callable[[], None] | None = None
        self._is_over = False
        self._is_asking = False
        self._is_due = False
        self._has_ended = False
        self._ended_with: Any = None
        self._gives_up_at_s = _NEVER_S
        self._duties: list[_Duty] = []
        if effect.timeout_s is not None:
            self._gives_up_at_s = self._in(effect.timeout_s)
            if effect.voice is not None:
                self._owe(effect.voice.every_s, partial(self._speak, effect.voice))
            if effect.beat is not None:
                self._owe(effect.beat.every_s, partial(self._beat, effect.beat))
        if effect.renewal is not None:
            self._owe(effect.renewal.every_s, partial(self._renew, effect.renewal))

    def _in(self, duration_s: float) -> float:
        return self._simulator.agenda.now_s + self._process.host.clock.lasts_s(duration_s)

    def _owe(self, every_s: float, act: Callable[[], None]) -> None:
        self._duties.append(_Duty(every_s, act, self._in(every_s)))

    def begin(self) -> None:
        """Start the work."""
        try:
            handed = self._effect.work(self._token)
        except DrillFailedError:
            # A promise that was seen to be broken is no failure of the work.
            raise
        except BaseException as error:  # noqa: BLE001 - every other failure belongs to the protocol
            self._simulator.agenda.after(0.0, self._finish, error)
            return
        if not isinstance(handed, Request):
            self._simulator.agenda.after(0.0, self._finish, handed)
            return
        self._request = handed
        handed.on_end = self._request_ended
        self._schedule()

    def cancel(self, *, is_dead: bool) -> None:
        """Let nobody wait for it any more.

        Args:
            is_dead: Whether its process is gone, and with it the connection to storage.
        """
        self._is_over = True
        self._token.cancelled = True
        if self._request is None:
            return
        if is_dead:
            self._simulator.storage.abort(self._request)
        elif self._request.ended_at_s is None:
            self._request.is_abandoned = True

    def interrupt(self, error: BaseException) -> None:
        """Throw an interruption into the caller, once it can take it."""
        if self._is_asking and self._is_inline:
            self._end_after_asking(error)
        else:
            self._is_over = True
            self._answer(error)

    def woken(self) -> None:
        """Do what has become due while the process stood still."""
        heard, self._heard_late = self._heard_late, None
        if heard is not None:
            heard()
        if self._is_due and not self._is_over:
            self._is_due = False
            self._look_around(None)

    def _request_ended(self, request: Request) -> None:
        self._finish("done" if request.failed is None else request.failed)

    def _finish(self, value: Any) -> None:  # noqa: ANN401 - whatever came of it
        if self._is_over or self._has_ended:
            return
        if self._is_asking:
            self._end_after_asking(value)
            return
        self._is_over = True
        self._answer(value)

    def _end_after_asking(self, value: Any) -> None:  # noqa: ANN401 - as above
        self._has_ended, self._ended_with = True, value
        if self._is_inline:
            longest_s = self._process.host.clock.lasts_s(LAST_WORDS_S)
            self._simulator.agenda.after(longest_s, self._ask_no_longer)

    def _ask_no_longer(self, _value: Any = None) -> None:  # noqa: ANN401 - nothing
        if not self._is_over:
            self._is_over = True
            self._answer(self._ended_with)

    def _schedule(self) -> None:
        next_at_s = min([self._gives_up_at_s, *(duty.due_at_s for duty in self._duties)])
        if next_at_s < _NEVER_S:
            self._simulator.agenda.at(next_at_s, self._look_around)

    def _look_around(self, _value: Any) -> None:  # noqa: ANN401 - nothing
        if self._is_over or self._has_ended:
            return
        if self._process.is_paused:
            self._is_due = True
            return
        now_s = self._simulator.agenda.now_s
        if now_s >= self._gives_up_at_s:
            self._give_up()
            return
        for duty in self._duties:
            if now_s >= duty.due_at_s:
                duty.due_at_s = self._in(duty.every_s)
                duty.act()
                return
        self._schedule()

    def _give_up(self) -> None:
        self.cancel(is_dead=False)
        self._answer(
            CallTimeoutError(f"The call made no progress for {self._effect.timeout_s:g} s.")
        )

    def _speak(self, voice: fx.Voice) -> None:
        silent_s = self._simulator.agenda.now_s - self._began_at_s
        self._simulator.emit(self._process, voice.event(silent_s * self._process.host.clock.rate))
        self._schedule()

    def _beat(self, beat: fx.Beat) -> None:
        value = self._process.dice.nonce().encode()
        self._ask(fx.Set(beat.key, value), lambda _returned: None)

    def _renew(self, renewal: fx.Renewal) -> None:
        request = renewal.request(self._process.dice.nonce())
        if isinstance(request, fx.CompareAndSet):
            self._ask(request, renewal.answered)
            return
        if request is not None:
            renewal.answered(self._simulator.perform_own(self._process, request.effect))
        self._schedule()

    def _ask(self, effect: fx.Set | fx.CompareAndSet, answered: Callable[[Any], None]) -> None:
        self._is_asking = True
        self._simulator.send(self._process, effect, partial(self._answered, answered))

    def _answered(self, answered: Callable[[Any], None], value: Any) -> None:  # noqa: ANN401 - whatever the store returns
        if not self._process.is_alive:
            return
        if self._process.is_paused:
            self._heard_late = partial(self._answered, answered, value)
            return
        if self._is_over and not self._is_inline:
            # Whoever asked was thrown out of its question.
            return
        if isinstance(value, BaseException):
            self._simulator.emit(self._process, StoreLost(op="beat", error=str(value)))
        else:
            answered(value)
        self._is_asking = False
        if self._has_ended:
            self._ask_no_longer()
        elif not self._is_over:
            self._go_on()

    def _go_on(self) -> None:
        if self._is_inline:
            # Its helper sleeps anew after each renewal; a caller counts from one to the next.
            for duty in self._duties:
                duty.due_at_s = self._in(duty.every_s)
        self._schedule()
