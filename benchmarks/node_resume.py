# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Resume on one node from an S3-protocol server: one rank, and several at the same time.

The server runs in a process of its own, sends no faster over any one connection than it is told,
and counts the bytes that it sends. Each rank is a forked child, and copies what it has loaded into
tensors that it has already, as a model does. It has ended when all of them have. Lightning's own
``TorchCheckpointIO`` loads in turn with ours, so that both meet the same neighbours; there, every
rank asks the storage, and nothing is checked.

Run it::

    python benchmarks/node_resume.py --mebibytes 256 --ranks 4 --rounds 5 --mebibytes-per-s 100

It prints medians, what the server has sent as a multiple of the checkpoint, and the ratio of
several ranks to one, and asserts nothing.
"""

from __future__ import annotations

import argparse
import http.server
import multiprocessing
import re
import shutil
import socketserver
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_resilience.adapters.lightning.loading import TorchLoad, on_cpu
from lightning_resilience.adapters.lightning.mappings import Mappings
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.runtime.calls import Token
from lightning_resilience.runtime.system import SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.queues import Queue
    from multiprocessing.sharedctypes import Synchronized
    from multiprocessing.synchronize import Barrier
    from typing import BinaryIO

    Load = Callable[[dict[str, Any], str], dict[str, Any]]

URL = "s3://bucket/x.ckpt"
MEBIBYTE = 2**20
PIECE_BYTES = 2**18
HANG_S = 600.0


class Source(http.server.BaseHTTPRequestHandler):
    """A bucket with one object."""

    protocol_version = "HTTP/1.1"
    path_of_file: ClassVar[str] = ""
    bytes_per_s: ClassVar[float] = 0.0
    sent: ClassVar[Synchronized[int]]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _begin(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _object(self) -> int | None:
        """Return the length of what is asked for; None where there is nothing."""
        is_there = self.path.partition("?")[0].endswith("/x.ckpt")
        return Path(self.path_of_file).stat().st_size if is_there else None

    def do_HEAD(self) -> None:
        """Tell the length of the object."""
        size = self._object()
        if size is None:
            self._begin(404, 0)
            return
        stamp = "Mon, 01 Jan 2024 00:00:00 GMT"
        self._begin(200, size, ETag='"0"', Last_Modified=stamp)

    def do_GET(self) -> None:
        """Send a range of the object, no faster than this server does; list nothing."""
        size = self._object()
        if size is None:
            body = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
            is_list = "list-type" in self.path
            self._begin(200 if is_list else 404, len(body) if is_list else 0)
            self.wfile.write(body if is_list else b"")
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
        self._begin(
            206 if asked else 200,
            last - first + 1,
            Content_Range=f"bytes {first}-{last}/{size}",
            ETag='"0"',
        )
        with Path(self.path_of_file).open("rb") as file:
            file.seek(first)
            self._send(file, last - first + 1)

    def _send(self, file: BinaryIO, left: int) -> None:
        started, sent = time.monotonic(), 0
        while left:
            piece = file.read(min(left, PIECE_BYTES))
            self.wfile.write(piece)
            left -= len(piece)
            sent += len(piece)
            with self.sent.get_lock():
                self.sent.value += len(piece)
            if self.bytes_per_s:
                time.sleep(max(0.0, sent / self.bytes_per_s - (time.monotonic() - started)))


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves each connection in a thread."""

    daemon_threads = True


def serve(path: str, bytes_per_s: float, *, sent: Synchronized[int], answer: Connection) -> None:
    """Be the server, until the process is ended."""
    Source.path_of_file, Source.bytes_per_s, Source.sent = path, bytes_per_s, sent
    server = Server(("127.0.0.1", 0), Source)
    answer.send(server.server_address[1])
    server.serve_forever()


def lightning_load(options: dict[str, Any], _node: str) -> dict[str, Any]:
    """Load as Lightning does without the callback, on every rank."""
    import fsspec  # noqa: PLC0415 - in the child only: its event loop must not be forked

    fsspec.config.conf["s3"] = options
    loaded: dict[str, Any] = TorchCheckpointIO().load_checkpoint(URL, weights_only=True)
    return loaded


