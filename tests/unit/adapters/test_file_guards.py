# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The guard behind ``resilient::``: attempts, breakers, probes, and whom it shares them with."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.core import url_to_fs
from torch.distributed import TCPStore

from lightning_resilience import (
    CircuitOpenError,
    ConfigError,
    RetriesExhaustedError,
    StoreUnavailableError,
)
from lightning_resilience.adapters.resilient_filesystem import ResilientFileSystem
from lightning_resilience.adapters.standalone import close_connections
from lightning_resilience.core.keys import Keys
from lightning_resilience.runtime.memory import MemoryStore
from tests import chained, faulty_filesystem
from tests.chained import BREAKER, fast
from tests.faulty_filesystem import FaultPlan, Rule


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Storage:
    """A folder with faults, as a prefixed URL."""

    def __init__(self, folder: Path, plan: FaultPlan) -> None:
        self.folder = folder
        self.url = f"resilient::faulty://{folder}"
        self.plan = plan

    def open(self, **options: Any) -> Any:
        """Return a filesystem on it."""
        return url_to_fs(self.url, resilient=options)[0]

    def put(self, fs: Any, name: str) -> None:
        """Write a file through the guard."""
        with fs.open(f"{self.folder}/{name}", "wb") as file:
            file.write(b"x")

    def requests(self, *operations: str, name: str = "") -> int:
        """How many requests there were."""
        return len(self.plan.calls(*operations, name=name))


@pytest.fixture
def storage(
    tmp_path: Path, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Storage]]:
    """Make a storage with these faults."""
    del spool
    chained.register()
    faulty_filesystem.register()

    def make(*rules: Rule) -> Storage:
        plan = FaultPlan.write(tmp_path / "plan", *rules)
        monkeypatch.setenv(faulty_filesystem.VARIABLE, str(plan.folder))
        return Storage(tmp_path / "storage", plan)

    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "there").write_bytes(b"there")
    yield make
    ResilientFileSystem.clear_instance_cache()
    close_connections()


def test_a_write_is_repeated_until_it_succeeds(storage: Callable[..., Storage]) -> None:
    """The staged file is still there for the next attempt."""
    place = storage(Rule(operations=("put_file",), error="reset", last=2))

    place.put(place.open(**fast()), "x")

    assert (place.folder / "x").read_bytes() == b"x"
    assert place.requests("put_file") == 3


def test_a_read_is_repeated_until_it_succeeds(storage: Callable[..., Storage]) -> None:
    """Whatever the caller asked for, it is asked again."""
    place = storage(Rule(operations=("info",), error="busy", last=2))

    found = place.open(**fast()).info(f"{place.folder}/there")

    assert found["size"] == 5
    assert place.requests("info") == 3


def test_a_series_that_is_given_up_names_the_last_failure(storage: Callable[..., Storage]) -> None:
    """The error is ours, its cause the storage's."""
    place = storage(Rule(operations=("info",), error="odd"))

    with pytest.raises(RetriesExhaustedError, match="given up after 2 attempts") as caught:
        place.open(**fast()).info(f"{place.folder}/there")

    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.failure == "unknown"


def test_a_denial_is_raised_as_it_is(storage: Callable[..., Storage]) -> None:
    """One request, the library's own exception, and nothing of ours around it."""
    place = storage(Rule(operations=("put_file", "info"), error="denied"))
    fs = place.open(**fast())

    with pytest.raises(PermissionError) as caught:
        fs.info(f"{place.folder}/there")
    with pytest.raises(PermissionError):
        place.put(fs, "x")

    assert place.requests("info") == 1
    assert place.requests("put_file") == 1
    assert caught.value.__context__ is None
    assert isinstance(caught.value.__cause__, faulty_filesystem.ClientError)


def test_fresh_credentials_are_asked_for_once(storage: Callable[..., Storage]) -> None:
    """Where a fresh client is refused as well, the refusal is raised as it is."""
    place = storage(Rule(operations=("info",), error="expired"))

    with pytest.raises(PermissionError):
        place.open(**fast()).info(f"{place.folder}/there")

    assert place.requests("info") == 2


def test_a_missing_file_is_one_request(storage: Callable[..., Storage]) -> None:
    """It is an answer, also to an operation that would have changed something."""
    place = storage()
    fs = place.open(**fast())

    with pytest.raises(FileNotFoundError):
        fs.info(f"{place.folder}/missing")
    with pytest.raises(FileNotFoundError):
        fs.rm_file(f"{place.folder}/missing")

    assert place.requests("info") == 1
    assert place.requests("rm_file") == 1


def test_a_users_classifier_decides(storage: Callable[..., Storage]) -> None:
    """As it does for the callback."""
    place = storage(Rule(operations=("info",), error="odd"))

    with pytest.raises(RuntimeError, match="nobody knows"):
        place.open(**fast(classify=lambda _: "permanent")).info(f"{place.folder}/there")

    assert place.requests("info") == 1


def test_an_open_circuit_holds_for_every_filesystem_of_the_process(
    storage: Callable[..., Storage],
) -> None:
    """A breaker belongs to a storage, not to an instance; reads and writes have one each."""
    place = storage(Rule(operations=("put_file",), error="reset"))
    options = fast(when_open="raise")
    first, second = place.open(**options), place.open(**options, classify=lambda _: None)

    with pytest.raises(CircuitOpenError):
        place.put(first, "x")
    with pytest.raises(CircuitOpenError, match="faulty://:write is open") as caught:
        place.put(second, "y")

    assert first is not second
    assert place.requests("put_file") == 3
    assert caught.value.attempts == 0
    assert second.cat_file(f"{place.folder}/there") == b"there"


