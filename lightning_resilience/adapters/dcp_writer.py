# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A storage writer for ``torch.distributed.checkpoint`` whose ranks save together, or not at all.

``save`` calls a writer in four places, and gathers what ranks return in between::

    prepare_local_plan   all      offers where this rank could go on       ─┐ gathered
    prepare_global_plan  rank 0   makes the terms for all                  ─┘ scattered
    write_data           all      writes shards, then metadata: all done   ─┐ gathered
    finish               rank 0   nothing is left to do in storage         ─┘ broadcast

Ranks that wait in a gathering wait in a collective, where the process group's timeout runs. So
everything that storage is asked for happens in ``write_data``, in two joint operations on the
shared store (``dcp_saving``), and no rank returns from it before the outcome is known to all. The
metadata is known there already: the planner keeps it, and what every rank has written is told
through the store.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lightning_resilience.adapters.dcp_end import DcpEnd
from lightning_resilience.adapters.dcp_plain import take_over_writing
from lightning_resilience.adapters.dcp_saving import Commit, ShardWrite
from lightning_resilience.adapters.dcp_session import seat
from lightning_resilience.adapters.dcp_staging import results_of
from lightning_resilience.adapters.dcp_thread import CallersThread
from lightning_resilience.adapters.dcp_verdict import SharedFailure
from lightning_resilience.adapters.guard_options import check_travels
from lightning_resilience.adapters.lightning.commit import origin_of
from lightning_resilience.adapters.lightning.sharded_save import raising
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.config import refuse_unknown_arguments
from lightning_resilience.core.meeting import Offer, Terms, agree
from lightning_resilience.core.portions import decode_portion, merge
from lightning_resilience.core.validation import check_whole
from lightning_resilience.errors import ConfigError, ResilienceError


if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.distributed import Store
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from lightning_resilience.adapters.dcp_session import DcpSession
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.joint import JointConfig
    from lightning_resilience.core.outcome import Classifier
    from lightning_resilience.core.portions import Portion
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken, SharedStore


__all__ = ["ResilientWriter"]

_CACHED: Final = (
    "The planner has left out plans that it has cached (enable_plan_caching=True), and with them "
    "what the ranks agree on for each save. Use a planner that does not cache plans."
)
_NO_METADATA: Final = (
    "{planner} does not keep the metadata that it makes: rank 0 needs it before finish, to publish "
    "it while no rank waits in a collective. Let create_global_plan set self.metadata to what it "
    "returns, as DefaultSavePlanner does; and let rank 0 coordinate the save."
)
_OTHER_METADATA: Final = (
    "The metadata that was published is not what create_global_plan returned: the planner's "
    "attribute metadata is another one. Set it to what create_global_plan returns."
)
_NO_COLLECTIVES: Final = (
    "use_collectives=False is not allowed: each rank would have metadata of its own, and no rank "
    "would know whether the checkpoint is complete. Leave it out."
)


