# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Save one checkpoint to an S3-protocol server: Lightning's ``TorchCheckpointIO`` and ours.

The server runs in a process of its own, reads what it is sent and keeps none of it, so that what is
measured is the client. Each save runs in a forked child, the two in turn, so that both meet the
same neighbours, and so that a child's peak memory is its own. Ours includes what Lightning's leaves
out: a file on disk with digest and ``fsync``, and asking the storage for the size afterwards.

On loopback the network is as fast as memory, and the cost of handling bytes is what is seen;
``--mebibytes-per-s`` makes the server read no faster from any one connection, as a storage does.

Run it::

    python benchmarks/s3_save.py --mebibytes 256 --rounds 5 --mebibytes-per-s 100

It prints medians, the ratio, and the extra memory of each, and asserts nothing.
"""

from __future__ import annotations

import argparse
import http.server
import multiprocessing
import resource
import socketserver
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.runtime.calls import Token
from lightning_resilience.runtime.system import SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Save = Callable[[dict[str, object], str], None]
    Saves = Callable[[dict[str, Any]], Save]

KIBIBYTE = 1024
PIECE_BYTES = 2**18


class Sink(http.server.BaseHTTPRequestHandler):
    """A bucket that knows how long its objects are, and nothing else of them."""

    protocol_version = "HTTP/1.1"
    sizes: ClassVar[dict[str, int]] = {}
    parts: ClassVar[dict[str, dict[int, int]]] = {}
    bytes_per_s: float = 0.0
    first_byte_s: float = 0.0

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _read(self) -> int:
        """Read the body, no faster than this server does; return the length of what it holds."""
        self._length, self._started = 0, time.monotonic()
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                self._take(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            self._take(int(self.headers.get("Content-Length", "0")))
        return int(self.headers.get("x-amz-decoded-content-length", self._length))

    def _take(self, size: int) -> None:
        while size:
            taken = len(self.rfile.read(min(size, PIECE_BYTES)))
            size -= taken
            self._length += taken
            if self.bytes_per_s:
                ahead_s = self._length / self.bytes_per_s - (time.monotonic() - self._started)
                time.sleep(max(0.0, ahead_s))

    def _answer(self, status: int, text: str = "", **headers: str) -> None:
        body = text.encode()
        time.sleep(self.first_byte_s)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        """Take an object or a part."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        length = self._read()
        if "uploadId" in query:
            self.parts[query["uploadId"][0]][int(query["partNumber"][0])] = length
        else:
            self.sizes[parts.path] = length
        self._answer(200, ETag='"0"')

    def do_POST(self) -> None:
        """Begin or complete an upload in parts."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        self._read()
        if "uploads" in query:
            name = f"u{len(self.parts)}"
            self.parts[name] = {}
            self._answer(
                200,
                "<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key>"
                f"<UploadId>{name}</UploadId></InitiateMultipartUploadResult>",
            )
        else:
            self.sizes[parts.path] = sum(self.parts.pop(query["uploadId"][0]).values())
            self._answer(
                200,
                '<CompleteMultipartUploadResult><ETag>"0"</ETag></CompleteMultipartUploadResult>',
            )

    def do_HEAD(self) -> None:
        """Tell the length of an object."""
        size = self.sizes.get(urlsplit(self.path).path)
        if size is None:
            self._answer(404)
            return
        stamp = "Mon, 01 Jan 2024 00:00:00 GMT"
        self._answer(200, Content_Length=str(size), ETag='"0"', Last_Modified=stamp)

    def do_GET(self) -> None:
        """List nothing."""
        self._answer(200, "<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")

    def do_DELETE(self) -> None:
        """Forget an object."""
        self.sizes.pop(urlsplit(self.path).path, None)
        self._answer(204)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves each connection in a thread."""

    daemon_threads = True


def serve(bytes_per_s: float, first_byte_s: float, answer: Connection) -> None:
    """Be the server, until the process is ended."""
    Sink.bytes_per_s, Sink.first_byte_s = bytes_per_s, first_byte_s
    server = Server(("127.0.0.1", 0), Sink)
    answer.send(server.server_address[1])
    server.serve_forever()


def lightning_saves(options: dict[str, Any]) -> Save:
    """Return what saves as Lightning does without the callback."""
    import fsspec  # noqa: PLC0415 - in the child only: its event loop must not be forked

    fsspec.config.conf["s3"] = options
    return TorchCheckpointIO().save_checkpoint


def our_saves(options: dict[str, Any]) -> Save:
    """Return what saves as rank 0 does with the callback, at a healthy storage."""
    storage = Storage(options, spool=tempfile.gettempdir)

    def save(checkpoint: dict[str, object], url: str) -> None:
        staged = StagedSave(storage, url, checkpoint, nonce=SystemDice().nonce)
        staged.attempt(Token())
        staged.close()

    return save


def peak_kib() -> int:
    """Return this process's peak memory in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child(
    saves: Saves, checkpoint: dict[str, object], options: dict[str, Any], *, answer: Connection
) -> None:
    """Save once by a client that has saved before, and send seconds and extra KiB."""
    # Both libraries keep their client for as long as the process lives.
    save = saves(options)
    save({"x": 1}, "s3://bucket/warm.ckpt")
    before = peak_kib()
    started = time.perf_counter()
    save(checkpoint, "s3://bucket/x.ckpt")
    answer.send((time.perf_counter() - started, peak_kib() - before))


def measure(
    saves: Saves, checkpoint: dict[str, object], options: dict[str, Any]
) -> tuple[float, float]:
    """Return seconds and extra MiB of one save in a child of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=child, args=(saves, checkpoint, options), kwargs={"answer": theirs}
    )
    process.start()
    seconds, kib = ours.recv()
    process.join()
    return seconds, kib / KIBIBYTE


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes-per-s", type=float, default=0.0)
    parser.add_argument("--first-byte-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    rate, first_byte_s = arguments.mebibytes_per_s * 2**20, arguments.first_byte_ms / 1000
    server = context.Process(target=serve, args=(rate, first_byte_s, theirs), daemon=True)
    server.start()
    options = {
        "key": "testing",
        "secret": "testing",
        "endpoint_url": f"http://127.0.0.1:{ours.recv()}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    tensors = {f"w{i}": torch.zeros(2**18).normal_() for i in range(arguments.mebibytes)}
    checkpoint: dict[str, object] = {"state_dict": tensors}
    kinds: dict[str, Saves] = {"Lightning": lightning_saves, "lightning-resilience": our_saves}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(arguments.rounds):
        for name, saves in kinds.items():
            results[name].append(measure(saves, checkpoint, options))
    medians = {}
    for name, rows in results.items():
        medians[name] = statistics.median(seconds for seconds, _ in rows)
        extra = statistics.median(mebibytes for _, mebibytes in rows)
        print(f"{name:22s} {medians[name]:7.3f} s   {extra:8.1f} MiB extra memory")
    ratio = medians["Lightning"] / medians["lightning-resilience"]
    print(f"{arguments.mebibytes} MiB: {ratio:.2f} times as fast")
    server.terminate()


if __name__ == "__main__":
    main()
