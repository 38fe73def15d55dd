# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A filesystem that fails as it is told, in every process that a job has.

``faulty:///folder/file`` is a local file behind a protocol of its own, so that it is treated as
remote storage: staged elsewhere, sent by one ``put_file``, and believed after an ``info``. Like a
multipart upload, ``put_file`` sends pieces, calls back after each, and shows nothing before the
last.

The plan lies in a folder that the environment variable ``FAULTY_FILESYSTEM`` names, so that one
plan holds for all ranks and for the test that watches them: ``rules.json`` says what fails, and
``calls.jsonl`` has one line for each call. An outage begins with the first call that it strikes and
is timed by the monotonic clock, which all processes of a host share.

Where a rule is about ``land``, the instant at which a file that was sent appears is a call of its
own. What is asked about a manifest has a name of its own, such as ``manifest_put_file``, and so has
what is tried before the first step, such as ``preflight_put_file``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.callbacks import NoOpCallback
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import Self


if TYPE_CHECKING:
    from collections.abc import Callable


VARIABLE = "FAULTY_FILESYSTEM"
PROTOCOL = "faulty"
_PIECES = 8


class PanicException(BaseException):
    """What a native client raises when it panics: no ``Exception``, and no request to stop."""


class EndpointConnectionError(Exception):
    """What botocore raises for an endpoint that is not there: no ``OSError``."""


class HttpError(Exception):
    """What gcsfs raises for most answers with an error in them."""

    def __init__(self, code: int) -> None:
        super().__init__(f"The object exceeded the rate limit for mutations, {code}")
        self.code = code


class ClientError(Exception):
    """What botocore raises for an answer with an error in it."""

    def __init__(self, code: str) -> None:
        super().__init__(f"An error occurred ({code}) when calling the PutObject operation")
        self.response = {"Error": {"Code": code}}


def _denied() -> BaseException:
    error = PermissionError("Access Denied")
    error.__cause__ = ClientError("AccessDenied")
    return error


def _expired() -> BaseException:
    error = PermissionError("The provided token has expired")
    error.__cause__ = ClientError("ExpiredToken")
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "reset": lambda: ConnectionResetError(errno.ECONNRESET, "connection reset by peer"),
    "busy": lambda: OSError(errno.EBUSY, "resource busy"),
    "denied": _denied,
    "endpoint": lambda: EndpointConnectionError("Could not connect to the endpoint URL"),
    "expired": _expired,
    "full": lambda: OSError(errno.ENOSPC, "no space left on device"),
    "panic": lambda: PanicException("called `Result::unwrap()` on an `Err` value"),
    "missing": lambda: FileNotFoundError(errno.ENOENT, "it is gone"),
    "throttled": lambda: HttpError(429),
    "odd": lambda: RuntimeError("nobody knows this one"),
}
"""What can be raised, by name."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a call is struck, and by what.

    Args:
        operations: Names of the operations; empty for all requests.
        name: Part of the path, empty for any.
        error: Name in ``ERRORS`` of what is raised; empty for nothing.
        rank: Only calls of this rank are numbered and struck, by the launcher's number.
        kill: The process that calls is killed.
        hang: The call does not come back until the folder of the plan has a file ``released``.
        swallow: The call does nothing and says nothing.
        slow_s: Time that each piece of ``put_file`` takes, in seconds; other calls once.
        first: Number of the first matching call that is struck.
        last: Number of the last one; None for all that follow.
        apart_s: Where it is more than 0, only a call is struck that comes less than this many
            seconds after one for the same path that was not.
        lasting_s: How long an outage lasts, in seconds, from the first call that is struck.
    """

    operations: tuple[str, ...] = ()
    name: str = ""
    error: str = ""
    rank: int | None = None
    kill: bool = False
    hang: bool = False
    swallow: bool = False
    slow_s: float = 0.0
    first: int = 1
    last: int | None = None
    apart_s: float = 0.0
    lasting_s: float | None = None

    def matches(self, operation: str, path: str) -> bool:
        """Tell whether a call is one of those that are numbered."""
        # To make a client is no request: an outage of everything begins with the first request.
        meant = operation in self.operations or (not self.operations and operation != "connect")
        return meant and self.name in path

    def numbers(self, call: dict[str, Any]) -> bool:
        """Tell whether an earlier call is one of those that are numbered."""
        return self.rank is None or call["rank"] == str(self.rank)


