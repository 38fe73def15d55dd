# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A rank by itself saves and loads with ``torch.distributed.checkpoint``, on every storage."""

from __future__ import annotations

import copy
import os
import pickle
import uuid
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_resilience import ResilientReader, ResilientWriter
from lightning_resilience.adapters import dcp_saving
from lightning_resilience.adapters.dcp_verdict import SharedFailure
from lightning_resilience.adapters.object_store import list_files
from lightning_resilience.adapters.standalone import close_connections
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.verifying import Verification
from lightning_resilience.core.meeting import Offer
from lightning_resilience.core.shards import is_shard
from lightning_resilience.core.verification import State
from lightning_resilience.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    JointError,
)
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.s3_server import S3Server


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

RETRY = {
    "base_delay_s": 0.01,
    "max_delay_s": 0.02,
    "throttle_base_delay_s": 0.01,
    "max_attempts": 4,
    "deadline_s": 2,
}


@pytest.fixture(autouse=True)
def _own_spool(spool: Path) -> Iterator[None]:
    yield
    close_connections()
    assert [path for path in spool.rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module", autouse=True)
def _server(s3_server: S3Server) -> None:
    """Start the server before the first test, which would be blamed for its thread."""
    del s3_server


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a directory for checkpoints, on each storage."""
    if request.param == "file":
        return str(tmp_path / "checkpoints")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"s3://{request.getfixturevalue('bucket')}/checkpoints"


@pytest.fixture
def storage(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of that storage."""
    if not url.startswith("s3"):
        return {}
    server: S3Server = request.getfixturevalue("s3_server")
    return server.storage_options


def state(value: float) -> dict[str, Any]:
    """Return a state: tensors, one of them a part of a larger one, and an object."""
    whole = torch.arange(24.0).reshape(6, 4) + value
    return {"model": {"weight": whole, "row": whole[2]}, "step": value, "empty": {}}


def loaded(reader: Any) -> dict[str, Any]:
    """Return what is loaded into another state."""
    tensors = state(-1.0)
    load(tensors, storage_reader=reader)
    return tensors


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two states are the same."""
    assert torch.equal(found["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(found["model"]["row"], expected["model"]["row"])
    assert found["step"] == expected["step"]


def cause_of(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """Return what a rank that is alone has met, from what torch raises."""
    ((cause, _),) = error.value.failures.values()
    return cause.error if isinstance(cause, SharedFailure) else cause


def names_at(url: str, storage: dict[str, Any]) -> list[str]:
    """Return the names of all files of a checkpoint, past every cache of ours."""
    fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **storage)
    return sorted(name.rpartition("/")[2] for name in fs.find(path))


def test_what_is_saved_is_loaded(url: str, storage: dict[str, Any]) -> None:
    """The state is the same, and the manifest lists every file."""
    save(state(1.0), storage_writer=ResilientWriter(f"{url}/a", storage_options=storage))

    found = loaded(ResilientReader(f"{url}/a", storage_options=storage))

    assert_same(found, state(1.0))
    names = names_at(f"{url}/a", storage)
    assert [name for name in names if not is_shard(name)] == [".metadata"]
    assert len(names) == 2


def test_a_checkpoint_of_the_same_name_is_replaced(url: str, storage: dict[str, Any]) -> None:
    """The newer one is loaded, and nothing of the older one is left."""
    writer = ResilientWriter(f"{url}/a", storage_options=storage)
    save(state(1.0), storage_writer=writer)
    older = names_at(f"{url}/a", storage)

    save(state(2.0), storage_writer=writer, checkpoint_id=f"{url}/a")

    assert_same(loaded(ResilientReader(f"{url}/a", storage_options=storage)), state(2.0))
    assert set(older) & set(names_at(f"{url}/a", storage)) == {".metadata"}
    assert len(names_at(f"{url}/a", storage)) == len(older)


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "gone", "longer"])
def test_a_shard_that_is_not_what_was_saved_is_refused(
    url: str, storage: dict[str, Any], damage: str
) -> None:
    """The error says what it is, and no tensor was touched."""
    save(state(1.0), storage_writer=ResilientWriter(f"{url}/a", storage_options=storage))
    fs, path = fsspec.core.url_to_fs(f"{url}/a", skip_instance_cache=True, **storage)
    (shard,) = (name for name in fs.find(path) if is_shard(name.rpartition("/")[2]))
    data = bytearray(fs.cat_file(shard))
    data[len(data) // 2] ^= 1
    changed = {"flipped bit": data, "truncated": data[:-1], "longer": data + b"x"}
    fs.rm_file(shard)
    if damage in changed:
        fs.pipe_file(shard, bytes(changed[damage]))
    tensors = state(-1.0)

    with pytest.raises(CheckpointException) as error:
        load(tensors, storage_reader=ResilientReader(f"{url}/a", storage_options=storage))

    assert isinstance(cause_of(error), CorruptCheckpointError)
    assert "distcp" in str(cause_of(error))
    assert_same(tensors, state(-1.0))


def test_metadata_that_was_changed_is_refused(url: str, storage: dict[str, Any]) -> None:
    """A pickle that is not what was saved is not even looked at."""
    save(state(1.0), storage_writer=ResilientWriter(f"{url}/a", storage_options=storage))
    fs, path = fsspec.core.url_to_fs(f"{url}/a", skip_instance_cache=True, **storage)
    data = fs.cat_file(f"{path}/.metadata")
    fs.pipe_file(f"{path}/.metadata", data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])

    with pytest.raises(CheckpointException) as error:
        loaded(ResilientReader(f"{url}/a", storage_options=storage))

    assert isinstance(cause_of(error), CorruptCheckpointError)


def test_no_checkpoint_is_said_to_be_none(url: str, storage: dict[str, Any]) -> None:
    """A directory that no save has completed is no checkpoint."""
    fs, path = fsspec.core.url_to_fs(f"{url}/a", skip_instance_cache=True, **storage)
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/__0_0.distcp", b"a shard")

    with pytest.raises(CheckpointException) as error:
        loaded(ResilientReader(f"{url}/a", storage_options=storage))

    assert isinstance(cause_of(error), FileNotFoundError)


def test_torchs_reader_loads_it_and_ours_what_torch_has_saved(tmp_path: Path) -> None:
    """The format is torch's, both ways; several files of one rank as well."""
    save(state(1.0), storage_writer=ResilientWriter(tmp_path / "ours", thread_count=2))
    save(state(2.0), storage_writer=FileSystemWriter(tmp_path / "torchs"))

    assert_same(loaded(FileSystemReader(tmp_path / "ours")), state(1.0))
    assert_same(loaded(ResilientReader(tmp_path / "torchs")), state(2.0))


def test_metadata_without_a_manifest_that_is_damaged_is_refused(tmp_path: Path) -> None:
    """What does not unpickle is damaged, and no failure of storage."""
    save(state(2.0), storage_writer=FileSystemWriter(tmp_path / "torchs"))
    metadata = tmp_path / "torchs" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])

    with pytest.raises(CheckpointException) as error:
        loaded(ResilientReader(tmp_path / "torchs"))

    assert isinstance(cause_of(error), CorruptCheckpointError)


