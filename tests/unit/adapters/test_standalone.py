# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which store and which limits a process has without a Trainer, and what becomes of them."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from lightning_resilience import Guard
from lightning_resilience.adapters.guard_options import guard_options
from lightning_resilience.adapters.standalone import Standalone, close_connections, standalone
from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.runtime.memory import MemoryStore
from tests.counted_store import CountedStore


if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).resolve().parents[3]
BOUND_S = 30.0


@pytest.fixture(autouse=True)
def _own_connections() -> Iterator[None]:
    yield
    close_connections()


def run_script(code: str, **environment: str) -> list[str]:
    """Run a script in a fresh interpreter, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# One for each store and run --------------------------------------------------------------------


def test_guards_of_one_store_and_run_share_a_connection() -> None:
    """The same object or the same URL is the same connection, whoever asks."""
    store = CountedStore()
    url = "tcp://127.0.0.1:9"

    assert standalone(store, run_id="run") is standalone(store, run_id="run")
    assert standalone(url, run_id="run") is standalone("".join(url), run_id="run")
    assert standalone(None, run_id=None) is standalone(None, run_id=None)


def test_another_store_or_run_is_another_connection() -> None:
    """Objects that are equal in everything but identity are two stores."""
    store = CountedStore()
    first = standalone(store, run_id="run")

    others = [
        standalone(CountedStore(), run_id="run"),
        standalone(store, run_id="other"),
        standalone("tcp://127.0.0.1:9", run_id="run"),
    ]

    assert len({id(place) for place in (first, *others)}) == 4


def test_a_users_store_is_not_closed_with_the_connection() -> None:
    """What the guard closes is a handle of its own; the next call makes another."""
    store = CountedStore()
    guard = Guard("x", store=store, run_id="run", breaker={"view_max_age_s": 1e-6})
    guard.call(len, "ab")

    close_connections()
    close_connections()

    assert store.get("unknown") is None
    assert guard.call(len, "ab") == 2


def test_nothing_is_sent_before_the_first_call(unused_port: int) -> None:
    """A URL at which nobody listens is no error, and no wait, while nobody calls."""
    place = Standalone(f"tcp://127.0.0.1:{unused_port}", run_id=None)

    assert isinstance(place.driver.store, TorchStore)
    place.close()


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (
            "mine",
            {"LIGHTNING_RESILIENCE_RUN_ID": "ours", "TORCHELASTIC_RUN_ID": "launched"},
            "mine",
        ),
        (None, {"LIGHTNING_RESILIENCE_RUN_ID": "ours", "TORCHELASTIC_RUN_ID": "launched"}, "ours"),
        (None, {"TORCHELASTIC_RUN_ID": "launched", "SLURM_JOB_ID": "7"}, "launched"),
        (None, {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "7"),
        (None, {}, "default"),
    ],
)
def test_the_run_is_named_by_the_option_then_the_environment(
    monkeypatch: pytest.MonkeyPatch, option: str | None, environ: dict[str, str], expected: str
) -> None:
    """All processes of a job come to the same name, which every key has."""
    for name in ("LIGHTNING_RESILIENCE_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    circuit = Standalone(CountedStore(), run_id=option).circuit("x:read", guard_options({}))

    assert circuit.key == f"lr/{expected}/breaker/x:read"


# Limits ----------------------------------------------------------------------------------------


def test_a_process_that_is_alone_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four processes without a store, each has a quarter of the slots and of the retries."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    options = guard_options({"breaker": {"max_concurrent": 8}, "budget": {"retry_floor": 20}})

    circuit = Standalone(None, run_id=None).circuit("x:read", options, hosts=2)

    assert circuit.config.max_concurrent == 2
    assert circuit.ledger.config.retry_floor == 5
    assert circuit.hosts == 1


@pytest.mark.parametrize(("declared", "expected"), [(None, 2), (5, 5)])
def test_processes_that_share_a_store_share_its_limits(
    monkeypatch: pytest.MonkeyPatch, declared: int | None, expected: int
) -> None:
    """The limits are the job's; the hosts are the launcher's, or those that the guard declares."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "1")
    options = guard_options({})

    circuit = Standalone(CountedStore(), run_id=None).circuit("x:read", options, hosts=declared)

    assert circuit.config == options.breaker
    assert circuit.ledger.config == options.budget
    assert circuit.hosts == expected
    assert circuit.host.endswith("#1")


