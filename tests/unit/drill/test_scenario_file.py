# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A scenario file is read as it is meant, or refused with file, line, field, value and range."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.drill.scenario import (
    Brownout,
    BrownoutFailure,
    Clocks,
    Crash,
    Fault,
    GroupRestart,
    Interrupt,
    Kind,
    Outage,
    OutageFailure,
    Pause,
    Refusal,
    RefusalError,
    Scenario,
    Storage,
    StoragePartition,
    Store,
    StoreGone,
    StorePartition,
    Stray,
    Workload,
)
from lightning_resilience.drill.scenario_fields import field_rows
from lightning_resilience.drill.scenario_file import parse_scenario, read_scenario, scenario_text
from lightning_resilience.errors import ConfigError, ScenarioError


if TYPE_CHECKING:
    from pathlib import Path


FULL = """\
name: an outage, and a dead worker
ranks: 4
hosts: 2
ends_at_s: 120
clocks: {offset_s: 5, rate: 1.1}
workload:
  kinds: [single, joint]
  rounds: 3
store:
  lost_answers: 1e-2      # a number of YAML 1.2
storage:
  slots: 4
breaker:
  max_concurrent: 4
  open_for_s: 9
retry:
  max_attempts: 6
budget: {retry_floor: 30}
admission: {beat_every_s: 2}
may_go_alone: false
faults:
  - kind: outage
    at_s: 10
    for_s: 60
    error: hang
  - {kind: crash, at_s: 12.5, ranks: [0, 3], effects: 2}
  - {kind: store_partition, for_s: 1, at_s: 20, hosts: [1]}
"""


def refused(text: str) -> ScenarioError:
    """Return the error that a text ends with."""
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, source="bad.yaml")
    return caught.value


# Reading --------------------------------------------------------------------------------------


def test_a_file_is_a_scenario(tmp_path: Path) -> None:
    """Every section and several faults arrive as they were written; the rest is the defaults'."""
    path = tmp_path / "outage.yaml"
    path.write_text(FULL, encoding="utf-8")

    assert read_scenario(path) == Scenario(
        name="an outage, and a dead worker",
        ranks=4,
        hosts=2,
        ends_at_s=120.0,
        clocks=Clocks(offset_s=5.0, rate=1.1),
        workload=Workload(kinds=("single", "joint"), rounds=3),
        store=Store(lost_answers=0.01),
        storage=Storage(slots=4),
        breaker=BreakerConfig(max_concurrent=4, open_for_s=9.0),
        retry=RetryPolicy(max_attempts=6),
        budget=BudgetConfig(retry_floor=30),
        admission=AdmissionConfig(beat_every_s=2.0),
        may_go_alone=False,
        faults=(
            Outage(at_s=10.0, for_s=60.0, error="hang"),
            Crash(at_s=12.5, ranks=(0, 3), effects=2),
            StorePartition(at_s=20.0, for_s=1.0, hosts=(1,)),
        ),
    )


def test_an_empty_mapping_is_the_defaults() -> None:
    """Whoever means the defaults says so."""
    assert parse_scenario("{}") == Scenario()


def test_whole_numbers_become_seconds() -> None:
    """A file may leave out the point: what arrives is a float all the same."""
    scenario = parse_scenario("ends_at_s: 5\nbreaker: {open_for_s: 12}")

    assert (type(scenario.ends_at_s), scenario.ends_at_s) == (float, 5.0)
    assert type(scenario.breaker.open_for_s) is float


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: no", "no"),
        ("name: on", "on"),
        ("name: 1:30", "1:30"),
        ("name: 2026-01-01", "2026-01-01"),
        ("name: '1e3'", "1e3"),
        ("name: !!str 5", "5"),
        ("name: 0x10", "0x10"),
        ("name: 'true'", "true"),
    ],
)
def test_a_text_is_a_text(text: str, expected: str) -> None:
    """What only YAML 1.1 takes for a truth, a time or a date is the text that it looks like."""
    assert parse_scenario(text).name == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e3", 1000.0), ("+1.5", 1.5), (".5", 0.5), ("010", 10.0), ("7.", 7.0), ("2E-1", 0.2)],
)
def test_a_number_is_the_number_that_it_looks_like(text: str, expected: float) -> None:
    """Exponents need no point and no sign, and a zero in front makes nothing octal."""
    assert parse_scenario(f"ends_at_s: {text}").ends_at_s == expected


