# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Resume a job while storage is ill: plain torchrun, NVRx's ``ft_launcher``, and ours, in turn.

A job of 2 agents with 4 workers each (loopback, DDP, gloo, CPU) starts from a checkpoint in an
S3-protocol storage. When the first worker asks for that checkpoint the storage falls ill, for 8 s:
every request is answered 503 SlowDown. All launchers get the same job, checkpoint, storage and
``--max-restarts``; only ours has the backend ``resilient`` and the callback, with its defaults.

The S3 client has its own patience, which is that of botocore and s3fs; ``--aws-max-attempts 1``
has the first taken away for all alike. Each request takes the storage 20 ms, so that requests can
meet there. Workers are forked from one process that has imported everything: 8 of them importing
Lightning at once would take longer than the outage on a small machine.

``ft_launcher`` is not installed by this project. It is looked for on the PATH, or given; where it
is not found, it is left out, and the table says so. It needs no GPU to run::

    python -m venv nvrx
    nvrx/bin/pip install nvidia-resiliency-ext
    python benchmarks/restart_storm.py --ft-launcher nvrx/bin/ft_launcher

Run it (needs ``s3fs`` and ``moto[server]``; less than four minutes)::

    python benchmarks/restart_storm.py              # --json: for programs; --keep: keep the logs

It prints a table, and asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import importlib
import importlib.metadata
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

AGENTS, WORKERS = 2, 4
BUCKET = "storm"
START_PATH = f"/{BUCKET}/start/last.ckpt"
START = f"s3:/{START_PATH}"
START_STEP, STEPS = 5, 15
PACE_S = 0.1
SERVICE_S = 0.02
IMPORTS_S = 120.0
SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"""
# Headers that speak of one connection, not of the message; the length is told anew.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}
TORCHRUN, NVRX, OURS = "torchrun", "ft_launcher", "torchrun, ours"


# --- storage: works, but for its outage, and counts -----------------------------------------------


@dataclass
class Phase:
    """What has reached the storage in one phase."""

    requests: int = 0
    peak: int = 0


class Outage:
    """Decides what becomes of each request, and counts them. Any thread may ask.

    Args:
        length_s: How long it lasts, in seconds, from the first request on for the checkpoint that
            the job starts from; 0 for no outage.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.before, self.during, self.after = Phase(), Phase(), Phase()
        self.struck_at_s = 0.0
        self._here = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def request(self, path: str) -> Iterator[bool]:
        """Count a request while it is served; tell whether it is to be refused."""
        with self._lock:
            now_s = time.monotonic()
            if not self.struck_at_s and path.partition("?")[0] == START_PATH:
                self.struck_at_s = now_s
            has_begun = bool(self.struck_at_s)
            is_ill = has_begun and now_s < self.struck_at_s + self.length_s
            phase = self.during if is_ill else self.after if has_begun else self.before
            self._here += 1
            phase.requests += 1
            phase.peak = max(phase.peak, self._here)
        try:
            yield is_ill
        finally:
            with self._lock:
                self._here -= 1


