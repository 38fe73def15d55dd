# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a file is cut into parts."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lightning_resilience.core.parts import cut


MIB = 2**20
PART = 16 * MIB


@given(st.integers(1, 5 * 2**40))
def test_the_parts_cover_the_file_within_the_limit_of_the_protocol(size_bytes: int) -> None:
    """At most 10,000 parts, none of them empty, and no more workers than parts."""
    plan = cut(size_bytes, part_bytes=PART)

    assert plan.count <= 10_000
    assert (plan.count - 1) * plan.part_bytes < size_bytes <= plan.count * plan.part_bytes
    assert plan.in_flight == min(4, plan.count)


def test_parts_grow_only_where_there_would_be_too_many() -> None:
    """The last file of short parts has exactly as many as the protocol allows."""
    most = cut(10_000 * PART, part_bytes=PART)
    more = cut(10_000 * PART + 1, part_bytes=PART)

    assert (most.part_bytes, most.count) == (PART, 10_000)
    assert (more.part_bytes, more.count) == (2 * PART, 5_001)