@pytest.mark.slow
def test_one_probe_finds_out_that_storage_is_well(storage: Callable[..., Storage]) -> None:
    """Waiters wait; a probe writes and removes a small object; then the file is published."""
    place = storage(Rule(operations=("put_file",), error="reset", last=3))
    fs = place.open(**fast(breaker=BREAKER))

    place.put(fs, "x")

    assert place.requests("put_file", name="/x") == 4
    assert place.requests("put_file", name=".resilience/probe/") == 1
    assert [path.name for path in place.folder.iterdir() if path.is_file()] == ["there", "x"]


@pytest.mark.slow
def test_a_read_is_probed_by_asking(storage: Callable[..., Storage]) -> None:
    """A reader may have no right to write."""
    place = storage(Rule(operations=("cat_file", "info"), error="reset", last=3))
    fs = place.open(**fast(breaker=BREAKER))

    data = fs.cat_file(f"{place.folder}/there")

    assert data == b"there"
    assert place.requests("put_file") == 0
    assert place.requests("info") == 1


def test_processes_share_the_store_that_is_named(storage: Callable[..., Storage]) -> None:
    """The breaker's record is where the option says."""
    place = storage()
    shared = MemoryStore()
    options = fast(store=shared)

    place.put(place.open(**options), "x")

    record = Keys(run_id=options["run_id"], incarnation="").breaker("faulty://:write")
    assert b'"state":"closed"' in (shared.get(record) or b"")


def test_a_url_of_a_store_is_dialled_when_it_is_needed(
    storage: Callable[..., Storage], unused_port: int
) -> None:
    """To make a filesystem sends nothing."""
    place = storage()

    place.open(**fast(store=f"tcp://127.0.0.1:{unused_port}"))

    assert place.requests() == 0


@pytest.mark.parametrize("kind", ["url", "object"])
def test_a_store_of_torchs_is_shared(storage: Callable[..., Storage], kind: str) -> None:
    """A ``torch.distributed.Store`` object will do as well as a URL."""
    place = storage()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = fast(store=server if kind == "object" else f"tcp://127.0.0.1:{server.port}")

    place.put(place.open(**options), "x")

    record = Keys(run_id=options["run_id"], incarnation="").breaker("faulty://:write")
    assert b'"state":"closed"' in server.get(record)


class Away(MemoryStore):
    """A store that does not answer, or not any more."""

    def __init__(self, *, answers: int = 0) -> None:
        super().__init__()
        self.answers = answers
        self.asked = 0

    def watcher(self) -> Away:
        """Itself: the test looks at what it was asked."""
        return self

    def _require_open(self, operation: str, key: str) -> None:
        self.asked += 1
        if self.asked > self.answers:
            message = f"{operation} of {key}: away"
            raise StoreUnavailableError(message)


def test_a_lost_store_is_not_a_lost_file(
    storage: Callable[..., Storage], caplog: pytest.LogCaptureFixture
) -> None:
    """Calls go on with what this process knows; it is said, and the store is left alone a while."""
    place = storage(Rule(operations=("put_file",), error="reset", last=2))
    store = Away()
    fs = place.open(**fast(store=store))

    with caplog.at_level("INFO", logger="lightning_resilience"):
        place.put(fs, "x")
        asked = store.asked
        place.put(fs, "y")

    assert (place.folder / "y").read_bytes() == b"x"
    assert store.asked <= asked + 1
    assert "the shared store has not answered" in caplog.text
    assert "decides alone about" in caplog.text


def test_what_was_done_is_not_done_again_when_the_store_is_lost(
    storage: Callable[..., Storage],
) -> None:
    """Where the store is away when a result is reported, the result stands."""
    place = storage(Rule(operations=("put_file",), error="reset", last=1))
    fs = place.open(**fast(store=Away(answers=4)))

    place.put(fs, "x")

    assert place.requests("put_file") <= 3
    assert (place.folder / "x").read_bytes() == b"x"


def test_strict_fails_while_the_store_is_away(storage: Callable[..., Storage]) -> None:
    """Nothing is sent that the job could not count."""
    place = storage()
    fs = place.open(**fast(store=Away(), strict=True))

    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            fs.info(f"{place.folder}/there")

    assert place.requests("info") == 0


def test_a_bad_variable_is_a_config_error(
    storage: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text names the variable."""
    place = storage()
    monkeypatch.setenv("LIGHTNING_RESILIENCE_STORE", "nowhere")

    with pytest.raises(ConfigError, match="LIGHTNING_RESILIENCE_STORE"):
        place.open(**fast())


def test_threads_share_a_filesystem(storage: Callable[..., Storage]) -> None:
    """Each operation is its own, and none is lost."""
    place = storage(Rule(operations=("put_file",), error="reset", first=2, last=3))
    fs = place.open(**fast())
    threads = [threading.Thread(target=place.put, args=(fs, f"{n}")) for n in range(6)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(path.name for path in place.folder.iterdir() if path.name != "there") == [
        str(n) for n in range(6)
    ]


def test_a_full_disk_is_raised_as_it_is(storage: Callable[..., Storage]) -> None:
    """One attempt: a full disk does not empty itself."""
    place = storage(Rule(operations=("put_file",), error="busy"))

    def full(_: BaseException) -> str:
        return "capacity"

    with pytest.raises(OSError, match="busy") as caught:
        place.put(place.open(**fast(classify=full)), "x")

    assert caught.value.errno == errno.EBUSY
    assert place.requests("put_file") == 1