class Storage(http.server.ThreadingHTTPServer):
    """Stands before an S3-protocol server, on a free port of loopback."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, backend: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.backend = backend
        self.outage = Outage(0.0)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base
        """Keep quiet about clients that are gone: a killed worker does not say goodbye."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    """Forwards or refuses one connection's requests."""

    protocol_version = "HTTP/1.1"
    server: Storage  # type: ignore[mutable-override] # made by that server alone

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle_request(self) -> None:
        """Serve one request."""
        body = self._body()
        with self.server.outage.request(self.path) as is_ill:
            time.sleep(SERVICE_S)
            if is_ill:
                self._answer(503, {"Content-Type": "application/xml"}, SLOW_DOWN)
            else:
                self._forward(body)

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815 - names of the base

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _forward(self, body: bytes) -> None:
        sent = {name: text for name, text in self.headers.items() if name.lower() not in HOP_BY_HOP}
        backend = http.client.HTTPConnection(self.server.backend, timeout=60)
        with contextlib.closing(backend):
            backend.request(self.command, self.path, body or None, sent)
            answer = backend.getresponse()
            content = answer.read()
        kept = {name: text for name, text in answer.getheaders() if name.lower() not in HOP_BY_HOP}
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(answer.status, kept, content, length=length)

    def _answer(
        self, status: int, headers: Mapping[str, str], content: bytes, *, length: str | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextlib.contextmanager
def storage() -> Iterator[Storage]:
    """Run a storage with an empty bucket."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - workers do without

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    connection = http.client.HTTPConnection(f"{host}:{port}", timeout=60)
    with contextlib.closing(connection):
        connection.request("PUT", f"/{BUCKET}")
        connection.getresponse().read()
    with Storage(f"{host}:{port}") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
    moto.stop()


# --- workers: forked from a process that has imported everything ----------------------------------


def be_stub(path: str, arguments: Sequence[str]) -> int:
    """Be the worker for its launcher: have it forked, hand on signals, and end as it ends."""
    launcher = os.getppid()
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(path)
        request = json.dumps({"arguments": list(arguments), "environment": dict(os.environ)})
        socket.send_fds(warm, [len(request).to_bytes(8, "big")], [1, 2])
        warm.sendall(request.encode())
        pid = int(warm.recv(64))
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
        warm.settimeout(0.5)
        while True:
            try:
                answer = warm.recv(64)
            except TimeoutError:
                # The worker notices that this is gone.
                if os.getppid() != launcher:
                    return 1
                continue
            return int(answer) if answer else 1


def be_warm(path: str) -> None:
    """Import everything, then fork a worker for each connection, until standard input ends."""
    for name in ("lightning.pytorch", "s3fs", "lightning_resilience.adapters.lightning.callback"):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            connection = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                be_forked(connection)
            connection.close()


def be_forked(connection: socket.socket) -> None:
    """Work in place of the stub that is at the other end, and tell it how that has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, outputs, _, _ = socket.recv_fds(connection, 8, 2)
    with connection.makefile("rb") as source:
        request = json.loads(source.read(int.from_bytes(length, "big")))
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    with contextlib.suppress(OSError):
        connection.sendall(str(os.getpid()).encode())
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    code = 0
    try:
        work(*request["arguments"])
    except BaseException as error:  # noqa: BLE001 - told to the stub, whatever it is
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        connection.sendall(str(code).encode())
    os._exit(code)


def end_with(connection: socket.socket) -> None:
    """End this process once its stub is gone."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(1)


def work(kind: str, home: str) -> None:
    """Train: as one of the job's ranks, or alone, to make the checkpoint that it starts from."""
    # All of it is loaded already, in the process that this one is forked from.
    import fsspec  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from lightning.pytorch import LightningModule, Trainer  # noqa: PLC0415
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    from lightning_resilience import ResilienceCallback  # noqa: PLC0415

    is_first = kind == "start"
    rank = os.environ.get("RANK", "0")
    # Takes as long as the outage where 8 do it at once on a small machine; asks for nothing.
    fsspec.filesystem("s3").connect()
    begun = {"agent": os.environ.get("STORM_AGENT"), "rank": int(rank)}
    note(home, "starts", {"count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), **begun})

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(256, 256)

        def training_step(self, batch: Sequence[torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Pace(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            time.sleep(PACE_S)
            note(home, "steps", {"step": trainer.global_step, **begun})

    folder = START.rpartition("/")[0] if is_first else f"s3://{BUCKET}/{Path(home).name}"
    last = START_STEP if is_first else START_STEP + STEPS
    checkpoints = ModelCheckpoint(
        folder, save_last=True, every_n_train_steps=last, save_on_train_epoch_end=False
    )
    spread = {"devices": WORKERS, "num_nodes": AGENTS, "strategy": "ddp"}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=last,
        callbacks=[Pace(), checkpoints, *([ResilienceCallback()] if kind == OURS else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"devices": 1} if is_first else spread),
    )
    data = DataLoader(TensorDataset(torch.ones(4096, 256)), batch_size=8)
    trainer.fit(Model(), data, ckpt_path=None if is_first else START)


def note(home: str, name: str, told: Mapping[str, object]) -> None:
    """Add a line to one of the job's logs; all processes of the host share this clock."""
    line = json.dumps({"at_s": time.monotonic(), **told}) + "\n"
    with Path(home, name).open("a", encoding="utf-8") as file:
        file.write(line)


def noted(home: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of one of the job's logs."""
    path = home / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


# --- jobs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a job has gone.

    Args:
        kind: Its launcher.
        codes: Exit statuses of the agents; None where one was ended after the limit.
        restarts: Restarts of torch's own kind that were used up, of the agent with most.
        starts: Workers that were started, in all.
        during: Requests that reached the storage during the outage.
        peak: Requests that were at the storage at once during the outage.
        peak_after: The same after it.
        trains_after_s: From the start of the outage until all workers have made a step, in seconds.
        is_alive: Whether the job has ended well.
    """

    kind: str
    codes: tuple[int | None, ...]
    restarts: int
    starts: int
    during: int
    peak: int
    peak_after: int
    trains_after_s: float | None
    is_alive: bool


def result_of(kind: str, home: Path, *, outage: Outage, codes: tuple[int | None, ...]) -> Result:
    """Make a result of what was counted and noted."""
    starts = noted(home, "starts")
    first: dict[int, float] = {}
    for each in noted(home, "steps"):
        first.setdefault(each["rank"], each["at_s"])
    trains = len(first) == AGENTS * WORKERS
    return Result(
        kind=kind,
        codes=codes,
        restarts=max((each["count"] for each in starts), default=0),
        starts=len(starts),
        during=outage.during.requests,
        peak=outage.during.peak,
        peak_after=outage.after.peak,
        trains_after_s=max(first.values()) - outage.struck_at_s if trains else None,
        is_alive=all(code == 0 for code in codes),
    )


def table(results: Sequence[Result], skipped: Mapping[str, str]) -> list[str]:
    """Return the lines of a table."""
    rows = [
        "launcher        job    restarts  workers  requests in  most at once  training again",
        "                       used up   started  the outage   during/after  after",
    ]
    for each in results:
        # An agent without a status was still there at the limit.
        end = "alive" if each.is_alive else "HANGS" if None in each.codes else "DEAD"
        again = "never" if each.trains_after_s is None else f"{each.trains_after_s:.1f} s"
        rows.append(
            f"{each.kind:15s} {end:6s} {each.restarts:8d}  {each.starts:7d}  {each.during:11d}"
            f"  {each.peak:6d}/{each.peak_after:<5d}  {again:>14s}"
        )
    return rows + [f"{kind:15s} left out: {why}" for kind, why in skipped.items()]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Bench:
    """Where jobs are run.

    Args:
        home: Folder for logs.
        storage: What they load from.
        arguments: From the command line.
        launchers: How the launcher of each kind is called.
    """

    home: Path
    storage: Storage
    arguments: argparse.Namespace
    launchers: Mapping[str, Sequence[str]]
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def socket(self) -> str:
        """Where the warm process listens."""
        return str(self.home / "warm")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all processes of a job."""
        own = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.storage.url,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self.home),
        }
        most = self.arguments.aws_max_attempts
        return {**os.environ, **own, **({"AWS_MAX_ATTEMPTS": str(most)} if most else {})}

    def warm_up(self) -> None:
        """Start the warm process, and wait until it has imported everything."""
        command = [sys.executable, __file__, "--warm", self.socket]
        warm = subprocess.Popen(command, env=self.environment)
        self.stack.callback(warm.wait)
        self.stack.callback(warm.kill)
        until_s = time.monotonic() + IMPORTS_S
        while not Path(self.socket).exists():
            if warm.poll() is not None or time.monotonic() > until_s:
                message = f"the warm process has not come up within {IMPORTS_S:g} s"
                raise RuntimeError(message)
            time.sleep(0.05)

    def worker(self, kind: str, home: Path) -> list[str]:
        """Return the command of a worker."""
        stub = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
        return [*stub, "--stub", self.socket, kind, str(home)]

    def make_start(self) -> None:
        """Make the checkpoint that all jobs start from."""
        home = self.home / "start"
        home.mkdir()
        subprocess.run(
            self.worker("start", home), env=self.environment, timeout=IMPORTS_S, check=True
        )

    def run(self, kind: str) -> Result:
        """Run a job through an outage."""
        home = self.home / kind.replace(", ", "-")
        home.mkdir()
        outage = self.storage.outage = Outage(self.arguments.outage_s)
        agents: list[subprocess.Popen[bytes]] = []
        port = free_port()
        for node in range(AGENTS):
            with (home / f"agent{node}.log").open("wb") as log:
                agents.append(
                    subprocess.Popen(
                        self._agent(kind, home, port=port, node=node),
                        env={**self.environment, "STORM_AGENT": str(node)},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        try:
            codes = wait(agents, self.arguments.limit_s)
        finally:
            end(agents)
        return result_of(kind, home, outage=outage, codes=codes)

    def _agent(self, kind: str, home: Path, *, port: int, node: int) -> list[str]:
        return [
            *self.launchers[kind],
            f"--nnodes={AGENTS}",
            f"--nproc-per-node={WORKERS}",
            f"--max-restarts={self.arguments.max_restarts}",
            f"--rdzv-backend={'resilient' if kind == OURS else 'c10d'}",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            f"--rdzv-id={home.name}",
            f"--rdzv-conf=is_host={int(node == 0)}",
            "--local-addr=127.0.0.1",
            "--no-python",
            *self.worker(kind, home),
        ]


def wait(agents: Sequence[subprocess.Popen[bytes]], limit_s: float) -> tuple[int | None, ...]:
    """Return the exit statuses of all, None for one that has not ended in time."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s and any(each.poll() is None for each in agents):
        time.sleep(0.05)
    return tuple(each.returncode for each in agents)


def end(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave nothing of agents behind; what they have started notices that they are gone."""
    for each in agents:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def launchers_of(given: str | None) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return how launchers are called, and why others are left out."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    found: dict[str, list[str]] = {TORCHRUN: torchrun}
    skipped: dict[str, str] = {}
    path = given or shutil.which("ft_launcher")
    if path is None:
        skipped[NVRX] = "it is not installed (pip install nvidia-resiliency-ext, --ft-launcher)"
    else:
        found[NVRX] = [path, "--ignore-missing-fault-tol-cfg"]
    return {**found, OURS: torchrun}, skipped


def measure(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all jobs, and return what is to be told."""
    if not importlib.metadata.entry_points(group="torchrun.handlers", name="resilient"):
        message = "torchrun does not find the backend: install this package (pip install -e .)"
        raise SystemExit(message)
    launchers, skipped = launchers_of(arguments.ft_launcher)
    home = Path(tempfile.mkdtemp(prefix="storm"))
    load = os.getloadavg()[0]
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        if not arguments.keep:
            stack.callback(shutil.rmtree, home, ignore_errors=True)
        bench = Bench(home, stack.enter_context(storage()), arguments, launchers, stack)
        bench.warm_up()
        bench.make_start()
        for kind in [arguments.only] if arguments.only else launchers:
            say(f"{kind} …")
            results.append(bench.run(kind))
    if arguments.keep:
        say(f"logs are in {home}")
    return {
        "outage_s": arguments.outage_s,
        "max_restarts": arguments.max_restarts,
        "load": load,
        "results": [asdict(each) for each in results],
        "skipped": skipped,
        "table": table(results, skipped),
    }


def main() -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--ft-launcher", help="path of NVRx's launcher, in an environment of its own"
    )
    parser.add_argument("--outage-s", type=float, default=8.0)
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("--aws-max-attempts", type=int, help="botocore's; its own by default")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for each job")
    parser.add_argument("--only", choices=(TORCHRUN, NVRX, OURS), help="one of the launchers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    parser.add_argument("--warm", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--stub", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stub:
        return be_stub(arguments.stub[0], arguments.stub[1:])
    if arguments.warm:
        be_warm(arguments.warm)
    told = measure(arguments, (lambda _: None) if arguments.json else print)
    lines = told.pop("table")
    if arguments.json:
        print(json.dumps(told, indent=2))
        return 0
    print(f"an outage of {arguments.outage_s:g} s, {AGENTS} × {WORKERS} workers,")
    print(f"--max-restarts {arguments.max_restarts} (load {told['load']:.1f}):")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