def our_load(options: dict[str, Any], node: str) -> dict[str, Any]:
    """Load as a rank does with the callback, at a healthy storage."""
    load = TorchLoad(
        Storage(options, spool=lambda: node),
        URL,
        nonce=SystemDice().nonce,
        options={"map_location": on_cpu, "weights_only": True},
        common="resume",
        mappings=Mappings(),
    )
    token = Token()
    load.prepare(token)
    path = load.attempt(token) if load.needs_storage else None
    loaded: dict[str, Any] = load.finish(path, token)
    load.close()
    return loaded


def rank(load: Load, bench: Bench, node: str, *, barrier: Barrier, answer: Queue[float]) -> None:
    """Load once, into tensors that are there, and send the seconds that it took."""
    import s3fs  # noqa: PLC0415 - what a client needs is loaded before anything is measured

    s3fs.S3FileSystem(skip_instance_cache=True, **bench.options).exists("bucket/other")
    model = {name: torch.ones(2**18) for name in names(bench.mebibytes)}
    barrier.wait()
    started = time.perf_counter()
    loaded = load(bench.options, node)["state_dict"]
    for name, tensor in model.items():
        tensor.copy_(loaded[name])
    answer.put(time.perf_counter() - started)


def names(count: int) -> list[str]:
    """Return the names of the tensors, each of one mebibyte."""
    return [f"w{number}" for number in range(count)]


@dataclass
class Bench:
    """What is measured with."""

    options: dict[str, Any]
    sent: Synchronized[int]
    size_bytes: int
    mebibytes: int
    results: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)

    def measure(self, name: str, load: Load, ranks: int) -> None:
        """Load on several ranks of a node at once; note seconds and multiples that were sent."""
        context = multiprocessing.get_context("fork")
        barrier, answer = context.Barrier(ranks), context.Queue()
        node = tempfile.mkdtemp()
        before = self.sent.value
        children = [
            context.Process(
                target=rank,
                args=(load, self, node),
                kwargs={"barrier": barrier, "answer": answer},
            )
            for _ in range(ranks)
        ]
        for child in children:
            child.start()
        seconds = max(answer.get(timeout=HANG_S) for _ in children)
        for child in children:
            child.join()
        shutil.rmtree(node)
        sent = (self.sent.value - before) / self.size_bytes
        self.results.setdefault((name, ranks), []).append((seconds, sent))

    def show(self, name: str, ranks: int) -> float:
        """Print medians; return that of the seconds."""
        rows = self.results[name, ranks]
        seconds = statistics.median(row[0] for row in rows)
        sent = statistics.median(row[1] for row in rows)
        print(f"{name:22s} {ranks} ranks {seconds:7.3f} s   {sent:5.2f} × its bytes sent")
        return seconds


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes-per-s", type=float, default=100.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    path = f"{folder}/x.ckpt"
    tensors = {name: torch.zeros(2**18).normal_() for name in names(arguments.mebibytes)}
    torch.save({"state_dict": tensors}, path)
    context = multiprocessing.get_context("fork")
    sent = context.Value("q", 0)
    ours, theirs = context.Pipe(duplex=False)
    rate = arguments.mebibytes_per_s * MEBIBYTE
    server = context.Process(
        target=partial(serve, path, rate, sent=sent, answer=theirs), daemon=True
    )
    server.start()
    options = {
        "key": "testing",
        "secret": "testing",
        "endpoint_url": f"http://127.0.0.1:{ours.recv()}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    size_bytes = Path(path).stat().st_size
    bench = Bench(options=options, sent=sent, size_bytes=size_bytes, mebibytes=arguments.mebibytes)
    kinds: dict[str, Load] = {"Lightning": lightning_load, "lightning-resilience": our_load}
    for _ in range(arguments.rounds):
        for name, load in kinds.items():
            for ranks in (1, arguments.ranks):
                bench.measure(name, load, ranks)
    for name in kinds:
        one, several = (bench.show(name, ranks) for ranks in (1, arguments.ranks))
        print(f"{name}: {arguments.ranks} ranks take {several / one:.2f} times as long as one")
    server.terminate()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
