# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Remove what earlier starts of a requeued job have saved, once what it has saved now is there.

``core.requeueing`` says which that is. Rank 0 looks, and removes, in the joint operation in which
it asks for the job to be requeued, so the others wait for it as they do anyway. Each of the two has
one attempt, behind the breaker, and both together a part of the time that is left. Whatever fails
is a warning: the checkpoint is saved, and the job has to be requeued.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.namespaces import saving_of
from lightning_resilience.adapters.lightning.removals import Removals
from lightning_resilience.adapters.lightning.sharded_work import Removal
from lightning_resilience.adapters.lightning.strategy import removal_of
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.manifests import check_in_place
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.requeueing import clearing_s, earlier, is_needless
from lightning_resilience.core.shards import Saving
from lightning_resilience.errors import CheckpointError, ConfigError
from lightning_resilience.protocols.guard import guard


if TYPE_CHECKING:
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.core.manifest import Manifest
    from lightning_resilience.ports import CancelToken


__all__ = ["clear_up"]

_log = logging.getLogger(__name__)


def clear_up(trainer: Any, session: Session, saved: str, *, left_s: float | None) -> None:
    """Remove this job's checkpoints that ``saved`` has replaced; on rank 0, for a bounded time.

    Args:
        trainer: The Trainer.
        session: This rank's session.
        saved: What this start has saved, for the next one. Where it is not verified in storage,
            nothing is removed.
        left_s: How long this process may still run, in seconds; None for as long as it likes.
    """
    alone = session.alone
    within_s = clearing_s(left_s)
    if not within_s or not alone.retaining.is_verified(saved):
        return
    ends_at_s = alone.driver.clock.now_s() + within_s
    try:
        urls = _needless(session, saved, within_s)
        removals = Removals(alone)
        for url in urls:
            removals.ask(_removal(trainer, session, url), replaced_by=saved)
        # A call whose answer took all of the time leaves the rest for the next stop.
        removals.finish(ends_at_s - alone.driver.clock.now_s())
    except Exception as error:  # noqa: BLE001 - the job has to be requeued all the same
        _log.warning(
            "what %s has replaced is not removed; the next stop tries it again: %r",
            redacted(saved),
            error,
        )
    finally:
        # This thread ends with the operation.
        alone.driver.close()


def _removal(trainer: Any, session: Session, url: str) -> Work:
    if saving_of(trainer) is Saving.SHARDED:
        return Removal(session.storage, url)
    return removal_of(trainer.strategy, session, url)


def _needless(session: Session, saved: str, within_s: float) -> list[str]:
    alone = session.alone
    work = Asked(session.storage, saved, partial(_look, session.storage, saved))
    call = alone.call("list", work, kind="read")
    hasty = replace(
        call,
        policy=replace(call.policy, max_attempts=1, unknown_max_attempts=1),
        patience=replace(call.patience, when_open="raise"),
        timeout_s=within_s,
        may_go_alone=True,
        store_patience_s=0.0,
    )
    found: list[str] = alone.driver.run(guard(alone.breakers.circuit(saved, "read"), hasty)).value
    return found


def _look(storage: Storage, saved: str, token: CancelToken) -> list[str]:
    folder, _, last = saved.rstrip("/").rpartition("/")
    listed = storage.names_in(folder, token)
    names = earlier(last, [path.rstrip("/").rpartition("/")[2] for path in listed])
    new = _manifest(storage, saved, token) if names else None
    urls = {name: f"{folder}/{name}" for name in names}
    return [
        url
        for name, url in urls.items()
        if is_needless(_manifest(storage, url, token), name=name, saved=new)
    ]


def _manifest(storage: Storage, url: str, token: CancelToken) -> Manifest | None:
    try:
        return check_in_place(storage.place(url), token, digests=False)
    except (CheckpointError, ConfigError):
        # Whatever it is, it is not what was saved there; or a later version of this package, whose
        # manifests are not understood here, has saved it.
        return None
