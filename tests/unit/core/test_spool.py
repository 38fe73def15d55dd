# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What waits on a node, in which order it goes, and when it is too much."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.manifest import Manifest
from lightning_resilience.core.spool import (
    DEFERRABLE,
    Item,
    Spool,
    SpoolConfig,
    diverts,
    flush_s,
    is_of_another_training,
    is_outdated,
    is_spooled,
    outage_policy,
    pause_s,
    plan_for,
    refusal,
    spooled_detail,
    statement,
)
from lightning_resilience.core.spooled import SpoolEntry, may_be_spooled
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CheckpointError,
    CircuitOpenError,
    ConfigError,
    RetriesExhaustedError,
)


CONFIG = SpoolConfig(spool_max_items=3, spool_max_bytes=100, max_unpublished_s=50.0)
DIGEST = "xxh3-128:" + "0" * 32


def item(path: str, number: int, *, since_s: float = 0.0, size_bytes: int = 10) -> Item:
    """A checkpoint that waits."""
    return Item(name=f"n{number}", path=path, number=number, size_bytes=size_bytes, since_s=since_s)


def spool(*items: Item) -> Spool:
    """A spool with some."""
    found = Spool()
    for each in items:
        found = found.added(each)
    return found


def entry(
    path: str = "/c/a",
    *,
    step: int | None = 4,
    number: int = 1,
    digest: str = DIGEST,
    training: str = "",
) -> SpoolEntry:
    """A record."""
    said = {"number": number, "step": step, "training": training}
    return SpoolEntry(path=path, size_bytes=10, digest=digest, **said)  # type: ignore[arg-type]


def age(record: SpoolEntry) -> tuple[int, int]:
    """How new it is."""
    return (-1 if record.step is None else record.step, record.number)


# Order -------------------------------------------------------------------------------------------


def test_the_earliest_goes_first() -> None:
    """In the order in which they came."""
    waiting = spool(item("/c/a", 1), item("/c/b", 2))

    first = waiting.first()

    assert first is not None
    assert first.path == "/c/a"
    assert waiting.without(first).first() == item("/c/b", 2)
    assert Spool().first() is None


@given(
    paths=st.lists(st.sampled_from("abc"), max_size=12),
    sent=st.sets(st.integers(1, 12), max_size=4),
    data=st.data(),
)
def test_only_earlier_ones_of_the_same_path_are_superseded(
    paths: list[str], sent: set[int], data: st.DataObject
) -> None:
    """Never one of another path, a later one, or one that is being sent."""
    waiting = spool(*(item(path, number) for number, path in enumerate(paths, 1)))
    for each in waiting.items:
        if each.number in sent:
            waiting = waiting.sending(each, is_sent=True)
    path, before = data.draw(st.sampled_from("abc")), data.draw(st.integers(1, 13))

    gone = waiting.superseded(path, before=before)

    expected = [
        each.number
        for each in waiting.items
        if each.path == path and each.number < before and each.number not in sent
    ]
    assert [each.number for each in gone] == expected


def test_what_is_sent_may_wait_again() -> None:
    """A publication that was not carried out leaves it where it was."""
    mine = item("/c/a", 1)
    waiting = spool(mine).sending(mine, is_sent=True)

    assert waiting.superseded("/c/a", before=9) == ()
    assert waiting.sending(mine, is_sent=False).superseded("/c/a", before=9) == (mine,)
    assert waiting.has(mine)
    assert waiting.holds("/c/a")
    assert not waiting.without(mine).has(mine)


# Bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "path", "free_bytes", "now_s", "why"),
    [
        ((), "/c/a", 1000, 0.0, ""),
        ((item("a", 1), item("b", 2)), "c", 1000, 0.0, ""),
        ((item("a", 1), item("b", 2), item("c", 3)), "d", 1000, 0.0, "spool_max_items=3"),
        ((item("a", 1), item("b", 2), item("c", 3)), "c", 1000, 0.0, ""),
        ((item("a", 1, size_bytes=50),), "b", 1000, 0.0, ""),
        ((item("a", 1, size_bytes=51),), "b", 1000, 0.0, "spool_max_bytes=100"),
        ((), "a", 0, 0.0, "0 are free"),
        ((item("a", 1),), "b", 1000, 49.9, ""),
        ((item("a", 1),), "b", 1000, 50.0, "max_unpublished_s=50"),
    ],
)
def test_a_bound_that_is_reached_is_named(
    items: tuple[Item, ...], path: str, free_bytes: int, now_s: float, why: str
) -> None:
    """Empty where there is room; a later one of a path that waits takes no more room."""
    told = refusal(spool(*items), CONFIG, path, free_bytes=free_bytes, now_s=now_s)

    assert bool(told) is bool(why)
    assert why in told


