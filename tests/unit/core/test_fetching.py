# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of a load: each order as a list, and what becomes of it where a step fails."""

from __future__ import annotations

import contextlib
import errno
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core import fetching
from lightning_resilience.core.carrying import carried_out
from lightning_resilience.core.fetching import Fetch, Lock, There
from lightning_resilience.core.pipeline import Do, carry_out
from lightning_resilience.core.resolution import Inspection
from lightning_resilience.errors import CallTimeoutError, CheckpointError, CorruptCheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from lightning_resilience.core.pipeline import Steps

PATIENCE_S = 10.0
SEEN = Inspection(path="s3://b/a.ckpt", size_bytes=4, digest="00")
DESCRIBED = Inspection(path="s3://b/a.ckpt", size_bytes=4, saved="xxh3-128:00")
"""What nobody has opened."""
COPIED = {"": (4, "xxh3-128:00")}
WAITING = ["now", "ask", "look", "take", "look", "now"]


class Node:
    """Hands that note each step, and answer each kind from its own list; the last one repeats."""

    def __init__(self, **answers: list[Any]) -> None:
        self.done: list[str] = []
        self._now_s = 0.0
        self._answers: dict[Fetch, list[Any]] = {
            Fetch.LOOK: [There()],
            Fetch.TAKE: [True],
            Fetch.COPY: [COPIED],
            Fetch.FIND: [4],
            Fetch.DIGEST: [("00", "")],
            Fetch.SUM: ["xxh3-128:00"],
            **{Fetch[name.upper()]: list(each) for name, each in answers.items()},
        }

    def run(self, steps: Steps[Any]) -> Any:
        """Carry the steps out."""
        return carry_out(steps, {step: self._hand(step) for step in Fetch})

    def _hand(self, step: Fetch) -> Callable[[Any], Any]:
        def hand(_of: object) -> Any:
            self.done.append(step.value)
            if step is Fetch.PAUSE:
                self._now_s += 1.0
            if step is Fetch.NOW:
                return self._now_s
            left = self._answers.get(step, [None])
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return hand


def test_what_is_on_the_node_is_used_without_a_lock() -> None:
    """Nobody takes a lock of what is there."""
    node = Node(look=[There(is_there=True)])

    assert node.run(fetching.settling(PATIENCE_S))
    node.run(fetching.obtaining(PATIENCE_S))

    assert "take" not in node.done


def test_whoever_gets_a_lock_looks_once_more() -> None:
    """Who had it may have made the file between the look and the lock."""
    node = Node(look=[There(), There(is_there=True)])

    node.run(fetching.obtaining(PATIENCE_S))

    assert node.done == ["give way", *WAITING, "release"]


def test_a_reader_makes_it_and_vouches_for_it_last() -> None:
    """It appears once it is made, where nobody has given up meanwhile."""
    node = Node()

    node.run(fetching.obtaining(PATIENCE_S))

    made = ["beat", "sweep", "make", "ask", "appear", "vouch", "release"]
    assert node.done == ["give way", *WAITING, *made]


@pytest.mark.parametrize("step", ["make", "ask", "appear", "vouch", "sweep", "beat"])
def test_a_reader_that_fails_keeps_no_lock_and_leaves_nothing(step: str) -> None:
    """Whatever fails: another rank reads."""
    failure = ConnectionResetError()
    answers: dict[str, list[Any]] = {step: [None, failure] if step == "ask" else [failure]}
    node = Node(**answers)

    with pytest.raises(ConnectionResetError):
        node.run(fetching.obtaining(PATIENCE_S))

    assert node.done[-2:] == ["release", "discard"]


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_damaged_is_refused_for_the_others(is_told: Any) -> None:
    """Also where they cannot be told, no lock is kept."""
    told: list[Any] = [None] if is_told else [OSError(errno.ENOSPC, "full")]
    node = Node(make=[CorruptCheckpointError("a bit")], refuse=told)

    with pytest.raises(CorruptCheckpointError if is_told else OSError):
        node.run(fetching.obtaining(PATIENCE_S))

    assert node.done[-3:] == ["refuse", "release", "discard"]


