# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The thread that publishes: one at a time, and the end waits for the one that is at work."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.publisher import Publisher
from lightning_resilience.adapters.lightning.shelf import Shelf, Shelved
from lightning_resilience.adapters.names import name_of
from lightning_resilience.adapters.spool import Kept
from lightning_resilience.core.spooled import SpoolEntry


if TYPE_CHECKING:
    from pathlib import Path

    import pytest


HANG_S = 30.0


def test_a_thread_that_ends_late_does_not_hide_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of a run would not wait for what is being published."""
    may_end, is_ending = threading.Event(), threading.Event()

    def close_late() -> None:
        is_ending.set()
        may_end.wait(HANG_S)

    drivers = iter([SimpleNamespace(close=close_late), SimpleNamespace(close=lambda: None)])
    shelf = Shelf(lambda: str(tmp_path), pause_s=lambda _written_at_s: 0.0)
    alone: Any = SimpleNamespace()
    publisher = Publisher(alone, shelf)
    monkeypatch.setattr(publisher, "_own_driver", lambda: next(drivers))
    publisher.start()
    assert is_ending.wait(HANG_S)
    (first,) = [each for each in threading.enumerate() if each.name == "lightning-resilience-spool"]
    url = "s3://b/last.ckpt"
    storage: Any = None
    entry = SpoolEntry(path=url, size_bytes=1, digest="d")
    kept = Kept(name="a", file=str(tmp_path / "a"), entry=entry)

    with shelf.saving(name_of(url)):
        # It waits, because its path is being saved.
        shelf.put(Shelved(kept=kept, storage=storage), since_s=0.0)
        publisher.start()
        second = publisher._thread
        may_end.set()
        first.join(HANG_S)

        assert second is not None
        assert second is not first
        assert publisher._thread is second
        assert publisher.close() == [kept]
        assert not second.is_alive()
