# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A save point that is killed at one of its effects, and the start that comes after it.

A *bench* is a directory of checkpoints with what a job has left there before. One process owns it
and forks from itself, for each effect, a job that is killed there, and then the next start of that
job; in between it looks at what the dead one has left. So nothing is imported twice, and every
death is a real one.

Deaths share the next start where it cannot tell them apart: every file and what is in it, every
directory, where links point, in which order files on a filesystem were written, and of what is
unfinished the place, the name but for the part that is random, and whether it is empty, are the
same. What is in an unfinished file, and how long it is, is left out, because nobody reads it: a
next start that opens one to read it fails.

Storage may be ill, so that what is saved waits on the node. Then that is among what a start goes on
from, and a job is killed as it puts it there, or, in its next start, as it publishes it.

Effects are what a job asks of the system: that a file is opened, written, synchronised, renamed,
linked or removed, that a directory is made or removed, and each request to S3. A process is killed
*before* an effect, which is after the one before it; in a write, after half of it, and in a request
that sends something, also after half of what it sends.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import warnings
from asyncio import selector_events
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from lightning.pytorch import Callback

from lightning_resilience.adapters import object_store
from lightning_resilience.adapters.staging import is_staging_name
from lightning_resilience.core.parts import Lengths
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import Job, make_data, make_model, make_trainer
from tests.s3_server import S3Server


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Bench", "Outage", "run"]

