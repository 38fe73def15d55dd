# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Run a protocol to its end on real ports: the blocking driver.

The driver is one loop: advance the protocol, perform the effect that it yields, send the result
back in or throw the failure. It holds no policy; what a protocol does about a failure is the
protocol's business. The simulator is the other driver, and runs the same protocols.

Any thread may run a protocol; each thread has its own helper for waits. Ctrl-C takes effect at
once, and what ``interrupt`` raises within a second in every wait, but not in work that goes on: a
call that makes progress, and the milliseconds that ranks wait for each other, are left alone. An
interruption is thrown into the protocol, which may still perform short store operations as its last
words, and it is never swallowed.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_resilience.core.events import StoreLost
from lightning_resilience.core.incident import is_stop
from lightning_resilience.errors import CallTimeoutError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.store_effects import STORE_OPERATIONS, store_performers
from lightning_resilience.runtime.bells import Bells
from lightning_resilience.runtime.calls import PIECE_S, RunningCall, Token
from lightning_resilience.runtime.memory import MemoryStore


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.ports import Clock, Dice, EventSink, SharedStore
    from lightning_resilience.protocols.effects import Effect, Protocol


__all__ = ["Driver"]

T = TypeVar("T")

# A wait is interrupted once it has lasted this long, plus a piece: in all, within a second.
_UNDISTURBED_S: Final = 0.6
# Last words are for a store that answers: a healthy one takes less than a millisecond.
_LAST_WORDS_S: Final = 0.5


def _nothing() -> None:
    return None


def _adopt_nothing() -> Callable[[], None]:
    return _nothing


