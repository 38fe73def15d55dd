# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Survive an outage of the checkpoint storage: one job, twice, without and with the callback.

A small convolutional network learns handwritten digits on two ranks (DDP, gloo, CPU) under
``torchrun --max-restarts 3``, and writes a checkpoint every few steps to S3: a real S3-protocol
server on loopback, behind a proxy. From the write of ``step=0040.ckpt`` on, the storage is ill for
20 s or more: each request is answered 503 SlowDown, every third by a connection reset instead.

* Without the callback the save raises, torchrun restarts the workers, each new attempt asks the
  ill storage for the newest checkpoint, and the job is dead while the outage still lasts.
* With ``ResilienceCallback(on_outage="wait")`` the ranks wait together, for longer than the process
  group's timeout of 10 s, one rank probes for all, and training goes on where it stood: no restart,
  nothing lost.

Times are scaled down, in both runs alike: an outage of many minutes to 20 s, a process-group
timeout of half an hour to 10 s, and the S3 client's own patience from 40 s to 2 s
(``AWS_MAX_ATTEMPTS=1``; the five tries of s3fs stay). With its full patience, one or two restarts
are burnt in the same time, and the third needs a longer outage. Where workers start slowly the
outage lasts longer, up to a minute, for both runs alike: all restarts are to fall into it. How long
is decided before it begins.

Run it (one to two minutes; needs ``s3fs``, ``moto[server]`` and ``scikit-learn``)::

    python examples/01_survive_an_outage.py            # --fast: shorter; --keep: keep the logs

The last lines, under a table with the figures; the exit code is 0 only if every claim holds::

    ✓ without the callback: the job failed
    ✓ without the callback: every restart was used
    ✓ with the callback: the job ended with exit code 0
    ✓ with the callback: no restart was used
    ✓ with the callback: every checkpoint is there, loads, and holds the right step
    ✓ with the callback: training waited for longer than the process group's timeout
    ✓ with the callback: the breaker went open, half_open, recovering
    ✓ with the callback: every rank reads the same history
    ✓ with the callback: what each rank saw on the way is a part of it
    ✓ with the callback: requests during the outage stayed within the bound
    ✓ the same outage struck both jobs while they trained
    All 11 claims hold.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import fsspec
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import BreakerConfig, ResilienceCallback, RetryPolicy


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BUCKET = "demo"
RANKS = 2
SAVE_EVERY = 10
HEALTH = {"before": "well", "during": "ILL", "after": "well again"}
SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"""
# Headers that speak of one connection, not of the message; the length is told anew.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How long things take. The numbers of the full scale tell the story, ``FAST`` is for tests."""

    steps: int = 100
    strike_step: int = 40
    pace_s: float = 0.2
    outage_s: float = 20.0
    group_timeout_s: float = 10.0
    max_restarts: int = 3
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    def checkpoints(self) -> dict[str, int]:
        """Name every checkpoint that a whole run leaves, with the step that it holds."""
        steps = range(SAVE_EVERY, self.steps + 1, SAVE_EVERY)
        return {f"step={step:04d}.ckpt": step for step in steps} | {"last.ckpt": self.steps}

    def most_requests(self, outage_s: float) -> int:
        """Bound the requests that may reach ill storage, whatever the number of ranks.

        Attempts until the trip, for reads and for writes; then probes, of at most a write and its
        clean-up each, never closer together than ``open_for_s``.
        """
        probes = math.ceil(outage_s / self.breaker.open_for_s)
        return 2 * self.breaker.trip_failures + 2 * probes


FULL = Scale()
FAST = Scale(
    steps=40,
    strike_step=20,
    pace_s=0.1,
    outage_s=8.0,
    group_timeout_s=4.0,
    max_restarts=1,
    retry=RetryPolicy(base_delay_s=0.2, throttle_base_delay_s=0.5, max_delay_s=2.0),
    breaker=BreakerConfig(
        open_for_s=4, max_open_for_s=4, view_max_age_s=1, probe_timeout_s=1, probe_lease_s=3.5
    ),
)


# --- the job: what a user would write, and one callback ------------------------------------------