_AGED_S = 2 * 24 * 3600.0
_EVERY = 2
_KEPT = frozenset({"kept", "kept-waiting"})
_AUDITED = frozenset(
    {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link"}
)


class Outage(Enum):
    """When storage takes no checkpoint."""

    NEVER = "never"
    IN_SAVE = "in the save"
    BEFORE_START = "before the start"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is killed, and where.

    Args:
        home: A folder for all that lies on this machine.
        folder: Where checkpoints go: path or URL.
        steps_before: Steps that the job has trained before the start that is killed; 0 for none.
        saves_before: Save points that the start survives before the one in which it is killed.
        checkpoint: Options of ``ModelCheckpoint``.
        server: The server of S3, None for local files.
        parts: Whether every file is sent in parts. Then requests alone are counted: how a file is
            staged does not depend on how it is sent.
        outage: When storage takes no checkpoint of the save point: never, while the job is killed
            in it, or in the start before, so that the job is killed as it publishes what waits.
            Only in a directory of ``faulty://``.
    """

    home: str
    folder: str
    steps_before: int = _EVERY
    saves_before: int = 0
    checkpoint: dict[str, Any] = field(default_factory=dict)
    server: str | None = None
    parts: bool = False
    outage: Outage = Outage.NEVER

    @property
    def path(self) -> Path:
        """Where checkpoints go, if that is on this machine."""
        return Path(self.folder.removeprefix("faulty://"))

    @property
    def spool(self) -> Path:
        """Where checkpoints wait, and what was fetched is kept."""
        return Path(self.home) / "spool"

    def plan(self, *, is_ill: bool) -> FaultPlan:
        """Return what storage does; it lies where no effect is counted."""
        plan = FaultPlan(f"{Path(self.home).parent}/plan-{Path(self.home).name}-{is_ill}")
        if not plan.folder.exists():
            sent = ("put_file", "manifest_put_file", "rm_file")
            names = (f"step={self.killed_at}", "last") if is_ill else ()
            FaultPlan.write(
                plan.folder, *(Rule(operations=sent, name=name, error="reset") for name in names)
            )
        return plan

    @property
    def log(self) -> Path:
        """What the process of this bench has printed."""
        return Path(self.home) / "bench.log"

    @property
    def report(self) -> Path:
        """Where it writes what it has found."""
        return Path(self.home) / "report.json"

    @property
    def killed_at(self) -> int:
        """The step of the save point in which it is killed."""
        return self.steps_before + (self.saves_before + 1) * _EVERY

    def job(self, *, is_ill: bool = False) -> Job:
        """Return the job, the same for each start; where storage is ill, its end waits for less."""
        return Job(
            folder=self.folder,
            ranks=1,
            steps=self.killed_at + _EVERY,
            every=_EVERY,
            options={"spool": {"flush_timeout_s": 0.01}} if is_ill else {},
            checkpoint={"save_top_k": 1, "save_last": True, **self.checkpoint},
            trainer={"default_root_dir": self.home},
            resume="last",
        )


# What is there ------------------------------------------------------------------------------------


class _LocalContent:
    """The bench's directory on a filesystem."""

    def __init__(self, bench: Bench) -> None:
        self._path = bench.path
        self._kept = Path(bench.home) / "kept"

    def keep(self) -> None:
        """Remember what is there."""
        self._path.mkdir(exist_ok=True)
        shutil.copytree(self._path, self._kept, symlinks=True)

    def restore(self) -> None:
        """Bring back what was remembered."""
        shutil.rmtree(self._path)
        shutil.copytree(self._kept, self._path, symlinks=True)

    def files(self) -> dict[str, bytes]:
        """Return everything that is there, by its name below the directory."""
        return {
            str(path.relative_to(self._path)): path.read_bytes()
            for path in sorted(self._path.rglob("*"))
            if path.is_file()
        }

    def shape(self) -> list[object]:
        """Return what a start may see beside the contents of files."""
        found = [path for path in sorted(self._path.rglob("*")) if not is_staging_name(path.name)]
        times = {path: path.lstat().st_mtime_ns for path in found if not path.is_dir()}
        order = sorted({*times.values()})
        return [
            (
                str(path.relative_to(self._path)),
                path.is_dir(),
                str(path.readlink()) if path.is_symlink() else "",
                order.index(times[path]) if path in times else -1,
            )
            for path in found
        ]

    @staticmethod
    def unfinished() -> list[str]:
        """Return uploads that are neither completed nor aborted."""
        return []


class _RemoteContent:
    """The bench's bucket."""

    def __init__(self, bench: Bench) -> None:
        _warm_clients()
        self._client = S3Server(url=bench.server or "").client()
        self._bucket, _, self._prefix = bench.folder.removeprefix("s3://").partition("/")
        self._kept: dict[str, bytes] = {}

    def keep(self) -> None:
        """Remember what is there."""
        self._kept = self.files()

    def restore(self) -> None:
        """Bring back what was remembered."""
        for name in self.files():
            self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")
        for upload in self._uploads():
            ended = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
            self._client.abort_multipart_upload(Bucket=self._bucket, **ended)
        for name, data in self._kept.items():
            self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}", Body=data)

    def files(self) -> dict[str, bytes]:
        """Return everything that is there, by its name below the directory."""
        listed = self._client.list_objects_v2(Bucket=self._bucket).get("Contents", ())
        keys = [item["Key"] for item in listed]
        return {
            key.removeprefix(f"{self._prefix}/"): self._client.get_object(
                Bucket=self._bucket, Key=key
            )["Body"].read()
            for key in keys
        }

    @staticmethod
    def shape() -> list[object]:
        """Return what a start may see beside the contents of files: there are no links here."""
        return []

    def unfinished(self) -> list[str]:
        """Return uploads that are neither completed nor aborted."""
        return [f"upload of {upload['Key']}" for upload in self._uploads()]

    def _uploads(self) -> list[dict[str, Any]]:
        found = self._client.list_multipart_uploads(Bucket=self._bucket)
        return list(found.get("Uploads", ()))


def _warm_clients() -> None:
    """Import and read here what each job would import and read for its client of S3."""
    for name in ("s3fs", "aiobotocore.session", "aiobotocore.httpxsession"):
        with contextlib.suppress(ImportError):
            import_module(name)
    loader = import_module("botocore.loaders").JSONFileLoader
    load, loaded = loader.load_file, {}

    def load_once(self: Any, path: str) -> Any:
        if path not in loaded:
            loaded[path] = load(self, path)
        return loaded[path]

    loader.load_file = load_once


