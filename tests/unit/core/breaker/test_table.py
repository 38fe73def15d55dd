# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The documented tables are what the breaker does, pair by pair."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from lightning_resilience.core import breaker
from lightning_resilience.core.breaker import (
    TABLE,
    AttemptFailed,
    AttemptSucceeded,
    BreakerConfig,
    BreakerInput,
    BreakerState,
    ForcedOpen,
    ForceReleased,
    HeldUpstream,
    ProbeFailed,
    ProbeReleased,
    ProbeSucceeded,
    VoteDropped,
    VotesCleared,
)
from lightning_resilience.core.events import ResultDropped
from lightning_resilience.core.records import BreakerRecord
from tests.models.breaker_invariants import check_step
from tests.unit.core.breaker.samples import (
    CONFIG,
    EPOCH,
    HOLDER,
    apply,
    claim,
    record_in,
    variants,
    vote,
)


if TYPE_CHECKING:
    from collections.abc import Iterator


PAGE = Path(__file__).resolve().parents[4] / "docs" / "breaker.md"
CLOSED, OPEN, HALF_OPEN, RECOVERING, FORCED_OPEN = BreakerState
OLD, THIS = EPOCH - 1, EPOCH
# One call at a time: a successful probe has nothing to ramp.
NARROW = BreakerConfig(max_concurrent=1, ramp_start=1)

Situation = tuple[BreakerRecord, BreakerInput, BreakerConfig]


def held(claimed: tuple[int, str] | None) -> HeldUpstream:
    """Return that the site's circuit is open, with the probe that it holds back."""
    return HeldUpstream(upstream=5, open_s=15.0, reason="the site is ill", claim=claimed)


# What the page's word for a condition means, for each state and input that it stands beside.
SITUATIONS: dict[tuple[str, str, str], Situation] = {
    ("CLOSED", "HostVoted", "its vote makes the quorum"): (
        record_in(CLOSED, votes=("host-b",)),
        vote(hosts=4),
        CONFIG,
    ),
    ("CLOSED", "HostVoted", "more votes are needed"): (record_in(CLOSED), vote(hosts=4), CONFIG),
    ("CLOSED", "HostVoted", "the host is listed already"): (
        record_in(CLOSED, votes=("host-a",)),
        vote(hosts=4),
        CONFIG,
    ),
    ("CLOSED", "VoteDropped", "the host is listed"): (
        record_in(CLOSED, votes=("host-a",)),
        VoteDropped(host="host-a"),
        CONFIG,
    ),
    ("CLOSED", "VoteDropped", "the host is not listed"): (
        record_in(CLOSED, votes=("host-a",)),
        VoteDropped(host="host-b"),
        CONFIG,
    ),
    ("CLOSED", "VotesCleared", "there are votes"): (
        record_in(CLOSED, votes=("host-a",)),
        VotesCleared(),
        CONFIG,
    ),
    ("CLOSED", "VotesCleared", "there are none"): (record_in(CLOSED), VotesCleared(), CONFIG),
    ("OPEN", "ProbeClaimed", "unchanged for the open wait"): (
        record_in(OPEN, open_s=20.0),
        claim(20.0),
        CONFIG,
    ),
    ("OPEN", "ProbeClaimed", "too early"): (record_in(OPEN, open_s=20.0), claim(19.999), CONFIG),
    ("HALF_OPEN", "ProbeClaimed", "unchanged for `probe_lease_s`"): (
        record_in(HALF_OPEN),
        claim(CONFIG.probe_lease_s),
        CONFIG,
    ),
    ("HALF_OPEN", "ProbeClaimed", "too early"): (
        record_in(HALF_OPEN),
        claim(CONFIG.probe_lease_s - 0.001),
        CONFIG,
    ),
    ("HALF_OPEN", "ProbeSucceeded", "of this epoch and holder, nothing to ramp"): (
        record_in(HALF_OPEN),
        ProbeSucceeded(epoch=THIS, holder=HOLDER),
        NARROW,
    ),
    **{
        ("HALF_OPEN", type(event).__name__, when): (record_in(HALF_OPEN), event, CONFIG)
        for when, epoch, holder in (
            ("of this epoch and holder", THIS, HOLDER),
            ("of another epoch", OLD, HOLDER),
            ("of another holder", THIS, "other"),
        )
        for event in (
            ProbeSucceeded(epoch=epoch, holder=holder),
            ProbeFailed(epoch=epoch, holder=holder, reason="timeout"),
            ProbeReleased(epoch=epoch, holder=holder),
        )
    },
    ("RECOVERING", "AttemptSucceeded", "of this epoch"): (
        record_in(RECOVERING, limit=4),
        AttemptSucceeded(epoch=THIS),
        CONFIG,
    ),
    (
        "RECOVERING",
        "AttemptSucceeded",
        "of this epoch, and the limit reaches `max_concurrent`",
    ): (record_in(RECOVERING, limit=8), AttemptSucceeded(epoch=THIS), CONFIG),
    ("RECOVERING", "AttemptSucceeded", "of another epoch"): (
        record_in(RECOVERING),
        AttemptSucceeded(epoch=OLD),
        CONFIG,
    ),
    ("RECOVERING", "AttemptFailed", "of this epoch"): (
        record_in(RECOVERING, limit=4),
        AttemptFailed(epoch=THIS, reason="timeout"),
        CONFIG,
    ),
    ("RECOVERING", "AttemptFailed", "of this epoch, and the limit cannot be halved"): (
        record_in(RECOVERING, limit=1),
        AttemptFailed(epoch=THIS, reason="timeout"),
        CONFIG,
    ),
    ("RECOVERING", "AttemptFailed", "of this epoch, and it is the `reopen_failures`-th"): (
        record_in(RECOVERING, limit=8, failures=2),
        AttemptFailed(epoch=THIS, reason="timeout"),
        CONFIG,
    ),
    ("RECOVERING", "AttemptFailed", "of another epoch"): (
        record_in(RECOVERING),
        AttemptFailed(epoch=OLD, reason="timeout"),
        CONFIG,
    ),
    **{
        (state.name, "HeldUpstream", when): (record_in(state), held(claimed), CONFIG)
        for state, when, claimed in (
            (CLOSED, "no probe is held back", None),
            (CLOSED, "a probe is held back", (THIS, HOLDER)),
            (HALF_OPEN, "of this epoch and holder", (THIS, HOLDER)),
            (HALF_OPEN, "of another epoch", (OLD, HOLDER)),
            (HALF_OPEN, "of another holder", (THIS, "other")),
            (HALF_OPEN, "no probe is held back", None),
            (RECOVERING, "no probe is held back", None),
            (RECOVERING, "a probe is held back", (THIS, HOLDER)),
        )
    },
    **{
        (state.name, "ForcedOpen", "always"): (record_in(state), ForcedOpen(reason="r"), CONFIG)
        for state in (CLOSED, OPEN, HALF_OPEN, RECOVERING)
    },
    ("FORCED_OPEN", "ForceReleased", "always"): (
        record_in(FORCED_OPEN),
        ForceReleased(reason="r"),
        CONFIG,
    ),
}


