# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Open a rank's session: which run and start it belongs to, by which store, with which times.

Called in ``setup``, on every rank at the same point: there Lightning has collectives as well, and
the two of ours are nobody's surprise.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning import namespaces
from lightning_resilience.adapters.lightning.alone import adopt_device
from lightning_resilience.adapters.lightning.resilient_io import STORE_TIMEOUT_S
from lightning_resilience.adapters.lightning.session import Session
from lightning_resilience.adapters.lightning.whereabouts import Whereabouts
from lightning_resilience.adapters.site_store import open_site
from lightning_resilience.adapters.store_discovery import open_store
from lightning_resilience.config import check_relations
from lightning_resilience.core.keys import Keys
from lightning_resilience.protocols.joint import Member
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.options import Options
    from lightning_resilience.adapters.lightning.signals import Termination
    from lightning_resilience.config import Environment
    from lightning_resilience.core.joint import JointConfig
    from lightning_resilience.ports import EventSink


__all__ = ["check_times", "open_session"]

_log = logging.getLogger(__name__)


def check_times(trainer: Any, options: Options, joint: JointConfig) -> None:
    """Check what depends on the process group's timeout.

    Args:
        trainer: The Trainer; its process group is up.
        options: Checked options.
        joint: Options of joint operations.

    Raises:
        ConfigError: An option contradicts that timeout.

    Note:
        Any rank, not collective.
    """
    timeout_s = namespaces.process_group_timeout_s(trainer.strategy)
    check_relations(
        options.retry,
        options.breaker,
        joint,
        budget=options.budget,
        process_group_timeout_s=timeout_s if trainer.world_size > 1 else None,
    )
    if trainer.is_global_zero and trainer.world_size > 1:
        _warn_of_waits(options.retry.deadline_s, timeout_s)


def open_session(
    trainer: Any,
    environment: Environment,
    options: Options,
    *,
    joint: JointConfig,
    termination: Termination,
    sink: EventSink,
    asked: Any,
) -> Session:
    """Open this rank's session.

    Args:
        trainer: The Trainer; its process group is up.
        environment: What the environment variables say.
        options: Checked options of the callback, with those of a ``CheckpointIO`` that it found.
        joint: Options of joint operations.
        termination: Ends waits at a signal.
        sink: Where events go.
        asked: What this rank was asked to start from; rank 0's counts.

    Raises:
        StoreUnavailableError: The shared store does not answer.

    Note:
        Every rank; a broadcast and a barrier.
    """
    rank = trainer.global_rank
    dice = SystemDice(rank=rank)
    # Keys of an earlier start of the same run are still in the launcher's store, and all ranks have
    # to leave them alone.
    # And a variable that is set on one node only must not give its ranks keys of their own.
    own_run_id = options.run_id or environment.run_id or dice.nonce()
    run_id, incarnation, asked = trainer.strategy.broadcast((own_run_id, dice.nonce(), asked))
    store = options.store if options.store is not None else environment.store
    driver = Driver(
        store=open_store(
            store,
            world_size=trainer.world_size,
            timeout_s=STORE_TIMEOUT_S,
            check=termination.check,
        ),
        clock=SystemClock(),
        dice=dice,
        sink=sink,
        interrupt=termination.check,
        adopt=adopt_device,
        site=open_site(options.site_store or environment.site_store),
    )
    keys = Keys(run_id=run_id, incarnation=incarnation)
    session = Session(
        member=_member(keys, trainer, joint),
        policy=options.policy,
        driver=driver,
        storage=options.storage(environment, run_id=run_id, nonce=dice.nonce),
        hosts=trainer.num_nodes,
        is_stopping=lambda: termination.is_pending,
        asked=asked,
    )
    # Until a checkpoint is chosen, and also where the user has named one: whoever goes back to an
    # older one does not want to go on from the newest.
    session.storage.training = incarnation
    session.place = Whereabouts(lambda: trainer.global_step)
    # Order: all have enlisted before the first joint operation of any, which may be in setup.
    trainer.strategy.barrier("lightning_resilience_setup")
    return session


def _member(keys: Keys, trainer: Any, joint: JointConfig) -> Member:
    timeout_s = namespaces.process_group_timeout_s(trainer.strategy)
    terms = joint.store_terms(process_group_timeout_s=timeout_s)
    return Member(
        keys=keys,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        timeout_s=joint.timeout_s(process_group_timeout_s=timeout_s),
        beat_s=joint.beat_s(process_group_timeout_s=timeout_s),
        on_outage=joint.on_outage,
        store_patience_s=terms.store_patience_s,
        defer_after_s=terms.defer_after_s,
    )


def _warn_of_waits(deadline_s: float, timeout_s: float) -> None:
    if deadline_s <= timeout_s:
        return
    _log.warning(
        "deadline_s=%g is longer than the process group's timeout of %g s: what rank 0 asks of "
        "storage outside joint operations (such as ModelCheckpoint.to_yaml) may wait until the "
        "other ranks' collective has timed out. Lower deadline_s, or raise the strategy's timeout.",
        deadline_s,
        timeout_s,
    )
