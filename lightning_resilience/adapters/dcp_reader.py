# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A storage reader for ``torch.distributed.checkpoint`` whose ranks load together, or not at all.

``load`` calls a reader in two places where storage is asked, and gathers what ranks return::

    read_metadata   all   is there a checkpoint, and which rank needs what   ─┐ gathered
    read_data       all   shards are read, compared, and made tensors of     ─┐ gathered

In both all ranks take the steps of ``dcp_loading``, each a joint operation on the shared store, and
no rank goes on to a gathering before the outcome is known to all. For that, the ranks agree at the
beginning of ``read_metadata`` in one short gathering of their own, before anything can have failed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from lightning_resilience.adapters.dcp_end import DcpEnd
from lightning_resilience.adapters.dcp_loading import (
    Find,
    ReadMetadata,
    ShardFetch,
    manifest_told,
)
from lightning_resilience.adapters.dcp_plain import take_over_reading
from lightning_resilience.adapters.dcp_session import Seat, seat
from lightning_resilience.adapters.dcp_thread import CallersThread
from lightning_resilience.adapters.dcp_verdict import SharedFailure
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.config import refuse_unknown_arguments
from lightning_resilience.core.meeting import agree


if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from typing import Literal

    from torch.distributed import ProcessGroup, Store
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

    from lightning_resilience.adapters.dcp_session import DcpSession
    from lightning_resilience.core.admission import AdmissionConfig
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.joint import JointConfig
    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.core.meeting import Terms
    from lightning_resilience.core.outcome import Classifier
    from lightning_resilience.core.retry import RetryPolicy
    from lightning_resilience.ports import CancelToken, SharedStore


__all__ = ["ResilientReader"]


class ResilientReader(DcpEnd, StorageReader):
    """Loads a checkpoint of ``torch.distributed.checkpoint``, if it is what was saved.

    One rank sees whether the checkpoint is complete, and tells the others. Each rank reads every
    shard that it needs to its end, under a slot, and compares its digest with the manifest; where
    a rank finds another one, all raise the same ``JointError``, whose cause there is a
    ``CorruptCheckpointError``, and no tensor was touched on any. Checkpoints without a manifest,
    such as those of torch's own writers, are loaded as they are.

    One that is loaded by a single rank is checked alike, and ``load`` raises its
    ``CheckpointException`` with what was found in it. One load at a time.

    Args:
        path: Path or URL of the checkpoint's directory.
        process_group: The group that ``load`` is given; None is the default group.
        joint: A mapping of options of joint operations; False where ranks load by themselves, with
            ``no_dist=True``, although there is a process group.
        spool_dir: Parent of the node's directory for fetched shards; the default is the writer's.
        retry, breaker, budget, admission, store, run_id, storage_options, classify, strict: As for
            ``ResilientWriter``.

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another.

    Example::

        dcp.load(state_dict, storage_reader=ResilientReader("s3://bucket/step-100"))
    """

    def __init__(  # noqa: PLR0913 - the arguments that the reference lists
        self,
        path: str | os.PathLike[str],
        *,
        process_group: ProcessGroup | None = None,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        breaker: BreakerConfig | Mapping[str, Any] | None = None,
        budget: BudgetConfig | Mapping[str, Any] | None = None,
        admission: AdmissionConfig | Mapping[str, Any] | None = None,
        joint: JointConfig | Mapping[str, Any] | Literal[False] | None = None,
        store: SharedStore | Store | str | None = None,
        run_id: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        classify: Classifier | None = None,
        spool_dir: str | None = None,
        strict: bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown_arguments(ResilientReader, unknown)
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
        self._group = process_group
        take_over_reading(self, self._url, self._options)

    def _begin(self) -> None:
        super()._begin()
        self._terms: Terms | None = None
        self._session: DcpSession | None = None
        self._manifest: Manifest | None = None
        self._metadata: Metadata | None = None

    # torch's methods ------------------------------------------------------------------------------

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, once it is known to all ranks that there is a checkpoint.

        Raises:
            SharedFailure: In place of what all ranks raise.
        """
        del args, kwargs
        # Of a load that has ended between the metadata and the data.
        self._leave()
        try:
            metadata: Metadata = self._together(self._read_metadata)
        except BaseException as error:
            self._leave()
            # Alone as well: any Exception would be taken for metadata that is not there.
            raise SharedFailure(error) from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._id
        return metadata

    def set_up_storage_reader(  # torch's signature
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Keep where everything is."""
        del is_coordinator, args, kwargs
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load: return once all ranks have their tensors.

        Raises:
            SharedFailure: In place of what all ranks raise.
            BaseException: What this rank has met, where it is the only one.
        """
        try:
            self._together(partial(self._read_data, plan, planner))
        except BaseException as error:
            if self._terms is not None and self._terms.world_size > 1:
                raise SharedFailure(error) from error
            raise
        finally:
            self._leave()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # Inside ---------------------------------------------------------------------------------------

    def _together(self, load: Callable[[DcpSession], Any]) -> Any:
        if self._session is None:
            at = self._seat = seat(self._options)
            terms = self._terms = _meet(at, self._group, nonce=self._dice.nonce())
            self._session = at.take(terms)
        return load(self._session)

    def _read_metadata(self, session: DcpSession) -> Metadata:
        storage, url = session.storage, self._url
        told = session.on_rank_zero("find", url, Find(storage, url).attempt, kind="read").detail
        self._manifest = manifest_told(told)
        read = ReadMetadata(storage, url, manifest=self._manifest)
        session.by_all("metadata", url, read, kind="read")
        assert read.metadata is not None  # noqa: S101 - or it would have raised
        return read.metadata

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner, session: DcpSession) -> None:
        storage, url = session.storage, self._url
        storage_data = getattr(self._metadata, "storage_data", None) or {}
        names = {storage_data[item.storage_index].relative_path for item in plan.items}
        nonce = session.driver.dice.nonce
        shards = ShardFetch(storage, url, names, manifest=self._manifest, nonce=nonce)
        caller = CallersThread()

        def make_tensors(token: CancelToken) -> str:
            token.raise_if_cancelled()
            reader = FileSystemReader(shards.folder)
            reader.storage_data = storage_data
            with caller.taken_over():
                reader.read_data(plan, planner).wait()
            return ""

        try:
            session.by_all("fetch", url, shards, kind="read")
            session.by_all("apply", url, Asked(storage, url, make_tensors), is_guarded=False)
        finally:
            shards.discard()

    def _leave(self) -> None:
        self._session = None
        super()._leave()


def _meet(at: Seat, group: ProcessGroup | None, *, nonce: str) -> Terms:
    """Agree with the other ranks where to go on; collective, where there are others."""
    if not (at.options.is_joint and dist.is_available() and dist.is_initialized()):
        return agree([at.offer], nonce=nonce)[0]
    offers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(offers, (at.offer, nonce), group=group)
    # The name that rank 0 has proposed serves all.
    return agree([offer for offer, _ in offers], nonce=offers[0][1])[dist.get_rank(group)]