@pytest.mark.parametrize("order", [fetching.settling, fetching.obtaining])
def test_what_a_reader_has_refused_the_others_raise(order: Any) -> None:
    """With its reason, and without a look of their own."""
    node = Node(look=[There(refusal="a bit has flipped")])

    with pytest.raises(CorruptCheckpointError, match="a bit has flipped"):
        node.run(order(PATIENCE_S))

    assert "take" not in node.done


def test_a_silent_reader_is_taken_over_and_its_file_is_left_alone() -> None:
    """What it has made so far is not swept: it may still be at work."""
    node = Node(take=[False], mark=[7])

    node.run(fetching.obtaining(PATIENCE_S))

    assert node.done.count("pause") == PATIENCE_S
    assert "sweep" not in node.done
    assert node.done[-4:] == ["ask", "appear", "vouch", "release"]


def test_a_reader_that_goes_on_is_heard() -> None:
    """Each new mark is progress of the wait."""
    node = Node(take=[False], mark=list(range(30)), look=[*[There()] * 30, There(is_there=True)])

    assert node.run(fetching.settling(PATIENCE_S))

    assert node.done.count("heard") == 30


@pytest.mark.parametrize("order", [fetching.settling, fetching.obtaining])
def test_what_an_earlier_load_has_left_is_checked_and_used(order: Any) -> None:
    """Under the reading, so that the others see that somebody is about it."""
    node = Node(look=[There(is_left=True)])

    node.run(order(PATIENCE_S))

    assert node.done[-2:] == ["vouch", "release"]
    assert "recheck" in node.done
    assert "make" not in node.done


@pytest.mark.parametrize("failure", [CorruptCheckpointError("a bit"), OSError(errno.EIO, "disk")])
def test_what_is_no_longer_good_is_dropped(failure: Exception) -> None:
    """Before a slot it is this rank's turn, and with one it fetches."""
    outside = Node(look=[There(is_left=True)], recheck=[failure])
    inside = Node(look=[There(is_left=True)], recheck=[failure])

    assert not outside.run(fetching.settling(PATIENCE_S))
    inside.run(fetching.obtaining(PATIENCE_S))

    assert outside.done[-3:] == ["recheck", "drop", "release"]
    assert inside.done[-7:-2] == ["drop", "sweep", "make", "ask", "appear"]


def test_a_check_that_was_given_up_drops_nothing() -> None:
    """It says nothing of the file, and lets go of the reading."""
    node = Node(look=[There(is_left=True)], recheck=[CallTimeoutError("given up")])

    with pytest.raises(CallTimeoutError):
        node.run(fetching.settling(PATIENCE_S))

    assert node.done[-2:] == ["recheck", "release"]


def test_a_copy_is_checked_by_everything_that_is_known() -> None:
    """Size and manifest in storage, length, digest and contents of what has arrived."""
    described, plain = Node(manifest=["it"]), Node()

    described.run(fetching.fetching(SEEN, may_ask=True, shown="a"))
    plain.run(fetching.fetching(None, may_ask=False, shown="a"))

    assert described.done == ["find", "manifest", "room", "copy", "contents", "digest"]
    assert plain.done == ["room", "copy", "examine"]


@pytest.mark.parametrize(
    ("answers", "error", "said"),
    [
        ({"find": [5]}, CheckpointError, "4 bytes of a arrived, but it has 5"),
        ({"find": [3], "copy": [{"": (3, "")}]}, OSError, "3 bytes here and 4 bytes on rank 0"),
        ({"digest": [("11", "")]}, OSError, "digest 11 here and 00 on rank 0"),
        ({"digest": [("", "it is cut")]}, OSError, "it is cut"),
        ({"examine": [CorruptCheckpointError("a bit")]}, CorruptCheckpointError, "a bit"),
    ],
)
def test_a_copy_that_differs_is_refused(answers: Any, error: type[Exception], said: str) -> None:
    """In what it differs is said; what may pass is an error of the filesystem."""
    with pytest.raises(error, match=said):
        Node(**answers).run(fetching.fetching(SEEN, may_ask=True, shown="a"))


