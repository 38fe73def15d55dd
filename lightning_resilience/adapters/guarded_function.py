# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A guarded call of a function that does not go straight: a series of attempts under the protocol.

It is apart from ``adapters.guard`` because it needs the protocols, the driver and the events, which
a program loads with its first guarded call and not with the definition of a guard.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.blocking import name_of
from lightning_resilience.adapters.standalone import STORE_PATIENCE_S, standalone
from lightning_resilience.core.outcome import with_user_classifier
from lightning_resilience.core.waiting import VOICE_S
from lightning_resilience.protocols.guard import GuardedCall
from lightning_resilience.protocols.probe import Patience


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.guard import Made
    from lightning_resilience.adapters.guard_options import FunctionOptions
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.shortcut import Shortcut


__all__ = ["Series"]


class Series:
    """The attempts at one call of a function, in the caller's thread.

    Args:
        options: The guard's.
        function: What is called, for its name.
        attempt: Makes one attempt.
        made: The first attempt, where it went straight.
    """

    def __init__(
        self,
        options: FunctionOptions,
        function: Callable[..., Any],
        *,
        attempt: Callable[[], Any],
        made: Made | None,
    ) -> None:
        self._options = options
        self._function = function
        self._attempt = attempt
        self._made = made
        common = options.common
        self._place = standalone(common.store, run_id=common.run_id)
        self._circuit = self._place.circuit(options.name, common, hosts=options.hosts)

    @property
    def shortcut(self) -> Shortcut:
        """The way past the gate for the calls that follow."""
        return self._circuit.shortcut

    def run(self) -> Any:
        """Make attempts until one succeeds or the policy ends.

        Returns:
            What the function returned.

        Raises:
            BaseException: As ``Standalone.run``.
        """
        options, common = self._options, self._options.common
        classify = partial(
            with_user_classifier(common.classify), reading=options.operation == "read"
        )
        call = GuardedCall(
            work=self._work,
            operation="call",
            target=name_of(self._function),
            policy=common.retry,
            patience=Patience(
                probe=partial(_probe, options.probe),
                classify=classify,
                when_open=common.when_open,
                voice_s=VOICE_S,
            ),
            collective=options.collective,
            may_go_alone=not common.strict,
            store_patience_s=STORE_PATIENCE_S,
            let_through=None if self._made is None else self._made.view,
            has_thread=False,
        )
        return self._place.run(self._circuit, call)

    def _work(self, token: CancelToken) -> Any:
        del token  # nobody abandons what runs in the caller's own thread
        try:
            if self._made is not None:
                self._made.raise_error()
            return self._attempt()
        except Exception:
            # Other threads ask at the gate until it is known what this says.
            self.shortcut.close()
            raise


def _probe(probe: Callable[[], Any] | None, token: CancelToken) -> None:
    del token
    if probe is not None:
        probe()
