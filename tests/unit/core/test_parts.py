# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a file is cut into parts."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lightning_resilience.core.parts import cut


MIB = 2**20
PART = 8 * MIB


@given(st.integers(1, 5 * 2**40))
def test_the_parts_cover_the_file_within_the_limits_of_protocol_and_memory(size_bytes: int) -> None:
    """At most 10,000 parts, none of them empty; 32 MiB under way, or a single part."""
    plan = cut(size_bytes, part_bytes=PART)

    assert plan.count <= 10_000
    assert (plan.count - 1) * plan.part_bytes < size_bytes <= plan.count * plan.part_bytes
    assert 1 <= plan.in_flight <= min(4, plan.count)
    assert plan.in_flight == 1 or plan.in_flight * plan.part_bytes <= 32 * MIB


def test_parts_grow_only_where_there_would_be_too_many() -> None:
    """The last file of short parts has exactly as many as the protocol allows."""
    most = cut(10_000 * PART, part_bytes=PART)
    more = cut(10_000 * PART + 1, part_bytes=PART)

    assert (most.part_bytes, most.count, most.in_flight) == (PART, 10_000, 4)
    assert (more.part_bytes, more.count, more.in_flight) == (2 * PART, 5_001, 2)
