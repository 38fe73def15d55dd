# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What every ``SharedStore`` must do, written once; each backend inherits it with a few fixtures.

No test here measures speed: a bound on time is there to turn a hang into a failure.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.errors import StoreError, StoreUnavailableError
from lightning_resilience.ports import SharedStore


if TYPE_CHECKING:
    from collections.abc import Callable


HANG_S = 20.0
EVERY_BYTE = bytes(range(256))
ODD_KEYS = ["plain", "a/b/c", "with space\n", "ключ", "€/😀", "a\x00b", "k" * 2000, "-1", "%s{}"]


class SharedStoreContract:
    """Inherit, implement ``new_store``, and add what only this backend does."""

    @pytest.fixture
    def new_store(self) -> Callable[[], SharedStore]:
        """Make handles to one and the same store, and close them after the test."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, new_store: Callable[[], SharedStore]) -> SharedStore:
        """One handle to an empty store."""
        return new_store()

    @pytest.fixture
    def other(self, new_store: Callable[[], SharedStore]) -> SharedStore:
        """Another handle to the same store."""
        return new_store()

    def test_it_is_a_shared_store(self, store: SharedStore) -> None:
        """It has every method of the port."""
        assert isinstance(store, SharedStore)

    # --- compare-and-set: the four cases ---------------------------------------------------------

    def test_cas_creates_a_missing_key_from_nothing(self, store: SharedStore) -> None:
        """A missing key and an empty expectation: created, and the new value is returned."""
        answer = store.compare_and_set("k", b"", b"mine")

        assert answer == b"mine"
        assert store.get("k") == b"mine"

    def test_cas_says_gone_for_a_missing_key_with_an_expectation(self, store: SharedStore) -> None:
        """A missing key and an expectation: nothing is written, and the expectation comes back."""
        answer = store.compare_and_set("k", b"what I read", b"mine")

        assert answer == b"what I read"
        assert store.get("k") is None

    def test_cas_replaces_the_value_that_is_expected(
        self, store: SharedStore, other: SharedStore
    ) -> None:
        """The value is as expected: replaced, and the new value is returned."""
        other.set("k", b"old")

        answer = store.compare_and_set("k", b"old", b"mine")

        assert answer == b"mine"
        assert other.get("k") == b"mine"

    @pytest.mark.parametrize("expected", [b"", b"older", b"theirs and more", b"their"])
    def test_cas_returns_the_value_that_is_not_expected(
        self, store: SharedStore, other: SharedStore, expected: bytes
    ) -> None:
        """The value is another: nothing is written, and what is there is returned."""
        other.set("k", b"theirs")

        answer = store.compare_and_set("k", expected, b"mine")

        assert answer == b"theirs"
        assert other.get("k") == b"theirs"

    def test_cas_on_a_deleted_key_is_as_on_a_missing_one(self, store: SharedStore) -> None:
        """Deleting brings back the first two cases."""
        store.set("k", b"old")
        store.delete("k")

        gone = store.compare_and_set("k", b"old", b"mine")
        created = store.compare_and_set("k", b"", b"mine")

        assert (gone, created) == (b"old", b"mine")

    def test_cas_treats_an_empty_value_as_a_value(self, store: SharedStore) -> None:
        """A key that holds nothing exists, and an empty expectation matches it."""
        store.set("k", b"")

        kept = store.compare_and_set("k", b"something", b"mine")
        replaced = store.compare_and_set("k", b"", b"mine")

        assert (kept, replaced) == (b"", b"mine")

    # --- winning ---------------------------------------------------------------------------------

    def test_one_of_many_writers_wins(self, new_store: Callable[[], SharedStore]) -> None:
        """Of writers with nonces that start from the same bytes exactly one wins each round."""
        handles = [new_store() for _ in range(4)]
        rounds = 10

        with ThreadPoolExecutor(len(handles)) as threads:
            barrier = threading.Barrier(len(handles))

            def race(number: int) -> list[bool]:
                won = []
                for turn in range(rounds):
                    desired = b"open, by %d" % number
                    barrier.wait(HANG_S)
                    won.append(handles[number].compare_and_set(f"k{turn}", b"", desired) == desired)
                return won

            results = list(threads.map(race, range(len(handles))))

        assert [sum(turn) for turn in zip(*results, strict=True)] == [1] * rounds

    @pytest.mark.parametrize("has_own", [True, False], ids=["handles", "one handle"])
    def test_no_change_of_many_writers_is_lost(
        self, new_store: Callable[[], SharedStore], *, has_own: bool
    ) -> None:
        """Threads that change a cell from what they have read count every change once."""
        first = new_store()
        first.set("k", b"0 nobody")
        handles = [first, *(new_store() if has_own else first for _ in range(3))]
        turns = 15

        barrier = threading.Barrier(len(handles))

        def count(writer: int) -> None:
            store, lost = handles[writer], 0
            barrier.wait(HANG_S)
            for turn in range(turns):
                raw = store.get("k")
                assert raw is not None
                while True:
                    desired = b"%d by %d, %d" % (int(raw.split()[0]) + 1, writer, turn)
                    found = store.compare_and_set("k", raw, desired)
                    if found == desired:
                        break
                    raw, lost = found, lost + 1
                    assert lost < 1000

        with ThreadPoolExecutor(len(handles)) as threads:
            list(threads.map(count, range(len(handles))))

        raw = first.get("k")
        assert raw is not None
        assert int(raw.split()[0]) == turns * len(handles)

    def test_a_cell_is_held_by_one_at_a_time(self, new_store: Callable[[], SharedStore]) -> None:
        """Threads that claim a free cell, and free it from their own bytes, never hold it both."""
        handles = [new_store() for _ in range(4)]
        handles[0].set("slot", b"free")
        inside: list[int] = []
        most: list[int] = []
        barrier = threading.Barrier(len(handles))

        def hold(writer: int) -> None:
            store, held = handles[writer], 0
            barrier.wait(HANG_S)
            for turn in range(10_000):
                mine = b"held by %d, %d" % (writer, turn)
                if store.compare_and_set("slot", b"free", mine) != mine:
                    continue
                inside.append(writer)
                most.append(len(inside))
                inside.remove(writer)
                assert store.compare_and_set("slot", mine, b"free") == b"free"
                held += 1
                if held == 10:
                    return
            pytest.fail("the cell never came free")

        with ThreadPoolExecutor(len(handles)) as threads:
            list(threads.map(hold, range(len(handles))))

        assert most == [1] * 40
        assert handles[0].get("slot") == b"free"

    def test_a_key_that_is_deleted_is_not_brought_back_by_who_had_read_it(
        self, new_store: Callable[[], SharedStore]
    ) -> None:
        """Changes race with deletions: what is gone stays gone."""
        handles = [new_store() for _ in range(4)]
        ended = threading.Event()

        def change(writer: int) -> None:
            store = handles[writer]
            while not ended.is_set():
                raw = store.get("k")
                if raw is not None:
                    store.compare_and_set("k", raw, b"changed by %d" % writer)

        with ThreadPoolExecutor(len(handles)) as threads:
            changing = [threads.submit(change, writer) for writer in (1, 2, 3)]
            left = []
            for turn in range(100):
                handles[0].set("k", b"new %d" % turn)
                handles[0].delete("k")
                left += [handles[0].get("k") for _ in range(3)]
            ended.set()
            for each in changing:
                each.result(HANG_S)

        assert left == [None] * 300

    def test_a_winner_who_asks_again_has_still_won(
        self, store: SharedStore, other: SharedStore
    ) -> None:
        """With a nonce a repeat after a lost answer tells winner and loser the truth."""
        store.compare_and_set("k", b"", b"open, by me")

        mine = store.compare_and_set("k", b"", b"open, by me")
        theirs = other.compare_and_set("k", b"", b"open, by them")

        assert mine == b"open, by me"
        assert theirs == b"open, by me"

    def test_equal_bytes_make_every_writer_believe_it_won(
        self, store: SharedStore, other: SharedStore
    ) -> None:
        """Without a nonce the loser is told the bytes it wanted: this is why records carry one."""
        desired = b"open"

        first = store.compare_and_set("k", b"", desired)
        second = other.compare_and_set("k", b"", desired)

        assert first == second == desired

    # --- reading ---------------------------------------------------------------------------------

    def test_reading_a_missing_key_neither_blocks_nor_creates(self, store: SharedStore) -> None:
        """A missing key reads as None, and is missing still."""
        assert store.get("k") is None
        assert store.get("k") is None
        assert store.wait_for("k", 0.0) is False

    def test_several_keys_read_in_order_with_none_for_the_missing(self, store: SharedStore) -> None:
        """One missing key costs the others nothing, wherever it stands."""
        store.set("a", b"1")
        store.set("c", b"")

        assert store.multi_get(["a", "b", "c", "a"]) == [b"1", None, b"", b"1"]
        assert store.multi_get(["c", "a"]) == [b"", b"1"]
        assert store.multi_get(["x", "y"]) == [None, None]
        assert store.multi_get([]) == []

    # --- writing ---------------------------------------------------------------------------------

    def test_what_one_handle_writes_the_other_reads(
        self, store: SharedStore, other: SharedStore
    ) -> None:
        """The last write is what everybody reads."""
        store.set("k", b"1")
        store.set("k", b"2")

        assert other.get("k") == b"2"

    @pytest.mark.parametrize("value", [b"", b"\x00", EVERY_BYTE, EVERY_BYTE * 256, b"\xff\xfe"])
    def test_values_are_bytes_and_come_back_as_they_were(
        self, store: SharedStore, value: bytes
    ) -> None:
        """Zeros, what is no text, nothing, and 64 KiB survive every way of writing and reading."""
        store.set("set", value)
        created = store.compare_and_set("cas", b"", value)
        replaced = store.compare_and_set("set", value, value + b"!")

        assert created == value
        assert replaced == value + b"!"
        assert store.get("cas") == value
        assert store.multi_get(["set", "cas"]) == [value + b"!", value]

    def test_keys_are_any_text(self, store: SharedStore) -> None:
        """Unusual keys do not get into each other's way."""
        for number, key in enumerate(ODD_KEYS):
            store.set(key, b"%d" % number)

        assert store.multi_get(ODD_KEYS) == [b"%d" % number for number in range(len(ODD_KEYS))]
        assert [store.get(key) for key in ODD_KEYS] == store.multi_get(ODD_KEYS)
        assert all(store.delete(key) for key in ODD_KEYS)

    def test_deleting_says_whether_the_key_existed(
        self, store: SharedStore, other: SharedStore
    ) -> None:
        """The first of two deletions says True, and the key is gone for all."""
        store.set("k", b"1")

        assert store.delete("k") is True
        assert store.delete("k") is False
        assert other.get("k") is None

    # --- counting --------------------------------------------------------------------------------

    def test_counters_start_at_nothing_and_count_all(
        self, new_store: Callable[[], SharedStore]
    ) -> None:
        """No addition of any thread is lost, negative amounts included."""
        handles = [new_store() for _ in range(3)]

        with ThreadPoolExecutor(len(handles)) as threads:
            list(threads.map(lambda store: [store.add("n", 2) for _ in range(10)], handles))

        assert handles[0].add("n", 0) == 60
        assert handles[1].add("n", -61) == -1
        assert handles[2].get("n") == b"-1"

    def test_adding_to_text_is_an_error_of_the_store(self, store: SharedStore) -> None:
        """It is never read as a number, and the store works on."""
        store.set("k", b"text")

        with pytest.raises(StoreError, match="add"):
            store.add("k", 1)

        assert store.get("k") == b"text"

    # --- waiting ---------------------------------------------------------------------------------

    def test_waiting_for_a_key_that_exists_ends_at_once(self, store: SharedStore) -> None:
        """A key that is there is not waited for, with or without a timeout."""
        store.set("k", b"")

        assert store.wait_for("k", HANG_S) is True
        assert store.wait_for("k", 0.0) is True

    @pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.0001, 0.05])
    def test_waiting_for_a_key_that_never_comes_ends_false(
        self, store: SharedStore, timeout_s: float
    ) -> None:
        """The end of the time is an answer, not an error, and the handle works on."""
        assert store.wait_for("k", timeout_s) is False
        assert store.get("k") is None

    def test_a_waiter_wakes_when_another_handle_writes(
        self, store: SharedStore, other: SharedStore
    ) -> None:
        """Whoever waits is woken by the write, not by the end of its time."""
        watcher = store.watcher()
        assert watcher.wait_for("k", 0.01) is False

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(watcher.wait_for, "k", HANG_S * 3)
            other.set("k", b"1")

            assert waiting.result(HANG_S) is True

        watcher.close()

    def test_a_waiting_watcher_delays_nobody(self, store: SharedStore) -> None:
        """While a watcher waits, every operation of its store's own connection is answered."""
        watcher = store.watcher()

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(watcher.wait_for, "bell", HANG_S * 3)
            for number in range(20):
                store.set("k", b"%d" % number)
                store.compare_and_set("c", b"", b"1")
                store.multi_get(["k", "c"])
                store.add("n", 1)
            was_waiting = not waiting.done()
            store.set("bell", b"")

            assert waiting.result(HANG_S) is True

        assert was_waiting
        assert store.get("n") == b"20"
        watcher.close()

    # --- closing ---------------------------------------------------------------------------------

    def test_a_closed_handle_says_so(self, store: SharedStore, other: SharedStore) -> None:
        """Every operation after ``close`` raises, ``close`` itself may be repeated."""
        store.set("k", b"1")

        store.close()
        store.close()

        for operation in (
            lambda: store.get("k"),
            lambda: store.multi_get(["k"]),
            lambda: store.set("k", b"2"),
            lambda: store.delete("k"),
            lambda: store.compare_and_set("k", b"1", b"2"),
            lambda: store.add("n", 1),
            lambda: store.wait_for("k", 0.0),
        ):
            with pytest.raises(StoreUnavailableError, match="closed"):
                operation()
        assert other.get("k") == b"1"
        assert other.get("n") is None

    def test_closing_a_watcher_ends_its_wait_and_nothing_else(self, store: SharedStore) -> None:
        """Whoever waits on a handle that is closed gets an error, not the rest of its time."""
        watcher = store.watcher()

        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(watcher.wait_for, "k", HANG_S * 3)
            watcher.close()

            with pytest.raises(StoreUnavailableError, match="closed"):
                waiting.result(HANG_S)

        store.set("k", b"1")
        assert store.get("k") == b"1"

    def test_closing_a_store_leaves_its_watcher_open(self, store: SharedStore) -> None:
        """Each handle has its own connection."""
        watcher = store.watcher()

        store.close()

        watcher.set("k", b"1")
        assert watcher.get("k") == b"1"
        watcher.close()
