# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Records come back as they were written, and nothing else is ever taken for one."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from lightning_resilience.core.breaker import BreakerState
from lightning_resilience.core.joint import GateVerdict
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.records import (
    VERSION,
    BreakerRecord,
    FinalRecord,
    GateRecord,
    OutcomeRecord,
    StoreIdRecord,
    Transition,
    decode,
    encode,
)
from lightning_resilience.errors import CorruptRecordError, StoreError


KEY = "lr/run/breaker/s3://bucket:write"
KINDS: tuple[type[Any], ...] = (
    BreakerRecord,
    StoreIdRecord,
    GateRecord,
    OutcomeRecord,
    FinalRecord,
)

texts = st.text(st.characters(codec="utf-8"), max_size=30)
counts = st.integers(0, 2**53)
ranks = st.integers(0, 10**6)
states = st.sampled_from([state.value for state in BreakerState])
failures = st.sampled_from(["", *(failure.value for failure in FailureClass)])
durations = st.floats(1e-3, 1e9)
transitions = st.builds(Transition, epoch=counts, state=states, reason=texts)

RECORDS: dict[type[Any], st.SearchStrategy[Any]] = {
    BreakerRecord: st.builds(
        BreakerRecord,
        store_id=texts,
        epoch=counts,
        generation=counts,
        state=states,
        votes=st.lists(texts, max_size=8).map(tuple),
        limit=counts,
        failures=counts,
        holder=texts,
        open_s=durations,
        history=st.lists(transitions, max_size=32).map(tuple),
        reason=texts,
        writer=texts,
    ),
    StoreIdRecord: st.builds(StoreIdRecord, store_id=texts, writer=texts),
    GateRecord: st.builds(
        GateRecord,
        op=texts,
        digest=texts,
        subject=texts,
        verdict=st.sampled_from([verdict.value for verdict in GateVerdict]),
        epoch=counts,
        rank=ranks,
        reason=texts,
        writer=texts,
    ),
    OutcomeRecord: st.builds(
        OutcomeRecord, rank=ranks, failure=failures, error=texts, detail=texts, attempts=counts
    ),
    FinalRecord: st.builds(
        FinalRecord,
        op=texts,
        failure=failures,
        first_rank=st.integers(-1, 10**6),
        error=texts,
        detail=texts,
        subject=texts,
        workers=st.lists(ranks, max_size=9).map(tuple),
        lost_ranks=st.lists(ranks, max_size=9).map(tuple),
        attempts=counts,
        is_open=st.booleans(),
        is_draft=st.booleans(),
        writer=texts,
    ),
}
SAMPLES: dict[type[Any], Any] = {
    BreakerRecord: BreakerRecord(
        epoch=1, generation=0, state="closed", limit=16, open_s=10.0, writer="w"
    ),
    StoreIdRecord: StoreIdRecord(store_id="s", writer="w"),
    GateRecord: GateRecord(
        op="save", digest="d", verdict="wait", epoch=1, rank=0, reason="r", writer="w"
    ),
    OutcomeRecord: OutcomeRecord(rank=0),
    FinalRecord: FinalRecord(op="save", writer="w"),
}
any_record = st.one_of(
    *(strategy.map(lambda record: (type(record), record)) for strategy in RECORDS.values())
)
BREAKER: dict[str, Any] = {
    "v": 1,
    "store_id": "store",
    "epoch": 7,
    "generation": 2,
    "state": "closed",
    "votes": ["host-a"],
    "limit": 16,
    "failures": 0,
    "holder": "",
    "open_s": 10.0,
    "history": [{"epoch": 7, "state": "closed", "reason": "created"}],
    "reason": "created",
    "writer": "nonce",
}


def breaker_bytes(**changes: object) -> bytes:
    """Return the bytes of a valid breaker record with changed fields."""
    return json.dumps(BREAKER | changes).encode()


def refuse(raw: bytes, kind: type[Any] = BreakerRecord) -> CorruptRecordError:
    """Return the error that these bytes are refused with."""
    with pytest.raises(CorruptRecordError) as caught:
        decode(kind, raw, key=KEY)
    return caught.value


@given(any_record)
def test_a_record_comes_back_as_it_was_written(written: tuple[type[Any], Any]) -> None:
    """Every record survives the way through the store, bytes included."""
    kind, record = written

    raw = encode(record)

    assert decode(kind, raw, key=KEY) == record
    assert encode(decode(kind, raw, key=KEY)) == raw


@pytest.mark.parametrize("kind", KINDS)
def test_the_version_comes_first(kind: type[Any]) -> None:
    """The bytes begin with the version, and the fields follow in the order of the struct."""
    record = SAMPLES[kind]

    raw = encode(record)

    assert raw.startswith(b'{"v":1,')
    assert list(json.loads(raw)) == [field.name for field in msgspec.structs.fields(kind)]
    assert VERSION == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_compare_and_set_writes_names_its_writer(kind: type[Any]) -> None:
    """Two processes that write the same state never write the same bytes."""
    if kind is OutcomeRecord:
        # Each rank sets its own key: nobody else writes these bytes.
        return
    first = msgspec.structs.replace(SAMPLES[kind], writer="nonce-1")
    second = msgspec.structs.replace(SAMPLES[kind], writer="nonce-2")

    assert encode(first) != encode(second)


