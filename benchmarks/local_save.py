# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Save one checkpoint to a local disk: Lightning's ``TorchCheckpointIO`` and ours, side by side.

Each save runs in a forked child, the two in turn, so that both meet the same page cache and the
same neighbours, and so that a child's peak memory is its own. Ours includes what Lightning's leaves
out: a digest, ``fsync`` of file and directory, and asking the storage for the size afterwards.

Run it::

    python benchmarks/local_save.py --mebibytes 256 --rounds 5

It prints medians, the ratio, the extra memory of each, and how much of our save the digest is when
the same bytes are hashed once more by themselves. It asserts nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.runtime.calls import Token
from lightning_resilience.runtime.system import SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Save = Callable[[dict[str, object], str], None]

KIBIBYTE = 1024


def lightning_save(checkpoint: dict[str, object], path: str) -> None:
    """Save as Lightning does without the callback."""
    TorchCheckpointIO().save_checkpoint(checkpoint, path)


def our_save(checkpoint: dict[str, object], path: str) -> None:
    """Save as rank 0 does with the callback, at a healthy storage."""
    storage = Storage({}, spool=tempfile.gettempdir)
    save = StagedSave(storage, path, checkpoint, nonce=SystemDice().nonce)
    save.attempt(Token())
    save.close()


def peak_kib() -> int:
    """Return this process's peak memory in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child(save: Save, checkpoint: dict[str, object], *, path: str, answer: Connection) -> None:
    """Save once, and send seconds and extra KiB."""
    before = peak_kib()
    started = time.perf_counter()
    save(checkpoint, path)
    answer.send((time.perf_counter() - started, peak_kib() - before))


def measure(save: Save, checkpoint: dict[str, object]) -> tuple[float, float]:
    """Return seconds and extra MiB of one save in a child of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = context.Pipe(duplex=False)
        path = str(Path(directory) / "x.ckpt")
        places = {"path": path, "answer": theirs}
        process = context.Process(target=child, args=(save, checkpoint), kwargs=places)
        process.start()
        seconds, kib = ours.recv()
        process.join()
    return seconds, kib / KIBIBYTE


def digest_s(tensors: dict[str, torch.Tensor]) -> float:
    """Return the seconds that the digest of all tensors takes."""
    digest = xxhash.xxh3_128()
    started = time.perf_counter()
    for tensor in tensors.values():
        digest.update(tensor.numpy().data)
    return time.perf_counter() - started


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    # A child must not start torch's threads over those of its parent.
    torch.set_num_threads(1)
    tensors = {f"w{i}": torch.zeros(2**18).normal_() for i in range(arguments.mebibytes)}
    checkpoint: dict[str, object] = {"state_dict": tensors}
    kinds = {"Lightning": lightning_save, "lightning-resilience": our_save}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(arguments.rounds):
        for name, save in kinds.items():
            results[name].append(measure(save, checkpoint))
    medians = {}
    for name, rows in results.items():
        medians[name] = statistics.median(seconds for seconds, _ in rows)
        extra = statistics.median(mebibytes for _, mebibytes in rows)
        print(f"{name:22s} {medians[name]:7.3f} s   {extra:8.1f} MiB extra memory")
    ratio = medians["Lightning"] / medians["lightning-resilience"]
    print(
        f"{arguments.mebibytes} MiB: {ratio:.2f} times as fast, with digest, fsync and a size check"
    )
    share = digest_s(tensors) / medians["lightning-resilience"]
    print(f"the digest is {share:.1%} of the save")


if __name__ == "__main__":
    main()
