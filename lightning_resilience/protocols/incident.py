# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Tell the other ranks that this one leaves, and learn which one left first.

A rank that leaves publishes before it does anything that may block: one record, then one bell.
Which record stands is what ``core.incident`` says: a compare-and-set from exactly the bytes that
were read replaces an echo by its cause, and nothing replaces a cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.incident import IncidentRecord, outranks
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import StoreError
from lightning_resilience.protocols.effects import Get, Set
from lightning_resilience.protocols.shared_cell import write


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["first_incident", "publish_incident", "tell_incident"]

# A record is created, replaced by a cause, and lost with the store: each once, and some more.
_ATTEMPTS: Final = 8


def publish_incident(keys: Keys, mine: IncidentRecord) -> Protocol[IncidentRecord]:
    """Offer an incident, and wake whoever waits for one.

    Args:
        keys: Names of the keys of this run and incarnation.
        mine: Why this rank leaves, with a fresh writer nonce.

    Returns:
        The incident that stands, maybe another rank's.

    Raises:
        StoreUnavailableError: The shared store did not answer; nobody may have been told.
        CorruptRecordError: What stands does not decode; the others were woken all the same.
    """
    bell = Set(keys.joint("failed", 0), b"1")
    try:
        standing = yield from _stand(keys.joint("incident", 0), mine)
    except StoreError:
        yield bell
        raise
    # Order: after the record, so that whoever is woken reads it.
    yield bell
    return standing


def tell_incident(keys: Keys, mine: IncidentRecord) -> Protocol[IncidentRecord]:
    """Offer an incident, and wake nobody: whoever has to know why this rank has ended looks later.

    Args:
        keys: Names of the keys of this run and incarnation.
        mine: Why this rank leaves, with a fresh writer nonce.

    Returns:
        The incident that stands, maybe another rank's.

    Raises:
        StoreUnavailableError: The shared store did not answer.
        CorruptRecordError: What stands does not decode.
    """
    return (yield from _stand(keys.joint("incident", 0), mine))


def _stand(key: str, mine: IncidentRecord) -> Protocol[IncidentRecord]:
    expected, desired = b"", encode(mine)
    for _ in range(_ATTEMPTS):
        written = yield from write(key, expected, desired)
        if written.won:
            return mine
        if written.gone:
            expected = b""
            continue
        found = decode(IncidentRecord, written.raw, key=key)
        if not outranks(mine, found):
            return found
        expected = written.raw
    return mine


def first_incident(keys: Keys) -> Protocol[IncidentRecord | None]:
    """Read the incident that stands.

    Args:
        keys: Names of the keys of this run and incarnation.

    Returns:
        The incident, or None where there is none.

    Raises:
        StoreUnavailableError: The shared store did not answer.
        CorruptRecordError: The record does not decode.
    """
    key = keys.joint("incident", 0)
    raw: bytes | None = yield Get(key)
    return None if raw is None else decode(IncidentRecord, raw, key=key)