@pytest.mark.parametrize("text", ["null", "~", "Null", ""])
def test_nothing_is_null(text: str) -> None:
    """A field that may be absent can be said to be so."""
    assert parse_scenario(f"ends_at_s: {text}").ends_at_s is None


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    """Editors that put one in front do no harm."""
    path = tmp_path / "marked.yaml"
    path.write_bytes(b"\xef\xbb\xbfranks: 3\n")

    assert read_scenario(path).ranks == 3


# Bad input ------------------------------------------------------------------------------------

# Text; line and field that the error names; words that it has.
BAD_FIELDS = {
    "unknown": ("ranks: 2\nrank: 3", 2, "rank", ("'rank'", "3", "'ranks'", "Allowed are: ")),
    "unknown in a section": (
        "store:\n  timeout_s: 1\n  latency: 0.5\n",
        3,
        "store.latency",
        ("store has no option 'latency'", "0.5", "'latency_s'"),
    ),
    "unknown in a config": (
        "breaker:\n  trip_failurs: 3",
        2,
        "breaker.trip_failurs",
        ("'trip_failurs'", "3", "'trip_failures'"),
    ),
    "unknown in retry": ("retry: {max_atempts: 8}", 1, "retry.max_atempts", ("'max_attempts'",)),
    "unknown in budget": ("budget:\n  floor: 8", 2, "budget.floor", ("'floor'", "retry_floor")),
    "unknown in admission": (
        "admission:\n\n  lease_s: 8",
        3,
        "admission.lease_s",
        ("'slot_lease_s'",),
    ),
    "of another section": (
        "storage: {max_concurrent: 8}",
        1,
        "storage.max_concurrent",
        ("option of BreakerConfig",),
    ),
    "unknown in a fault": (
        "faults:\n- kind: outage\n  at_s: 1\n  for_s: 3\n  share: 0.5",
        5,
        "faults[0].share",
        ("faults[0] has no option 'share'", "0.5", "kind, at_s, for_s, error"),
    ),
    "no text as name": ("1: 2", 1, "1", ("'1'", "2")),
    "list as name": ("? [1]\n: 2", 1, "", ("whose name is a list or a mapping",)),
    "merge": ("<<: {ranks: 3}", 1, "<<", ("'<<'", "a dict")),
    "fault of no kind": ("faults:\n- at_s: 1", 2, "faults[0].kind", ("lacks kind", "'outage'")),
    "fault of unknown kind": (
        "faults:\n- at_s: 1\n  kind: store_is_gone",
        3,
        "faults[0].kind",
        ("kind='store_is_gone' is not allowed", "'crash'", "Did you mean 'store_gone'?"),
    ),
    "kind that is a mapping": ("faults: [{kind: {}}]", 1, "faults[0].kind", ("a mapping",)),
    "fault without time": (
        "faults:\n- {kind: group_restart, at_s: 1}\n- kind: outage\n  at_s: 1",
        3,
        "faults[1].for_s",
        ("faults[1] lacks for_s", "a finite number of seconds ≥ 0"),
    ),
    "fault that is a number": ("faults: [3]", 1, "faults[0]", ("faults[0]=3", "a mapping of a")),
    "faults that are a mapping": ("faults: {a: 1}", 1, "faults", ("a mapping is not", "a list")),
    "negative": (
        "faults:\n- kind: pause\n  ranks: [0]\n  at_s: 1\n  for_s: -3",
        5,
        "faults[0].for_s",
        ("faults[0].for_s=-3 is not allowed", "a finite number of seconds ≥ 0"),
    ),
    "negative rank": (
        "faults:\n- {kind: crash, at_s: 1,\n   ranks: [0,\n    -1]}",
        4,
        "faults[0].ranks[1]",
        ("=-1", "≥ 0"),
    ),
    "above": ("clocks:\n  rate: 3", 2, "clocks.rate", ("rate=3", "≥ 1 and ≤ 1.2")),
    "above one": ("store: {lost_answers: 1.5}", 1, "store.lost_answers", ("=1.5", "≤ 1")),
    "jitter of one": ("storage: {jitter: 1}", 1, "storage.jitter", ("=1 ", "< 1")),
    "no ranks": ("ranks: 0", 1, "ranks", ("ranks=0", "a whole number ≥ 1")),
    "too many ranks": ("ranks: 2000000", 1, "ranks", ("=2000000", "≤ 1000000")),
    "text as number": ("ends_at_s: soon", 1, "ends_at_s", ("='soon'", "seconds", "or null")),
    "time of day": ("ends_at_s: 1:30", 1, "ends_at_s", ("='1:30'", "seconds")),
    "truth as number": ("ranks: true", 1, "ranks", ("ranks=true", "a whole number")),
    "word as truth": ("may_go_alone: yes", 1, "may_go_alone", ("='yes'", "true or false")),
    "number as text": ("name: 3", 1, "name", ("name=3", "a text")),
    "half a rank": ("ranks: 2.5", 1, "ranks", ("ranks=2.5", "a whole number")),
    "list as number": ("ranks: [1, 2]", 1, "ranks", ("a list of 2", "a whole number")),
    "number as list": ("workload: {kinds: 1}", 1, "workload.kinds", ("kinds=1", "a list")),
    "no kinds": ("workload: {kinds: []}", 1, "workload.kinds", ("a list of 0", "at least 1")),
    "unknown choice": (
        "workload:\n  kinds:\n  - single\n  - both",
        4,
        "workload.kinds[1]",
        ("='both'", "'collective', 'joint', 'load', 'single'"),
    ),
    "config that is nothing": ("retry:", 1, "retry", ("retry=null", "a mapping")),
    "section that is a list": ("store: [1]", 1, "store", ("a list of 1", "a mapping")),
    "text in a config": (
        "breaker:\n  trip_failures: '3'",
        2,
        "breaker.trip_failures",
        ("='3'", "a whole number"),
    ),
    "infinite": ("ends_at_s: .inf", 1, "ends_at_s", ("ends_at_s=inf", "a finite number")),
    "overflow": ("ends_at_s: 1e999", 1, "ends_at_s", ("ends_at_s=inf", "a finite number")),
    "no number": ("ends_at_s: .nan", 1, "ends_at_s", ("ends_at_s=nan", "a finite number")),
    "minus infinity in a config": (
        "retry: {deadline_s: -.inf}",
        1,
        "retry.deadline_s",
        ("=-inf", "a finite number"),
    ),
    "hundreds of digits": (f"ends_at_s: {'9' * 400}", 1, "ends_at_s", ("of 1329 bits",)),
    "thousands of digits": (f"ranks: {'9' * 5000}", 1, "ranks", ("'9999", "no value of int")),
    "a long text": (f"ranks: {'a' * 5000}", 1, "ranks", ("aaa…", "a whole number")),
    "not of its type": ("ranks: !!int abc", 1, "ranks", ("'abc' is no value of int",)),
    "no truth": ("may_go_alone: !!bool 3", 1, "may_go_alone", ("'3' is no value of bool",)),
    "type by name": ("name: !!binary aGk=", 1, "name", ("'tag:yaml.org,2002:binary'", "a text")),
    "given twice": ("ranks: 2\nhosts: 1\nranks: 3", 3, "ranks", ("twice", "in line 1")),
    "given twice in a fault": (
        "faults:\n- kind: crash\n  kind: pause",
        3,
        "faults[0].kind",
        ("twice", "in line 2"),
    ),
    "more hosts than ranks": ("ranks: 2\nhosts: 3", 2, "hosts", ("hosts=3", "ranks=2")),
    "more permits than slots": (
        "breaker:\n  max_concurrent: 20",
        2,
        "breaker.max_concurrent",
        ("breaker.max_concurrent=20", "at most storage.slots=16", "Lower the first"),
    ),
    "fewer slots than permits": (
        "storage:\n  service_s: 1\n  slots: 8",
        3,
        "storage.slots",
        ("breaker.max_concurrent=16", "storage.slots=8"),
    ),
    "absent rank": (
        "ranks: 4\nfaults:\n- {kind: group_restart, at_s: 1}\n- {kind: crash, at_s: 1, ranks: [4]}",
        4,
        "faults[1].ranks",
        ("faults[1].ranks has 4", "from 0 to 3"),
    ),
    "absent host": (
        "faults:\n- {kind: storage_partition, at_s: 1, for_s: 1, hosts: [1]}",
        2,
        "faults[0].hosts",
        ("faults[0].hosts has 1", "hosts", "from 0 to 0"),
    ),
    "a refused rank that is absent": (
        "ranks: 2\nfaults:\n- {kind: refusal, at_s: 1, for_s: 1, ranks: [0, 2]}",
        3,
        "faults[0].ranks",
        ("faults[0].ranks has 2", "ranks", "from 0 to 1"),
    ),
    "a refusal that would pass": (
        "faults:\n- {kind: refusal, at_s: 1, for_s: 1, ranks: [0], error: reset}",
        2,
        "faults[0].error",
        ("error='reset'", "'auth', 'capacity', 'permanent'"),
    ),
    "nobody": ("faults:\n- {kind: crash, at_s: 1, ranks: []}", 2, "faults[0].ranks", ("nobody",)),
    "twice": (
        "faults:\n- {kind: crash, at_s: 1, ranks: [1, 2, 1]}",
        2,
        "faults[0].ranks",
        ("has 1 twice",),
    ),
    "relation of a config": (
        "breaker:\n  window_s: 90\n  view_max_age_s: 20",
        3,
        "breaker.view_max_age_s",
        ("breaker: view_max_age_s=20 must be less than open_for_s=10", "Lower the first"),
    ),
    "relation to a default": (
        "breaker:\n  window_s: 90\n\n  open_for_s: 2",
        4,
        "breaker.open_for_s",
        ("view_max_age_s=5 must be less than open_for_s=2",),
    ),
    "range of a config": (
        "retry:\n  max_attempts: 0",
        2,
        "retry.max_attempts",
        ("retry: max_attempts=0 is not allowed", "a whole number ≥ 1"),
    ),
    "a list": ("- 1\n- 2", 1, "", ("a list of 2 is no scenario", "a mapping")),
    "a number": ("# say\n3", 2, "", ("3 is no scenario", "a mapping")),
}