class FaultPlan:
    """The folder that says what fails, and remembers what was called.

    Args:
        folder: The folder; made by ``write``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @classmethod
    def write(cls, folder: Path, *rules: Rule) -> FaultPlan:
        """Make a plan; of several rules, the first that strikes a call counts."""
        plan = cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps([asdict(rule) for rule in rules])
        (folder / "rules.json").write_text(content, encoding="utf-8")
        return plan

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to follow this plan."""
        return {VARIABLE: str(self.folder)}

    def release(self) -> None:
        """Let every call that hangs go on."""
        (self.folder / "released").touch()

    @property
    def is_released(self) -> bool:
        """Whether calls that hang go on."""
        return (self.folder / "released").exists()

    def calls(self, *operations: str, name: str = "") -> list[dict[str, Any]]:
        """Return the calls so far, of all processes, in their order."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rule = Rule(operations=operations, name=name)
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if rule.matches(call["operation"], call["path"])]

    def strike(self, operation: str, path: str) -> Rule | None:
        """Note a call; return the rule that strikes it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rules = self.rules()
            call: dict[str, Any] = {"operation": operation, "path": path}
            call["rank"] = os.environ.get("RANK", "")
            earlier = [self._numbered(rule) for rule in rules]
            now_s = time.monotonic()
            struck = None
            for number, (rule, before) in enumerate(zip(rules, earlier, strict=True)):
                if not rule.matches(operation, path) or not self._is_ill(number, rule, now_s):
                    continue
                if not rule.numbers(call):
                    continue
                if rule.apart_s and not _is_too_soon(before, path, now_s - rule.apart_s):
                    continue
                if rule.first <= len(before) + 1 <= (rule.last or len(before) + 1):
                    struck = rule
                    self._begin(number, now_s)
                    break
            call |= {"at_s": now_s, "struck": struck is not None}
            with (self.folder / "calls.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(call) + "\n")
        return struck

    def _numbered(self, rule: Rule) -> list[dict[str, Any]]:
        calls = self.calls(*rule.operations, name=rule.name)
        return [call for call in calls if rule.numbers(call)]

    def suffer(self, operation: str, path: str) -> Rule | None:
        """Note a call and let it be struck; return the rule that has struck it, if it goes on."""
        rule = self.strike(operation, path)
        if rule is None:
            return None
        if rule.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        while rule.hang and not self.is_released:
            time.sleep(0.02)
        if rule.slow_s and operation != "put_file":
            time.sleep(rule.slow_s)
        if rule.error:
            make = ERRORS[rule.error]
            error = make()
            raise error
        return rule

    def rules(self) -> list[Rule]:
        """Return the rules."""
        path = self.folder / "rules.json"
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return [Rule(**{**row, "operations": tuple(row["operations"])}) for row in rows]

    def _begin(self, number: int, now_s: float) -> None:
        began = self.folder / f"began-{number}"
        if not began.exists():
            began.write_text(repr(now_s), encoding="utf-8")

    def _is_ill(self, number: int, rule: Rule, now_s: float) -> bool:
        began = self.folder / f"began-{number}"
        if rule.lasting_s is None or not began.exists():
            return True
        return now_s < float(began.read_text(encoding="utf-8")) + rule.lasting_s


class _Reads:
    """An open file of which each read is a call."""

    def __init__(self, file: Any, strike: Callable[[], Any]) -> None:
        self._file = file
        self._strike = strike

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, *args: Any) -> Any:
        """Read."""
        self._strike()
        return self._file.read(*args)


def _is_too_soon(before: list[dict[str, Any]], path: str, since_s: float) -> bool:
    return any(
        call["path"] == path and not call["struck"] and call["at_s"] > since_s for call in before
    )


class FaultyFileSystem(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """Local files behind a protocol and a plan of faults."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(auto_mkdir=True, **kwargs)
        self.plan = FaultPlan(os.environ[VARIABLE])
        self.plan.strike("connect", str(kwargs.get("token", "")))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, (list, tuple)):
            return [cls._strip_protocol(part) for part in path]
        return super()._strip_protocol(os.fspath(path).removeprefix(f"{PROTOCOL}://"))

    def _strike(self, operation: str, path: Any) -> Rule | None:
        name = str(self._strip_protocol(path))
        if name.endswith(".json") and "/.resilience/" in name:
            # Not the checkpoint's own: whoever counts or strikes those does not mean these.
            operation = f"manifest_{operation}"
        elif "/.resilience/preflight" in name:
            operation = f"preflight_{operation}"
        return self.plan.suffer(operation, name)

    def put_file(self, path1: Any, path2: Any, callback: Any = None, **kwargs: Any) -> None:
        """Send a file in pieces; it appears with the last of them."""
        del kwargs
        callback = callback or NoOpCallback()
        target = Path(self._strip_protocol(path2))
        # Order: first, as a client that has its file open, so that a late call has all it needs.
        data = Path(path1).read_bytes()
        rule = self._strike("put_file", path2)
        for number in range(_PIECES):
            if rule is not None and rule.slow_s:
                time.sleep(rule.slow_s)
            callback.relative_update(len(data[number::_PIECES]))
        if rule is not None and rule.swallow:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two of one process may be under way at once: one of them was abandoned.
        part = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")
        part.write_bytes(data)
        if any("land" in each.operations for each in self.plan.rules()):
            self._strike("land", path2)
        part.replace(target)

    def info(self, path: Any, **kwargs: Any) -> Any:
        """Describe a file."""
        if not isinstance(path, os.DirEntry):
            self._strike("info", path)
        return super().info(path, **kwargs)

    def ls(self, path: Any, detail: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002 - fsspec's signature
        """List a folder."""
        self._strike("ls", path)
        path = self._strip_protocol(path)
        return LocalFileSystem().ls(path, detail=detail, **kwargs)

    def isdir(self, path: Any) -> Any:
        """Tell whether it is a folder."""
        self._strike("isdir", path)
        return super().isdir(path)

    def cat_file(self, path: Any, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        """Read a file, or a part of it."""
        del kwargs
        self._strike("cat_file", path)
        with Path(self._strip_protocol(path)).open("rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        rule = self._strike("rm_file", path)
        if rule is None or not rule.swallow:
            super().rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:  # noqa: FBT001, FBT002 - fsspec's signature
        """Remove a folder."""
        self._strike("rm", path)
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def _open(self, path: Any, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        self._strike("open", path)
        file = super()._open(path, mode=mode, block_size=block_size, **kwargs)
        reads = any("read" in rule.operations for rule in self.plan.rules())
        return _Reads(file, partial(self._strike, "read", path)) if reads else file


def register() -> None:
    """Make ``faulty://`` known to fsspec in this process. Idempotent."""
    fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)
