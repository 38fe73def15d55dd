# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The guard for any function: breaker, retries, admission and budget around one dependency.

While the circuit is closed and this process's view of it is fresh, a call is the function's own
call behind one comparison with the clock. Everything else, the first call included, runs as a
protocol (``protocols.guard``).
"""

from __future__ import annotations

import functools
import inspect
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar

from lightning_resilience.adapters.guard_options import OPTIONS, guard_options
from lightning_resilience.adapters.standalone import STORE_PATIENCE_S, standalone
from lightning_resilience.config import read_environment, refuse_unknown
from lightning_resilience.core.fast_path import NEVER_S, straight_until_s
from lightning_resilience.core.outcome import with_user_classifier
from lightning_resilience.core.validation import check_choice, check_kind, check_whole
from lightning_resilience.core.waiting import VOICE_S
from lightning_resilience.errors import ConfigError
from lightning_resilience.protocols.detour import guide
from lightning_resilience.protocols.guard import GuardedCall
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.runtime.system import monotonic_s


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import Store

    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker import BreakerConfig, BreakerView
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.outcome import Classifier
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken, SharedStore
    from lightning_resilience.protocols.circuit import Circuit


__all__ = ["Guard"]

P = ParamSpec("P")
R = TypeVar("R")

# What makes a function whose call does not do its work, but returns what will.
_DEFERRED: Final = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Guard:
    """Guards calls of any function that needs one dependency.

    A failed call is classified, counted, and repeated with full jitter within the retry policy and
    the job's retry budget; while the dependency is ill, all processes that share a store stay away
    from it, and one of them probes. Outside a job, or with no store in reach, the process decides
    for itself.

    Args:
        dependency: Its name, the same in every process, for example ``https://models.example``.
            A user name and password in it are left out.
        operation: ``read`` or ``write``: each has a breaker of its own. A missing file is an answer
            to a read.
        retry: A ``RetryPolicy``, or a mapping of its options.
        budget: A ``BudgetConfig``, or a mapping of its options.
        breaker: A ``BreakerConfig``, or a mapping of its options.
        admission: An ``AdmissionConfig``, or a mapping of its options.
        store: The store that all processes share: a URL ``tcp://host:port``, a
            ``torch.distributed.Store``, or None for the server behind the default process group.
            Where there is none either, this process decides for itself.
        run_id: Name of this run, the same in every process. None takes
            ``LIGHTNING_RESILIENCE_RUN_ID`` or the launcher's; name it where several jobs share a
            store.
        classify: Names the failure class of an exception (``transient``, ``permanent``, …), or
            returns None for the default.
        when_open: ``wait`` (default: no work is lost) for an ill dependency, up to ``deadline_s``,
            or ``raise`` at once.
        strict: Whether a call fails where the shared store is away. By default it goes on with what
            this process knows, on its share of every limit.
        collective: Whether all ranks make these calls at the same time. Then no more than
            ``max_concurrent`` of them are in flight, also while all is well, at the cost of about
            four store operations a call.
        probe: A cheap real operation of the dependency, which raises while it is ill. Without one,
            the first call that is let in after the open wait is the probe.
        hosts: Hosts that use the dependency, ≥ 1, for the quorum. None takes the launcher's number.

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another.

    Note:
        Any thread and rank may call; no call is a collective. The function runs in the caller's
        thread and is never abandoned: give it a timeout of its own, shorter than the process
        group's where the others wait for it in a collective. A guard may be pickled; its state
        belongs to the process, and a forked child begins anew.

    Example:
        >>> from lightning_resilience import Guard
        >>> guard = Guard("https://models.example", retry={"max_attempts": 4})
        >>> guard.call(pow, 2, 10)
        1024
        >>> @guard
        ... def fetch(name: str) -> str:
        ...     return f"weights of {name}"
        >>> fetch("resnet")
        'weights of resnet'
    """

    def __init__(  # noqa: PLR0913 - the options that the reference lists
        self,
        dependency: str,
        *,
        operation: str = "read",
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        budget: BudgetConfig | Mapping[str, Any] | None = None,
        breaker: BreakerConfig | Mapping[str, Any] | None = None,
        admission: AdmissionConfig | Mapping[str, Any] | None = None,
        store: SharedStore | Store | str | None = None,
        run_id: str | None = None,
        classify: Classifier | None = None,
        when_open: str = "wait",
        strict: bool = False,
        collective: bool = False,
        probe: Callable[[], Any] | None = None,
        hosts: int | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown("Guard", unknown, allowed=(*OPTIONS, *_OWN_OPTIONS))
        self._name = f"{_checked_name(dependency)}:{operation}"
        check_choice("operation", operation, choices=("read", "write"))
        given = {name: value for name, value in locals().items() if name in OPTIONS}
        self._options = guard_options(given)
        check_kind("collective", collective, fits=isinstance(collective, bool), allowed="a bool")
        check_kind("probe", probe, fits=callable(probe), allowed="a function without arguments")
        if hosts is not None:
            check_whole("hosts", hosts, minimum=1)
        self._collective = collective
        self._hosts = hosts
        self._patience = Patience(
            probe=partial(_probe, probe),
            classify=partial(with_user_classifier(classify), reading=operation == "read"),
            when_open=when_open,
            voice_s=VOICE_S,
        )
        self._forget()

    def _forget(self) -> None:
        # One number says it all: the view is fresh, the circuit closed, and nothing to report.
        self._straight_until_s = NEVER_S
        self._straight_view: BreakerView | None = None
        self._straight_calls = 0

    def __getstate__(self) -> dict[str, Any]:
        """Take the options along, and nothing of what this process knows."""
        state = dict(vars(self))
        del state["_straight_until_s"], state["_straight_view"], state["_straight_calls"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew with the options."""
        self.__dict__.update(state)
        self._forget()

    def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` under the guard.

        Args:
            function: Does one attempt; it may be called again. Not a coroutine function or a
                generator function, whose call does not do the work.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            What it returned.

        Raises:
            Exception: The function's own, where repeating cannot help (a missing file, a denial, a
                full disk).
            RetriesExhaustedError: A series of attempts was given up; its cause is the last failure.
            CircuitOpenError: The circuit is open, or no slot came free, and ``when_open`` is
                ``raise`` or ``deadline_s`` has passed.
            BudgetExhaustedError: The job's retry budget denies another attempt, and ``when_open``
                is ``raise``.
            StoreUnavailableError: The shared store is away, under ``strict``.
            ConfigError: ``function`` is a coroutine or generator function, or what the environment
                says of the store is not allowed.
        """
        if monotonic_s() < self._straight_until_s:
            self._straight_calls += 1
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the first attempt of a series
                failed = error
            return self._guarded(function, partial(function, *args, **kwargs), failed)
        return self._guarded(function, partial(function, *args, **kwargs), None)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with every call of it under the guard.

        Raises:
            ConfigError: It is a coroutine function or a generator function.
        """
        _refuse_deferred(function)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            return self.call(function, *args, **kwargs)

        return guarded

    def _guarded(
        self, function: Callable[..., Any], attempt: Callable[[], R], failed: Exception | None
    ) -> R:
        _refuse_deferred(function)
        admitted_by = None if failed is None else self._straight_view
        self._straight_until_s = NEVER_S
        if not read_environment().enabled:
            return _straight(attempt, failed)
        options = self._options
        place = standalone(options.store, run_id=options.run_id)
        circuit = place.circuit(self._name, options, hosts=self._hosts)
        # The closed path has counted them; the budget's share rests on all calls.
        circuit.note_calls(self._straight_calls, now_s=monotonic_s())
        self._straight_calls = 0
        call = GuardedCall(
            work=_Attempts(attempt, failed),
            operation="call",
            target=getattr(function, "__qualname__", type(function).__name__),
            policy=options.retry,
            patience=self._patience,
            collective=self._collective,
            may_go_alone=not options.strict,
            store_patience_s=STORE_PATIENCE_S,
            has_thread=False,
            admitted_by=admitted_by,
        )
        value: R = place.run(circuit, call)
        if not self._collective:
            view = circuit.view
            until_s = _until_s(circuit, view)
            if until_s > NEVER_S:
                # Order: first the view, by which a straight call that fails is judged.
                self._straight_view = view
            self._straight_until_s = until_s
        return value


_OWN_OPTIONS: Final = ("dependency", "operation", "collective", "probe", "hosts")


class _Attempts:
    """The function's attempts; the first may have been made on the closed path already."""

    def __init__(self, attempt: Callable[[], Any], failed: Exception | None) -> None:
        self._attempt = attempt
        self._failed = failed

    def __call__(self, token: CancelToken) -> Any:
        del token  # nobody abandons what runs in the caller's own thread
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        return self._attempt()


def _straight(attempt: Callable[[], R], failed: Exception | None) -> R:
    if failed is not None:
        raise failed
    return attempt()


def _until_s(circuit: Circuit, view: BreakerView | None) -> float:
    return straight_until_s(
        view,
        circuit.window,
        circuit.config,
        host=circuit.host,
        is_alone=guide(circuit) is not circuit,
    )


def _probe(probe: Callable[[], Any] | None, token: CancelToken) -> None:
    del token
    if probe is not None:
        probe()


def _refuse_deferred(function: Callable[..., Any]) -> None:
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    if code is not None and code.co_flags & _DEFERRED:
        message = (
            f"{getattr(inner, '__qualname__', inner)!r} is a coroutine or generator function: its "
            "call returns before the work is done, and that is what would be guarded. Guard the "
            "blocking function that does the work."
        )
        raise ConfigError(message)


def _checked_name(dependency: object) -> str:
    fits = isinstance(dependency, str) and bool(dependency.strip())
    if not fits:
        message = (
            f"dependency={dependency!r} is not allowed: it must be a name that is not empty, the "
            "same in every process, for example https://models.example."
        )
        raise ConfigError(message)
    return re.sub(r"(?<=://)[^/@]*@", "", str(dependency))