class DigitsNet(LightningModule):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)
        )

    def training_step(self, batch: Sequence[torch.Tensor], _batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Pace(Callback):
    """Makes a step as long as that of a bigger network, and tells the driver where training is."""

    def __init__(self, pace_s: float, step_file: Path) -> None:
        self.pace_s = pace_s
        self.step_file = step_file

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Wait, and write the step down."""
        time.sleep(self.pace_s)
        if trainer.is_global_zero:
            self.step_file.write_text(str(trainer.global_step))


def leave_with_launcher(launcher: int) -> None:
    """End this process once its launcher is gone, so that nothing outlives the demo."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


def run_worker(home: Path, scale: Scale) -> None:
    """Train as one rank of the job; ``home`` says where to report to, and which job it is."""
    watch = threading.Thread(target=leave_with_launcher, args=(os.getppid(),), daemon=True)
    watch.start()
    folder = f"s3://{BUCKET}/{home.name}"
    newest = f"{folder}/last.ckpt"
    resume_from = newest if fsspec.url_to_fs(newest)[0].exists(newest) else None
    checkpoints = ModelCheckpoint(
        folder, "{step:04d}", every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True
    )
    callbacks = [checkpoints, Pace(scale.pace_s, home / "step")]
    # At full scale, these are the options that ResilienceCallback() has anyway, but for the policy:
    # the table is about an outage that all ranks wait out.
    resilience = ResilienceCallback(retry=scale.retry, breaker=scale.breaker, on_outage="wait")
    if home.name == "with":
        callbacks.append(resilience)
    timeout = timedelta(seconds=scale.group_timeout_s)
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timeout),
        max_steps=scale.steps,
        max_epochs=-1,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    trainer.fit(DigitsNet(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path=resume_from)
    if home.name == "with":
        report = {name: asdict(told) for name, told in resilience.breaker_report().items()}
        (home / f"breaker-{trainer.global_rank}.json").write_text(json.dumps(report))


# --- the storage's bad day -----------------------------------------------------------------------


class Outage:
    """Decides what becomes of each request, and counts them. Any thread may ask.

    Args:
        scale: When it strikes, and for how long at least.
        length_s: Its length in seconds, if that has been decided by an earlier run.
    """

    def __init__(self, scale: Scale, length_s: float = 0.0) -> None:
        self.length_s = length_s
        self.during = 0
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.struck_at_s = 0.0
        self.served_again_at_s = 0.0
        self._lock = threading.Lock()
        self._launched_at_s = time.monotonic()
        self._scale = scale

    def phase(self) -> str:
        """Say where we are: before, during or after."""
        if not self.struck_at_s:
            return "before"
        return "during" if time.monotonic() < self.struck_at_s + self.length_s else "after"

    def told(self) -> str:
        """Return the requests during the outage in words."""
        kinds = [(n, *key[1:]) for key, n in sorted(self.requests.items()) if key[0] == "during"]
        return f"{self.during}: " + ", ".join(f"{n} {method} {kind}" for n, method, kind in kinds)

    def waited_s(self) -> float:
        """Return how long it took, from the first refusal on, until a request was served again."""
        return max(0.0, self.served_again_at_s - self.struck_at_s)

    def decide(self, method: str, path: str) -> str:
        """Count a request; return whether to ``forward``, ``refuse`` or ``reset`` it."""
        path = path.split("?", maxsplit=1)[0]
        kind = "checkpoint" if path.endswith(".ckpt") else "other"
        kind = "probe" if ".resilience/probe/" in path else kind
        with self._lock:
            now_s = time.monotonic()
            if not self.length_s:
                # Workers take this long to get here, now and after each restart. Half as much again
                # as all attempts need is long enough to see them all fail.
                attempts_s = (self._scale.max_restarts + 1) * (now_s - self._launched_at_s)
                least_s = self._scale.outage_s
                self.length_s = min(max(least_s, 1.5 * attempts_s), 3 * least_s)
            strikes = method == "PUT" and path.endswith(f"step={self._scale.strike_step:04d}.ckpt")
            if strikes and not self.struck_at_s:
                self.struck_at_s = now_s
            phase = self.phase()
            self.requests[phase, method, kind] += 1
            if phase == "during":
                self.during += 1
                return "refuse" if self.during % 3 else "reset"
            if phase == "after" and not self.served_again_at_s:
                self.served_again_at_s = now_s
            return "forward"


class ProxyServer(http.server.ThreadingHTTPServer):
    """Stands between the job and the storage, on a free port of loopback."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, outage: Outage, storage: str) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.outage = outage
        self.storage = storage

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base
        """Keep quiet about clients that are gone: a killed worker does not say goodbye."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class ProxyHandler(http.server.BaseHTTPRequestHandler):
    """Forwards, refuses or resets one connection's requests."""

    protocol_version = "HTTP/1.1"
    server: ProxyServer  # type: ignore[mutable-override] # made by that server alone

    def handle_request(self) -> None:
        """Serve one request."""
        body = self.read_body()
        verdict = self.server.outage.decide(self.command, unquote(self.path))
        if verdict == "forward":
            self.forward(body)
        elif verdict == "refuse":
            self.answer(503, {"Content-Type": "application/xml"}, SLOW_DOWN)
        else:
            self.close_connection = True
            # A socket that lingers for 0 s is not closed but reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815 - names of the base

    def read_body(self) -> bytes:
        """Read what the client sends, of a length told before or chunk by chunk."""
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return b"".join(self.read_chunks())

    def read_chunks(self) -> Iterator[bytes]:
        """Yield the chunks of a chunked body, and read past its trailers."""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def forward(self, body: bytes) -> None:
        """Ask the storage, and hand its answer on."""
        sent = {name: text for name, text in self.headers.items() if name.lower() not in HOP_BY_HOP}
        storage = http.client.HTTPConnection(self.server.storage, timeout=60)
        with contextlib.closing(storage):
            storage.request(self.command, self.path, body or None, sent)
            answer = storage.getresponse()
            content = answer.read()
        kept = {name: text for name, text in answer.getheaders() if name.lower() not in HOP_BY_HOP}
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.answer(answer.status, kept, content, length=length)

    def answer(
        self, status: int, headers: dict[str, str], content: bytes, *, length: str | None = None
    ) -> None:
        """Answer. To HEAD, without the content; ``length`` is then what GET would have had."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        head = self.command == "HEAD"
        if status not in {204, 304}:
            self.send_header("Content-Length", length or str(0 if head else len(content)))
        self.end_headers()
        if not head:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing: the outage counts, and the driver tells."""


# --- the driver: two runs, and what is true of them ----------------------------------------------


@contextlib.contextmanager
def child(command: list[str], log: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own, and leave nothing of it behind."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | settings,
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def storage_server(logs: Path) -> Iterator[str]:
    """Run an S3-protocol server with an empty bucket; yield its host and port."""
    log = logs / "storage.log"
    with child(["-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], log) as server:
        until_s = time.monotonic() + 60
        while not (found := re.search(r"Running on http://([\d.:]+)", log.read_text())):
            if server.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"The storage server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        s3(found[1]).mkdir(BUCKET)
        yield found[1]


def s3(storage: str) -> Any:  # noqa: ANN401 - fsspec has no types
    """Open the storage itself, past the proxy."""
    return fsspec.filesystem("s3", endpoint_url=f"http://{storage}", skip_instance_cache=True)


class Run:
    """One job, and what came of it.

    Args:
        scale: How long things take.
        home: Folder for its logs and reports; its name says whether the callback is used.
        outage: What happens to the storage meanwhile.
    """

    def __init__(self, scale: Scale, home: Path, outage: Outage) -> None:
        self.scale = scale
        self.home = home
        self.outage = outage
        self.title = f"{home.name} the callback"
        self.exit_code = -1
        self.seconds = 0.0
        self.checkpoints: dict[str, int | str] = {}

    def run(self, console: Console, storage: str) -> None:
        """Run the job to its end, and look at what it left in the storage."""
        self.home.mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={RANKS}", f"--max-restarts={self.scale.max_restarts}"]
        command += [f"--log-dir={self.home / 'workers'}", "--redirects=3"]
        command += [__file__, f"--worker={self.home}", *["--fast"] * (self.scale is FAST)]
        began_s = time.monotonic()
        with ProxyServer(self.outage, storage) as proxy:
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            endpoint = f"http://127.0.0.1:{proxy.server_port}"
            with child(command, self.home / "torchrun.log", AWS_ENDPOINT_URL=endpoint) as launcher:
                self.follow(console, launcher)
            proxy.shutdown()
        self.seconds = time.monotonic() - began_s
        self.exit_code = launcher.returncode
        self.checkpoints = load_steps(s3(storage), f"{BUCKET}/{self.home.name}")

    def follow(self, console: Console, launcher: subprocess.Popen[bytes]) -> None:
        """Show one line of progress until the job ends, for at most 150 s."""
        began_s = told_s = time.monotonic()
        step_file, seen = self.home / "step", self.outage
        with console.status(self.title) as status:
            while launcher.poll() is None:
                now_s = time.monotonic()
                step = step_file.read_text() if step_file.exists() else "0"
                line = f"{self.title}: {now_s - began_s:3.0f} s, {self.restarts} restarts, "
                line += f"step {step}, storage {HEALTH[seen.phase()]}"
                line += f", {seen.during} requests while it was ill" if seen.during else ""
                status.update(line)
                if not console.is_terminal and now_s > told_s + 3:
                    told_s = now_s
                    console.print(line)
                if now_s > began_s + 150:
                    raise SystemExit(f"{line}. {late(150)} The logs are in {self.home}")
                time.sleep(0.2)

    @property
    def restarts(self) -> int:
        """Restarts that torchrun made: it keeps a folder for each attempt."""
        return max(0, len(list(self.home.glob("workers/*/attempt_*"))) - 1)

    @property
    def errors(self) -> list[str]:
        """For each failed attempt, the last error of the rank that torchrun saw fail first."""
        seen = re.compile(r"failed \(exitcode: .*?local_rank: (\d+)")
        raised = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)
        errors = []
        for attempt, rank in enumerate(seen.findall((self.home / "torchrun.log").read_text())):
            for log in self.home.glob(f"workers/*/attempt_{attempt}/{rank}/stderr.log"):
                last = (raised.findall(log.read_text()) or ["no error in its log"])[-1]
                errors.append(f"attempt {attempt}, rank {rank}: {last}")
        return errors

    @property
    def saved(self) -> str:
        """How many checkpoints there are, and how many of them hold the step that they should."""
        steps = {step for step in self.checkpoints.values() if isinstance(step, int)}
        expected = self.scale.checkpoints() | {"last.ckpt": max(steps, default=0)}
        verified = self.checkpoints.items() & expected.items()
        return f"{len(self.checkpoints)} present, {len(verified)} verified"

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The breakers' story as each rank read it at the end, by the name of the dependency."""
        return [json.loads(path.read_text()) for path in sorted(self.home.glob("breaker-*.json"))]


def late(within_s: float) -> str:
    """Say that a job has not ended, and whether this machine may be the reason."""
    machine = f"This machine has {os.cpu_count()} cores and a load of {os.getloadavg()[0]:.1f}"
    return f"It should have ended within {within_s:g} s. {machine}; a busy one takes longer."


def load_steps(storage: Any, folder: str) -> dict[str, int | str]:  # noqa: ANN401 - as above
    """Download and load every checkpoint; return the step in it, or why it does not load."""
    steps: dict[str, int | str] = {}
    for path in storage.find(folder):
        if not path.endswith(".ckpt"):
            continue
        try:
            content = io.BytesIO(storage.cat_file(path))
            steps[Path(path).name] = torch.load(content, weights_only=True)["global_step"]
        except Exception as error:  # noqa: BLE001 - whatever it is: this checkpoint does not load
            steps[Path(path).name] = repr(error)
    return steps


def chain(told: dict[str, Any], key: str = "history") -> list[str]:
    """Return the transitions that one rank read at the end, or saw on the way."""
    return [f"{epoch} {state}" for epoch, state, *_ in told[key]]


def claims(plain: Run, protected: Run, scale: Scale) -> dict[str, bool]:
    """Say everything that the demo claims, and whether it is so."""
    ill, reports = protected.outage, protected.reports
    histories = [{name: told["history"] for name, told in report.items()} for report in reports]
    # A chain is a part of another if all of it can be found in one walk through the other.
    parts = [
        all(transition in walk for transition in chain(told, "seen"))
        for report in reports
        for told in report.values()
        for walk in [iter(chain(told))]
    ]
    path = [
        any(
            re.search(r"\d+ open,\d+ half_open,\d+ recovering", ",".join(chain(told)))
            for told in report.values()
        )
        for report in reports
    ]
    struck = all(run.outage.struck_at_s and run.outage.during for run in (plain, protected))
    everyone = len(reports) == RANKS
    without, with_ = "without the callback", "with the callback"
    return {
        f"{without}: the job failed": plain.exit_code != 0,
        f"{without}: every restart was used": plain.restarts == scale.max_restarts,
        f"{with_}: the job ended with exit code 0": protected.exit_code == 0,
        f"{with_}: no restart was used": protected.restarts == 0,
        f"{with_}: every checkpoint is there, loads, and holds the right step": (
            protected.checkpoints == scale.checkpoints()
        ),
        f"{with_}: training waited for longer than the process group's timeout": (
            ill.waited_s() > scale.group_timeout_s
        ),
        f"{with_}: the breaker went open, half_open, recovering": everyone and all(path),
        f"{with_}: every rank reads the same history": (
            everyone and all(history == histories[0] for history in histories)
        ),
        f"{with_}: what each rank saw on the way is a part of it": everyone and all(parts),
        f"{with_}: requests during the outage stayed within the bound": (
            0 < ill.during <= scale.most_requests(ill.length_s)
        ),
        "the same outage struck both jobs while they trained": (
            struck and plain.outage.length_s == ill.length_s
        ),
    }


def table(plain: Run, protected: Run, scale: Scale) -> Table:
    """Lay out the figures of both runs, side by side."""
    grid = Table("", plain.title, protected.title, show_lines=True)
    runs, ill = (plain, protected), protected.outage
    row = grid.add_row
    row("ended", *(f"exit code {run.exit_code} after {run.seconds:.0f} s" for run in runs))
    row("restarts used", *(f"{run.restarts} of {scale.max_restarts}" for run in runs))
    row("errors", *("\n".join(run.errors) or "none" for run in runs))
    row(f"checkpoints, of {len(scale.checkpoints())}", *(run.saved for run in runs))
    row(f"requests in the outage of {ill.length_s:.0f} s", *(run.outage.told() for run in runs))
    row("… at most", "no bound", str(scale.most_requests(ill.length_s)))
    row("waited for the storage", "–", f"{ill.waited_s():.0f} s")
    for rank, report in enumerate(protected.reports):
        for name, told in report.items():
            history = " → ".join(chain(told)) or "no transition"
            seen = ", ".join(chain(told, "seen")) or "none"
            row(f"{name}, as rank {rank} reads it", "–", f"{history}\nseen on the way: {seen}")
    return grid


def conclude(console: Console, results: dict[str, bool], logs: Path, *, keep: bool) -> int:
    """Print every claim with its mark; return the exit code."""
    broken = sum(not holds for holds in results.values())
    if broken:
        newest = sorted(logs.glob("with/workers/*/attempt_*/*/stderr.log"))[-RANKS:]
        for log in [*sorted(logs.glob("*/torchrun.log")), *newest]:
            tail = log.read_text(errors="replace").splitlines()[-12:]
            console.print(f"--- {log}", *tail, sep="\n", soft_wrap=True)
    if broken or keep:
        console.print(f"The logs are in {logs}", soft_wrap=True)
    else:
        shutil.rmtree(logs)
    for claim, holds in results.items():
        console.print(f"{'✓' if holds else '✗'} {claim}")
    whole = f"All {len(results)} claims hold."
    console.print(f"{broken} of {len(results)} claims do not hold." if broken else whole)
    return 1 if broken else 0


def isolate() -> None:
    """Keep this machine's own AWS settings and proxies out of the demo."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "LIGHTNING_RESILIENCE"))]:
        del os.environ[name]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_MAX_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    # gloo listens on the address of the host's name unless it is told otherwise.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def run_demo(scale: Scale, *, keep: bool) -> int:
    """Run the job twice and say what came of it."""
    isolate()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Wide enough for the table where there is no terminal to ask.
    width = None if sys.stdout.isatty() else 120
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    logs = Path(tempfile.mkdtemp(prefix="survive-an-outage-"))
    try:
        with storage_server(logs) as storage:
            plain = Run(scale=scale, home=logs / "without", outage=Outage(scale))
            plain.run(console, storage)
            outage = Outage(scale, plain.outage.length_s)
            protected = Run(scale=scale, home=logs / "with", outage=outage)
            protected.run(console, storage)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Nothing is left running; the logs are in {logs}")
        return 130
    console.print(table(plain, protected, scale))
    return conclude(console, claims(plain, protected, scale), logs, keep=keep)


def main() -> int:
    """Be the driver or, as torchrun starts it, one rank of the job."""
    parser = argparse.ArgumentParser(description="Survive an outage of the checkpoint storage.")
    parser.add_argument("--fast", action="store_true", help="shorter, for tests")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = FAST if options.fast else FULL
    if options.worker:
        run_worker(options.worker, scale)
        return 0
    return run_demo(scale, keep=options.keep)


if __name__ == "__main__":
    sys.exit(main())
