# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a node copies, maps and keeps of checkpoints, and which of its ranks reads."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.node_cache import (
    Kept,
    Limits,
    Step,
    Watch,
    cache_key,
    is_copied,
    is_usable,
    may_map,
    next_step,
    pages_of,
    to_remove,
    watched,
)
from lightning_resilience.core.resolution import Inspection


LOCAL = ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay")
NOT_LOCAL = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.s3fs", "9p", "virtiofs"),
    *("", "heard of by nobody", None),
)
BOOLS = (False, True)
SEEN = Inspection(path="s3://b/a.ckpt", size_bytes=100, digest="00ff")


@pytest.mark.parametrize("kind", LOCAL)
def test_only_a_local_disk_is_read_in_place(kind: str) -> None:
    """No other node writes there."""
    assert not is_copied(kind)


@pytest.mark.parametrize("kind", NOT_LOCAL)
def test_whatever_is_not_known_to_be_local_is_copied(kind: str | None) -> None:
    """A shared filesystem, one of a kind that nobody knows, and storage that is no filesystem."""
    assert is_copied(kind)


@pytest.mark.parametrize("kind", [kind for kind in (*LOCAL, *NOT_LOCAL) if kind is not None])
def test_a_map_needs_all_of_its_conditions(kind: str) -> None:
    """A local disk, records as they are in memory, and somebody who lets go of it."""
    for is_plain, is_let_go in product(BOOLS, BOOLS):
        expected = kind in LOCAL and is_plain and is_let_go

        assert may_map(kind=kind, is_plain=is_plain, is_let_go=is_let_go) is expected


