# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C37: a run id that an earlier run has closed, or none, and a scheduler that tries for ever.

Here: the agent leaves with a status that says "do not start me again", with the remedy; and a job
without a name of its own is warned. Reported for pytorch as #82160.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.handlers import server, status_of


if TYPE_CHECKING:
    from pathlib import Path

    from tests.handlers import Handlers


def test_a_closed_run_id_is_told(handlers: Handlers, tmp_path: Path) -> None:
    """In a store that has outlived the run that closed it."""
    store = server()
    earlier = handlers.make(store.port)
    handlers.join(earlier)
    assert earlier.shutdown()
    later = handlers.make(store.port, termination_log=str(tmp_path / "reason"))

    assert status_of(later.next_rendezvous) == 79

    reason = json.loads((tmp_path / "reason").read_text())
    assert (reason["name"], reason["may_start_again"]) == ("closed", False)
    assert "closed by an earlier run" in reason["reason"]
    assert "--rdzv-id" in reason["next"]


@pytest.mark.parametrize(("run_id", "is_warned"), [("none", True), ("", True), ("mine", False)])
def test_a_job_without_a_name_is_warned(
    handlers: Handlers, caplog: pytest.LogCaptureFixture, run_id: str, *, is_warned: bool
) -> None:
    """Before anything can go wrong."""
    handlers.make(7, run_id=run_id)

    assert ("Give each job an --rdzv-id" in caplog.text) is is_warned
