# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a file is cut into parts, whole or while it is still being written."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lightning_resilience.core.parts import CONNECTIONS, Lengths, cut


MIB = 2**20
S3 = Lengths(single_bytes=16 * MIB, shortest_bytes=5 * MIB, longest_bytes=16 * MIB)
SIZES = st.one_of(st.integers(1, 5 * 2**40), st.integers(1, 2**31))


@given(SIZES)
def test_the_parts_cover_the_file_within_the_limits_of_the_protocol(size_bytes: int) -> None:
    """At most 10,000 parts, one after the other, none empty, and none but the last too short."""
    plan = cut(size_bytes, S3)
    count = plan.ready(size_bytes, is_whole=True)
    first, last = plan.span(1, size_bytes), plan.span(count, size_bytes)

    assert plan.holds(size_bytes)
    assert 1 <= count <= 10_000
    assert plan.part_bytes >= S3.shortest_bytes
    assert first == (0, min(plan.part_bytes, size_bytes))
    assert last[0] == (count - 1) * plan.part_bytes
    assert last[1] >= 1
    assert sum(last) == size_bytes


@given(SIZES)
def test_what_is_under_way_fits_into_64_mib_and_leaves_connections_to_others(
    size_bytes: int,
) -> None:
    """Six MiB for each connection; and a request that is asked meanwhile does not wait for one."""
    plan = cut(size_bytes, S3)

    assert 1 <= plan.in_flight * 6 * MIB <= 64 * MIB
    assert plan.in_flight < CONNECTIONS


@given(st.integers(17 * MIB, 100 * 2**30), st.integers(0, 2**20))
def test_no_part_is_left_for_a_round_of_its_own(expected_bytes: int, more_bytes: int) -> None:
    """Where the file is a little longer than was expected, its parts still fill whole rounds."""
    plan = cut(expected_bytes, S3)
    size_bytes = expected_bytes + min(more_bytes, expected_bytes // 64)
    count = plan.ready(size_bytes, is_whole=True)
    rounds = -(-count // plan.in_flight)

    assert rounds <= max(1, -(-(expected_bytes + expected_bytes // 64) // (160 * MIB)))


def test_parts_grow_beyond_the_longest_only_where_there_would_be_too_many() -> None:
    """Up to 156 GiB they are no longer than 16 MiB."""
    most = cut(10_000 * 16 * MIB, S3)
    more = cut(10_000 * 16 * MIB + 1, S3)

    assert most.part_bytes == 16 * MIB
    assert more.part_bytes == 16 * MIB + 1


@given(SIZES, st.lists(st.integers(1, 64 * MIB), max_size=50))
def test_a_growing_file_has_only_whole_parts_and_never_fewer(
    expected_bytes: int, steps: list[int]
) -> None:
    """None is begun before the file is too long for one request; the end makes the last one."""
    plan = cut(expected_bytes, S3)
    size_bytes, before = 0, 0

    for step in steps:
        size_bytes += step
        ready = plan.ready(size_bytes, is_whole=False)
        assert before <= ready
        assert ready * plan.part_bytes <= size_bytes
        assert ready == 0 or size_bytes > S3.single_bytes
        before = ready

    assert before <= plan.ready(size_bytes, is_whole=True)


def test_a_file_that_outgrows_what_was_expected_is_not_held() -> None:
    """The protocol takes no more parts, so it has to be sent anew in longer ones."""
    plan = cut(20 * MIB, S3)
    most = plan.part_bytes * 10_000

    assert plan.holds(most)
    assert not plan.holds(most + 1)
    assert plan.ready(most + plan.part_bytes, is_whole=False) == 10_000
