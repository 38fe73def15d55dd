# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""With which status an agent leaves that leaves by itself."""

from __future__ import annotations

from lightning_resilience.core.exit_codes import ExitCode, may_start_again
from lightning_resilience.core.leaving import told_to_stop, unread


def test_an_agent_that_was_told_to_stop_may_be_started_again() -> None:
    """Nothing is known to be wrong with the job, and the signal is named."""
    ending = told_to_stop("SIGTERM")

    assert ending.code == ExitCode.PREEMPTED
    assert may_start_again(ending.code)
    assert "got signal SIGTERM," in ending.reason


def test_an_agent_that_cannot_read_the_record_may_be_started_again() -> None:
    """And says why it could not."""
    ending = unread("no answer")

    assert ending.code == ExitCode.OUTAGE
    assert "could not be read: no answer." in ending.reason