class _Waiting:
    """What waits on the bench's node."""

    def __init__(self, bench: Bench) -> None:
        self._path = bench.spool
        self._kept = Path(bench.home) / "kept-waiting"

    def keep(self) -> None:
        """Remember what waits."""
        ignored = shutil.ignore_patterns(".node-cache")
        self._path.mkdir(exist_ok=True)
        shutil.copytree(self._path, self._kept, ignore=ignored)

    def restore(self) -> None:
        """Bring back what was remembered, and nothing that was fetched for an earlier cell."""
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(self._kept, self._path)

    def names(self) -> list[str]:
        """Return what there is of checkpoints that wait, complete or not."""
        found = self._path.glob("*/*/unpublished/*")
        return sorted(str(path) for path in found if path.name != "owner")

    def shape(self) -> list[object]:
        """Return what a start may see of it, but for the parts of names that are random."""
        files = [path for path in self._path.rglob("*") if path.is_file()]
        read = [path for path in files if not _is_staged(str(path))]
        digests = [xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in read]
        return [
            *sorted(
                (path.parent.name, path.suffix, digest)
                for path, digest in zip(read, digests, strict=True)
            )
        ]

    def steps(self) -> dict[str, int | str]:
        """Return the step of each checkpoint that is known to wait, by the name that it is to have.

        Its record is written last, so it is there as a whole; or what is wrong with it is said.
        """
        found: dict[str, int | str] = {}
        for record in sorted(self._path.glob("*/*/unpublished/*.json")):
            name = json.loads(record.read_bytes())["path"].rpartition("/")[2]
            file = record.with_suffix(".checkpoint")
            found[name] = _step({name: file.read_bytes()}, name) if file.exists() else "it is gone"
        return found


def _staged(bench: Bench) -> list[str]:
    names = [path for path in Path(bench.home).rglob("*") if not _KEPT & {*path.parts}]
    return sorted(str(path) for path in names if is_staging_name(path.name))


def _steps(files: dict[str, bytes]) -> dict[str, int | str]:
    """Return the step of each checkpoint by its name, or what is wrong with it."""
    return {name: _step(files, name) for name in files if name.endswith(".ckpt")}


def _step(files: dict[str, bytes], name: str) -> int | str:
    data = files[name]
    manifest = files.get(f".resilience/{name}.json")
    said = json.loads(manifest) if manifest is not None else {}
    if said and said["digest"] != f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}":
        return "it is not what its manifest says"
    with contextlib.suppress(Exception):
        return int(torch.load(io.BytesIO(data), weights_only=True)["global_step"])
    return f"it is torn ({len(data)} bytes)"


# How a job is killed ------------------------------------------------------------------------------


