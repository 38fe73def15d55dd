# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: nothing leaks from one into the next.

A test that leaves an environment variable, a signal handler, a thread or a process group behind
fails itself, instead of a later one that has nothing to do with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.agents import agents
from tests.gcs_server import gcs_bucket, gcs_server, gcs_server_if_any
from tests.handlers import handlers
from tests.s3_server import bucket, s3_server
from tests.single_rank import faulty, spool
from tests.two_agents import launch
from tests.uploads import side
from tests.warm_python import warm_python


if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = [
    "agents",
    "bucket",
    "faulty",
    "gcs_bucket",
    "gcs_server",
    "gcs_server_if_any",
    "handlers",
    "launch",
    "s3_server",
    "side",
    "spool",
    "warm_python",
]

TESTS = Path(__file__).resolve().parent

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=100, print_blob=True
)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=200)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# What frameworks set in passing; it is put back after the test, but no test is blamed for it.
FOREIGN_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "KMP_",
    "OMP_NUM_THREADS",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_",
    "TORCH_NCCL_",
)
# Threads that a library starts once and keeps for the life of the process.
FOREIGN_THREADS = (
    "asyncio_",  # executor of an event loop that fsspec keeps
    "fsspecIO",  # fsspec's event loop
    "gcsfs-deferred-close",  # gcsfs, for clients that nobody holds any more
    "pin_memory",  # torch's data loader
    "tmonitor",  # progress bars
)
# Not SIGALRM: pytest-timeout owns it and sets it for each phase of a test.
SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
THREAD_GRACE_S = 10.0
# Fixtures that start real agents.
AGENTS = frozenset({"agents", "launch"})
MAPPED_LOOPBACK = "::ffff:127.0.0.1"
HOSTS_LINE = f"{MAPPED_LOOPBACK} localhost\n"
HOSTS_KEY = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the store of torch a resolver that answers, where this process may, and let Ctrl-C work.

    A shell without job control starts what is in the background with SIGINT ignored, and Python
    leaves it so: there tests that interrupt a wait would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[HOSTS_KEY] = ""
    if not hasattr(config, "workerinput") and os.geteuid() == 0:
        config.stash[HOSTS_KEY] = name_loopback(Path("/etc/hosts"))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported and collected: it stays to the end."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say it where a file of the machine was changed."""
    return config.stash[HOSTS_KEY] or None


def name_loopback(hosts: Path) -> str:
    """Name the mapped loopback address in ``hosts`` where it has no name.

    torch's TCPStore looks up the name of every client in the one thread that serves them all. An
    address without a name is asked of the network each time, and a resolver that is slow to answer
    then holds up every test that shares a store.
    """
    with contextlib.suppress(OSError):
        name, _ = socket.getnameinfo((MAPPED_LOOPBACK, 0, 0, 0), 0)
        if name != MAPPED_LOOPBACK:
            return ""
    with contextlib.suppress(OSError):
        text = hosts.read_text(encoding="utf-8")
        if HOSTS_LINE not in text:
            with hosts.open("a", encoding="utf-8") as file:
                file.write(("" if text.endswith("\n") else "\n") + HOSTS_LINE)
            return f"hosts: {HOSTS_LINE.strip()!r} added to {hosts}: the address had no name"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests time, begin with them, and keep together what shares something expensive."""
    for item in items:
        if item.get_closest_marker("integration") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(180))
        group = _group(item) if _is_long(item) else ""
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    # The last to begin should be short, or all but one process would wait for it.
    items.sort(key=lambda item: (not _is_long(item), _group(item) != "agents", -_timeout_s(item)))


def _is_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("integration", "multiprocess"))


def _group(item: pytest.Item) -> str:
    """Return what a test shares with those that go to the same worker; empty where nothing."""
    # pytest has no public way to ask for the fixtures that a test will use, and their scopes.
    function: Any = item
    found: dict[str, Any] = function._fixtureinfo.name2fixturedefs
    # Agents are several processes with clocks in seconds: never those of two tests at a time.
    if not AGENTS.isdisjoint(found):
        return "agents"
    shares = any(each.scope == "module" for definitions in found.values() for each in definitions)
    return str(item.path) if shares else ""


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else float(item.config.getini("timeout") or 0)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)

    yield

    after = dict(os.environ)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and not name.startswith(FOREIGN_VARIABLES)
    )
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert not changed, f"environment variables left changed: {', '.join(changed)}"


@pytest.fixture(autouse=True)
def _no_leaked_signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}

    yield

    changed = [number for number in SIGNALS if signal.getsignal(number) != before[number]]
    for number in changed:
        signal.signal(number, before[number])
    assert not changed, f"signal handlers left changed: {[number.name for number in changed]}"


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())

    yield

    deadline_s = time.monotonic() + THREAD_GRACE_S
    leaked = [
        thread
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith(FOREIGN_THREADS)
    ]
    for thread in leaked:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    names = [thread.name for thread in leaked if thread.is_alive()]
    assert not names, f"threads still run {THREAD_GRACE_S:g} s after the test: {names}"


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    yield

    distributed = sys.modules.get("torch.distributed")
    leaked = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if distributed is not None and leaked:
        distributed.destroy_process_group()
    assert not leaked, "the default process group was left initialised"