@pytest.mark.parametrize(
    ("text", "line", "field", "words"), BAD_FIELDS.values(), ids=BAD_FIELDS.keys()
)
def test_a_bad_field_is_named(text: str, line: int, field: str, words: tuple[str, ...]) -> None:
    """The error says where the field is, what is wrong with what was seen, and what is allowed."""
    error = refused(text)

    assert str(error).startswith(f"bad.yaml:{line}: ")
    assert (error.source, error.line, error.field) == ("bad.yaml", line, field)
    assert [word for word in words if word not in str(error)] == []
    assert len(str(error)) < 500


# Text; line that the error names; words that it has.
BAD_YAML = {
    "empty": ("", 1, ("holds nothing", "{}")),
    "comments": ("# one\n# two\n", 1, ("holds nothing", "{}")),
    "tab": ("breaker:\n\twindow_s: 3", 2, (r"'\t'", "indented with spaces")),
    "several documents": ("ranks: 2\n---\nranks: 3", 2, ("a single document", "another")),
    "open quote": ("name: 'x\nranks: 3", 2, ("quoted scalar", "unexpected end")),
    "open list": ("faults: [", 1, ("expected",)),
    "wrong indentation": ("store:\n  late_s: 1\n slots: 3", 3, ("expected",)),
    "control character": ("ranks: 2\nname: \x07", 2, (r"'\x07'", "does not allow")),
    "alias": ("store: &one {}\nstorage: *one", 2, ("alias", "write the value again")),
    "alias of itself": ("faults: &all [*all]", 1, ("alias",)),
    "depth": ("faults: " + "[" * 5000, 1, ("16 others", "deeper")),
    "a name for a type": ("ranks: !<x y> 3", 1, ("expected",)),
}


