# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a rank does without the shared store, from what every rank knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_resilience.adapters.lightning.spooling import Spooled
from lightning_resilience.adapters.lightning.storeless import Storeless
from lightning_resilience.core.records import FinalRecord
from lightning_resilience.core.retention import Stage
from lightning_resilience.core.spool import spooled_detail
from lightning_resilience.core.store_loss import Unsettled, deferred_final, told_names
from lightning_resilience.protocols.guard import Guarded
from lightning_resilience.protocols.joint import JointResult


FOLDER = "s3://bucket/run"
DEFERRED = deferred_final("save", subject="a", workers=(0,), why="gone")


def storeless(*, spools: bool = True, rank: int = 0, **known: Any) -> Storeless:
    """One rank's ways, in a job whose saves may be deferred."""
    member = SimpleNamespace(rank=rank, defer_after_s=1.0, unsettled=Unsettled(**known))
    session: Any = SimpleNamespace(member=member)
    return Storeless(session, lambda _url: spools)


def saved(value: Any) -> JointResult:
    """A deferred save, as the rank that has made it sees it."""
    return JointResult(final=DEFERRED, value=Guarded(value=value, attempts=1, elapsed_s=0.0))


def test_a_save_is_covered_where_its_checkpoint_may_wait_on_the_node() -> None:
    """A tuner's file, or one in a format of the user's, is not."""
    assert storeless().begins("save", f"{FOLDER}/a.ckpt", workers=(0,))
    assert not storeless(spools=False).begins("save", f"{FOLDER}/a.ckpt", workers=(0,))


def test_a_question_is_covered_once_every_rank_knows_the_answer() -> None:
    """By the listing at the start, or because the run has saved that name."""
    ways, url = storeless(), f"{FOLDER}/a.ckpt"
    assert not ways.begins("exists", url, workers=(0,))

    ways.saved(url, JointResult(final=FinalRecord(op="save", writer="w")))
    assert ways.begins("exists", url, workers=(0,))
    assert ways.answer(url, DEFERRED) == "True"

    ways.listed(f"{FOLDER}/", told_names(["b.ckpt"]))
    assert ways.answer(f"{FOLDER}/b.ckpt", DEFERRED) == "True"
    assert ways.answer(f"{FOLDER}/c.ckpt", DEFERRED) == "False"


def test_a_verdict_is_believed_before_what_is_known() -> None:
    """Storage was asked, and a name may have been freed."""
    ways = storeless()
    ways.listed(FOLDER, told_names(["b.ckpt"]))
    ways.published([f"{FOLDER}/d.ckpt"])
    no = FinalRecord(op="exists", detail="False", writer="w")

    assert ways.answer(f"{FOLDER}/b.ckpt", no) == "False"
    assert ways.answer(f"{FOLDER}/d.ckpt", no) == "False"
    assert ways.answer(f"{FOLDER}/d.ckpt", DEFERRED) == "True"


def test_all_ranks_wait_at_the_end_once_something_may_be_left() -> None:
    """Whether this one was told so or not, and whether it has deferred anything or not."""
    ways, knows, asks = storeless(), storeless(deferred=(3,)), storeless()
    ways.begins("save", f"{FOLDER}/a.ckpt", workers=(0,))
    asks.begins("exists", f"{FOLDER}/a.ckpt", workers=(0,))

    assert ways.end.is_due
    assert not knows.end.is_due
    assert not asks.end.is_due


@pytest.mark.parametrize(
    ("result", "stage"),
    [
        (JointResult(final=DEFERRED), Stage.SPOOLED),
        (saved(Spooled(file="f", size_bytes=1, digest=spooled_detail("d"))), Stage.SPOOLED),
        (saved(SimpleNamespace(digest="d")), Stage.VERIFIED),
        (JointResult(final=FinalRecord(op="save", detail="d", writer="w")), Stage.VERIFIED),
        (
            JointResult(final=FinalRecord(op="save", detail=spooled_detail("d"), writer="w")),
            Stage.SPOOLED,
        ),
    ],
    ids=["others", "staged", "made before the loss", "verdict", "spooled by a verdict"],
)
def test_no_save_counts_as_verified_that_may_not_be_in_storage(
    result: JointResult, stage: Stage
) -> None:
    """Only the rank that has made it itself knows that it is."""
    assert storeless().saved(f"{FOLDER}/a.ckpt", result) is stage


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_the_end_says_once_what_was_never_settled(
    caplog: pytest.LogCaptureFixture, rank: int, lines: int
) -> None:
    """Rank 0 says it, and only where something is open."""
    storeless(rank=rank).close()
    storeless(rank=rank, deferred=(3,)).close()

    assert len(caplog.records) == lines