def test_it_is_found_to_be_verified(tmp_path: Path) -> None:
    """A checkpoint of many files has a manifest as any other, and nothing else is in it."""
    save(state(1.0), storage_writer=ResilientWriter(tmp_path / "step=1"))

    (found,) = Verification(
        Storage({}, spool=str),
        str(tmp_path),
        RecordingToken(),
        is_quick=False,
        run=lambda ask: ask(),
    ).findings()

    assert (found.name, found.state, found.reason) == ("step=1", State.VERIFIED, "")


def test_the_metadata_that_save_returns_is_complete(tmp_path: Path) -> None:
    """It says where everything is, as that of torch's own writer does."""
    ours = save(state(1.0), storage_writer=ResilientWriter(tmp_path / "ours"))
    torchs = save(state(1.0), storage_writer=FileSystemWriter(tmp_path / "torchs"))

    assert ours.storage_data.keys() == torchs.storage_data.keys()
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.storage_meta is not None
    assert ours.storage_meta.checkpoint_id == str(tmp_path / "ours")


# What is refused ----------------------------------------------------------------------------------


class Forgetful(DefaultSavePlanner):
    """A planner that does not keep what it makes."""

    def create_global_plan(self, all_plans: Any) -> Any:
        """Make it, and forget it."""
        made = super().create_global_plan(all_plans)
        del self.metadata
        return made