@pytest.mark.parametrize("manifest", [["it"], [None]], ids=["described here", "not here"])
def test_a_copy_of_what_nobody_has_opened_is_compared_in_every_byte(manifest: list[Any]) -> None:
    """By its digest, which is known already; nothing inside has more to say."""
    node = Node(manifest=manifest)

    node.run(fetching.fetching(DESCRIBED, may_ask=True, shown="a"))

    compared = ["contents"] if manifest[0] else []
    assert node.done == ["find", "manifest", "room", "copy", *compared]


def test_nothing_but_the_bytes_that_rank_zero_has_chosen_is_taken() -> None:
    """Whatever this node sees of the file and of its manifest; the length is always the same."""
    chosen, other = "xxh3-128:00", "xxh3-128:11"
    for here, saved in product((chosen, other), (chosen, other, None)):
        is_damaged = saved not in {None, here}
        damage = [CorruptCheckpointError("a bit")] if is_damaged else [None]
        node = Node(copy=[{"": (4, here)}], manifest=[saved], contents=damage)

        taken = contextlib.nullcontext()
        is_other = pytest.raises(OSError, match="digest xxh3-128:11 here and xxh3-128:00 by the")
        refused = pytest.raises(CorruptCheckpointError)
        with refused if is_damaged else taken if here == chosen else is_other:
            node.run(fetching.fetching(DESCRIBED, may_ask=True, shown="a"))


@pytest.mark.parametrize("digest", ["xxh3-128:00", "xxh3-128:11"])
def test_what_an_earlier_load_has_left_of_it_is_read_through(digest: str) -> None:
    """Once; where a byte differs, it is not what rank 0 has chosen."""
    node = Node(sum=[digest])
    steps = fetching.examining(DESCRIBED, 4, is_described=False, shown="a")

    is_it = digest == DESCRIBED.saved
    with contextlib.nullcontext() if is_it else pytest.raises(OSError, match="has chosen"):
        node.run(steps)

    assert node.done == ["sum"]


def test_a_file_that_is_read_where_it_is_is_checked_likewise() -> None:
    """By its manifest, or by its own checksums."""
    described, plain = Node(manifest=["it"], read=[4]), Node(read=[4])

    described.run(fetching.checking(SEEN, shown="a"))
    plain.run(fetching.checking(SEEN, shown="a"))

    assert described.done == ["manifest", "read", "digest"]
    assert plain.done == ["manifest", "read", "digest", "examine"]


def test_a_load_asks_the_storage_only_where_it_has_to() -> None:
    """And looks once more, when it has read, whether that is what was checked."""
    alone, second = Node(prepare=[True]), Node(prepare=[False])

    alone.run(fetching.loading())
    second.run(fetching.loading())

    assert alone.done == ["prepare", "attempts", "finish", "confirm"]
    assert second.done == ["prepare", "finish", "confirm"]


def test_whoever_gives_up_lets_the_others_try() -> None:
    """Before it raises."""
    node = Node(prepare=[True], attempts=[ConnectionResetError()])

    with pytest.raises(ConnectionResetError):
        node.run(fetching.loading())

    assert node.done == ["prepare", "attempts", "give up"]


def test_hands_may_be_generators() -> None:
    """What they yield is yielded, what is sent is theirs, and what they raise is the order's."""

    def take(lock: Lock) -> Generator[str, str, str]:
        answer = yield f"take the {lock.value}"
        if not answer:
            raise ConnectionResetError
        return answer

    def order() -> Steps[str]:
        try:
            yield Do(Fetch.TAKE, Lock.TURN)
        except ConnectionResetError:
            return str((yield Do(Fetch.TAKE, Lock.READING)))
        return ""

    running = carried_out(order(), {Fetch.TAKE: take})

    assert next(running) == "take the turn"
    assert running.send("") == "take the reading"
    with pytest.raises(StopIteration) as ended:
        running.send("done")
    assert ended.value.value == "done"