@pytest.mark.parametrize(
    ("waiting", "size_bytes", "is_refused"),
    [(spool(), 100, False), (spool(), 101, True), (spool(item("a", 1, size_bytes=40)), 61, True)],
)
def test_one_that_is_too_long_by_itself_does_not_wait(
    waiting: Spool,
    size_bytes: int,
    is_refused: bool,  # noqa: FBT001 - data
) -> None:
    """The bound holds for the first of all as well, and for one that is longer than the others."""
    told = refusal(waiting, CONFIG, "b", free_bytes=1000, now_s=0.0, size_bytes=size_bytes)

    assert bool(told) is is_refused


def test_by_default_half_of_the_disk_is_left_to_others() -> None:
    """What is free and what is spooled, together."""
    config = SpoolConfig()
    waiting = spool(item("a", 1, size_bytes=100))

    assert not refusal(waiting, config, "b", free_bytes=300, now_s=0.0)
    assert "spool_max_bytes=199" in refusal(waiting, config, "b", free_bytes=299, now_s=0.0)


def test_one_that_is_being_sent_makes_no_room_for_its_successor() -> None:
    """Both are on the disk until it is sent."""
    mine = item("a", 1)
    full = replace(CONFIG, spool_max_items=1)

    assert not refusal(spool(mine), full, "a", free_bytes=1000, now_s=0.0)
    sent = spool(mine).sending(mine, is_sent=True)
    assert refusal(sent, full, "a", free_bytes=1000, now_s=0.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"spool_max_items": 0},
        {"spool_max_bytes": 0},
        {"max_unpublished_s": 0.0},
        {"flush_timeout_s": float("nan")},
        {"same_path_interval_s": -0.1},
    ],
)
def test_an_option_out_of_range_is_refused(bad: dict[str, float]) -> None:
    """By its name."""
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SpoolConfig(**bad)  # type: ignore[arg-type] # that is the point


# Policy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CircuitOpenError("open", dependency="d", retry_after_s=None, epoch=1, reason="r"), True),
        (RetriesExhaustedError("r", attempts=3, reason="r", failure="transient"), True),
        (RetriesExhaustedError("r", attempts=3, reason="r", failure="throttle"), True),
        (RetriesExhaustedError("r", attempts=3, reason="r", failure="permanent"), False),
        (RetriesExhaustedError("r", attempts=3, reason="r", failure="capacity"), False),
        (RetriesExhaustedError("r", attempts=3, reason="r", failure="unknown"), False),
        (CheckpointError("nothing is there"), False),
        (OSError("disk"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_an_outage_is_waited_out_on_the_node(error: BaseException, expected: bool) -> None:  # noqa: FBT001 - data
    """What repeating does not help would wait there for ever."""
    assert diverts(error) is expected


def test_an_empty_budget_is_an_outage_as_well() -> None:
    """The job has no retry left, and storage may be well later."""
    assert diverts(BudgetExhaustedError("b", dependency="d"))


@pytest.mark.parametrize(
    ("on_outage", "op", "is_saving"),
    [
        *itertools.product(
            ("spool", "wait", "skip", "fail"),
            ("save", "exists", "remove", "link", "load", "resolve", "list", "pause"),
            (False, True),
        )
    ],
)
def test_the_policy_of_each_operation(on_outage: str, op: str, is_saving: bool) -> None:  # noqa: FBT001 - data
    """What has another way goes on; what is read or searched for waits, unless all is to fail."""
    policy = outage_policy(on_outage, op=op, is_saving=is_saving)

    if on_outage in {"wait", "fail"}:
        assert policy == on_outage
    elif on_outage == "spool":
        assert policy == ("proceed" if op in DEFERRABLE else "wait")
    elif op == "remove":
        assert policy == "proceed"
    else:
        assert policy == ("fail" if is_saving or op == "save" else "wait")


@pytest.mark.parametrize(
    ("written_at_s", "interval_s", "expected"),
    [(None, 1.0, 0.0), (10.0, 1.0, 0.75), (9.5, 1.0, 0.25), (9.0, 1.0, 0.0), (10.25, 0.0, 0.0)],
)
def test_a_name_is_left_alone_after_it_was_written(
    written_at_s: float | None, interval_s: float, expected: float
) -> None:
    """For the interval, and not at all with an interval of 0."""
    config = SpoolConfig(same_path_interval_s=interval_s)

    assert pause_s(written_at_s, config, now_s=10.25) == expected


def test_all_ranks_are_told_that_a_save_was_spooled() -> None:
    """By what they are told of it, which is a digest otherwise."""
    assert is_spooled(spooled_detail(DIGEST))
    assert not is_spooled(DIGEST)
    assert not is_spooled("")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/c/step=4.ckpt", True),
        ("/c/last.ckpt", True),
        ("/root/.lr_find_1.ckpt", False),
        ("s3://b/.scale_batch_size_2.ckpt", False),
        ("/tmp/.hidden/step=4.ckpt", True),
    ],
)
def test_a_tuners_temporary_file_does_not_wait(path: str, expected: bool) -> None:  # noqa: FBT001 - data
    """Its own name begins with a dot."""
    assert may_be_spooled(path) is expected


