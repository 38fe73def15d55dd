# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C17: an upload in parts was not there when it was to be completed, and the save was lost.

``piskvorky/smart_open#628``, ``peak/s5cmd#450``: sending it all again works, and is not even needed
where an earlier request to complete it was executed. s3fs makes the same ``FileNotFoundError`` of a
missing upload, key and bucket.
"""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_resilience.adapters import object_store
from lightning_resilience.adapters.filesystem import guarded
from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.core.parts import Lengths
from lightning_resilience.errors import RetriesExhaustedError
from tests.real_guard import Rank
from tests.tokens import RecordingToken
from tests.uploads import BEGIN, COMPLETE, PART_BYTES, abort, watch


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.uploads import Asked, Side


class Uploads:
    """Watches a client's requests, and lets completions find no upload.

    Args:
        fs: The client.
        before: What is done with the upload before each completion, in order: ``complete`` it, as
            by a request whose answer was lost, or ``abort`` it; after these, nothing.
    """

    def __init__(self, fs: Any, *before: str) -> None:
        self._fs, self._before = fs, list(before)
        self.words: list[str] = []
        watch(fs, self.call)

    async def call(self, asked: Asked, go: Callable[[], Awaitable[Any]]) -> Any:
        """Pass a request on; before a completion, do what was asked for."""
        self.words.append(asked.what)
        if asked.what == COMPLETE and self._before:
            if self._before.pop(0) == "complete":
                await go()
                # One server forgives a second completion; others have forgotten the upload, and
                # say what they say to an abort.
                return await abort(self._fs, asked)
            await abort(self._fs, asked)
        return await go()


@pytest.fixture
def save(
    side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Uploads]]:
    """Save one checkpoint of a little more than two parts, under a guard."""
    lengths = Lengths(single_bytes=PART_BYTES, shortest_bytes=PART_BYTES, longest_bytes=PART_BYTES)
    monkeypatch.setattr(object_store, "_LENGTHS", lengths)
    storage = Storage(side.options, spool=lambda: str(tmp_path))
    nonces = itertools.count()

    def run(checkpoint: object, *before: str) -> tuple[Any, Uploads]:
        url = side.url("a.ckpt")
        uploads = Uploads(storage.place(url).fs, *before)
        saving = StagedSave(storage, url, checkpoint, nonce=lambda: str(next(nonces)))
        done = Rank().call(saving.attempt)
        saving.close()
        return done, uploads

    return run


def checkpoint(value: float) -> dict[str, Any]:
    """A checkpoint whose size does not depend on what it holds."""
    return {"weights": torch.full((2_800_000,), value)}


def saved(side: Side) -> float:
    """Return what the stored checkpoint holds, read by another client."""
    found = io.BytesIO(side.read("a.ckpt") or b"")
    weights = torch.load(found, weights_only=True)["weights"]
    value: float = weights[0].item()
    assert bool((weights == value).all())
    return value


def test_an_upload_that_is_gone_is_sent_again(
    save: Callable[..., tuple[Any, Uploads]], side: Side
) -> None:
    """The whole upload is made once more, and nothing of the first one is left."""
    done, uploads = save(checkpoint(1.0), "abort")

    assert done.attempts == 2
    assert uploads.words.count(BEGIN) == 2
    assert saved(side) == 1.0
    assert side.uploads() == []


def test_an_upload_that_is_gone_because_it_is_complete_is_not_sent_again(
    save: Callable[..., tuple[Any, Uploads]], side: Side
) -> None:
    """The object is looked for first, and it is there."""
    done, uploads = save(checkpoint(1.0), "complete")

    assert done.attempts == 1
    assert uploads.words.count(BEGIN) == 1
    assert saved(side) == 1.0


def test_an_older_object_of_the_same_size_is_not_taken_for_the_new_one(
    save: Callable[..., tuple[Any, Uploads]], side: Side
) -> None:
    """A checkpoint that is written again has its predecessor's size."""
    save(checkpoint(1.0))

    done, _ = save(checkpoint(2.0), "abort")

    assert done.attempts == 2
    assert saved(side) == 2.0


def test_a_missing_bucket_is_permanent(side: Side, tmp_path: Path) -> None:
    """The same type of error, another code inside: one attempt, and no bucket is made."""
    storage = Storage(side.options, spool=lambda: str(tmp_path))
    url = f"{side.scheme}://no-bucket-of-that-name/a.ckpt"
    saving = StagedSave(storage, url, {}, nonce=lambda: "1")

    with pytest.raises(RetriesExhaustedError, match="NoSuchBucket") as caught:
        Rank().call(saving.attempt)
    saving.close()

    assert (caught.value.failure, caught.value.attempts) == ("permanent", 1)


def test_a_missing_key_is_missing(side: Side, tmp_path: Path) -> None:
    """Asked for, it does not exist; read, it is not there, and is not read again."""
    storage = Storage(side.options, spool=lambda: str(tmp_path))
    url = side.url("a.ckpt")
    fs = guarded(storage.place(url).fs, run=None)

    there = storage.exists(url, RecordingToken())
    with pytest.raises(RetriesExhaustedError) as caught:
        Rank().call(lambda _token: fs.cat_file(f"{side.bucket}/a.ckpt"), reading=True)

    assert there is False
    assert (caught.value.failure, caught.value.attempts) == ("permanent", 1)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