def rows(header: str) -> Iterator[list[str]]:
    """Yield the cells of the page's table that begins with this header."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(header) + 2
    for line in lines[start:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip().strip("|").split("|")]


ROWS = list(rows("| state | input | when | next | what else |"))


def key_of(row: list[str]) -> tuple[str, str, str]:
    """Return a row's state, input and condition."""
    return row[0], row[1].strip("`"), row[2]


def test_every_pair_of_state_and_input_is_in_the_table_of_the_code() -> None:
    """The code says what each of the 12 inputs does in each of the 5 states."""
    assert set(TABLE) == set(BreakerState)
    for handlers in TABLE.values():
        assert set(handlers) == set(get_args(BreakerInput))


def test_every_row_of_the_page_has_a_situation() -> None:
    """The page and this file speak of the same conditions, each once."""
    keys = [key_of(row) for row in ROWS]

    assert len(keys) == len(set(keys))
    assert set(keys) == set(SITUATIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(key_of(row)))
def test_a_row_of_the_page_is_what_the_code_does(row: list[str]) -> None:
    """In the situation that a row describes, the breaker does what the row says."""
    record, event, config = SITUATIONS[key_of(row)]
    outcome, what_else = row[3], row[4]

    stepped = apply(record, event, config=config)

    if outcome == "nothing":
        assert stepped.record is record
    else:
        assert stepped.record.state == BreakerState[outcome].value
        same_epoch = "in the same epoch" in what_else
        assert stepped.record.epoch == record.epoch + (not same_epoch)
        new_generation = "a new generation" in what_else
        assert stepped.record.generation == record.generation + new_generation
    dropped = "it is reported as dropped" in what_else
    assert any(isinstance(fact, ResultDropped) for fact in stepped.events) is dropped


LISTED = {key_of(row)[:2] for row in ROWS}


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (state, kind)
        for state in BreakerState
        for kind in get_args(BreakerInput)
        if (state.name, kind.__name__) not in LISTED
    ],
)
def test_what_the_page_does_not_list_changes_nothing(state: BreakerState, kind: type) -> None:
    """Every variant of an input that a state does not list leaves the very same record."""
    record = record_in(state)

    for event in variants()[kind]:
        stepped = apply(record, event)

        assert stepped.record is record
        assert not stepped.changed
        late = getattr(event, "epoch", EPOCH) != EPOCH
        assert [type(fact) for fact in stepped.events] == [ResultDropped] * late


@pytest.mark.parametrize("state", BreakerState)
def test_every_variant_of_every_input_keeps_the_invariants(state: BreakerState) -> None:
    """No input in any variant breaks a rule that holds after every step."""
    for events in variants().values():
        for event in events:
            record = record_in(state)
            check_step(CONFIG, record, event, apply(record, event))


def test_legal_transitions_are_those_of_the_page() -> None:
    """The set of legal transitions holds what the page's rows lead to, and nothing else."""
    documented = {
        (BreakerState[row[0]], BreakerState[row[3]])
        for row in ROWS
        if row[3] != "nothing" and "in the same epoch" not in row[4]
    }

    assert documented == breaker.LEGAL


def test_the_page_names_the_inputs_that_exist() -> None:
    """Every input in the page's table is one of the code's."""
    names = {kind.__name__ for kind in get_args(BreakerInput)}

    assert {re.sub("`", "", row[1]) for row in ROWS} == names


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [(int(row[0]), int(row[1])) for row in rows("| hosts | quorum |")],
)
def test_the_quorum_is_that_of_the_page(hosts: int, expected: int) -> None:
    """The page's numbers are what the code asks for."""
    assert breaker.quorum(hosts, fraction=CONFIG.quorum_fraction) == expected
