# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``resilient::`` in front of a URL: what it returns, its options, and who uses it."""

from __future__ import annotations

import copy
import gc
import gzip
import io
import pickle
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import fsspec
import pandas as pd
import pytest
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_resilience import ConfigError, RetryPolicy
from lightning_resilience.adapters.file_guards import FileGuard
from lightning_resilience.adapters.guard_options import OPTIONS
from lightning_resilience.adapters.resilient_filesystem import ResilientFileSystem
from lightning_resilience.adapters.standalone import close_connections
from lightning_resilience.config import CONFIGS
from lightning_resilience.runtime.memory import MemoryStore
from tests.chained import fast, register


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.s3_server import S3Server


World: TypeAlias = tuple[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def _registered(spool: Path) -> Iterator[None]:
    del spool
    register()
    yield
    ResilientFileSystem.clear_instance_cache()
    close_connections()


@pytest.fixture(params=["file", "memory", "s3"])
def world(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> World:
    """A folder that exists, as a prefixed URL, and the options to reach it."""
    options = {"resilient": fast()}
    if request.param == "file":
        (tmp_path / "data").mkdir()
        return f"resilient::file://{tmp_path}/data", options
    if request.param == "memory":
        return f"resilient::memory://{uuid.uuid4().hex}", options
    options["s3"] = s3_server.storage_options
    return f"resilient::s3://{s3_server.new_bucket()}/data", options


def plain(world: World, name: str) -> bytes | None:
    """Return what somebody without a guard finds under ``name``."""
    url, options = world
    fs, path = url_to_fs(url.removeprefix("resilient::"), **options.get("s3", {}))
    fs.invalidate_cache()
    content: bytes | None = fs.cat_file(f"{path}/{name}") if fs.exists(f"{path}/{name}") else None
    return content


# What it returns ------------------------------------------------------------------------------


def test_the_filesystem_is_that_of_the_inner_url(world: World) -> None:
    """Class and path are those that the URL without the prefix has."""
    url, options = world
    expected, expected_path = url_to_fs(url.removeprefix("resilient::"), **options.get("s3", {}))

    fs, path = url_to_fs(url, **options)

    assert isinstance(fs, type(expected))
    assert isinstance(fs.guard_run, FileGuard)
    assert path == expected_path


def test_it_can_be_made_without_a_url(tmp_path: Path) -> None:
    """``fsspec.filesystem`` takes the inner protocol as an option."""
    fs = fsspec.filesystem("resilient", target_protocol="file", target_options={"auto_mkdir": True})

    fs.pipe_file(f"{tmp_path}/new/x", b"x")

    assert isinstance(fs, LocalFileSystem)
    assert (tmp_path / "new" / "x").read_bytes() == b"x"


def test_paths_may_have_the_prefix(world: World) -> None:
    """Whole URLs are paths too: Lightning hands over what it has joined."""
    url, options = world
    fs, path = url_to_fs(url, **options)

    fs.pipe_file(f"{url}/x", b"x")

    assert fs.exists(f"{url}/x")
    assert fs.cat_file(f"{path}/x") == b"x"
    assert [Path(name).name for name in fs.ls(url, detail=False)] == ["x"]
    fs.mv(f"{url}/x", f"{url}/y")
    assert plain(world, "x") is None
    assert plain(world, "y") == b"x"


def test_a_chain_may_end_in_it(tmp_path: Path) -> None:
    """A cache in front reads through the guard."""
    (tmp_path / "x").write_bytes(b"x")

    with fsspec.open(f"simplecache::resilient::file://{tmp_path}/x") as file:
        assert file.read() == b"x"


def test_torch_is_not_loaded() -> None:
    """Who reads files through the guard does not pay for torch or Lightning."""
    code = (
        "import sys\n"
        "from tests.chained import register\n"
        "register()\n"
        "import fsspec\n"
        "with fsspec.open('resilient::memory://a', 'wb') as file:\n"
        "    file.write(b'x')\n"
        "print(sorted({'torch', 'lightning', 'pandas'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


# Whole or not at all --------------------------------------------------------------------------


def write_bytes(url: str, options: dict[str, Any]) -> None:
    """Fail in a block of ``fsspec.open``."""
    with fsspec.open(f"{url}/x", "wb", **options) as file:
        file.write(b"half")
        raise ZeroDivisionError


def write_text(url: str, options: dict[str, Any]) -> None:
    """Fail in a block of ``fsspec.open`` in text mode."""
    with fsspec.open(f"{url}/x", "w", **options) as file:
        file.write("half")
        raise ZeroDivisionError


def write_compressed(url: str, options: dict[str, Any]) -> None:
    """Fail in a block of ``fsspec.open`` with a compressor in between."""
    with fsspec.open(f"{url}/x", "wb", compression="gzip", **options) as file:
        file.write(b"half")
        raise ZeroDivisionError


def write_several(url: str, options: dict[str, Any]) -> None:
    """Fail in a block of ``fsspec.open_files``."""
    with fsspec.open_files([f"{url}/x", f"{url}/y"], "wb", **options) as files:
        files[0].write(b"half")
        raise ZeroDivisionError


def write_frame(url: str, options: dict[str, Any]) -> None:
    """Fail in the middle of a table: pandas closes its file whatever happened."""

    class Unprintable:
        def __str__(self) -> str:
            raise ZeroDivisionError

    frame = pd.DataFrame({"a": ["x", Unprintable()]})
    frame.to_csv(f"{url}/x", storage_options=options)


@pytest.mark.parametrize(
    "write", [write_bytes, write_text, write_compressed, write_several, write_frame]
)
def test_an_exception_publishes_nothing(
    world: World, spool: Path, write: Callable[..., None]
) -> None:
    """Nothing is there, nothing staged is left, and the exception is the user's."""
    url, options = world

    with pytest.raises(ZeroDivisionError):
        write(url, options)

    assert plain(world, "x") is None
    assert not list(spool.parent.rglob("*.staged"))


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_file_that_is_lost_publishes_nothing(world: World, spool: Path, mode: str) -> None:
    """A file that nobody closed is not complete, whatever is wrapped around it."""
    url, options = world

    opened = fsspec.open(f"{url}/x", mode, **options)
    file = opened.open()
    file.write("half" if mode == "w" else b"half")
    del file, opened
    gc.collect()

    assert plain(world, "x") is None
    assert not list(spool.parent.rglob("*.staged"))


def test_a_report_of_an_exception_is_published(world: World) -> None:
    """What is opened while an exception is handled is complete when its block ends."""
    url, options = world

    class Reporting:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *details: object) -> None:
            with fsspec.open(f"{url}/report", "w", **options) as file:
                file.write(f"{details[1]!r}")

    def fail() -> None:
        with Reporting():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert plain(world, "report") == b"ZeroDivisionError()"


def test_a_file_closed_in_a_handler_is_published(world: World) -> None:
    """An explicit ``close`` says that it is complete, also where an exception told so."""
    url, options = world
    items = iter([b"1", b"2"])

    file = fsspec.open(f"{url}/x", "wb", **options).open()
    try:
        while True:
            file.write(next(items))
    except StopIteration:
        file.close()

    assert plain(world, "x") == b"12"


def test_compressed_files_are_published_whole(world: World) -> None:
    """The compressor is closed before the file."""
    url, options = world

    with fsspec.open(f"{url}/x.gz", "wt", compression="infer", **options) as file:
        file.write("text")

    assert gzip.decompress(plain(world, "x.gz") or b"") == b"text"
    with fsspec.open(f"{url}/x.gz", "rt", compression="infer", **options) as file:
        assert file.read() == "text"


def test_a_transaction_publishes_at_its_end_or_nothing(world: World) -> None:
    """All files together, and none where the block fails."""
    url, options = world
    fs, path = url_to_fs(url, **options)

    with fs.transaction:
        for name in ("a", "b"):
            with fs.open(f"{path}/{name}", "wb") as file:
                file.write(name.encode())
        inside = plain(world, "a")

    def fail() -> None:
        with fs.transaction:
            with fs.open(f"{path}/c", "wb") as file:
                file.write(b"c")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside is None
    assert [plain(world, name) for name in ("a", "b", "c")] == [b"a", b"b", None]


# Who uses it ----------------------------------------------------------------------------------


def test_pandas_reads_and_writes(world: World) -> None:
    """Options go through ``storage_options``."""
    url, options = world
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})

    frame.to_csv(f"{url}/table.csv", index=False, storage_options=options)

    assert plain(world, "table.csv") == b"a,b\n1,x\n2,y\n"
    assert pd.read_csv(f"{url}/table.csv", storage_options=options).equals(frame)


