# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is an incident, what is its echo, and which of two stands."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import DistBackendError

from lightning_resilience.core.incident import (
    IncidentKind,
    IncidentRecord,
    PeerInterruption,
    error_of,
    incident_of,
    is_echo,
    is_notable,
    is_shared,
    note_of,
    outranks,
    why_not_saved,
)
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import (
    CorruptRecordError,
    JointError,
    JointUnavailableError,
    PeerFailedError,
    StoreUnavailableError,
)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def record(kind: str = "error", rank: int = 1, writer: str = "a") -> IncidentRecord:
    """Make a record."""
    return IncidentRecord(rank=rank, kind=kind, error="ValueError: bad", step=7, writer=writer)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), "error"),
        (RuntimeError("CUDA error: an illegal memory access"), "error"),
        (SystemExit(3), "error"),
        (StoreUnavailableError("away"), "error"),
        (KeyboardInterrupt(), "signal"),
        (SIGTERMException(), "signal"),
        (RuntimeError(GLOO), "echo"),
        (DistBackendError("NCCL error"), "echo"),
        (PeerFailedError("rank 0"), "echo"),
        (JointUnavailableError("no answer"), "echo"),
    ],
)
def test_an_exception_says_what_it_is(error: BaseException, kind: str) -> None:
    """A cause, a request to stop and the echo of another rank's end are told apart."""
    found = incident_of(error, is_an_echo=is_echo(error), rank=2, step=5, writer="w")

    assert (found.kind, found.rank, found.step, found.writer) == (kind, 2, 5, "w")
    assert found.error.startswith(type(error).__name__)


def test_a_stop_by_torchs_launcher_is_a_request_to_stop() -> None:
    """Its handler raises an exception of its own in a worker that is a fork of the agent."""
    error = type("SignalException", (Exception,), {})("got signal: 15")

    assert incident_of(error, is_an_echo=False, rank=0, step=1, writer="w").kind == "signal"


def test_whatever_follows_a_waking_is_an_echo() -> None:
    """A rank whose collectives were ended fails for that; a request to stop stays one."""
    assert is_echo(ValueError("no default process group"), was_woken=True)
    assert not is_echo(ValueError("no default process group"))
    assert not is_echo(SIGTERMException(), was_woken=True)


@pytest.mark.parametrize(
    ("error", "shared"),
    [
        (JointError("all ranks"), True),
        (JointUnavailableError("this rank"), False),
        (PeerFailedError("rank 0"), False),
        (ValueError("bad"), False),
    ],
)
def test_only_what_all_ranks_have_agreed_on_is_shared(error: Exception, *, shared: bool) -> None:
    """A verdict ends all ranks at the same point; nothing else does."""
    assert is_shared(error) is shared


@pytest.mark.parametrize(
    ("new", "found"),
    list(itertools.product(itertools.product(IncidentKind, [True, False]), repeat=2)),
)
def test_a_cause_replaces_what_is_none_and_nothing_replaces_a_cause(
    new: tuple[IncidentKind, bool], found: tuple[IncidentKind, bool]
) -> None:
    """The first cause stands, else what an agent has seen, else the first of anything."""
    nearest = [
        {(IncidentKind.ERROR, True), (IncidentKind.ERROR, False)},
        {(IncidentKind.KILLED, True), (IncidentKind.KILLED, False)},
        {(IncidentKind.SIGNAL, True)},
    ]
    place = {each: at for at, group in enumerate(nearest) for each in group}
    expected = place.get(new, 3) < place.get(found, 3)

    offered, standing = (
        msgspec.structs.replace(record(kind.value), by_agent=by_agent)
        for kind, by_agent in (new, found)
    )

    assert outranks(offered, standing) is expected


@pytest.mark.parametrize(
    ("mine", "standing", "notable"),
    [
        (record("error"), record("error"), False),
        (record("signal"), record("signal"), False),
        (record("echo"), record("echo"), True),
        (record("error"), record("error", 2), True),
        (record("signal"), record("error", 2), True),
        (record("signal"), record("echo", 2), True),
        (record("signal"), record("signal", 2), False),
    ],
)
def test_a_note_is_made_where_it_says_something(
    mine: IncidentRecord, standing: IncidentRecord, *, notable: bool
) -> None:
    """Not for one's own cause, and not for a scheduler that has told everybody to stop."""
    assert is_notable(mine, standing) is notable


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("error", "failed first, after step 7, with ValueError: bad. Mend that"),
        ("signal", "was told to stop first, after step 7"),
        ("echo", "A rank that was killed says nothing"),
    ],
)
def test_an_incident_in_words_names_rank_step_and_cause(kind: str, words: str) -> None:
    """The error of another rank says what happened and where to look, and has it as attributes."""
    error = error_of(record(kind), rank=3)

    assert words in note_of(record(kind))
    assert str(error) == f"Rank 3 stops because another rank has left. {note_of(record(kind))}"
    assert (error.rank, error.kind, error.error) == (1, kind, "ValueError: bad")


def test_an_incident_that_cannot_be_read_is_not_guessed() -> None:
    """Without a record, the error says that nobody is known, and names none."""
    error = error_of(None, rank=3)

    assert "Which one is not known" in str(error)
    assert (error.rank, error.kind, error.error) == (None, "", "")


def test_an_incident_is_decoded_strictly() -> None:
    """A kind that this version does not know is a corrupt record where it is read."""
    raw = encode(record())

    assert decode(IncidentRecord, raw, key="k") == record()
    with pytest.raises(CorruptRecordError):
        decode(IncidentRecord, encode(msgspec.structs.replace(record(), kind="odd")), key="k")


def test_an_interruption_for_a_peer_is_no_failure_of_what_waited() -> None:
    """No retry and no breaker takes it for a failure of the storage."""
    interruption = PeerInterruption(error_of(record(), rank=0))

    assert not isinstance(interruption, Exception)
    assert classify(interruption).failure is FailureClass.CANCELLED


@pytest.mark.parametrize(
    ("on_cpu", "is_replicated", "is_group_ended", "word"),
    [
        (True, True, True, ""),
        (True, True, False, "could hang"),
        (False, True, True, "accelerator"),
        (True, False, True, "spread"),
    ],
)
def test_rank_zero_saves_alone_only_what_is_whole(
    word: str, *, on_cpu: bool, is_replicated: bool, is_group_ended: bool
) -> None:
    """Each condition that is not met is the reason that is given."""
    why = why_not_saved(on_cpu=on_cpu, is_replicated=is_replicated, is_group_ended=is_group_ended)

    assert word in why
    assert bool(why) is bool(word)
