# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A ``CheckpointIO`` that is guarded and verified: alone as a plugin, or adopted by the callback.

Alone, each call is one rank's own: a save waits out an outage on rank 0 while the other ranks wait
in a collective, where the process group's timeout runs. With the callback in the same Trainer the
calls become joint operations, and this object only says whose format a checkpoint has and what the
options are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch.distributed as dist

from lightning_resilience.adapters.lightning import namespaces
from lightning_resilience.adapters.lightning.alone import Alone, adopt_device
from lightning_resilience.adapters.lightning.options import check_options
from lightning_resilience.adapters.lightning.whose import Format
from lightning_resilience.adapters.standalone import UNNAMED_RUN
from lightning_resilience.adapters.store_discovery import open_store
from lightning_resilience.adapters.telemetry import LoggingSink, audible
from lightning_resilience.config import check_relations, read_environment, refuse_unknown_arguments
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.validation import check_kind
from lightning_resilience.errors import ConfigError
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice
from lightning_resilience.topology import read_topology


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

    from lightning_resilience.adapters.lightning.options import Options
    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker import BreakerConfig
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.outcome import Classifier
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import SharedStore


__all__ = ["STORE_TIMEOUT_S", "ResilientCheckpointIO", "adopt_options", "format_of"]

_log = logging.getLogger(__name__)

STORE_TIMEOUT_S: Final = 5.0
"""A store operation takes less than a millisecond; longer than this it is lost. In seconds."""

_METHODS: Final = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")

# What was not said is not passed on: an older CheckpointIO does not take everything.
_UNSAID: Any = object()

_CheckpointIO: Any = type("_CheckpointIO", namespaces.checkpoint_io_bases(), {})