@pytest.mark.parametrize(("text", "line", "words"), BAD_YAML.values(), ids=BAD_YAML.keys())
def test_what_is_no_yaml_is_refused_with_its_line(
    text: str, line: int, words: tuple[str, ...]
) -> None:
    """The parser's own words, with file and line in front, and what a scenario is behind."""
    error = refused(text)

    assert str(error).startswith(f"bad.yaml:{line}: ")
    assert error.line == line
    assert [word for word in words if word not in str(error)] == []


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A wrong path is an error like every other: it names the file and the reason."""
    with pytest.raises(ScenarioError, match=r"absent\.yaml: it cannot be read: No such file"):
        read_scenario(tmp_path / "absent.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """The operating system's reason is told."""
    with pytest.raises(ScenarioError, match="it cannot be read: Is a directory"):
        read_scenario(tmp_path)


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    """A file of another encoding is refused where it stops being UTF-8."""
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"ranks: 2\nname: \xe9\n")

    with pytest.raises(ScenarioError, match=r"latin\.yaml:2: byte 15 of the file is no UTF-8"):
        read_scenario(path)


def test_nothing_is_constructed_from_a_type_by_name() -> None:
    """A file cannot make the program call anything."""
    text = "name: !!python/object/apply:os.system ['exit 3']"

    assert "name=a list of 1 is not allowed" in str(refused(text))