class ResilientWriter(DcpEnd, StorageWriter):
    """Saves a checkpoint of ``torch.distributed.checkpoint`` in a format that torch reads.

    Every rank's shards are staged on its node, published under their final names at once, and seen
    in storage; only then is the metadata published, and last a manifest beside the directory. Ranks
    wait for each other on the shared store. Where one of them fails, all raise the same
    ``JointError``, and there is no metadata; what was under that name before is still there.

    One that is saved by a single rank, without a process group or with ``no_dist=True``, is saved
    alike, and ``save`` raises its ``CheckpointException`` with what storage raised in it.

    One save at a time; another one at the same time has another writer. It can be pickled, unless
    its store is an object.

    Args:
        path: Path or URL of the checkpoint's directory.
        thread_count: How many files each rank writes at once, ≥ 1.
        retry: A ``RetryPolicy``, or a mapping of its options.
        breaker: A ``BreakerConfig``, or a mapping of its options.
        budget: A ``BudgetConfig``, or a mapping of its options.
        admission: An ``AdmissionConfig``, or a mapping of its options.
        joint: A mapping of options of joint operations.
        store: The store that all ranks share: a URL ``tcp://host:port``, a
            ``torch.distributed.Store``, or None for the server behind the default process group.
        run_id: Name of this run. None takes ``LIGHTNING_RESILIENCE_RUN_ID``, the launcher's, or
            ``default``: give one where several jobs share a store.
        storage_options: Options of the fsspec filesystem; merged with ours, not replaced.
        classify: Names the failure class of an exception, or returns None for the default.
        spool_dir: Parent of the node's directory for staged files. None takes
            ``LIGHTNING_RESILIENCE_SPOOL_DIR``, ``TMPDIR`` or ``/var/tmp``.
        strict: Whether a rank that saves alone fails where the shared store is away.

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another.

    Example::

        dcp.save(state_dict, storage_writer=ResilientWriter("s3://bucket/step-100"))
    """

    def __init__(  # noqa: PLR0913 - the arguments that the reference lists
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int = 1,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        breaker: BreakerConfig | Mapping[str, Any] | None = None,
        budget: BudgetConfig | Mapping[str, Any] | None = None,
        admission: AdmissionConfig | Mapping[str, Any] | None = None,
        joint: JointConfig | Mapping[str, Any] | None = None,
        store: SharedStore | Store | str | None = None,
        run_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        classify: Classifier | None = None,
        spool_dir: str | None = None,
        strict: bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown_arguments(ResilientWriter, unknown)
        check_whole("thread_count", thread_count, minimum=1)
        super().__init__(
            path,
            retry=retry,
            breaker=breaker,
            budget=budget,
            admission=admission,
            joint=joint,
            store=store,
            run_id=run_id,
            storage_options=storage_options,
            classify=classify,
            spool_dir=spool_dir,
            strict=strict,
        )
        self._thread_count = thread_count
        take_over_writing(self, self._url, self._options, thread_count=thread_count)

    def _begin(self) -> None:
        super()._begin()
        self._published: Metadata | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        check_travels(self._options, what="a ResilientWriter")
        return {**self.__dict__, "_seat": None, "_published": None}

    # torch's methods ------------------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's signature
        """Refuse what cannot be saved together."""
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise ConfigError(_NO_COLLECTIVES)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add to the plan where this rank could go on."""
        self._leave()
        self._seat = seat(self._options)
        return dataclasses.replace(plan, storage_data=self._seat.offer)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Put into every rank's plan where all go on."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ConfigError(_CACHED)
        offers = [plan.storage_data or Offer() for plan in plans]
        terms = agree(offers, nonce=self._dice.nonce())
        return [
            dataclasses.replace(plan, storage_data=rank_terms)
            for plan, rank_terms in zip(plans, terms, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save: return once the checkpoint is complete in storage, for all ranks.

        Raises:
            SharedFailure: In place of what all ranks raise.
            BaseException: What this rank has met, where it is the only one.
        """
        terms: Terms = plan.storage_data
        at = self._seat = self._seat or seat(self._options)
        try:
            mine = self._save(at.take(terms), plan, planner)
        except BaseException as error:
            if terms.world_size > 1:
                raise SharedFailure(error) from error
            raise
        finally:
            self._leave()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results_of(mine.entries))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the metadata that ``save`` returns; in storage it is already.

        Raises:
            ConfigError: It is not what was published.
        """
        del results
        published = self._published
        if published is None or not _is_same(metadata, published):
            raise ConfigError(_OTHER_METADATA)
        for each in dataclasses.fields(published):
            setattr(metadata, each.name, getattr(published, each.name))

    def storage_meta(self) -> StorageMeta:
        """Return what names the save in the metadata."""
        return StorageMeta(checkpoint_id=self._url, save_id=self._id)

    # Inside ---------------------------------------------------------------------------------------

    def _save(self, session: DcpSession, plan: SavePlan, planner: SavePlanner) -> Portion:
        nonce, is_first = session.driver.dice.nonce, session.member.rank == 0
        write = ShardWrite(
            session.storage,
            self._url,
            nonce=nonce,
            rank=session.member.rank,
            plan=plan,
            planner=planner,
            thread_count=self._thread_count,
            caller=CallersThread(),
        )
        told: str = session.by_all("write", self._url, write)
        commit = self._commit(session, planner) if is_first else None
        session.save(self._url, commit)
        return decode_portion(told)

    def _commit(self, session: DcpSession, planner: SavePlanner) -> Work:
        # Whatever is wrong here is for all ranks to know of.
        storage = session.storage
        try:
            portions = [decode_portion(text) for text in session.told("write")]
            contents = merge(portions, world_size=session.member.world_size)
            metadata = getattr(planner, "metadata", None)
            if not isinstance(metadata, Metadata):
                raise ConfigError(_NO_METADATA.format(planner=type(planner).__name__))
        except ResilienceError as error:
            return _Refusal(storage, self._url, error)
        self._published = metadata = dataclasses.replace(metadata)
        return Commit(
            storage,
            self._url,
            nonce=session.driver.dice.nonce,
            metadata=metadata,
            portions=portions,
            contents=contents,
            origin=origin_of(None, storage),
            save_id=self._id,
        )


class _Refusal(Asked):
    """Raises on rank 0 what all ranks are to know, and asks storage nothing."""

    is_guarded = False

    def __init__(self, storage: Any, url: str, error: ResilienceError) -> None:
        def refuse(token: CancelToken) -> None:
            del token
            raising(error)

        super().__init__(storage, url, refuse)


def _is_same(metadata: Metadata, published: Metadata) -> bool:
    return (metadata.state_dict_metadata, metadata.planner_data) == (
        published.state_dict_metadata,
        published.planner_data,
    )