def test_no_record_holds_an_instant() -> None:
    """Fields of records are epochs, counts and durations: no host can read another's clock."""
    names = [field.name for kind in KINDS for field in msgspec.structs.fields(kind)]

    assert not [name for name in names if name.endswith(("_at_s", "_at", "now_s", "time"))]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_are_ignored(kind: type[Any]) -> None:
    """A field that a newer minor version has added does not keep an older one from reading."""
    fields = json.loads(encode(SAMPLES[kind]))

    raw = json.dumps({"future": [1, {"a": None}], **fields, "also": "this"}).encode()

    assert decode(kind, raw, key=KEY) == SAMPLES[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_another_version_is_corrupt(kind: type[Any], version: int) -> None:
    """A record of another version is refused, and the error says which versions they are."""
    fields = json.loads(encode(SAMPLES[kind])) | {"v": version}

    error = refuse(json.dumps(fields).encode(), kind)

    assert (error.key, error.found_version) == (KEY, version)
    assert f"version {version}" in str(error)
    assert "version 1" in str(error)
    assert KEY in str(error)


def test_another_version_may_look_quite_different() -> None:
    """The version is read before anything else is asked of the record."""
    error = refuse(b'{"whatever":[],"v":7}')

    assert error.found_version == 7


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"1",
        b"closed",
        b'"closed"',
        b"[]",
        b"{}",
        b'{"v":null}',
        b'{"v":"1"}',
        b'{"v":1.0}',
        b'{"v":true}',
        b'{"v":1',
        b'{"v":1}}',
        b"\x80\x04\x95",
        b"\xff\xfe",
        b'{"v":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"v":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' * 100_000,
        breaker_bytes()[:-1],
        breaker_bytes() + b" {}",
    ],
    ids=range(21),
)
def test_what_is_no_record_is_corrupt(raw: bytes) -> None:
    """Bytes that are no record are reported with their key, whatever they are."""
    error = refuse(raw)

    assert error.key == KEY
    assert isinstance(error, StoreError)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "7"},
        {"epoch": 7.0},
        {"epoch": True},
        {"epoch": None},
        {"epoch": -1},
        {"epoch": 10**30},
        {"generation": -1},
        {"state": "CLOSED"},
        {"state": "closed\n"},
        {"state": "half-open"},
        {"state": ""},
        {"state": 1},
        {"votes": "host-a"},
        {"votes": [1]},
        {"votes": None},
        {"limit": -1},
        {"limit": 1.5},
        {"failures": -1},
        {"holder": None},
        {"open_s": "10"},
        {"open_s": 0},
        {"open_s": -10.0},
        {"history": [{"epoch": 1, "state": "closed"}]},
        {"history": [{"epoch": 1, "state": "ajar", "reason": ""}]},
        {"history": {}},
        {"writer": None},
    ],
    ids=str,
)
def test_types_are_strict(changes: dict[str, object]) -> None:
    """A field of another type, out of range, or with an unknown name is corrupt, never guessed."""
    error = refuse(breaker_bytes(**changes))

    assert error.found_version == 1
    assert next(iter(changes)) in str(error)


@pytest.mark.parametrize("name", ["epoch", "generation", "state", "limit", "open_s", "writer"])
def test_a_missing_field_is_corrupt(name: str) -> None:
    """A record that lacks what a decision needs is refused."""
    fields = {key: value for key, value in BREAKER.items() if key != name}

    assert name in str(refuse(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (GateRecord, {"verdict": "maybe"}),
        (GateRecord, {"rank": -1}),
        (OutcomeRecord, {"failure": "bad luck"}),
        (OutcomeRecord, {"attempts": -1}),
        (FinalRecord, {"failure": "TRANSIENT"}),
        (FinalRecord, {"workers": [0.5]}),
    ],
)
def test_other_records_are_strict_as_well(kind: type[Any], changes: dict[str, object]) -> None:
    """Verdicts and classes of failure are names that exist, ranks are no negative numbers."""
    fields = json.loads(encode(SAMPLES[kind])) | changes

    assert next(iter(changes)) in str(refuse(json.dumps(fields).encode(), kind))


@pytest.mark.parametrize("kind", [BreakerRecord, GateRecord])
@pytest.mark.parametrize("other", KINDS)
def test_a_decision_is_not_taken_from_another_record(kind: type[Any], other: type[Any]) -> None:
    """No other record that is stored under a wrong key is read as a breaker's or a gate's."""
    if kind is not other:
        refuse(encode(SAMPLES[other]), kind)


def test_every_name_that_is_written_can_be_read() -> None:
    """The names that records accept are those of the states, verdicts and classes of failure."""
    for state in BreakerState:
        assert decode(BreakerRecord, breaker_bytes(state=state.value), key=KEY).state == state.value
    for verdict in GateVerdict:
        gate = msgspec.structs.replace(SAMPLES[GateRecord], verdict=verdict.value)
        assert decode(GateRecord, encode(gate), key=KEY) == gate
    for failure in ["", *(failure.value for failure in FailureClass)]:
        outcome = OutcomeRecord(rank=3, failure=failure)
        assert decode(OutcomeRecord, encode(outcome), key=KEY) == outcome


