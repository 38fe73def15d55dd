# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which account of a job's end its agents get, and from whom."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core.accounts import account_of, status_of
from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.errors import JointError


class SIGTERMException(SystemExit):
    """As Lightning's."""


STANDING = IncidentRecord(rank=2, kind="error", error="ValueError: bad", step=5, writer="w2")


def told(error: BaseException, standing: IncidentRecord | None = None, **options: Any) -> Any:
    """Return what each of four ranks tells."""
    options = {"step": 7, "is_together": False, "writer": "w", **options}
    return [account_of(error, standing, rank=rank, **options) for rank in range(4)]


def verdict(outcome: str, first_rank: int | None) -> JointError:
    """Return what all ranks raise together."""
    return JointError("save failed", op="save", seq=3, outcome=outcome, first_rank=first_rank)


def test_what_stands_among_the_ranks_is_told_by_two() -> None:
    """By the one that left first, and by rank 0 in case that one does not get to it."""
    assert told(ValueError("of mine"), STANDING) == [STANDING, None, STANDING, None]


@pytest.mark.parametrize(("first", "tell"), [(2, [0, 2]), (0, [0]), (None, [0])])
def test_a_verdict_of_all_ranks_names_the_rank_of_its_cause(
    first: int | None, tell: list[int]
) -> None:
    """It is told by that rank and by rank 0, with its class, and the same by both."""
    accounts = told(verdict("permanent", first))

    assert [rank for rank, account in enumerate(accounts) if account] == tell
    for rank in tell:
        account = accounts[rank]
        assert (account.rank, account.kind) == (first or 0, "error")
        assert (account.failure, account.step) == ("permanent", 7)
        assert account.fingerprint


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (verdict("transient", 0), "error"),
        (verdict("cancelled", 0), "signal"),
        (verdict("lost", 0), "echo"),
    ],
)
def test_a_verdict_about_a_stop_or_a_silent_rank_is_no_error(error: Exception, kind: str) -> None:
    """Else a preemption would be charged, and a silent rank would hide why it is silent."""
    assert told(error)[0].kind == kind


@pytest.mark.parametrize("outcome", ["transient", "throttle", "auth", "permanent", "capacity"])
def test_a_verdict_is_told_with_the_class_that_all_ranks_have_agreed_on(outcome: str) -> None:
    """It decides whether another start is of use."""
    assert told(verdict(outcome, 0))[0].failure == outcome


def test_an_agreed_stop_is_told_by_rank_zero_alone() -> None:
    """All ranks have the same exception, and one account is enough."""
    accounts = told(SIGTERMException(), is_together=True)

    assert [account and account.kind for account in accounts] == ["signal", None, None, None]


def test_a_rank_that_could_ask_nobody_tells_its_own() -> None:
    """What stands is not known to it, and the agents may still listen."""
    accounts = told(ValueError("bad"))

    assert [account.rank for account in accounts] == [0, 1, 2, 3]
    assert {account.error for account in accounts} == {"ValueError: bad"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SIGTERMException(), 143),
        (SIGTERMException(0), 143),
        (SIGTERMException(7), None),
        (SystemExit(), None),
        (KeyboardInterrupt(), None),
        (ValueError("bad"), None),
    ],
)
def test_a_stop_does_not_end_a_process_with_success(
    error: BaseException, status: int | None
) -> None:
    """A program that ends itself has its own status."""
    assert status_of(error) == status