class Elsewhere(DefaultSavePlanner):
    """A planner that keeps something else than it returns."""

    def create_global_plan(self, all_plans: Any) -> Any:
        """Make it, and keep another."""
        plans, metadata = super().create_global_plan(all_plans)
        self.metadata = copy.copy(metadata)
        self.metadata.planner_data = {"another": "one"}
        return plans, metadata


def test_a_planner_has_to_keep_its_metadata(tmp_path: Path) -> None:
    """Without it nothing can be published before ``finish``, and nothing is."""
    writer = ResilientWriter(tmp_path / "a")

    with pytest.raises(CheckpointException) as error:
        save(state(1.0), storage_writer=writer, planner=Forgetful())

    assert isinstance(cause_of(error), ConfigError)
    assert "Forgetful does not keep" in str(cause_of(error))
    assert not (tmp_path / "a" / ".metadata").exists()


def test_a_planner_that_keeps_another_metadata_is_told_of(tmp_path: Path) -> None:
    """What was published is not what torch would have written, and nobody is left to believe so."""
    with pytest.raises(CheckpointException) as error:
        save(state(1.0), storage_writer=ResilientWriter(tmp_path / "a"), planner=Elsewhere())

    assert isinstance(cause_of(error), ConfigError)


def test_plans_that_were_left_out_are_refused(tmp_path: Path) -> None:
    """What ranks agree on would be that of an earlier save."""
    if "usable" not in SavePlan.__dataclass_fields__:
        pytest.skip("this torch caches no plans")
    writer = ResilientWriter(tmp_path / "a")

    with pytest.raises(ConfigError, match="enable_plan_caching"):
        writer.prepare_global_plan([SavePlan([], usable=False)])


def test_ranks_with_metadata_of_their_own_are_refused(tmp_path: Path) -> None:
    """Nobody would know whether such a checkpoint is complete."""
    with pytest.raises(ConfigError, match="use_collectives=False"):
        ResilientWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)


@pytest.mark.parametrize("path", ["s3://bucket", "gs://bucket/", "", 7])
@pytest.mark.parametrize("kind", [ResilientWriter, ResilientReader])
def test_a_checkpoint_is_a_directory_with_a_name(kind: Any, path: Any) -> None:
    """Its manifest lies beside it, which the root of a bucket has no room for."""
    with pytest.raises(ConfigError, match="path="):
        kind(path)
    assert not kind.validate_checkpoint_id(path)