def decode_any(raw: bytes) -> None:
    """Decode bytes as every kind, allowing a corrupt record and no other error."""
    for kind in KINDS:
        with contextlib.suppress(CorruptRecordError):
            assert type(decode(kind, raw, key=KEY)) is kind


@given(st.binary(max_size=300))
@example(b'{"v":1,"\\ud800":1}')
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    """Whatever the store holds, it is a record or a CorruptRecordError."""
    decode_any(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*BREAKER, "rank", "op", "failure"]), json_values))
def test_no_json_raises_anything_else(changes: dict[str, object]) -> None:
    """A record with any fields replaced by anything is a record or a CorruptRecordError."""
    decode_any(breaker_bytes(**changes))


@given(any_record, st.data())
def test_no_damage_raises_anything_else(
    written: tuple[type[Any], Any], data: st.DataObject
) -> None:
    """A record whose bytes were cut or changed is a record or a CorruptRecordError."""
    raw = bytearray(encode(written[1]))
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[place] = data.draw(st.integers(0, 255))
    else:
        del raw[place:]

    decode_any(bytes(raw))


KEYS = Keys(run_id="run-1", incarnation="3-abc")


def test_keys_are_as_documented() -> None:
    """The names of keys are those of the table in the module's docstring."""
    assert KEYS.store_id == "lr/run-1/store_id"
    assert KEYS.breaker("s3://b:write") == "lr/run-1/breaker/s3://b:write"
    assert KEYS.bell("s3://b:write", 4) == "lr/run-1/bell/s3://b:write/4"
    assert KEYS.waiting("s3://b:write", 4) == "lr/run-1/i3-abc/waiting/s3://b:write/4"
    assert KEYS.joint("arrived", 2) == "lr/run-1/i3-abc/arrived/2"
    assert KEYS.joint("gate", 7, 0) == "lr/run-1/i3-abc/gate/7/0"
    assert KEYS.joint("final", 7) == "lr/run-1/i3-abc/final/7"


def test_what_survives_a_restart_does_not_name_the_incarnation() -> None:
    """A breaker's keys stay the same over restarts; places in line and joint operations do not."""
    later = Keys(run_id="run-1", incarnation="4-def")

    assert KEYS.store_id == later.store_id
    assert KEYS.breaker("d") == later.breaker("d")
    assert KEYS.bell("d", 1) == later.bell("d", 1)
    assert KEYS.waiting("d", 1) != later.waiting("d", 1)
    assert KEYS.joint("gate", 7, 0) != later.joint("gate", 7, 0)


def test_keys_of_one_run_are_distinct() -> None:
    """No two things of a run share a key, nor do two runs."""
    names = [
        name
        for keys in (KEYS, Keys(run_id="run-2", incarnation="3-abc"))
        for name in (
            keys.store_id,
            *(keys.breaker(dependency) for dependency in "ab"),
            *(keys.bell(dependency, number) for dependency in "ab" for number in range(12)),
            *(keys.waiting(dependency, number) for dependency in "ab" for number in range(12)),
            *(
                keys.joint(part, number, last)
                for part in ("arrived", "gate", "beat", "out", "count", "final", "done", "rounds")
                for number in range(12)
                for last in (None, 0, 1, 11)
            ),
        )
    ]

    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_records_that_are_handed_out_again_cannot_be_changed(
    kind: type[Any], data: st.DataObject
) -> None:
    """Known bytes are decoded once, so whoever has a record must not be able to change it."""
    raw = encode(data.draw(RECORDS[kind]))

    first, again = (decode(kind, raw, key=KEY) for _ in range(2))

    assert first == again
    # Only what is immutable all the way down has a hash.
    assert hash(first) == hash(again)
    with pytest.raises(AttributeError, match="immutable"):
        first.v = 2


def test_bytes_that_are_known_as_one_kind_are_none_of_another() -> None:
    """What is remembered is remembered for its kind."""
    raw = encode(StoreIdRecord(store_id="s", writer="w"))
    assert decode(StoreIdRecord, raw, key=KEY).store_id == "s"

    with pytest.raises(CorruptRecordError, match="no GateRecord"):
        decode(GateRecord, raw, key=KEY)


def test_what_does_not_decode_names_its_own_key_each_time() -> None:
    """The same damage at two keys is two errors."""
    for key in ("lr/run/store_id", "lr/run/budget/d"):
        with pytest.raises(CorruptRecordError, match=key) as caught:
            decode(StoreIdRecord, b"damaged", key=key)
        assert caught.value.key == key


def test_a_long_record_is_decoded_as_a_short_one() -> None:
    """It is only not remembered."""
    record = StoreIdRecord(store_id="s" * 10_000, writer="w")

    assert decode(StoreIdRecord, encode(record), key=KEY) == record
    with pytest.raises(CorruptRecordError, match=KEY):
        decode(StoreIdRecord, encode(record)[:-1], key=KEY)
