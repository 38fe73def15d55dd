# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""With which status an agent leaves that leaves by itself."""

from __future__ import annotations

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from lightning_resilience.core.exit_codes import ExitCode, may_start_again
from lightning_resilience.core.leaving import (
    broken_off,
    is_theirs,
    told_to_stop,
    unread,
    used_up,
)
from lightning_resilience.core.restart import IncarnationRecord


START = IncarnationRecord(incarnation="2-n", nodes=2, writer="w")


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


@pytest.mark.parametrize("error", [DistStoreError("wait timeout"), DistNetworkError("reset")])
def test_an_agent_that_waited_for_another_in_vain_may_be_started_again(error: Exception) -> None:
    """Torch ends it, and it has done nothing wrong."""
    ending = broken_off(error)

    assert ending is not None
    assert ending.code == ExitCode.OUTAGE
    assert str(error) in ending.reason


@pytest.mark.parametrize("error", [None, ValueError("bad"), KeyboardInterrupt()])
def test_any_other_end_of_an_agent_is_its_own(error: BaseException | None) -> None:
    """The launcher's status stands."""
    assert broken_off(error) is None


@pytest.mark.parametrize(
    ("present", "own", "theirs"),
    [(None, "", False), (None, "1-n", False), (START, "2-n", False), (START, "1-n", True)],
)
def test_only_who_had_part_in_the_present_start_may_end_it(
    present: IncarnationRecord | None, own: str, *, theirs: bool
) -> None:
    """Before the first start anybody may: nobody trains."""
    assert is_theirs(present, own=own) is theirs


def test_who_never_had_a_part_ends_nothing_that_has_begun() -> None:
    """It knows nothing of those who train."""
    assert is_theirs(START, own="")


def test_torchs_own_limit_leaves_the_job_to_a_person() -> None:
    """The option that has ended it is named, and so is the one that counts for the job."""
    ending = used_up(3, incarnation="2-n")

    assert (ending.code, ending.incarnation) == (ExitCode.DEAD_LETTERED, "2-n")
    assert "Workers of node 3" in ending.reason
    assert "--max-restarts" in ending.reason
    assert "restart_quota" in ending.reason
