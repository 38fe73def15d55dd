# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which request is waited for before a name is used again."""

from __future__ import annotations

import pytest

from lightning_resilience.core.landings import Request, blocks, patience_s, refusal


WRITE = Request(key="file:///run/a.ckpt")
REMOVAL = Request(key="file:///run/a.ckpt", is_removal=True, is_sent=True)


def earlier(*, is_sent: bool, is_abandoned: bool) -> Request:
    """A write that has not ended."""
    return Request(key=WRITE.key, is_sent=is_sent, is_abandoned=is_abandoned)


@pytest.mark.parametrize("later", [WRITE, REMOVAL], ids=["write", "removal"])
@pytest.mark.parametrize(
    ("is_sent", "is_abandoned", "waited_for"),
    [(False, False, True), (True, False, True), (True, True, True), (False, True, False)],
)
def test_a_write_is_waited_for_unless_it_can_never_be_sent(
    later: Request,
    is_sent: bool,  # noqa: FBT001 - a parameter
    is_abandoned: bool,  # noqa: FBT001 - a parameter
    waited_for: bool,  # noqa: FBT001 - a parameter
) -> None:
    """Carried out late, it would replace what is newer, or bring back what was removed."""
    assert blocks(earlier(is_sent=is_sent, is_abandoned=is_abandoned), later) == waited_for


def test_a_removal_is_waited_for_by_writes_only() -> None:
    """Two removals want the same; one that is late would remove what was written since."""
    assert blocks(REMOVAL, WRITE)
    assert not blocks(REMOVAL, REMOVAL)


@pytest.mark.parametrize(
    ("key", "waited_for"),
    [
        ("file:///run/a.ckpt", True),
        ("file:///run/a.ckpt/shard-0", True),
        ("file:///run", True),
        ("file:///run/a.ckpt2", False),
        ("file:///run/.resilience/a.ckpt.json", False),
        ("file:///run2", False),
    ],
)
def test_a_directory_is_all_that_is_below_it(key: str, waited_for: bool) -> None:  # noqa: FBT001 - a parameter
    """Names that only begin alike have nothing to do with each other."""
    assert blocks(WRITE, Request(key=key)) == waited_for
    assert blocks(Request(key=key), WRITE) == waited_for


def test_a_wait_ends_before_it_is_a_stall() -> None:
    """So it is told from one, by an error that names what it was about."""
    assert 0 < patience_s(60.0) < 60.0


def test_the_refusal_says_what_has_not_ended() -> None:
    """And for how long it was waited for, and what can be done."""
    gone = refusal(earlier(is_sent=True, is_abandoned=True), shown="s3://b/a.ckpt", waited_s=30.0)
    busy = refusal(REMOVAL, shown="s3://b/a.ckpt", waited_s=0.25)

    assert "s3://b/a.ckpt" in gone
    assert "a write of it was given up after it was sent" in gone
    assert "within 30 s" in gone
    assert "a removal of it is under way" in busy
    assert "within 0.25 s" in busy