def test_guards_with_the_same_limits_have_the_same_memory() -> None:
    """Another name, other limits or other hosts have a memory of their own."""
    place = Standalone(None, run_id=None)
    options = guard_options({})
    circuit = place.circuit("x:read", options)

    others = [
        place.circuit("x:write", options),
        place.circuit("x:read", options, hosts=7),
        place.circuit("x:read", guard_options({"breaker": {"max_concurrent": 3}})),
    ]

    assert place.circuit("x:read", guard_options({"when_open": "raise"})) is circuit
    assert circuit not in others


# Who has no store yet, and who has one no more -------------------------------------------------


def test_a_guard_that_is_older_than_the_process_group_joins_it() -> None:
    """Before there is a group the process decides alone; afterwards the group's store is used."""
    guard = Guard("x", run_id=uuid.uuid4().hex, breaker={"view_max_age_s": 1e-6})
    guard.call(len, "ab")
    store = dist.HashStore()
    before = store.num_keys()

    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    grown = store.num_keys()
    guard.call(len, "ab")
    used = store.num_keys() - grown
    dist.destroy_process_group()
    after = guard.call(len, "ab")

    assert before <= grown
    assert used == 2  # the store's name and the breaker
    assert after == 2


def test_a_group_ends_with_its_server_whatever_guards_have_used_it() -> None:
    """The port is free for the next group, and the connection to the old server is let go."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    dist.init_process_group("gloo", store=server, rank=0, world_size=1)
    del server
    place = standalone(None, run_id="run")
    guard = Guard("x", run_id="run", breaker={"view_max_age_s": 1e-6})
    guard.call(len, "ab")

    dist.destroy_process_group()
    gc.collect()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=BOUND_S).close()
    assert guard.call(len, "ab") == 2
    assert standalone(None, run_id="run") is not place


def test_torch_is_not_loaded_for_a_process_without_a_group() -> None:
    """A guarded call in a program that knows no torch does not load it, nor what it needs."""
    code = (
        "import sys\n"
        "from lightning_resilience import Guard\n"
        "assert Guard('x').call(len, 'ab') == 2\n"
        "print([name for name in ('torch', 'lightning', 'fsspec', 'asyncio', 'typer')"
        " if name in sys.modules])"
    )

    assert run_script(code) == ["[]"]


# Fork ------------------------------------------------------------------------------------------

FORK = """
import os, sys, threading
import torch.distributed as dist
from lightning_resilience import Guard
from lightning_resilience.adapters.standalone import standalone
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
url = f"tcp://127.0.0.1:{server.port}"
retry = {"base_delay_s": 0.001, "throttle_base_delay_s": 0.001, "max_delay_s": 0.002}
options = {"store": url, "run_id": "run", "retry": retry}
guard = Guard("x", when_open="raise", breaker={"view_max_age_s": 1e-6}, **options)
fresh = Guard("x", when_open="raise", **options)
print("parent", guard.call(len, "ab"), fresh.call(len, "ab"))
place = standalone(url, run_id="run")
def reset():
    raise ConnectionResetError
sys.stdout.flush()
if not (pid := os.fork()):
    print("child, closed path", fresh.call(len, "ab"))
    print("child", guard.call(len, "ab"), standalone(url, run_id="run") is place)
    try:
        guard.call(reset)
    except Exception as error:
        print("child", type(error).__name__)
    sys.stdout.flush()
    os._exit(0)
print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
try:
    guard.call(len, "ab")
except Exception as error:
    print("parent", type(error).__name__)
print("parent has its own", standalone(url, run_id="run") is place)
"""


@pytest.mark.multiprocess
def test_a_forked_child_makes_its_own_connection() -> None:
    """It goes on where the parent was, over a connection of its own, and shares the breaker."""
    assert run_script(FORK) == [
        "parent 2 2",
        "child, closed path 2",
        "child 2 False",
        "child CircuitOpenError",
        "ended 0",
        "parent CircuitOpenError",
        "parent has its own True",
    ]


def test_a_process_alone_has_a_store_of_its_own() -> None:
    """Without a store to share, two runs of one process do not see each other's breakers."""
    stores: list[Any] = [standalone(None, run_id=run).driver.store for run in ("one", "two")]

    assert all(isinstance(store, MemoryStore) for store in stores)
    stores[0].set("k", b"1")
    assert stores[1].get("k") is None
