# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks around an ``AsyncCheckpointIO``, with a thread that the test lets go on."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_resilience.adapters.lightning.background import Background
from lightning_resilience.core.outcome import classify
from lightning_resilience.errors import CallTimeoutError
from lightning_resilience.runtime.calls import Token


class Checkpoint(dict[str, int]):
    """A checkpoint that can be looked for in memory."""


class Thread:
    """What a plugin passes checkpoints on to, in one thread, once the test lets it."""

    def __init__(self, background: Background) -> None:
        self.written: list[str] = []
        self.error: BaseException | None = None
        self.may_write = threading.Event()
        self.pool = ThreadPoolExecutor(max_workers=1)
        self._write = partial(background.write, self._carry_out)

    def _carry_out(self, checkpoint: Any, path: str, storage_options: Any = None) -> None:
        del storage_options
        self.may_write.wait(60.0)
        if self.error is not None:
            held = checkpoint
            raise self.error.with_traceback(None) from OSError(f"cause of {len(held)}")
        self.written.append(path)

    def submit(self, checkpoint: Any, path: str, storage_options: Any = None) -> None:
        """Stand for the plugin's ``save_checkpoint``."""
        self.pool.submit(self._write, checkpoint, path, storage_options=storage_options)

    def end(self) -> None:
        """Let it write, and wait for it."""
        self.may_write.set()
        self.pool.shutdown()


@pytest.fixture
def background() -> Background:
    """What one rank knows, with room for one save."""
    patience = SimpleNamespace(classify=classify)
    breakers = SimpleNamespace(patience=lambda *_args: patience)
    session: Any = SimpleNamespace(
        alone=SimpleNamespace(breakers=breakers, storage=None, spooling=None),
        member=SimpleNamespace(rank=0),
    )
    return Background(session, limit=1, root="/root")


@pytest.fixture
def thread(background: Background) -> Any:
    """A thread that is ended after the test."""
    thread = Thread(background)
    yield thread
    thread.end()


def test_at_the_bound_a_save_waits_until_a_write_has_ended(
    background: Background, thread: Thread
) -> None:
    """And goes on as soon as it has."""
    background.hand_over(thread.submit, {}, "/a")
    waits = threading.Thread(target=background.wait_for_room, args=(Token(),))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()

    thread.may_write.set()

    waits.join(60.0)
    assert not waits.is_alive()
    assert thread.written == ["/a"]


def test_a_save_that_was_abandoned_at_the_bound_is_never_handed_over(
    background: Background, thread: Thread
) -> None:
    """Whoever waited for it was interrupted, and the others were told that it failed."""
    background.hand_over(thread.submit, {}, "/a")
    token = Token()
    token.abandon()

    with pytest.raises(CallTimeoutError):
        background.wait_for_room(token)


def test_a_save_that_could_not_be_handed_over_takes_no_place(background: Background) -> None:
    """For example where there was no memory for the copy."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        background.hand_over(refuse, {}, "/a")

    background.wait_for_room(Token())


def test_who_writes_at_once_gets_the_error(background: Background, thread: Thread) -> None:
    """Nothing was handed over, so nobody else would be told."""
    thread.error = PermissionError("no")
    thread.may_write.set()

    with pytest.raises(PermissionError, match="no"):
        background.write(thread._carry_out, {}, "/a")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("/folder/a.ckpt", "file:///folder/a.ckpt"),
        ("file:///folder/a.ckpt", "resilient::/folder/a.ckpt"),
        ("/folder/a", "/folder/a/"),
        ("s3://bucket/a.ckpt", "resilient::s3://bucket/a.ckpt"),
    ],
)
def test_a_load_waits_by_whatever_name(
    saved: str, loaded: str, background: Background, thread: Thread
) -> None:
    """A save is pending under all names of its path."""
    background.hand_over(thread.submit, {}, saved)
    asked: list[str] = []
    waits = threading.Thread(target=background.load, args=(asked.append, loaded))
    waits.start()
    waits.join(0.3)
    assert asked == []

    thread.may_write.set()

    waits.join(60.0)
    assert asked == [loaded]


def test_a_load_of_another_path_does_not_wait(background: Background, thread: Thread) -> None:
    """What is pending is none of its business."""
    background.hand_over(thread.submit, {}, "/folder/a.ckpt")
    asked: list[str] = []

    background.load(asked.append, "/folder/b.ckpt")

    assert asked == ["/folder/b.ckpt"]
    assert not thread.written


def test_a_load_raises_what_its_save_has_failed_with(
    background: Background, thread: Thread
) -> None:
    """And storage is not asked."""
    thread.error = PermissionError("no")
    background.hand_over(thread.submit, {}, "/a")
    thread.may_write.set()

    with pytest.raises(PermissionError, match="no"):
        background.load(lambda _path: pytest.fail("storage was asked"), "/a")


def test_a_failure_that_is_kept_keeps_no_checkpoint(background: Background, thread: Thread) -> None:
    """The frames in which it was raised hold a copy of everything that was to be saved."""
    checkpoint = Checkpoint(step=1)
    alive = weakref.ref(checkpoint)
    thread.error = PermissionError("no")
    background.hand_over(thread.submit, checkpoint, "/a")

    thread.end()
    del checkpoint
    gc.collect()

    assert alive() is None
    with pytest.raises(PermissionError):
        background.load(print, "/a")