class Driver:
    """Performs effects on real ports.

    Args:
        store: The shared store.
        clock: Where time passes.
        dice: Where chance comes from.
        sink: Where events go.
        interrupt: Called several times a second in every wait that has lasted for more than half
            a second; what it raises ends the wait. It is how a signal handler that only sets a flag
            interrupts one.
        adopt: Called in the thread that makes a call with a timeout; returns what the call's own
            thread runs first (for example, set the same CUDA device).
        site: The store that this job shares with others, where there is one.
    """

    def __init__(
        self,
        *,
        store: SharedStore,
        clock: Clock,
        dice: Dice,
        sink: EventSink,
        interrupt: Callable[[], None] = _nothing,
        adopt: Callable[[], Callable[[], None]] = _adopt_nothing,
        site: SharedStore | None = None,
    ) -> None:
        self.store = store
        self.site = site
        self.clock = clock
        self.dice = dice
        self.sink = sink
        self.interrupt = interrupt
        self._adopt = adopt
        self._local = threading.local()
        self._own_store = MemoryStore()
        self._own_performers = store_performers(self._own_store)
        self._performers: dict[type, Callable[[Any], Any]] = {
            **store_performers(store),
            fx.WaitFor: self._wait_for,
            fx.Local: self._locally,
            fx.AtSite: self._at_site,
            fx.Sleep: self._sleep,
            fx.Now: lambda _effect: clock.now_s(),
            fx.Draw: lambda _effect: dice.draw(),
            fx.Nonce: lambda _effect: dice.nonce(),
            fx.Call: self._call,
            fx.Emit: lambda effect: sink.emit(effect.event),
        }

    def run(self, protocol: Protocol[T], *, hurry: bool = False) -> T:
        """Run a protocol to its end.

        Bounded by the protocol.

        Args:
            protocol: A fresh protocol.
            hurry: Whether the store has half a second for each answer, as it has for last words
                after an interruption.

        Returns:
            What it returns.

        Raises:
            BaseException: What it raises, interruptions included.
        """
        self._local.waiting_since_s = None
        advance: Callable[[], Effect] = partial(protocol.send, None)
        while True:
            try:
                effect = advance()
            except StopIteration as stop:
                result: T = stop.value
                return result
            try:
                value = self._perform(effect, hurry=hurry)
            except BaseException as error:  # noqa: BLE001 - every failure belongs to the protocol
                hurry = hurry or is_stop(error) or not isinstance(error, Exception)
                advance = partial(protocol.throw, error)
            else:
                advance = partial(protocol.send, value)

    def _perform(self, effect: Effect, *, hurry: bool) -> Any:  # noqa: ANN401 - whatever the effect yields
        perform = self._performers[type(effect)]
        if not hurry or not isinstance(effect, STORE_OPERATIONS):
            return perform(effect)
        call = RunningCall(
            lambda _token: perform(effect), token=Token(), clock=self.clock, adopt=_nothing
        )
        if not call.has_ended(within_s=_LAST_WORDS_S):
            message = (
                f"{type(effect).__name__} was not answered within {_LAST_WORDS_S:g} s, and whoever "
                "was interrupted waits no longer."
            )
            raise StoreUnavailableError(message)
        return call.result()

    def close(self) -> None:
        """Let this thread's helpers end. Idempotent."""
        for name in ("bells", "own_bells"):
            bells: Bells | None = getattr(self._local, name, None)
            if bells is not None:
                bells.close()

    def _locally(self, effect: fx.Local) -> Any:  # noqa: ANN401 - whatever the effect yields
        inner = effect.effect
        if isinstance(inner, fx.WaitFor):
            return self._wait_for(inner, name="own_bells", store=self._own_store)
        return self._own_performers[type(inner)](inner)

    def _at_site(self, effect: fx.AtSite) -> Any:  # noqa: ANN401 - whatever the effect yields
        if self.site is None:
            message = "this process has no connection to a site's store"
            raise StoreUnavailableError(message)
        return store_performers(self.site)[type(effect.effect)](effect.effect)

    def _wait_for(
        self, effect: fx.WaitFor, *, name: str = "bells", store: SharedStore | None = None
    ) -> bool:
        bells: Bells | None = getattr(self._local, name, None)
        if bells is None:
            bells = Bells(store or self.store, clock=self.clock)
            setattr(self._local, name, bells)
        found = bells.wait_for(effect.key, effect.timeout_s, check=self._look_around)
        if found:
            self._local.waiting_since_s = None
        return found

    def _sleep(self, effect: fx.Sleep) -> None:
        ends_at_s = self.clock.now_s() + effect.duration_s
        while (remaining_s := ends_at_s - self.clock.now_s()) > 0:
            self.clock.sleep(min(remaining_s, PIECE_S))
            self._look_around()

    def _look_around(self) -> None:
        """Let an interruption in, where this thread has been waiting for longer than it may.

        A save that is going well has its waits too, of milliseconds: an interruption that came
        before it must not be what fails it.
        """
        now_s = self.clock.now_s()
        since_s: float | None = getattr(self._local, "waiting_since_s", None)
        if since_s is None:
            self._local.waiting_since_s = now_s
        elif now_s - since_s >= _UNDISTURBED_S:
            self.interrupt()

    def _call(self, effect: fx.Call) -> Any:  # noqa: ANN401 - whatever the work returns
        if effect.timeout_s is None:
            with self._renewing(effect.renewal):
                return effect.work(Token())
        token = Token()
        try:
            value = self._run_call(effect, effect.timeout_s, token)
        except BaseException:
            # Also where it was interrupted before it had really begun.
            token.abandon()
            raise
        self._local.waiting_since_s = None
        return value

    @contextlib.contextmanager
    def _renewing(self, renewal: fx.Renewal | None) -> Iterator[None]:
        """Renew a lease from another thread while this one is in foreign code."""
        if renewal is None:
            yield
            return
        has_ended = threading.Event()

        def renew() -> None:
            while not has_ended.wait(renewal.every_s):
                self._renew(renewal)

        helper = threading.Thread(target=renew, name="lightning-resilience-lease", daemon=True)
        try:
            helper.start()
            yield
        finally:
            # Also where this thread was interrupted while the helper was starting: nobody else
            # would ever end it. A renewal that is under way at a store that does not answer is left
            # behind: whoever gives the lease back knows of it.
            has_ended.set()
            if helper.is_alive():
                helper.join(_LAST_WORDS_S)

    def _run_call(self, effect: fx.Call, timeout_s: float, token: Token) -> Any:  # noqa: ANN401 - as above
        call = RunningCall(
            effect.work,
            token=token,
            clock=self.clock,
            adopt=self._adopt(),
            may_extend=not effect.is_leased,
        )
        beaten_at_s = spoken_at_s = renewed_at_s = self.clock.now_s()
        while not call.has_ended(within_s=min(PIECE_S, timeout_s)):
            stalled_s = call.stalled_for_s()
            if stalled_s >= _UNDISTURBED_S:
                self.interrupt()
            _raise_if_stalled(stalled_s, timeout_s, token=token)
            spoken_at_s = self._speak(effect.voice, stalled_s, spoken_at_s)
            beaten_at_s = self._beat(effect.beat, beaten_at_s)
            renewed_at_s = self._renew_in_time(effect.renewal, renewed_at_s)
        return call.result()

    def _renew_in_time(self, renewal: fx.Renewal | None, renewed_at_s: float) -> float:
        now_s = self.clock.now_s()
        if renewal is None or now_s - renewed_at_s < renewal.every_s:
            return renewed_at_s
        self._renew(renewal)
        return now_s

    def _renew(self, renewal: fx.Renewal) -> None:
        effect = renewal.request(self.dice.nonce())
        if effect is None:
            return
        try:
            returned = self._performers[type(effect)](effect)
        except StoreUnavailableError as error:
            # It is asked again at the next beat, and the lease is longer than two of them.
            self.sink.emit(StoreLost(op="beat", error=str(error)))
        else:
            renewal.answered(returned)

    def _speak(self, voice: fx.Voice | None, stalled_s: float, spoken_at_s: float) -> float:
        now_s = self.clock.now_s()
        if voice is None or min(stalled_s, now_s - spoken_at_s) < voice.every_s:
            return spoken_at_s
        self.sink.emit(voice.event(stalled_s))
        return now_s

    def _beat(self, beat: fx.Beat | None, beaten_at_s: float) -> float:
        now_s = self.clock.now_s()
        if beat is None or now_s - beaten_at_s < beat.every_s:
            return beaten_at_s
        try:
            self.store.set(beat.key, self.dice.nonce().encode())
        except StoreUnavailableError as error:
            # The work is more important than the sign of life.
            self.sink.emit(StoreLost(op="beat", error=str(error)))
        return now_s


def _raise_if_stalled(stalled_s: float, timeout_s: float, *, token: Token) -> None:
    if stalled_s < timeout_s:
        return
    moved = token.moved.told()
    shown = f" ({moved})" if moved else ""
    message = (
        f"The call made no progress for {timeout_s:g} s and was abandoned{shown}; its thread may "
        "still be running. If calls need longer between two signs of progress, raise "
        "stall_timeout_s."
    )
    raise CallTimeoutError(message, moved=moved)
