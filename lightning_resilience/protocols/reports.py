# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What workers tell the agents of their job, beside why they leave and how far they have come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.restart import StorageRecord, with_told
from lightning_resilience.protocols.effects import Delete, MultiGet, Nonce
from lightning_resilience.protocols.shared_cell import create, update


if TYPE_CHECKING:
    from collections.abc import Collection

    from lightning_resilience.core.keys import Keys
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["tell_start"]


def tell_start(keys: Keys, urls: Collection[str], *, run_id: str = "") -> Protocol[None]:
    """Tell that a fit begins, and what it loads and saves. On rank 0, before any rank trains.

    What was told of an earlier fit of the same processes is taken back: they have survived it. Not
    so once an agent has seen one of them end.

    Args:
        keys: Names of the keys of this run and incarnation.
        urls: Directories of checkpoints, without credentials.
        run_id: Under which run the workers keep their circuits; the agents' own is no news.

    Raises:
        StoreUnavailableError: The store did not answer.
        CorruptRecordError: What is there does not decode.
    """
    names = (keys.joint("incident", 0), keys.joint("failed", 0), keys.storage)
    values: list[bytes | None] = yield MultiGet(names)
    incident, bell, raw = values
    if incident is not None and bell is None:
        yield Delete(keys.joint("incident", 0))
    own = "" if run_id == keys.run_id else run_id
    nonce: str = yield Nonce()
    if raw is None:
        first = with_told(None, urls, run_id=own, writer=nonce)
        if first is None:
            return
        written = yield from create(keys.storage, encode(first))
        if written.won:
            return
        raw = written.raw

    def change(found: bytes, writer: str) -> bytes | None:
        there = decode(StorageRecord, found, key=keys.storage)
        record = with_told(there, urls, run_id=own, writer=writer)
        return None if record is None else encode(record)

    yield from update(keys.storage, raw, change)
