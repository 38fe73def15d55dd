# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet go on under one name and number, whatever each of them has missed."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lightning_resilience.core.meeting import Offer, Terms, agree


OFFERS = st.lists(
    st.builds(
        Offer,
        incarnation=st.sampled_from(["", "a", "b"]),
        seq=st.integers(0, 9),
        world_size=st.integers(0, 4),
    ),
    min_size=1,
    max_size=4,
)


@given(offers=OFFERS)
def test_all_ranks_have_the_same_terms(offers: list[Offer]) -> None:
    """They differ in the rank only, and nobody is sent back to a number that it has used."""
    terms = agree(offers, nonce="new")

    assert [each.rank for each in terms] == list(range(len(offers)))
    assert len({(each.incarnation, each.seq, each.world_size) for each in terms}) == 1
    assert {each.world_size for each in terms} == {len(offers)}
    used = [offer.seq for offer in offers if offer.incarnation == terms[0].incarnation]
    assert terms[0].seq >= max(used, default=0)


def test_ranks_that_know_each_other_go_on() -> None:
    """One that has missed an operation is brought up to the others."""
    offers = [Offer(incarnation="a", seq=seq, world_size=2) for seq in (4, 6)]

    terms = agree(offers, nonce="new")

    assert terms[0] == Terms(incarnation="a", seq=6, world_size=2, rank=0)


def test_ranks_from_different_beginnings_begin_anew() -> None:
    """Also one that has worked with others, or with more of them, and one that never has."""
    known = Offer(incarnation="a", seq=4, world_size=2)
    strangers = (
        Offer(),
        Offer(incarnation="b", seq=4, world_size=2),
        Offer(incarnation="a", seq=4, world_size=3),
    )

    names = [agree([known, stranger], nonce="new")[0] for stranger in strangers]

    assert {(each.incarnation, each.seq) for each in names} == {("new", 0)}


def test_fewer_ranks_than_before_begin_anew() -> None:
    """All come from the same beginning, and one of them is not there."""
    offers = [Offer(incarnation="a", seq=4, world_size=3)] * 2

    assert agree(offers, nonce="new")[1].incarnation == "new"