class Killer(Callback):
    """Counts the effects of one save point, and kills its own process before one of them.

    Args:
        bench: Where it happens; what is done elsewhere is not counted.
        number: Number of the effect, from 1; 0 for none.
        log: File that gets one line for each effect.
    """

    def __init__(self, bench: Bench, number: int, log: Path) -> None:
        self._roots = (bench.home, bench.folder)
        self._killed_at = bench.killed_at
        self._is_early = bench.outage is Outage.BEFORE_START
        self._number = number
        self._count = 0
        self._lock = threading.Lock()
        self._is_armed = False
        self._halves = False
        self._write = os.write
        self._fsync = os.fsync
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if not bench.parts:
            sys.addaudithook(self._audit)
            os.write = self._written
            os.fsync = self._synchronised
        if bench.server is not None:
            self._count_requests()

    def setup(self, *_: Any, **__: Any) -> None:
        """Begin before anything is asked, where the start is what is killed."""
        self._is_armed = self._is_early

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Begin before the last step in front of the save point, and end after the save point."""
        is_before = trainer.global_step == self._killed_at - 1
        self._is_armed = is_before and not self._is_early

    def _effect(self, what: str, *, first: Callable[[], object] = lambda: None) -> None:
        if self._is_next(what):
            first()
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_next(self, what: str) -> bool:
        if not self._is_armed:
            return False
        with self._lock:
            self._count += 1
            self._write(self._log, f"{what}\n".encode())
            return self._count == self._number

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _AUDITED or not self._is_armed:
            return
        path = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
        if str(path).startswith(self._roots):
            self._effect(f"{event.removeprefix('os.')} {_shown(str(path))}")

    def _written(self, fd: int, data: Any) -> int:
        half = memoryview(data).cast("B")[: len(data) // 2]
        self._effect(f"write {len(data)} bytes", first=lambda: self._write(fd, half))
        return self._write(fd, data)

    def _synchronised(self, fd: Any) -> None:
        self._effect("fsync")
        self._fsync(fd)

    def _count_requests(self) -> None:
        import s3fs  # noqa: PLC0415 - only where S3 is asked

        call = s3fs.S3FileSystem._call_s3

        async def counted(fs: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            what = f"{method} {_shown(kwargs.get('Key', ''))}"
            self._effect(what)
            if "Body" in kwargs and self._is_next(f"half of {what}"):
                self._halves = True
            return await call(fs, method, *args, **kwargs)

        s3fs.S3FileSystem._call_s3 = counted
        self._send_half(vars(selector_events)["_SelectorSocketTransport"])

    def _send_half(self, transport: Any) -> None:
        """Die after half of the next body that any connection sends; headers are no body."""
        send = transport.write

        def write(connection: Any, data: Any) -> None:
            body = _body(bytes(data)) if self._halves else b""
            if body:
                send(connection, bytes(data)[: len(data) - len(body) + len(body) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            send(connection, data)

        transport.write = write
        transport.writelines = lambda connection, pieces: write(connection, b"".join(pieces))


def _body(data: bytes) -> bytes:
    """Return what of a piece that is sent to an HTTP server is a request's body."""
    if data.startswith((b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")):
        return data.partition(b"\r\n\r\n")[2]
    return data


def _place(name: str) -> str:
    if not _is_staged(name):
        return name
    # A run that has no name has a directory of a name by chance in the spool, beside the cache.
    folder = re.sub(r"/spool/([^/]+)/[^/.][^/]*$", r"/spool/\1/a run", name.rpartition("/")[0])
    return f"{folder}/ a staged file"


def _is_begun(name: str) -> bool:
    return _is_staged(name) and Path(name).stat().st_size > 0


def _is_staged(path: str) -> bool:
    return is_staging_name(path.rpartition("/")[2])


def _shown(path: str) -> str:
    return "a staged file" if _is_staged(path) else path.rpartition("/")[2]


# One process --------------------------------------------------------------------------------------


def _apart(function: Callable[[], object], log: Path) -> int:
    """Call a function in a process of its own; return its exit code, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        function()
        code = 0
    except BaseException:  # noqa: BLE001 - printed for the test to read
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(
    bench: Bench, *callbacks: Callback, steps: int | None = None, is_ill: bool = False
) -> Any:
    os.environ.update(bench.plan(is_ill=is_ill).environment)
    warnings.filterwarnings("ignore")
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s: %(message)s")
    if bench.parts:
        object_store._LENGTHS = Lengths(single_bytes=1, shortest_bytes=1024, longest_bytes=1024)
    torch.manual_seed(7)
    job = bench.job(is_ill=is_ill)
    trainer = make_trainer(job)
    if steps is not None:
        trainer.fit_loop.epoch_loop.max_steps = steps
    trainer.callbacks[:0] = callbacks
    trainer.fit(make_model(), make_data(), ckpt_path=job.resume)
    return trainer


class _Start(Callback):
    """Notes where training starts."""

    step = -1

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Note the step."""
        self.step = trainer.global_step


def _start_again(bench: Bench, report: Path) -> None:
    sys.addaudithook(partial(_refuse_to_read, frozenset(_staged(bench))))
    if bench.server is not None:
        _age_uploads()
    start = _Start()
    trainer = _train(bench, start)
    found = {"started_at": start.step, "ended_at": trainer.global_step}
    report.write_text(json.dumps(found), encoding="utf-8")


def _refuse_to_read(unfinished: frozenset[str], event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and str(args[0]) in unfinished:
        # Else deaths that have left different ones could not share a start.
        message = f"{args[0]} is unfinished, and was opened"
        raise AssertionError(message)


def _age_uploads() -> None:
    """Let a client be told that uploads began long ago: the server says the same of all of them."""
    import s3fs  # noqa: PLC0415 - only where S3 is asked

    call = s3fs.S3FileSystem._call_s3

    async def aged(fs: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await call(fs, method, *args, **kwargs)
        for upload in answer.get("Uploads", ()) if method == "list_multipart_uploads" else ():
            upload["Initiated"] -= timedelta(seconds=_AGED_S)
        return answer

    s3fs.S3FileSystem._call_s3 = aged


def _age_staged(bench: Bench) -> None:
    for name in _staged(bench):
        stat = Path(name).stat()
        os.utime(name, (stat.st_atime - _AGED_S, stat.st_mtime - _AGED_S))


# All cells ----------------------------------------------------------------------------------------


class _Cells:
    """The cells of one process.

    Args:
        bench: What is killed.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._home = Path(bench.home)
        self._content = _LocalContent(bench) if bench.server is None else _RemoteContent(bench)
        self._waiting = _Waiting(bench)
        self._seen: dict[str, dict[str, Any]] = {}

    def prepare(self) -> list[str]:
        """Let the job leave something behind; return the effects of what comes after it."""
        bench = self._bench
        if bench.steps_before:
            self._leave(bench.steps_before, is_ill=False)
        if bench.outage is Outage.BEFORE_START:
            self._leave(bench.killed_at, is_ill=True)
            assert set(self._waiting.steps().values()) == {bench.killed_at}
        self._content.keep()
        self._waiting.keep()
        return self._killed(0)

    def _leave(self, steps: int, *, is_ill: bool) -> None:
        log = self._home / "before.log"
        code = _apart(partial(_train, self._bench, steps=steps, is_ill=is_ill), log)
        assert code == 0, log.read_text(encoding="utf-8")

    def cell(self, number: int) -> dict[str, Any]:
        """Kill a job before one effect, and start it again."""
        self._content.restore()
        for name in _staged(self._bench):
            Path(name).unlink()
        self._waiting.restore()
        effect = self._killed(number)[-1]
        files = self._content.files()
        left = [*_staged(self._bench), *self._content.unfinished()]
        state = self._state(files, left, [*self._content.shape(), *self._waiting.shape()])
        waits = self._waiting.steps()
        if state not in self._seen:
            self._seen[state] = self._started_again()
        return {
            "number": number,
            "effect": effect,
            "found": _steps(files),
            "committed": [name for name in files if f".resilience/{name}.json" in files],
            "waits": waits,
            "left": len(left),
            **self._seen[state],
        }

    @staticmethod
    def _state(files: dict[str, bytes], left: list[str], shape: list[object]) -> str:
        ended = sorted((name, hash(data)) for name, data in files.items() if not _is_staged(name))
        unfinished = sorted(
            f"{_place(name)}, {'begun' if _is_begun(name) else 'empty'}" for name in left
        )
        return repr((ended, shape, unfinished))

    def _killed(self, number: int) -> list[str]:
        log = self._home / "effects.txt"
        killer = partial(_train_and_die, self._bench, number, log)
        code = _apart(killer, self._home / "killed.log")
        told = (self._home / "killed.log").read_text(encoding="utf-8")
        assert code == (-signal.SIGKILL if number else 0), told
        return log.read_text(encoding="utf-8").splitlines()

    def _started_again(self) -> dict[str, Any]:
        report, log = self._home / "again.json", self._home / "again.log"
        report.unlink(missing_ok=True)
        _age_staged(self._bench)
        code = _apart(partial(_start_again, self._bench, report), log)
        found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        return {
            "code": code,
            "started_at": found.get("started_at"),
            "ended_at": found.get("ended_at"),
            "after": _steps(self._content.files()),
            "left_after": [
                *_staged(self._bench),
                *self._content.unfinished(),
                *self._waiting.names(),
            ],
            "log": log.read_text(encoding="utf-8") if code else "",
        }


def _train_and_die(bench: Bench, number: int, log: Path) -> None:
    _train(bench, Killer(bench, number, log), is_ill=bench.outage is Outage.IN_SAVE)


def run(bench: Bench, part: int, parts: int) -> None:
    """Kill at every effect, of ``parts`` processes that share the work; write one row for each.

    Args:
        bench: What is killed; of this process alone.
        part: Number of this process, from 0.
        parts: How many there are.
    """
    cells = _Cells(bench)
    effects = cells.prepare()
    # Each death is a fork of this process: as in ``tests.warm_python``.
    gc.collect()
    gc.freeze()
    rows = [cells.cell(number) for number in range(1 + part, len(effects) + 1, parts)]
    text = json.dumps({"effects": effects, "rows": rows})
    bench.report.write_text(text, encoding="utf-8")