USED = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(st.integers(0, 10), st.integers(0, 10), USED)
def test_the_pages_of_a_map_are_those_of_which_something_is_in_use(
    first: int, count: int, used: list[tuple[int, int]]
) -> None:
    """Every such page once, no other one, and runs that do not touch."""
    place = (4 * first, 4 * (first + count))

    runs = pages_of(place, used=used, page_bytes=4)

    pages = [page for start, end in runs for page in range(start // 4, end // 4)]
    assert pages == [
        page
        for page in range(first, first + count)
        if any(start < 4 * (page + 1) and 4 * page < end and start < end for start, end in used)
    ]
    assert all(before[1] < after[0] for before, after in pairwise(runs))


# The name of an entry -----------------------------------------------------------------------------


def test_the_same_content_has_the_same_name_in_every_start() -> None:
    """What an earlier start has fetched is found."""
    first = cache_key(SEEN.path, expected=SEEN, common="one")

    assert cache_key(SEEN.path, expected=SEEN, common="two") == first


@pytest.mark.parametrize(
    "expected",
    [None, Inspection(path=SEEN.path), Inspection(path=SEEN.path, size_bytes=100)],
    ids=["nobody looked", "nothing is known", "a format without checksums"],
)
def test_what_has_no_checksums_has_a_new_name_for_each_load(expected: Inspection | None) -> None:
    """Nobody could tell whether it is the same."""
    first = cache_key(SEEN.path, expected=expected, common="one")

    assert cache_key(SEEN.path, expected=expected, common="one") == first
    assert cache_key(SEEN.path, expected=expected, common="two") != first


def test_another_place_size_or_content_has_another_name() -> None:
    """None of the three is enough."""
    urls = ("s3://b/a.ckpt", "s3://b/c.ckpt")
    keys = {
        cache_key(url, expected=Inspection(path=url, size_bytes=size, digest=digest), common="")
        for url, size, digest in product(urls, (1, 2), ("00", "01"))
    }

    assert len(keys) == 8


DIGESTS = st.sampled_from(["", "00", "01", "xxh3-128:00", "xxh3-128:01"])
INSPECTIONS = st.builds(
    Inspection, path=st.just(SEEN.path), size_bytes=st.integers(1, 2), digest=DIGESTS, saved=DIGESTS
)


@given(INSPECTIONS, INSPECTIONS)
def test_no_two_contents_have_the_same_name(one: Inspection, other: Inspection) -> None:
    """The digest of all bytes counts where it is known; and what has none shares with nobody."""
    keys = [
        cache_key(SEEN.path, expected=seen, common=common)
        for seen, common in ((one, "one"), (other, "other"))
    ]

    stands = [(seen.size_bytes, seen.saved or seen.digest) for seen in (one, other)]
    assert (keys[0] == keys[1]) == (stands[0] == stands[1] and bool(stands[0][1]))


@pytest.mark.parametrize("known", [100, None])
def test_a_file_of_another_length_is_not_used(known: int | None) -> None:
    """Where a length is known."""
    expected = Inspection(path=SEEN.path, size_bytes=known)

    assert [is_usable(size, expected=expected) for size in (100, 99, None)] == [
        True,
        known is None,
        False,
    ]
    assert is_usable(0, expected=None)


# Who reads ----------------------------------------------------------------------------------------


def test_every_look_leads_to_one_step() -> None:
    """All combinations: what is there is used, a lock is enough to read, silence to take over."""
    for is_there, is_refused, has_lock, silent_s in product(BOOLS, BOOLS, BOOLS, (0, 4.9, 5, 9)):
        step = next_step(
            is_there=is_there,
            is_refused=is_refused,
            has_lock=has_lock,
            silent_s=silent_s,
            patience_s=5,
        )

        if is_there:
            assert step is Step.USE
        elif is_refused:
            assert step is Step.REFUSE
        elif has_lock:
            assert step is Step.READ
        else:
            assert step is (Step.TAKE_OVER if silent_s >= 5 else Step.WAIT)


LOOKS = st.lists(
    st.tuples(st.floats(0, 10), st.sampled_from([None, 1, 2])), min_size=1, max_size=30
)


@given(LOOKS)
def test_silence_is_what_the_watching_rank_has_seen_of_one_mark(
    looks: list[tuple[float, int | None]],
) -> None:
    """The time since it first saw the mark that it sees now, and nothing while nobody reads."""
    now_s = 0.0
    watch = Watch(since_s=now_s)
    history: list[tuple[float, int | None]] = [(now_s, None)]
    for elapsed_s, mark in looks:
        now_s += elapsed_s
        watch = watched(watch, mark, now_s=now_s)
        history.append((now_s, mark))
        run_began_s = now_s
        for at_s, seen in reversed(history):
            if seen != mark:
                break
            run_began_s = at_s

        expected = 0.0 if mark is None else now_s - run_began_s
        assert watch.silent_s(now_s) == pytest.approx(expected)


@given(LOOKS)
def test_a_reader_that_goes_on_is_never_taken_over(looks: list[tuple[float, int | None]]) -> None:
    """With another mark at every look, however far apart, silence is never counted."""
    watch, now_s = Watch(since_s=0.0), 0.0
    for number, (elapsed_s, _) in enumerate(looks):
        now_s += elapsed_s
        watch = watched(watch, number, now_s=now_s)

        assert watch.silent_s(now_s) == 0.0


# What is kept -------------------------------------------------------------------------------------

LIMITS = Limits(max_bytes=100, max_age_s=1000, in_use_s=10)
NOW_S = 5000.0


def kept(name: str, size_bytes: int, unused_s: float) -> Kept:
    """Return a file that was last used so long ago."""
    return Kept(name=name, size_bytes=size_bytes, used_s=NOW_S - unused_s)


def removed(*files: Kept, incoming_bytes: int = 0, free_bytes: int = 10**6) -> list[str]:
    """Return what goes."""
    return to_remove(
        files,
        now_s=NOW_S,
        incoming_bytes=incoming_bytes,
        free_bytes=free_bytes,
        limits=LIMITS,
    )


def test_what_nobody_uses_any_more_goes() -> None:
    """Whether there is room or not."""
    assert removed(kept("old", 1, 1001), kept("new", 1, 999)) == ["old"]


def test_for_a_file_that_comes_in_the_least_lately_used_go() -> None:
    """No more of them than have to."""
    files = [kept("b", 40, 200), kept("a", 40, 300), kept("c", 20, 100)]

    assert removed(*files, incoming_bytes=40) == ["a"]
    assert removed(*files, incoming_bytes=41) == ["a", "b"]


def test_a_full_disk_makes_them_go_as_well() -> None:
    """What is freed counts as free."""
    files = [kept("a", 10, 300), kept("b", 10, 200)]

    assert removed(*files, incoming_bytes=15, free_bytes=5) == ["a"]
    assert removed(*files, incoming_bytes=16, free_bytes=5) == ["a", "b"]


def test_what_was_found_just_now_stays() -> None:
    """Somebody is about to open it."""
    assert removed(kept("a", 100, 9), incoming_bytes=100, free_bytes=0) == []


FILES = st.lists(
    st.builds(kept, st.text("abc", min_size=1), st.integers(0, 60), st.floats(-5, 2000)),
    max_size=12,
    unique_by=lambda file: file.name,
)


@given(FILES, st.integers(0, 120), st.integers(0, 120))
def test_no_more_goes_than_the_limits_ask_for(
    files: list[Kept], incoming_bytes: int, free_bytes: int
) -> None:
    """Within the limits afterwards, but for what is in use; and nothing went in vain."""
    gone = removed(*files, incoming_bytes=incoming_bytes, free_bytes=free_bytes)

    by_name = {file.name: file for file in files}
    stay = [file for file in files if file.name not in gone]
    kept_bytes = sum(file.size_bytes for file in stay)
    freed = free_bytes + sum(by_name[name].size_bytes for name in gone)
    is_crowded = kept_bytes + incoming_bytes > LIMITS.max_bytes or incoming_bytes > freed
    for file in stay:
        assert NOW_S - file.used_s <= LIMITS.max_age_s
        assert not is_crowded or NOW_S - file.used_s <= LIMITS.in_use_s
    uses = [by_name[name].used_s for name in gone]
    assert uses == sorted(uses)
    young = [by_name[name] for name in gone if NOW_S - by_name[name].used_s <= LIMITS.max_age_s]
    if young:
        # Without the last of them there would not have been room.
        last = young[-1].size_bytes
        had_room = kept_bytes + last + incoming_bytes <= LIMITS.max_bytes
        assert not (had_room and incoming_bytes <= freed - last)
