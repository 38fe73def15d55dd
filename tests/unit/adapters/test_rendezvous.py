# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""With which status an agent leaves, where the store cannot say how the job has ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.quota import Ending, RestartRecord, ended
from lightning_resilience.core.records import encode
from tests.agents import free_port
from tests.handlers import server, status_of


if TYPE_CHECKING:
    from pathlib import Path

    from lightning_resilience.adapters.rendezvous import ResilientHandler
    from tests.handlers import Handlers


def shut_down_after(error: Exception, handler: ResilientHandler) -> bool:
    """Do what torch's launcher does when its agent has raised."""
    try:
        raise error
    except type(error):
        return handler.shutdown()


def test_an_agent_that_has_failed_and_cannot_ask_may_be_started_again(handlers: Handlers) -> None:
    """The store has gone, and its workers have failed: nobody knows whether that would help."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)
    del store

    assert status_of(lambda: shut_down_after(ValueError("bad"), handler)) == 160


def test_an_agent_that_has_failed_alone_says_so_itself(handlers: Handlers) -> None:
    """Where the store can be asked, and the job has not ended, the launcher's own status stands."""
    store = server()
    handler = handlers.make(store.port)
    handlers.join(handler)

    assert shut_down_after(ValueError("bad"), handler)
    assert store.port


@pytest.mark.parametrize(("kept", "status"), [(86, 86), (160, 160), (None, 160)])
def test_an_agent_that_finds_no_store_heeds_what_storage_has_kept(
    kept: int | None, status: int, handlers: Handlers, tmp_path: Path
) -> None:
    """Whoever hosts the store has left with what a person has to release; so do the others."""
    record = RestartRecord(restarts=4, writer="w")
    if kept is not None:
        record = ended(record, Ending(code=kept, reason="ValueError: bad."), writer="v")
    (tmp_path / "job.restarts.json").write_bytes(encode(record))
    reason = tmp_path / "reason.json"
    handler = handlers.make(
        free_port(), restarts=str(tmp_path), join_timeout=1, read_timeout=1, termination_log=reason
    )

    assert status_of(handler.next_rendezvous) == status
    assert not handler.shutdown()
    text = json.loads(reason.read_text(encoding="utf-8"))["reason"]
    assert ("ValueError: bad." in text) is (status == 86)