@pytest.mark.parametrize(
    "options",
    [
        {"retries": 3},
        {"retry": {"max_attempts": 0}},
        {"joint": {"on_outage": "hope"}},
        {"joint": "all"},
        {"storage_options": 7},
    ],
)
@pytest.mark.parametrize("kind", [ResilientWriter, ResilientReader])
def test_a_wrong_option_is_refused(kind: Any, options: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(ConfigError):
        kind("checkpoints/a", **options)


def test_files_are_written_by_at_least_one_thread() -> None:
    """The text names the option."""
    with pytest.raises(ConfigError, match="thread_count"):
        ResilientWriter("checkpoints/a", thread_count=0)


# What goes wrong on the way -----------------------------------------------------------------------


def test_a_name_outside_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    """Metadata that points elsewhere is damaged."""
    save(state(1.0), storage_writer=FileSystemWriter(tmp_path / "a"))
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    path.write_bytes(pickle.dumps(metadata))

    with pytest.raises(CheckpointException) as error:
        loaded(ResilientReader(tmp_path / "a"))

    assert isinstance(cause_of(error), CorruptCheckpointError)
    assert "outside" in str(cause_of(error))


def test_a_shard_that_is_gone_before_the_metadata_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that has lost a verified shard is believed, and not the rank that has seen it."""

    def lose(fs: Any, path: str) -> Any:
        return {name: size for name, size in list_files(fs, path).items() if not is_shard(name)}

    monkeypatch.setattr(dcp_saving, "list_files", lose)

    with pytest.raises(CheckpointException) as error:
        save(state(1.0), storage_writer=ResilientWriter(tmp_path / "a", retry=RETRY))

    assert "was not made complete" in str(cause_of(error))
    assert not (tmp_path / "a" / ".metadata").exists()


def test_staged_files_of_a_failed_save_are_removed_by_the_next(tmp_path: Path) -> None:
    """What a killed save has left would make the checkpoint look damaged."""
    (tmp_path / "a").mkdir()
    for name in ("__3_0.distcp", ".resilience-0.staged"):
        (tmp_path / "a" / name).write_bytes(b"left")
    (tmp_path / "a" / "notes.txt").write_text("mine", encoding="utf-8")

    save(state(1.0), storage_writer=ResilientWriter(tmp_path / "a"))

    names = names_at(str(tmp_path / "a"), {})
    assert [name for name in names if not name.startswith("__0_")] == [".metadata", "notes.txt"]


# Around it ----------------------------------------------------------------------------------------


def test_switched_off_torchs_own_writer_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``LIGHTNING_RESILIENCE=off`` the files have torch's names, and there is no manifest."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")

    save(state(1.0), storage_writer=ResilientWriter(tmp_path / "a"))

    assert names_at(str(tmp_path / "a"), {}) == [".metadata", "__0_0.distcp"]
    assert_same(loaded(ResilientReader(tmp_path / "a")), state(1.0))
    assert not (tmp_path / ".resilience").exists()


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """It saves there as it would have here."""
    writer = pickle.loads(pickle.dumps(ResilientWriter(tmp_path / "a", retry=RETRY)))

    save(state(1.0), storage_writer=writer)

    assert_same(loaded(ResilientReader(tmp_path / "a")), state(1.0))


def test_a_state_of_inference_mode_is_loaded_into(tmp_path: Path) -> None:
    """Where torch's own reader may write to such tensors, so may the thread that does it here."""
    save(state(1.0), storage_writer=ResilientWriter(tmp_path / "a"))

    with torch.inference_mode():
        found = loaded(ResilientReader(tmp_path / "a"))

    assert_same(found, state(1.0))


def test_parameters_are_saved_and_loaded(tmp_path: Path) -> None:
    """A leaf that wants gradients is written to, as by torch's own reader."""
    layer, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save({"layer": layer}, storage_writer=ResilientWriter(tmp_path / "a"))

    load({"layer": other}, storage_reader=ResilientReader(tmp_path / "a"))

    assert torch.equal(layer.weight, other.weight)
    assert other.weight.requires_grad


def test_a_shared_failure_cannot_be_gathered() -> None:
    """Pickled, it raises what it carries."""
    error = JointError("all of us", first_rank=1)

    with pytest.raises(JointError) as raised:
        pickle.dumps((SharedFailure(error), "a traceback"))

    assert raised.value is error
    assert str(SharedFailure(error)) == "JointError: all of us"


def test_a_plan_has_what_a_rank_offers(tmp_path: Path) -> None:
    """A rank that has never saved offers nothing, and one that has offers to go on."""
    writer = ResilientWriter(tmp_path / "a")

    first = writer.prepare_local_plan(SavePlan([])).storage_data
    save(state(1.0), storage_writer=writer)
    second = writer.prepare_local_plan(SavePlan([])).storage_data

    assert first == Offer()
    assert second.incarnation
    assert second.world_size == 1


def test_local_permissions_follow_the_umask(tmp_path: Path) -> None:
    """Another user of the group may read what this one has saved, if it may read anything."""
    before = os.umask(0o022)
    try:
        save(state(1.0), storage_writer=ResilientWriter(tmp_path / "a"))
    finally:
        os.umask(before)

    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert modes == {0o644}


def test_errors_of_a_checkpoint_can_be_told_apart() -> None:
    """What is damaged is a kind of what is not as it was written."""
    assert issubclass(CorruptCheckpointError, CheckpointError)
