# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""SIGTERM while a rank waits.

Lightning's own handler runs a broadcast *inside the handler*: a rank that gets the signal alone, or
while the others wait somewhere else, hangs there until the process group's timeout. It is replaced
by one that sets Lightning's flag and forwards the signal to the launcher's children as the original
does, and leaves the collective out. Handlers that were there before Lightning's are chained by
Lightning as before.

A wait looks at the flag several times a second and ends with Lightning's own exception for it,
once: what is saved on that exception may wait again. What a background thread still writes waits no
longer once training has failed or was told to stop.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces import sigterm_exception, sigterm_notifier


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.patches import Patches


__all__ = ["Termination"]

_log = logging.getLogger(__name__)


class Termination:
    """Whether this process was told to stop, and whether somebody has acted on it.

    Args:
        trainer: The Trainer; its signal handlers are not registered yet.
        patches: Remembers what was replaced.
    """

    def __init__(self, trainer: Any, patches: Patches) -> None:
        self._trainer = trainer
        self._exception = sigterm_exception(trainer)
        self._pid = os.getpid()
        self._pending = False
        self._is_failing = False
        self._thread = threading.current_thread()
        owner, name = sigterm_notifier(trainer)
        self._owner = owner
        patches.replace(owner, name, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        # In the handler: flags and a signal, no collective, no lock, no I/O.
        del frame
        if os.getpid() != self._pid:
            # A forked data-loader worker has inherited the handler; the Trainer is not its own.
            return
        self._pending = True
        launcher = self._trainer.strategy.launcher
        if not self._owner.received_sigterm and launcher is not None:
            launcher.kill(signum)
        self._owner.received_sigterm = True

    @property
    def is_pending(self) -> bool:
        """True while nobody has acted on a signal that came."""
        return self._pending

    @property
    def is_failing(self) -> bool:
        """True once the Trainer is stopping for an exception."""
        return self._is_failing

    def check(self) -> None:
        """Raise Lightning's exception for SIGTERM: in the Trainer's thread once a signal.

        In a background thread, in every wait once training is ending without success: nobody is
        left who would wait for it.
        """
        if threading.current_thread() is not self._thread:
            if self._is_failing or self._owner.received_sigterm:
                raise self._exception
        elif self._pending:
            self._pending = False
            # Not in the handler, which may have interrupted another log call.
            _log.info("SIGTERM was received: this wait ends, and training stops.")
            raise self._exception

    def acknowledge(self) -> None:
        """Take note that the Trainer is stopping already, for an exception."""
        self._is_failing = True
        if self._pending:
            self._pending = False
            _log.info("SIGTERM was received: training stops.")
