# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The guard for any function: breaker, retries, admission and budget around one dependency.

While the circuit is closed and this process's view of it is fresh, a call is the function's own
call behind one comparison with the clock. Everything else, the first call included, runs as a
protocol (``protocols.guard``).
"""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from lightning_resilience.adapters.blocking import (
    DEFERRED,
    refuse_deferred,
    refuse_deferred_result,
)
from lightning_resilience.adapters.guard_options import (
    FunctionOptions,
    check_travels,
    guard_options,
)
from lightning_resilience.config import read_environment, refuse_unknown_arguments
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.validation import check_choice, check_kind, check_whole
from lightning_resilience.errors import ConfigError
from lightning_resilience.protocols.shortcut import Shortcut
from lightning_resilience.runtime.system import monotonic_s


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import Store

    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker import BreakerConfig
    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.outcome import Classifier
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import SharedStore


__all__ = ["Guard"]

P = ParamSpec("P")
R = TypeVar("R")


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
        group's where the others wait for it in a collective. A guard may be copied, and pickled
        unless its store is an object; its state belongs to the process, and a forked child makes
        its own connection.

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
        refuse_unknown_arguments(Guard, unknown)
        name = f"{_checked_name(dependency)}:{operation}"
        check_choice("operation", operation, choices=("read", "write"))
        common = guard_options(
            {
                "retry": retry,
                "budget": budget,
                "breaker": breaker,
                "admission": admission,
                "store": store,
                "run_id": run_id,
                "classify": classify,
                "when_open": when_open,
                "strict": strict,
            }
        )
        check_kind("collective", collective, fits=isinstance(collective, bool), allowed="a bool")
        check_kind("probe", probe, fits=callable(probe), allowed="a function without arguments")
        if hosts is not None:
            check_whole("hosts", hosts, minimum=1)
        self._options = FunctionOptions(
            name=name,
            operation=operation,
            common=common,
            collective=bool(collective),
            probe=probe,
            hosts=hosts,
        )
        self._shortcut = Shortcut()

    def __getstate__(self) -> dict[str, Any]:
        """Take the options along, and nothing of what this process knows."""
        check_travels(self._options.common, what="a guard")
        state = dict(vars(self))
        del state["_shortcut"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew with the options."""
        self.__dict__.update(state)
        self._shortcut = Shortcut()

    def __copy__(self) -> Guard:
        """Return a guard with the same options, which shares what guards of a process share."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        """Return a copy: the options do not change, and a store is not doubled."""
        del memo
        return copy.copy(self)

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
        # The decorator has the same lines: a call of one from the other would double their cost.
        shortcut = self._shortcut
        passage = shortcut.passage
        if monotonic_s() < passage.until_s:
            try:
                value = function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the first attempt of a series
                made = Made(error, passage.view)
            else:
                shortcut.calls += 1
                if type(value) in DEFERRED:
                    refuse_deferred_result(function, value)
                return value
            return self._series(function, args, kwargs, made=made)
        return self._series(function, args, kwargs)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with every call of it under the guard.

        Raises:
            ConfigError: It is a coroutine function or a generator function.
        """
        refuse_deferred(function)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            shortcut = self._shortcut
            passage = shortcut.passage
            if monotonic_s() < passage.until_s:
                try:
                    value = function(*args, **kwargs)
                except Exception as error:  # noqa: BLE001 - the first attempt of a series
                    made = Made(error, passage.view)
                else:
                    shortcut.calls += 1
                    if type(value) in DEFERRED:
                        refuse_deferred_result(function, value)
                    return value
                return self._series(function, args, kwargs, made=made)
            return self._series(function, args, kwargs)

        return guarded

    def _series(
        self,
        function: Callable[..., R],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        made: Made | None = None,
    ) -> R:
        refuse_deferred(function)
        attempt = partial(function, *args, **kwargs)
        if read_environment().enabled:
            value = self._guarded(function, attempt, made=made)
        else:
            value = _unguarded(attempt, made)
        if type(value) in DEFERRED:
            refuse_deferred_result(function, value)
        return value

    def _guarded(
        self, function: Callable[..., R], attempt: Callable[[], R], *, made: Made | None
    ) -> R:
        from lightning_resilience.adapters.guarded_function import (  # noqa: PLC0415 - with the first call
            Series,
        )

        series = Series(self._options, function, attempt=attempt, made=made)
        if not self._options.collective:
            self._shortcut = series.shortcut
        value: R = series.run()
        return value


class Made:
    """A first attempt that went straight and failed.

    Args:
        error: How it failed.
        view: The view on which it went.
    """

    __slots__ = ("_error", "view")

    def __init__(self, error: Exception, view: BreakerView | None) -> None:
        self._error: Exception | None = error
        self.view = view

    def raise_error(self) -> None:
        """Raise the error the first time, and keep nothing of it.

        The frames through which it passes know of this object, and its traceback of them.
        """
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


def _unguarded(attempt: Callable[[], R], made: Made | None) -> R:
    if made is not None:
        made.raise_error()
    return attempt()


def _checked_name(dependency: object) -> str:
    fits = isinstance(dependency, str) and bool(dependency.strip())
    if not fits:
        message = (
            f"dependency={dependency!r} is not allowed: it must be a name that is not empty, the "
            "same in every process, for example https://models.example."
        )
        raise ConfigError(message)
    return redacted(str(dependency))
