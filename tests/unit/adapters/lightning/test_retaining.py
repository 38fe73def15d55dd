# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one rank knows of its checkpoints, by whatever names they are called."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.lightning.retaining import Retaining
from lightning_resilience.core.retention import Decision
from lightning_resilience.errors import CallTimeoutError
from lightning_resilience.runtime.calls import Token


if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of a checkpoint callback; ``link`` beside it is the same."""
    folder = tmp_path.resolve() / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    return folder


@pytest.fixture
def retaining(folder: Path) -> Retaining:
    """One rank's, with that directory."""
    retaining = Retaining()
    retaining.directories = lambda: [str(folder)]
    return retaining


def test_a_save_that_succeeds_lets_the_older_one_go(retaining: Retaining, folder: Path) -> None:
    """And one that fails does not."""
    with retaining.saving(f"{folder}/a.ckpt"):
        pass
    with contextlib.suppress(PermissionError), retaining.saving(f"{folder}/b.ckpt"):
        raise PermissionError
    removal = retaining.removal(f"{folder}/a.ckpt")

    assert retaining.decide(removal) is Decision.WAIT
    with retaining.saving(f"{folder}/c.ckpt"):
        pass
    assert retaining.decide(removal) is Decision.REMOVE


def test_what_was_handed_over_counts_once_it_is_written(retaining: Retaining, folder: Path) -> None:
    """Not before: it may fail yet."""
    with retaining.handing_over(f"{folder}/b.ckpt"):
        pass
    removal = retaining.removal(f"{folder}/a.ckpt")
    before = retaining.decide(removal)

    with retaining.writing(f"{folder}/b.ckpt"):
        pass

    assert (before, retaining.decide(removal)) == (Decision.WAIT, Decision.REMOVE)


def test_what_could_not_be_handed_over_is_not_waited_for(
    retaining: Retaining, folder: Path
) -> None:
    """Nobody will tell how it ended."""
    with contextlib.suppress(OSError), retaining.handing_over(f"{folder}/b.ckpt"):
        raise OSError
    with retaining.saving(f"{folder}/c.ckpt"):
        pass

    assert retaining.decide(retaining.removal(f"{folder}/a.ckpt")) is Decision.REMOVE


def test_the_last_one_is_known_through_a_link_among_the_directories(
    retaining: Retaining, folder: Path
) -> None:
    """Once somebody has looked, and that is before anything is removed."""
    with retaining.saving(f"{folder}/a.ckpt"):
        pass
    other = f"{folder.with_name('link')}/a.ckpt"
    removal = retaining.removal(other)

    retaining.look(Token(), [other])

    assert retaining.decide(removal) is Decision.WAIT


def test_the_way_out_of_the_directory_is_seen(retaining: Retaining, folder: Path) -> None:
    """A name that begins with the directory's need not be in it."""
    away = f"{folder}/../elsewhere/a.ckpt"
    with retaining.saving(f"{folder}/b.ckpt"):
        pass
    removal = retaining.removal(away)

    retaining.look(Token(), [away])

    assert retaining.decide(removal) is Decision.OUTSIDE


def test_what_a_link_has_pointed_to_at_the_start_is_kept(
    retaining: Retaining, folder: Path
) -> None:
    """The link is moved by the first save, and what it pointed to is what was loaded."""
    (folder / "last.ckpt").symlink_to("a.ckpt")
    retaining.start_from(f"{folder}/last.ckpt")
    has_to_look = retaining.has_to_look

    retaining.look(Token())

    assert (has_to_look, retaining.has_to_look) == (True, False)
    decided = {retaining.decide(retaining.removal(f"{folder}/{n}.ckpt")) for n in ("a", "last")}
    assert decided == {Decision.RESUMED}


def test_a_look_that_was_given_up_is_made_again(retaining: Retaining, folder: Path) -> None:
    """What it finds late is about another time."""
    token = Token()
    token.abandon()
    retaining.start_from(f"{folder}/last.ckpt")

    with pytest.raises(CallTimeoutError):
        retaining.look(token)

    assert retaining.has_to_look


def test_nobody_has_to_look_at_what_has_no_links(retaining: Retaining) -> None:
    """An object has none, and to ask would be a request more."""
    retaining.start_from("s3://bucket/a.ckpt")

    assert not retaining.has_to_look