def outcome_of(text: str) -> Scenario | ScenarioError:
    """Return what reading a text ends with."""
    try:
        return parse_scenario(text)
    except ScenarioError as error:
        return error


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_a_scenario_or_a_scenario_error(text: str) -> None:
    """There is no text that ends in another error."""
    outcome = outcome_of(text)

    assert isinstance(outcome, Scenario) or str(outcome).startswith("scenario:")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["outage", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "at_s", "ranks", "slots"]), inner, max_size=3)
    ),
    max_leaves=6,
)
sections = [field.name for field in msgspec.structs.fields(Scenario)]


@given(st.dictionaries(st.sampled_from(sections), values, min_size=1, max_size=3))
def test_any_value_is_a_scenario_or_a_scenario_error_with_a_line(value: dict[str, Any]) -> None:
    """Whatever stands where: the error names the line."""
    text = msgspec.yaml.encode(value).decode()

    outcome = outcome_of(text)

    lines = range(1, text.count("\n") + 2)
    assert isinstance(outcome, Scenario) or outcome.line in lines


# Relations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ranks": 2, "hosts": 3}, "hosts"),
        ({"storage": Storage(slots=15)}, "breaker.max_concurrent"),
        ({"faults": (Crash(at_s=1, ranks=(8,)),)}, "faults[0].ranks"),
        ({"faults": (StorePartition(at_s=1, for_s=1, hosts=(0, 1)),)}, "faults[0].hosts"),
        ({"faults": (GroupRestart(at_s=1), Pause(at_s=1, for_s=1, ranks=()))}, "faults[1].ranks"),
    ],
    ids=["hosts", "slots", "rank", "host", "nobody"],
)
def test_a_scenario_made_by_a_program_is_held_to_its_relations(
    options: dict[str, Any], field: str
) -> None:
    """Also without a file, and also when it is changed: the error names the field."""
    for make in (Scenario, lambda **changes: msgspec.structs.replace(Scenario(), **changes)):
        with pytest.raises(ScenarioError) as caught:
            make(**options)

        assert caught.value.field == field
        assert isinstance(caught.value, ConfigError)
        assert (caught.value.source, caught.value.line) == ("", None)


# Writing --------------------------------------------------------------------------------------

seconds = st.floats(0, 1e9)
shares = st.floats(0, 1)