class ResilientCheckpointIO(_CheckpointIO):  # type: ignore[misc] # the base depends on what is installed
    """Saves, loads and removes checkpoints through a circuit breaker and with retries.

    A checkpoint is believed only once storage reports its size. A call waits while storage is ill,
    at most ``deadline_s``, and then raises ``RetriesExhaustedError`` or ``CircuitOpenError``, with
    the last failure as the cause. What repeating cannot help is raised as it is.

    By itself it is not joint: where the job has several ranks it warns, because the others wait in
    a collective meanwhile. Add a ``ResilienceCallback`` for that; it adopts this object and its
    options, and what it does replaces what is said here.

    Any thread may call. It can be pickled and copied; what is open stays behind.

    Args:
        inner: A ``CheckpointIO`` whose format is kept. None is Lightning's own format, byte for
            byte as ``TorchCheckpointIO`` writes it.
        staging: How ``inner`` is called. True (default): with a path on this node, to which it
            writes one file or one directory that we publish, or from which it reads what we have
            fetched. False: with the real path, as a whole, and the storage is asked afterwards; for
            one that cannot write locally.
        run_id: Name of this run. None takes ``LIGHTNING_RESILIENCE_RUN_ID``, the launcher's, or
            ``default``: give one where several jobs share a store.
        strict: Whether a call fails where the shared store is away. By default it goes on alone, on
            its share of every limit.
        retry, breaker, budget, admission, store, storage_options, classify, spool_dir: As for
            ``ResilienceCallback``.

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another.

    Example::

        trainer = Trainer(plugins=[ResilientCheckpointIO()])
    """

    def __init__(  # noqa: PLR0913 - the arguments that the reference lists
        self,
        inner: Any = None,
        *,
        staging: bool | None = None,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        breaker: BreakerConfig | Mapping[str, Any] | None = None,
        budget: BudgetConfig | Mapping[str, Any] | None = None,
        admission: AdmissionConfig | Mapping[str, Any] | None = None,
        store: SharedStore | Store | str | None = None,
        run_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        classify: Classifier | None = None,
        spool_dir: str | None = None,
        strict: bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        refuse_unknown_arguments(ResilientCheckpointIO, unknown)
        self.format = _checked_format(inner, staging)
        self.options = check_options(
            retry=retry,
            breaker=breaker,
            budget=budget,
            admission=admission,
            store=store,
            run_id=run_id,
            storage_options=storage_options,
            classify=classify,
            spool_dir=spool_dir,
            strict=strict,
        )
        check_relations(
            self.options.retry, self.options.breaker, JointConfig(), budget=self.options.budget
        )
        self._forget()

    def _forget(self) -> None:
        self.adopted_by: Alone | None = None
        self._alone: Alone | None = None
        self._opening = threading.Lock()
        self._audible = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        return {"format": self.format, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the options, with nothing open."""
        self._forget()
        self.__dict__.update(state)

    # Lightning's methods --------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: Mapping[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save a checkpoint, and verify that storage has it.

        Args:
            checkpoint: What is saved.
            path: Path or URL.
            storage_options: Options of the filesystem for this call, or of ``inner`` where there is
                one.

        Raises:
            RetriesExhaustedError: A series of attempts was given up; its cause is the last failure.
            CircuitOpenError: Storage was ill for longer than ``deadline_s``.
            StoreUnavailableError: The shared store does not answer, under ``strict``.
            BaseException: The storage's own, where repeating is no option: a denial, a full disk.
        """
        url, alone = os.fspath(path), self._guard()
        if alone is None:
            self._plain().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        alone.save(
            self.format.save(
                alone.storage,
                url,
                checkpoint,
                nonce=alone.driver.dice.nonce,
                storage_options=storage_options,
            )
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = _UNSAID,
        weights_only: bool | None = _UNSAID,  # noqa: FBT001 - Lightning's signature
    ) -> Any:
        """Load a checkpoint.

        Args:
            path: Path or URL.
            map_location: As ``torch.load`` takes it. By default tensors stay on the CPU.
            weights_only: As ``torch.load`` takes it. The default is that of the Lightning that is
                installed.

        Raises:
            RetriesExhaustedError: A series of attempts was given up; its cause is the last failure.
            CircuitOpenError: Storage was ill for longer than ``deadline_s``.
            StoreUnavailableError: The shared store does not answer, under ``strict``.
            BaseException: The storage's own, where repeating is no option: a missing file.
        """
        url, alone = os.fspath(path), self._guard()
        said = {"map_location": map_location, "weights_only": weights_only}
        options = {name: value for name, value in said.items() if value is not _UNSAID}
        if alone is None:
            return self._plain().load_checkpoint(path, **options)
        nonce = alone.driver.dice.nonce
        work = self.format.load(alone.storage, url, nonce=nonce, options=options)
        return alone.run("load", work, kind="read").value

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; absent is success.

        Raises:
            RetriesExhaustedError: A series of attempts was given up; its cause is the last failure.
            CircuitOpenError: Storage was ill for longer than ``deadline_s``.
            StoreUnavailableError: The shared store does not answer, under ``strict``.
            BaseException: The storage's own, where repeating is no option: a denial.
        """
        url, alone = os.fspath(path), self._guard()
        if alone is None:
            self._plain().remove_checkpoint(path)
            return
        alone.run("remove", self.format.remove(alone.storage, url), kind="write")

    def teardown(self) -> None:
        """Let go what is open. Idempotent; a later call opens it again."""
        with self._opening:
            alone, self._alone = self._alone, None
            self._audible.close()
        if alone is not None:
            alone.driver.close()
            alone.driver.store.close()
        tear_down = getattr(self.format.owner, "teardown", None)
        if tear_down is not None:
            tear_down()

    # Inside ---------------------------------------------------------------------------------------

    def _guard(self) -> Alone | None:
        if self.adopted_by is not None:
            return self.adopted_by
        if not read_environment().enabled:
            return None
        with self._opening:
            if self._alone is None:
                self._alone = self._open()
            return self._alone

    def _plain(self) -> Any:
        return namespaces.stock_io() if self.format.owner is None else self.format.owner

    def _open(self) -> Alone:
        environment, topology, options = read_environment(), read_topology(), self.options
        is_group = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_group else (0, 1)
        dice = SystemDice(rank=rank)
        run_id = options.run_id or environment.run_id or UNNAMED_RUN
        store = options.store if options.store is not None else environment.store
        driver = Driver(
            store=open_store(store, world_size=world_size, timeout_s=STORE_TIMEOUT_S),
            clock=SystemClock(),
            dice=dice,
            sink=LoggingSink(rank=rank),
            adopt=adopt_device,
        )
        if rank == 0:
            self._audible.enter_context(audible())
            if world_size > 1:
                _warn(world_size)
        return Alone(
            _member(Keys(run_id=run_id, incarnation=dice.nonce()), rank, world_size),
            policy=options.policy,
            driver=driver,
            storage=options.storage(environment, run_id=run_id, nonce=dice.nonce),
            # Without a group there may be nobody else to vote.
            hosts=topology.hosts if is_group else 1,
        )


def format_of(checkpoint_io: Any) -> Format:
    """Return whose format a ``CheckpointIO`` has; a plain one of the user's is called staged."""
    if isinstance(checkpoint_io, ResilientCheckpointIO):
        found: Format = checkpoint_io.format
        return found
    return Format(owner=checkpoint_io)


def adopt_options(callbacks: Options, checkpoint_io: Any) -> Options:
    """Return the options that hold for a Trainer with a callback and this ``CheckpointIO``.

    Args:
        callbacks: The callback's options.
        checkpoint_io: The Trainer's, which may be one of ours, or pass on to one.

    Raises:
        ConfigError: Both have options.
    """
    wrapper = namespaces.innermost_wrapper(checkpoint_io)
    inner = checkpoint_io if wrapper is None else wrapper.checkpoint_io
    if not isinstance(inner, ResilientCheckpointIO) or not inner.options.given:
        return callbacks
    if not callbacks.given:
        found: Options = inner.options
        return found
    message = (
        f"Both have options: ResilienceCallback has {', '.join(callbacks.given)}, and "
        f"ResilientCheckpointIO has {', '.join(inner.options.given)}. Give all of them to the "
        "callback, which adopts the CheckpointIO."
    )
    raise ConfigError(message)


def _checked_format(inner: Any, staging: bool | None) -> Format:  # noqa: FBT001 - an option's value
    check_kind("staging", staging, fits=isinstance(staging, bool), allowed="True or False")
    fits = all(callable(getattr(inner, name, None)) for name in _METHODS)
    check_kind("inner", inner, fits=fits, allowed="a CheckpointIO")
    if isinstance(inner, ResilientCheckpointIO) or namespaces.is_wrapping_io(inner):
        name = type(inner).__name__
        message = (
            f"inner={name} is not allowed: what it writes would be guarded twice, or later than it "
            f"is verified. Put this one into it: {name}(ResilientCheckpointIO())."
        )
        raise ConfigError(message)
    if staging is not None and inner is None:
        message = (
            f"staging={staging} says how inner is called, and inner is not given. Pass inner, or "
            "leave staging out."
        )
        raise ConfigError(message)
    return Format(owner=inner, staging=staging is not False)


def _member(keys: Keys, rank: int, world_size: int) -> Member:
    timeout_s = namespaces.process_group_timeout_s()
    joint = JointConfig()
    joint_timeout_s = joint.timeout_s(process_group_timeout_s=timeout_s)
    return Member(
        keys=keys,
        rank=rank,
        world_size=world_size,
        timeout_s=joint_timeout_s,
        beat_s=joint.beat_s(process_group_timeout_s=timeout_s),
        on_outage=joint.on_outage,
        store_patience_s=joint_timeout_s,
    )


def _warn(world_size: int) -> None:
    _log.warning(
        "ResilientCheckpointIO is used by %d ranks without ResilienceCallback: while rank 0 waits "
        "for storage, the others wait in a collective, where the process group's timeout runs. Add "
        "ResilienceCallback() to the Trainer's callbacks to have all ranks wait together.",
        world_size,
    )
