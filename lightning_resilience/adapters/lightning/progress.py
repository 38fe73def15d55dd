# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The progress bar says what training waits for, and afterwards again what it said before.

It learns that from the events that everything reports, in the Trainer's thread: what a background
thread waits for does not stop training. Both of Lightning's bars are known, of either distribution;
any other is left alone, and the log says the same.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces_loops import training_bar
from lightning_resilience.core.pausing import banner


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.namespaces_loops import BarText
    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import EventSink


__all__ = ["BarSink"]


class BarSink:
    """Passes events on, and lets the progress bar tell of some. Any thread; never raises.

    Args:
        trainer: The Trainer, in its thread.
        inner: Where events go.
    """

    def __init__(self, trainer: Any, inner: EventSink) -> None:
        self._trainer = trainer
        self._inner = inner
        self._thread = threading.current_thread()
        self._changed: tuple[BarText, str] | None = None

    def emit(self, event: Event) -> None:
        """Pass an event on."""
        self._inner.emit(event)
        text = banner(event)
        if text is None or threading.current_thread() is not self._thread:
            return
        # A bar that cannot be drawn is no reason to end a save.
        with contextlib.suppress(Exception):
            if text:
                self._show(text)
            else:
                self.put_back()

    def put_back(self) -> None:
        """Let the bar say what it said before. Idempotent."""
        changed, self._changed = self._changed, None
        if changed is not None:
            bar, before = changed
            with contextlib.suppress(Exception):
                bar.write(before)

    def _show(self, text: str) -> None:
        if self._changed is None:
            bar = training_bar(self._trainer)
            if bar is None:
                return
            self._changed = bar, bar.read()
        self._changed[0].write(text)