def test_the_wait_at_the_end_is_bounded() -> None:
    """By the option, and by half of what is left where the process was told to stop."""
    config = SpoolConfig(flush_timeout_s=100.0)

    assert flush_s(config, left_s=None) == 100.0
    assert flush_s(config, left_s=30.0) == 15.0
    assert flush_s(config, left_s=1000.0) == 100.0
    assert flush_s(config, left_s=-3.0) == 0.0


def test_what_is_left_is_told_with_its_place() -> None:
    """And what becomes of it."""
    one, two = ("s3://b/a", "/spool/1"), ("s3://b/c", "/spool/2")

    assert statement([one]).startswith("1 checkpoint could not be published")
    assert "s3://b/a lies at /spool/1" in statement([one])
    assert "2 checkpoints" in statement([one, two])
    assert "publishes them" in statement([one, two])


# The next start ----------------------------------------------------------------------------------


def test_of_each_path_the_newest_is_published() -> None:
    """By its step, whatever node it is on; the older one is of no use any more."""
    old, new = entry(step=4), entry(step=8)
    other = entry("/c/b", step=2)

    plan = plan_for([(1, "x", new), (0, "y", old), (1, "z", other)])

    assert plan.publish == {1: ("z", "x")}
    assert plan.drop == {0: ("y",)}


@given(
    found=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.uuids().map(str),
            st.builds(
                entry,
                st.sampled_from(["/c/a", "/c/b"]),
                step=st.none() | st.integers(0, 5),
                number=st.integers(1, 3),
            ),
        ),
        max_size=8,
    )
)
def test_nothing_is_forgotten_and_nothing_newer_dropped(
    found: list[tuple[int, str, SpoolEntry]],
) -> None:
    """Each is published or replaced by one of its path that is at least as new."""
    plan = plan_for(found)

    published = {name for names in plan.publish.values() for name in names}
    dropped = {name for names in plan.drop.values() for name in names}
    assert published | dropped == {name for _, name, _ in found}
    assert not published & dropped
    steps = {name: one for _, name, one in found}
    for path in ("/c/a", "/c/b"):
        mine = [name for name in published if steps[name].path == path]
        assert len(mine) == bool([one for one in steps.values() if one.path == path])
        for name in dropped:
            if steps[name].path == path:
                newest = steps[mine[0]]
                assert age(newest) >= age(steps[name])


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (None, False),
        (Manifest(path="a", size_bytes=10, digest=DIGEST, step=4), False),
        (Manifest(path="a", size_bytes=11, digest=DIGEST, step=5), True),
        (Manifest(path="a", size_bytes=11, digest=DIGEST, step=4), False),
        (Manifest(path="a", size_bytes=11, digest=DIGEST, step=3), False),
        (Manifest(path="a", size_bytes=11, digest=DIGEST), False),
    ],
)
def test_what_storage_has_is_left_where_it_is_newer(
    there: Manifest | None,
    expected: bool,  # noqa: FBT001 - data
) -> None:
    """Without a manifest nothing says that it is any good, and of the same this copy is."""
    assert is_outdated(entry(step=4), there) is expected


def test_the_older_of_two_trainings_is_not_dropped() -> None:
    """It may have gone less far and be the one that is wanted; of its own it would be dropped."""
    other, mine, older = (
        entry(step=8, training="a"),
        entry(step=4, training="b"),
        entry(step=2, training="a"),
    )

    plan = plan_for([(0, "x", other), (0, "y", mine), (1, "z", older)])

    assert plan.publish == {0: ("x",)}
    assert plan.drop == {1: ("z",)}


@pytest.mark.parametrize(
    ("mine", "there", "expected"),
    [("a", "b", True), ("a", "a", False), ("", "b", False), ("a", "", False), ("a", None, False)],
)
def test_steps_order_what_is_of_one_training(
    mine: str,
    there: str | None,
    expected: bool,  # noqa: FBT001 - data
) -> None:
    """And what names none, for want of anything else."""
    manifest = None
    if there is not None:
        manifest = Manifest(path="a", size_bytes=10, digest=DIGEST, step=8, training=there)

    assert is_of_another_training(entry(training=mine), manifest) is expected


def test_a_record_survives_its_file() -> None:
    """What is written is what is read."""
    record = entry()

    assert msgspec.json.decode(msgspec.json.encode(record), type=SpoolEntry) == record