def test_torch_saves_and_loads(world: World) -> None:
    """``torch.save`` writes to an opened file, and ``torch.load`` reads from one."""
    url, options = world
    weights = torch.arange(1000.0)

    with fsspec.open(f"{url}/weights.pt", "wb", **options) as file:
        torch.save({"weights": weights}, file)

    with fsspec.open(f"{url}/weights.pt", "rb", **options) as file:
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["weights"], weights)
    assert torch.load(io.BytesIO(plain(world, "weights.pt") or b""), weights_only=True)


ASKED: dict[str, Callable[[Any, str], Any]] = {
    "cat_file": lambda fs, path: fs.cat_file(f"{path}/missing"),
    "info": lambda fs, path: fs.info(f"{path}/missing"),
    "open": lambda fs, path: fs.open(f"{path}/missing").read(),
    "rm": lambda fs, path: fs.rm(f"{path}/missing"),
    "cp_file": lambda fs, path: fs.cp_file(f"{path}/missing", f"{path}/x"),
    "get_file": lambda fs, path: fs.get_file(f"{path}/missing", "x"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_missing_file_is_what_it_is_without_a_guard(world: World, name: str) -> None:
    """Callers catch ``FileNotFoundError``; where plain fsspec raises it, so does the guard."""
    url, options = world
    fs, path = url_to_fs(url, **options)
    same, _ = url_to_fs(url.removeprefix("resilient::"), **options.get("s3", {}))

    assert outcome(ASKED[name], fs, path) is outcome(ASKED[name], same, path)


def outcome(ask: Callable[[Any, str], Any], fs: Any, path: str) -> type[BaseException] | None:
    """Return the type of what is raised."""
    try:
        ask(fs, path)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return type(error)
    return None


# Instances ------------------------------------------------------------------------------------


def test_the_same_url_and_options_give_the_same_instance(world: World) -> None:
    """Opening in a loop makes one client, and one set of listings."""
    url, options = world

    first, _ = url_to_fs(url, **copy.deepcopy(options))
    second, _ = url_to_fs(f"{url}/other", **copy.deepcopy(options))

    assert second is first


def test_other_options_give_another_instance(world: World) -> None:
    """A guard belongs to the options that it was made with."""
    url, options = world
    fs, _ = url_to_fs(url, **options)

    other, _ = url_to_fs(url, **{**options, "resilient": fast()})
    # fsspec writes what stands beside them into the first protocol's options themselves.
    fresh, _ = url_to_fs(url, **copy.deepcopy(options), skip_instance_cache=True)
    again, _ = url_to_fs(url, **options)

    assert len({id(fs), id(other), id(fresh)}) == 3
    assert again is fs


def test_plain_users_get_another_instance(world: World) -> None:
    """Nobody is guarded, or has inner retries turned down, who has not asked for it."""
    url, options = world
    plain_url = url.removeprefix("resilient::")

    before, _ = url_to_fs(plain_url, **options.get("s3", {}))
    fs, _ = url_to_fs(url, **options)
    after, _ = url_to_fs(plain_url, **options.get("s3", {}))

    assert before is not fs
    assert after is not fs
    assert type(after) is type(before) is type(fs).guarded_class


def test_clearing_the_cache_gives_a_new_instance(tmp_path: Path) -> None:
    """As fsspec's own caches are cleared."""
    url = f"resilient::file://{tmp_path}/x"
    fs, _ = url_to_fs(url)

    ResilientFileSystem.clear_instance_cache()

    assert url_to_fs(url)[0] is not fs


def test_another_thread_has_an_instance_of_its_own(tmp_path: Path) -> None:
    """A transaction of one thread must not hold back the files of another (not asynchronous)."""
    url = f"resilient::file://{tmp_path}/x"
    found = [url_to_fs(url)[0]]

    thread = threading.Thread(target=lambda: found.append(url_to_fs(url)[0]))
    thread.start()
    thread.join()

    assert found[0] is not found[1]


def test_a_copy_has_the_guard(world: World) -> None:
    """A deep copy of what holds a filesystem works on, with the same options."""
    url, options = world
    fs, path = url_to_fs(url, **options)

    for twin in (copy.copy(fs), copy.deepcopy(fs)):
        twin.pipe_file(f"{path}/x", b"x")
        assert twin is not fs
        assert twin.guard_run is fs.guard_run


def test_a_pickled_one_works_in_another_process(world: World, tmp_path: Path) -> None:
    """Its guard is made there, with the same options."""
    url, options = world
    if url.startswith("resilient::memory"):
        pytest.skip("its data do not reach another process")
    fs, path = url_to_fs(url, **options)
    (tmp_path / "pickle").write_bytes(pickle.dumps(fs))
    code = (
        "import pickle, sys, pathlib\n"
        "fs = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "fs.pipe_file(sys.argv[2], b'from there')\n"
        "print(fs.guard_run.options.run_id, 'torch' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "pickle", f"{path}/x"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == [options["resilient"]["run_id"], "False"]
    assert plain(world, "x") == b"from there"


def test_a_store_object_does_not_travel() -> None:
    """The text says what does."""
    fs, _ = url_to_fs("resilient::memory://x", resilient=fast(store=MemoryStore()))

    with pytest.raises(ConfigError, match="names its store by a URL"):
        pickle.dumps(fs)


# Options --------------------------------------------------------------------------------------


BAD: list[tuple[dict[str, Any], str]] = [
    ({"resilient": {"retri": {}}}, "no option 'retri'.*Did you mean 'retry'"),
    ({"anon": True}, r"no option 'anon'.*storage stand under file=\{\.\.\.\}"),
    ({"resilient": {"retry": {"max_atempts": 3}}}, "Did you mean 'max_attempts'"),
    ({"resilient": {"retry": {"max_attempts": 0}}}, "max_attempts=0 is not allowed"),
    ({"resilient": {"retry": {"max_attempts": 3}}}, "trip_failures=3 must be less than"),
    ({"resilient": {"retry": 5}}, "5 of type int is not allowed"),
    ({"resilient": {"breaker": {"open_for_s": -1}}}, "open_for_s=-1 is out of range"),
    ({"resilient": {"budget": {"retry_ratio": 2}}}, "retry_ratio=2 is not allowed"),
    ({"resilient": {"budget": {"retry_floor": 15}}}, "retry_floor=15 must be at least"),
    ({"resilient": {"admission": {"slot_lease_s": 15}}}, "must be less than slot_lease_s=15"),
    ({"resilient": {"admission": "x"}}, "admission=….*AdmissionConfig"),
    ({"resilient": {"store": "http://x"}}, "store='http://x' is not allowed"),
    ({"resilient": {"store": 7}}, "store=7 of type int"),
    ({"resilient": {"run_id": " "}}, "run_id=.* of type str is not allowed"),
    ({"resilient": {"classify": "x"}}, "classify=.* is not allowed"),
    ({"resilient": {"when_open": "later"}}, "when_open='later' is not allowed"),
    ({"resilient": {"strict": 1}}, "strict=1 of type int"),
    ({"resilient": {"asynchronous": True}}, "asynchronous=True is not allowed.*to_thread"),
    ({"file": {"asynchronous": True}}, "asynchronous=True is not allowed.*to_thread"),
]


@pytest.mark.parametrize(("options", "match"), BAD, ids=[str(given) for given, _ in BAD])
def test_a_bad_option_is_refused_when_the_filesystem_is_made(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    """Before anything is sent, and the text names it and what is allowed."""
    with pytest.raises(ConfigError, match=match):
        fsspec.open(f"resilient::file://{tmp_path}/x", "wb", **options)


def test_every_option_has_its_bad_values() -> None:
    """No option is missing from the table above."""
    assert set(OPTIONS) <= {name for given, _ in BAD for name in given.get("resilient", {})}


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("resilient://bucket/key", "in front of a whole URL"),
        ("resilient::simplecache::memory://x", "simplecache::resilient::s3://"),
        ("resilient::resilient::memory://x", "once"),
    ],
)
def test_a_url_that_cannot_be_guarded_is_refused(url: str, match: str) -> None:
    """The text says where the prefix belongs."""
    with pytest.raises(ConfigError, match=match):
        url_to_fs(url)


def test_options_may_be_config_objects() -> None:
    """A mapping and the config that it describes are the same."""
    by_name, _ = url_to_fs("resilient::memory://x", resilient={"retry": {"max_attempts": 8}})
    by_object, _ = url_to_fs(
        "resilient::memory://x", resilient={"retry": RetryPolicy(max_attempts=8)}
    )

    assert by_object is by_name
    assert by_name.guard_run.options.retry.max_attempts == 8
    assert RetryPolicy in CONFIGS


def test_options_may_come_from_fsspecs_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """For callers that can hand over a URL only."""
    monkeypatch.setitem(fsspec.config.conf, "resilient", {"when_open": "raise"})

    fs, _ = url_to_fs("resilient::memory://x")

    assert fs.guard_run.options.when_open == "raise"


def test_switched_off_it_is_the_plain_filesystem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But it still takes the URLs that are written everywhere."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")
    (tmp_path / "x").write_bytes(b"x")

    fs, path = url_to_fs(f"resilient::file://{tmp_path}/x")

    assert isinstance(fs, LocalFileSystem)
    assert not hasattr(fs, "guard_run")
    assert fs.cat_file(f"resilient::file://{tmp_path}/x") == fs.cat_file(path) == b"x"