def structs(kind: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return instances of a kind with any subset of some fields, the others by default."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind(**given))


def some(numbers: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Return some of the first numbers, each at most once."""
    return st.lists(st.integers(0, numbers - 1), min_size=1, max_size=4, unique=True).map(tuple)


def faults(ranks: int, hosts: int) -> st.SearchStrategy[Any]:
    """Return faults of every kind in a world of so many ranks and hosts."""
    strike = {"at_s": seconds, "ranks": some(ranks), "effects": st.integers(0, 99)}
    lasting = {"at_s": seconds, "for_s": seconds}
    return st.one_of(
        st.builds(Outage, **lasting, error=st.sampled_from(get_args(OutageFailure))),
        st.builds(
            Brownout,
            **lasting,
            share=shares,
            slowdown=st.floats(1, 1e3),
            error=st.sampled_from(get_args(BrownoutFailure)),
        ),
        st.builds(
            Refusal,
            **lasting,
            ranks=some(ranks),
            error=st.sampled_from(get_args(RefusalError)),
        ),
        st.builds(Stray, at_s=seconds, ranks=some(ranks), twice=st.booleans()),
        st.builds(Crash, **strike),
        st.builds(Pause, **strike, for_s=seconds),
        st.builds(Interrupt, **strike),
        st.builds(StorePartition, **lasting, hosts=some(hosts)),
        st.builds(StoragePartition, **lasting, hosts=some(hosts)),
        st.builds(StoreGone, **lasting, comes_back_empty=st.booleans()),
        st.builds(GroupRestart, at_s=seconds),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw a scenario in which any field may differ from its default."""
    ranks = draw(st.integers(1, 64))
    hosts = draw(st.integers(1, ranks))
    permits = draw(st.integers(1, 64))
    breaker = structs(
        BreakerConfig,
        trip_failures=st.integers(1, 9),
        open_for_s=st.floats(8.5, 60),
        quorum_fraction=st.floats(1e-9, 1),
    )
    optional = {
        "name": st.text(),
        "ends_at_s": st.none() | seconds,
        "clocks": structs(Clocks, offset_s=seconds, rate=st.floats(1, 1.2)),
        "workload": structs(
            Workload,
            kinds=st.lists(st.sampled_from(get_args(Kind)), min_size=1, max_size=3).map(tuple),
            rounds=st.integers(1, 9),
            every_s=seconds,
            on_outage=st.sampled_from(["wait", "fail"]),
            when_open=st.sampled_from(["wait", "raise"]),
        ),
        "store": structs(Store, latency_s=seconds, lost_requests=shares, late_s=seconds),
        "retry": structs(RetryPolicy, max_attempts=st.integers(2, 99), deadline_s=st.floats(1, 9)),
        "budget": structs(BudgetConfig, retry_ratio=shares, retry_floor=st.integers(1, 99)),
        "admission": structs(AdmissionConfig, beat_every_s=st.floats(1e-9, 9.9)),
        "may_go_alone": st.booleans(),
        "faults": st.lists(faults(ranks, hosts), max_size=4).map(tuple),
    }
    given = draw(st.fixed_dictionaries({}, optional=optional))
    slots = permits + draw(st.integers(0, 3))
    return Scenario(
        ranks=ranks,
        hosts=hosts,
        breaker=dataclasses.replace(draw(breaker), max_concurrent=permits),
        storage=Storage(slots=slots, per_s=draw(seconds)),
        **given,
    )


@settings(max_examples=150)
@given(scenarios())
def test_what_is_written_is_read_back(scenario: Scenario) -> None:
    """Reading the text of a scenario gives an equal one, and its text again."""
    text = scenario_text(scenario)

    read = parse_scenario(text)

    assert read == scenario
    assert scenario_text(read) == text


def test_only_what_differs_is_written_in_the_order_of_the_fields() -> None:
    """The text is as short as a person would write it, flat lists on one line."""
    scenario = Scenario(
        faults=(
            Crash(ranks=(0, 3), at_s=12.5),
            Outage(for_s=60.0, at_s=10.0, error="hang"),
        ),
        breaker=BreakerConfig(open_for_s=12.0),
        storage=Storage(slots=16, service_s=0.00001),
        name="1e3",
        ranks=4,
    )

    assert scenario_text(scenario) == (
        "name: '1e3'\n"
        "ranks: 4\n"
        "storage:\n"
        "  service_s: 1.0e-05\n"
        "breaker:\n"
        "  open_for_s: 12.0\n"
        "faults:\n"
        "  - kind: crash\n"
        "    at_s: 12.5\n"
        "    ranks: [0, 3]\n"
        "  - kind: outage\n"
        "    at_s: 10.0\n"
        "    for_s: 60.0\n"
        "    error: hang\n"
    )


def test_the_defaults_are_an_empty_mapping() -> None:
    """Nothing differs, and the text can be read all the same."""
    assert scenario_text(Scenario()) == "{}\n"


# The table of fields --------------------------------------------------------------------------


def test_the_table_has_every_field_of_every_kind() -> None:
    """A field or a kind of fault that is added is in the table, with a range in words."""
    rows = {row.name: row for row in field_rows()}
    kinds = {kind.__struct_config__.tag: kind for kind in get_args(Fault)}
    expected = {f"{tag}.{name}" for tag, kind in kinds.items() for name in kind.__struct_fields__}
    expected |= {f"store.{name}" for name in Store.__struct_fields__}

    assert expected <= set(rows)
    assert all(row.allowed for row in rows.values())
    assert rows["pause.at_s"].default == "required"
    assert rows["store.timeout_s"].unit == "s"
    assert rows["storage.per_s"].unit == "1/s"
    assert rows["ends_at_s"].allowed == "a finite number of seconds ≥ 0 or null"
