# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A thread that waits for one key for as long as a run lasts, and then does something.

What the key stands for may come while the main thread cannot look: in foreign code, in a
collective. The wait is the store's own, on a connection of its own, so nothing is asked of the
store until the key is there.

A store that is away is waited for with growing pauses, without a word: it may be away because the
run has ended elsewhere, and nobody depends on the alarm.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import backoff
from lightning_resilience.errors import StoreUnavailableError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import Dice, SharedStore


__all__ = ["Alarm"]

_LONGEST_WAIT_S: Final = 600.0
_BASE_S: Final = 0.5
_CAP_S: Final = 60.0
_JOIN_S: Final = 1.0


class Alarm:
    """Calls ``ring`` once, from its own daemon thread, when ``key`` is there.

    Args:
        store: The store; its ``watcher()`` gives the alarm its own connection.
        key: What to wait for.
        ring: What to do then.
        dice: For the pauses while the store is away.

    Note:
        Any thread may close it.
    """

    def __init__(
        self, store: SharedStore, key: str, ring: Callable[[], None], *, dice: Dice
    ) -> None:
        self._watcher = store.watcher()
        self._key = key
        self._ring = ring
        self._dice = dice
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="lightning-resilience-alarm", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                if self._watcher.wait_for(self._key, _LONGEST_WAIT_S):
                    break
                failures = 0
            except StoreUnavailableError:
                failures += 1
                pause_s = backoff.delay_s(
                    failures, base_s=_BASE_S, cap_s=_CAP_S, draw=self._dice.draw()
                )
                self._closed.wait(pause_s)
        self._watcher.close()
        if not self._closed.is_set():
            self._ring()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        self._watcher.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
