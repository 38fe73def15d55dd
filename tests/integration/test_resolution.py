# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run starts from: one answer for all ranks, or one error."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import pickle
import shutil
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_resilience import CheckpointError, JointError
from lightning_resilience.adapters.lightning.deferral import Deferred
from tests import lightning_job
from tests.faulty_filesystem import VARIABLE, FaultPlan, Rule
from tests.lightning_job import (
    EvaluatedModel,
    Job,
    Running,
    make_data,
    make_model,
    make_trainer,
    patched,
    store_server,
)
from tests.single_rank import fit, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.warm_python import WarmPython


pytestmark = [
    pytest.mark.integration,
    # The checkpoint was made elsewhere.
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:.*is called with Trainer configured with multiple"),
]

OUTAGE_S = 8.0
"""Longer than the process group's timeout."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2, as Lightning itself writes it."""
    folder = tmp_path_factory.mktemp("before")
    options = {"default_root_dir": folder}
    fit(Job(folder=str(folder), steps=2, ranks=1, options=None, trainer=options))
    return folder / "step=2.ckpt"


def later(checkpoint: Path) -> bytes:
    """Return the same checkpoint, said to be of step 3."""
    content = torch.load(checkpoint, weights_only=True)
    content["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]["optimizer"][
        "step"
    ]["total"]["completed"] = 3
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.fixture
def resuming(faulty: Callable[..., Job], checkpoint: Path, tmp_path: Path) -> Callable[..., Job]:
    """Make a job whose folders hold these files, of which the last is the newest."""

    def make(*rules: Rule, files: dict[str, bytes | None] | None = None, **options: Any) -> Job:
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        for age, (name, data) in enumerate(reversed((files or {}).items())):
            path = tmp_path / name
            path.write_bytes(checkpoint.read_bytes() if data is None else data)
            os.utime(path, (2e9 - 60 * age, 2e9 - 60 * age))
        root = {"default_root_dir": f"faulty://{tmp_path}"}
        trainer = {**root, **options.pop("trainer", {})}
        return faulty(*rules, **{"resume": "last", "trainer": trainer, **options})

    return make


class Start(Callback):
    """Notes where training starts, and what had been asked of storage when it was set up."""

    def __init__(self) -> None:
        self.step = -1
        self.asked: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note what was asked before any callback's hook."""
        del trainer, pl_module, stage
        calls = FaultPlan(os.environ[VARIABLE]).calls()
        self.asked = [call["operation"] for call in calls if call["operation"] != "connect"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the step."""
        del pl_module
        self.step = trainer.global_step


def started(job: Job, *callbacks: Any) -> tuple[Any, Start]:
    """Train; return the Trainer and where it started."""
    trainer, start = make_trainer(job), Start()
    trainer.callbacks[:0] = [start, *callbacks]
    trainer.fit(make_model(), make_data(), ckpt_path=job.resume)
    return trainer, start


# Which one ----------------------------------------------------------------------------------------


def test_the_last_one_is_found_after_setup_with_its_protocol(resuming: Callable[..., Job]) -> None:
    """Storage is asked nothing before the callbacks are set up."""
    job = resuming(files={"checkpoints/last.ckpt": None, "checkpoints/step=2.ckpt": None})

    trainer, start = started(job)

    assert trainer.ckpt_path == f"{job.folder}/last.ckpt"
    assert (start.step, start.asked) == (2, [])


def test_of_several_the_newest_is_loaded(resuming: Callable[..., Job], checkpoint: Path) -> None:
    """By the time at which storage has got it."""
    files = {"checkpoints/last-v1.ckpt": None, "checkpoints/last.ckpt": later(checkpoint)}

    trainer, start = started(resuming(files=files))

    assert trainer.ckpt_path.endswith("/last.ckpt")
    assert start.step == 3


def test_an_empty_directory_is_a_start_from_the_beginning(
    resuming: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning, once."""
    with caplog.at_level(logging.WARNING):
        trainer, start = started(resuming())

    assert (trainer.ckpt_path, start.step) == (None, 0)
    assert sum("there is no last checkpoint yet" in line for line in caplog.messages) == 1


def set_aside(tmp_path: Path) -> dict[str, bytes]:
    """Return what was set aside in the folder of checkpoints, without marks and notes."""
    found = (tmp_path / "checkpoints" / ".resilience" / "set-aside").glob("*")
    return {path.stem: path.read_bytes() for path in found if path.suffix != ".json"}


def test_a_damaged_one_is_set_aside_and_not_seen_again(
    resuming: Callable[..., Job],
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next one is loaded, the log says why, and the next start has nothing to say."""
    torn = checkpoint.read_bytes()[:-100]
    files = {"checkpoints/last.ckpt": None, "checkpoints/last-v1.ckpt": torn}
    job = resuming(files=files, steps=2)

    with caplog.at_level(logging.WARNING):
        trainer, start = started(job)
    first = [line for line in caplog.messages if "not loaded" in line]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again, _ = started(job)

    assert trainer.ckpt_path == again.ckpt_path == f"{job.folder}/last.ckpt"
    assert start.step in {-1, 2}
    assert len(first) == 1
    assert "not loaded, it is damaged" in first[0]
    assert "It is set aside as faulty://" in first[0]
    assert set_aside(tmp_path) == {"last-v1.ckpt": torn}
    assert not [line for line in caplog.messages if "not loaded" in line]


def test_one_that_is_damaged_stays_where_a_run_only_reads(
    resuming: Callable[..., Job], checkpoint: Path, tmp_path: Path
) -> None:
    """The job that writes checkpoints may be running meanwhile."""
    torn = checkpoint.read_bytes()[:-100]
    files = {"checkpoints/last.ckpt": None, "checkpoints/last-v1.ckpt": torn}
    job = resuming(files=files)
    trainer = make_trainer(job)

    trainer.test(EvaluatedModel(), make_data(2), ckpt_path="last", verbose=False)

    assert trainer.ckpt_path == f"{job.folder}/last.ckpt"
    assert (tmp_path / "checkpoints" / "last-v1.ckpt").read_bytes() == torn


def test_training_goes_on_where_nothing_may_be_set_aside(
    resuming: Callable[..., Job],
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a warning; nothing is lost."""
    torn = checkpoint.read_bytes()[:-100]
    files = {"checkpoints/last.ckpt": None, "checkpoints/last-v1.ckpt": torn}
    rule = Rule(operations=("manifest_put_file",), name="set-aside", error="denied")
    job = resuming(rule, files=files)

    with caplog.at_level(logging.WARNING):
        trainer, start = started(job)

    assert trainer.ckpt_path == f"{job.folder}/last.ckpt"
    assert start.step == 2
    assert any("could not be set aside (PermissionError" in line for line in caplog.messages)
    assert (tmp_path / "checkpoints" / "last-v1.ckpt").read_bytes() == torn
    assert set_aside(tmp_path) == {}


def test_storage_that_is_ill_is_waited_for_before_one_is_set_aside(
    resuming: Callable[..., Job], checkpoint: Path, tmp_path: Path
) -> None:
    """It is retried behind the breaker, as everything that rank 0 asks."""
    torn = checkpoint.read_bytes()[:-100]
    files = {"checkpoints/last.ckpt": None, "checkpoints/last-v1.ckpt": torn}
    rule = Rule(operations=("manifest_put_file",), name="set-aside", error="reset", last=2)

    _, start = started(resuming(rule, files=files))

    assert start.step == 2
    assert len(plan_in_use().calls("manifest_put_file", name="set-aside")) == 3
    assert set_aside(tmp_path) == {"last-v1.ckpt": torn}


def first_byte_of_a_tensor(path: Path) -> int:
    """Return where it is in the file: behind the header of its record, and what that says."""
    with zipfile.ZipFile(path) as archive:
        record = next(each for each in archive.infolist() if "/data/" in each.filename)
    data = path.read_bytes()
    name_bytes, extra_bytes = struct.unpack_from("<2H", data, record.header_offset + 26)
    return int(record.header_offset) + 30 + int(name_bytes) + int(extra_bytes)


def test_the_only_one_that_is_found_damaged_while_it_is_loaded_is_an_error_and_stays(
    resuming: Callable[..., Job], tmp_path: Path
) -> None:
    """One flipped bit of a remote file, and there is no other one to go on from."""
    job = resuming(options={}, resume=None, checkpoint={"save_last": True}, steps=2)
    fit(job)
    path = tmp_path / "checkpoints" / "last.ckpt"
    data = bytearray(path.read_bytes())
    data[first_byte_of_a_tensor(path)] ^= 1
    path.write_bytes(data)
    (tmp_path / "checkpoints" / "step=2.ckpt").unlink()

    with pytest.raises(CheckpointError, match=r"last\.ckpt: it is not what .* says was saved"):
        fit(resuming(options={}, steps=4))

    assert path.read_bytes() == data
    assert set_aside(tmp_path) == {}


@pytest.mark.parametrize("asked", ["last", "hpc"])
def test_a_fresh_start_has_to_be_asked_for_where_none_can_be_loaded(
    asked: str, resuming: Callable[..., Job], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names what is left unused, and the run does not write over it."""
    name = "checkpoints/last.ckpt" if asked == "last" else "hpc_ckpt_3.ckpt"
    options = {"checkpoints": {"allow_fresh_start": True}}
    job = resuming(files={name: b"PK\x03\x04torn"}, resume=asked, options=options)

    with caplog.at_level(logging.WARNING):
        trainer, start = started(job)

    assert (trainer.ckpt_path, start.step) == (None, 0)
    unused = [line for line in caplog.messages if "allow_fresh_start is set" in line]
    assert len(unused) == 1
    assert f"{name}: it is damaged" in unused[0]
    folder = (tmp_path / name).parent / ".resilience" / "set-aside"
    moved = [path.read_bytes() for path in folder.glob("*") if path.suffix != ".json"]
    assert moved == [b"PK\x03\x04torn"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"checkpoints/last.ckpt": b""}, "last.ckpt: it is empty"),
        ({"checkpoints/last.ckpt": b"PK\x03\x04torn"}, "last.ckpt: it is damaged"),
        (
            {"checkpoints/step=2.ckpt": b"PK\x03\x04torn"},
            "1 checkpoints with other names (step=2.ckpt)",
        ),
    ],
    ids=["empty", "torn", "another name"],
)
def test_checkpoints_of_which_none_can_be_loaded_are_an_error(
    files: dict[str, bytes | None], said: str, resuming: Callable[..., Job], tmp_path: Path
) -> None:
    """Starting from the beginning would hide that there is work; nothing is removed."""
    job = resuming(files=files)

    with pytest.raises(CheckpointError) as caught:
        fit(job)

    assert said in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [
        name.rpartition("/")[2] for name in files
    ]


def test_one_that_was_killed_before_its_manifest_is_started_from(
    resuming: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The first checkpoint of all: it is whole, nothing else is there, and the log says so."""
    with caplog.at_level(logging.WARNING):
        trainer, start = started(resuming(files={"checkpoints/step=2.ckpt": None}))

    assert (trainer.ckpt_path, start.step) == (
        f"{trainer.checkpoint_callback.dirpath}/step=2.ckpt",
        2,
    )
    assert any("has no manifest, is whole, and is all there is" in line for line in caplog.messages)


def test_a_last_one_that_was_not_replaced_any_more_gives_way_to_a_newer_one(
    resuming: Callable[..., Job], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the steps that manifests say; the last one is what storage has got later."""
    fit(resuming(options={}, resume=None, checkpoint={"save_last": True}, steps=2))
    folder = tmp_path / "checkpoints"
    kept = {
        name: (folder / name).read_bytes() for name in ("last.ckpt", ".resilience/last.ckpt.json")
    }
    fit(resuming(options={}, checkpoint={"save_last": True, "save_top_k": -1}, steps=4))
    for name, data in kept.items():
        (folder / name).write_bytes(data)

    with caplog.at_level(logging.WARNING):
        trainer, start = started(resuming(options={}, steps=6))

    assert trainer.ckpt_path.endswith("/step=4.ckpt")
    assert start.step == 4
    assert sum("/step=4.ckpt is newer than" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("way", ["named", "from the beginning"])
def test_a_run_that_does_not_go_on_from_the_last_one_begins_a_training(
    way: str, resuming: Callable[..., Job], tmp_path: Path
) -> None:
    """Who goes back to an older checkpoint does not find the newer ones in the way afterwards."""
    options: dict[str, Any] = {
        "options": {},
        "every": 1,
        "checkpoint": {"save_last": True, "save_top_k": -1},
    }
    fit(resuming(resume=None, steps=4, **options))
    folder = tmp_path / "checkpoints"
    (folder / "step=2.ckpt").rename(tmp_path / "elsewhere.ckpt")
    job = resuming(resume=None, steps=3, **options)
    trainer, path = make_trainer(job), f"faulty://{tmp_path}/elsewhere.ckpt"
    trainer.fit(make_model(), make_data(), ckpt_path=path if way == "named" else None)

    _, start = started(resuming(**{**options, "steps": 5}))

    assert start.step == 3


def test_storage_that_cannot_tell_is_asked_again(resuming: Callable[..., Job]) -> None:
    """Twice it cannot tell, and the third answer counts."""
    # The first listing is that of the checkpoint callback, the second is for the spool.
    rule = Rule(operations=("ls",), error="reset", first=3, last=4)

    _, start = started(resuming(rule, files={"checkpoints/last.ckpt": None}))

    assert start.step == 2
    asked = [call["struck"] for call in plan_in_use().calls("ls")]
    assert asked == [False, False, True, True, False]


def test_storage_that_never_tells_is_an_error(resuming: Callable[..., Job]) -> None:
    """A refusal is no empty directory."""
    rule = Rule(operations=("ls",), error="denied", first=3)

    with pytest.raises(JointError, match="resolve of faulty://") as caught:
        fit(resuming(rule))

    assert caught.value.outcome == "permanent"


def test_a_damaged_path_is_an_error_that_says_so(
    resuming: Callable[..., Job], checkpoint: Path, tmp_path: Path
) -> None:
    """Not what ``torch.load`` makes of it; and what the user has named is not moved."""
    torn = checkpoint.read_bytes()[:-100]
    job = resuming(files={"checkpoints/a.ckpt": torn})
    trainer = make_trainer(job)

    with pytest.raises(CheckpointError, match="written to its end"):
        trainer.fit(make_model(), make_data(), ckpt_path=f"{job.folder}/a.ckpt")

    assert (tmp_path / "checkpoints" / "a.ckpt").read_bytes() == torn
    assert set_aside(tmp_path) == {}


def test_what_an_exception_has_saved_is_resumed(resuming: Callable[..., Job]) -> None:
    """Without being asked for, as Lightning does it, and only where it is the newest."""
    files = {"checkpoints/last.ckpt": None, "on_exception.ckpt": None}
    job = resuming(files=files, resume=None)
    saver = OnExceptionCheckpoint(job.trainer["default_root_dir"])

    trainer, start = started(job, saver)

    assert trainer.ckpt_path == saver.ckpt_path
    assert start.step == 2


def test_a_path_that_the_user_set_on_the_trainer_is_loaded(resuming: Callable[..., Job]) -> None:
    """``trainer.ckpt_path = …`` is what Lightning takes where ``fit`` is told nothing."""
    job = resuming(files={"checkpoints/a.ckpt": None})
    trainer, start = make_trainer(job), Start()
    trainer.callbacks.insert(0, start)
    trainer.ckpt_path = f"{job.folder}/a.ckpt"

    trainer.fit(make_model(), make_data())

    assert start.step == 2


# Under a scheduler --------------------------------------------------------------------------------


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SLURM puts into the environment of the only task."""
    values = {"NTASKS": 1, "NTASKS_PER_NODE": 1, "JOB_NAME": "training", "JOB_ID": 4711}
    values |= {"NODEID": 0, "PROCID": 0, "LOCALID": 0}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


HPC: dict[str, bytes | None] = {"hpc_ckpt_10.ckpt": None, "hpc_ckpt_9.ckpt": None}


@pytest.mark.usefixtures("slurm")
def test_under_slurm_what_the_scheduler_left_is_resumed(resuming: Callable[..., Job]) -> None:
    """The highest number, not the newest file, and storage is asked after ``setup``."""
    job = resuming(files=HPC, resume=None)

    trainer, start = started(job)

    assert trainer.ckpt_path == f"{job.trainer['default_root_dir']}/hpc_ckpt_10.ckpt"
    assert (start.step, start.asked) == (2, [])


@pytest.mark.usefixtures("slurm")
def test_under_slurm_a_first_run_starts_from_the_beginning(resuming: Callable[..., Job]) -> None:
    """Nothing was left, and nothing was asked for."""
    trainer, start = started(resuming(files={"other.ckpt": None}, resume=None))

    assert (trainer.ckpt_path, start.step) == (None, 0)


@pytest.mark.usefixtures("slurm")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_under_slurm_the_best_one_is_tested_where_nothing_was_left(
    resuming: Callable[..., Job],
) -> None:
    """``test`` without a model means the best checkpoint, as without SLURM."""
    job = resuming(resume=None)
    trainer = make_trainer(job)
    trainer.fit(EvaluatedModel(), make_data())

    trainer.test(dataloaders=make_data(2), verbose=False)

    assert trainer.ckpt_path == f"{job.folder}/step=4.ckpt"


def test_the_schedulers_checkpoint_is_an_error_where_it_is_to_be_tested(
    resuming: Callable[..., Job],
) -> None:
    """A model without its weights has no score that anybody wants."""
    trainer = make_trainer(resuming(resume=None))

    with pytest.raises(ValueError, match=r"no hpc_ckpt_<n>\.ckpt"):
        trainer.test(EvaluatedModel(), make_data(2), ckpt_path="hpc", verbose=False)


def test_a_torn_one_of_the_schedulers_gives_way_to_the_one_before(
    resuming: Callable[..., Job],
) -> None:
    """The job was killed while it wrote."""
    files = {"hpc_ckpt_9.ckpt": None, "hpc_ckpt_10.ckpt": b"PK\x03\x04torn"}

    trainer, start = started(resuming(files=files, resume="hpc"))

    assert trainer.ckpt_path.endswith("/hpc_ckpt_9.ckpt")
    assert start.step == 2


# Other entry points, and other Trainers -----------------------------------------------------------


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
@pytest.mark.parametrize("asked", ["last", "path", "best"])
def test_other_entry_points_load_behind_the_breaker(
    name: str, asked: str, resuming: Callable[..., Job]
) -> None:
    """The second answer counts, in the search and in the load."""
    rule = Rule(operations=("open", "info"), name="last", error="reset", last=2)
    job = resuming(rule, files={"checkpoints/last.ckpt": None})
    trainer = make_trainer(job)
    trainer.checkpoint_callback.best_model_path = f"{job.folder}/last.ckpt"
    path = f"{job.folder}/last.ckpt" if asked == "path" else asked
    quiet = {} if name == "predict" else {"verbose": False}

    getattr(trainer, name)(EvaluatedModel(), make_data(2), ckpt_path=path, **quiet)

    assert trainer.ckpt_path == f"{job.folder}/last.ckpt"
    assert patched(trainer) == []
    assert [call["struck"] for call in plan_in_use().calls("open", "info", name="last")][:2] == [
        True,
        True,
    ]
    assert lightning_job.our_threads() == []


class PathSeen(Callback):
    """Notes what Lightning's own choice is, at the first hook that follows it."""

    def __init__(self) -> None:
        self.chosen: list[Any] = []

    def watch(self, trainer: Any) -> None:
        """Listen to what the connector is given."""
        connector = trainer._checkpoint_connector
        inner = connector._restore_modules_and_callbacks

        def restore(path: Any = None, *args: Any, **kwargs: Any) -> None:
            self.chosen.append(path)
            inner(path, *args, **kwargs)

        connector._restore_modules_and_callbacks = restore


@pytest.mark.parametrize("way", ["without the callback", "switched off", "not covered"])
def test_lightning_chooses_by_itself_where_we_do_not(
    way: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spool: Path,
) -> None:
    """What stays wrapped on the class passes straight on for such a Trainer."""
    assert spool.exists()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    shutil.copy(checkpoint, folder / "last.ckpt")
    make_trainer(Job(folder=str(folder), ranks=1))
    if way == "switched off":
        monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")
    kind = type("Sharded", (SingleDeviceStrategy,), {"save_checkpoint": save_somehow})
    strategy = {"strategy": kind("cpu")} if way == "not covered" else {}
    options: dict[str, Any] | None = None if way == "without the callback" else {}
    job = Job(folder=str(folder), ranks=1, options=options, trainer=strategy, resume="last")
    trainer, seen = make_trainer(job), PathSeen()
    seen.watch(trainer)

    trainer.fit(make_model(), make_data(), ckpt_path="last")

    assert trainer.ckpt_path == str(folder / "last.ckpt")
    assert isinstance(seen.chosen[0], Deferred) == (way == "not covered")


def save_somehow(self: Any, *args: Any, **kwargs: Any) -> None:
    """Save as the base does; nobody can know."""
    SingleDeviceStrategy.save_checkpoint(self, *args, **kwargs)


@pytest.mark.parametrize("way", ["pickled", "copied"])
def test_the_marker_survives_being_copied(way: str) -> None:
    """A launcher may send it to another process, and a user may copy the Trainer."""
    marker = Deferred.of("fit", None, {"model_provided": True})

    copied = pickle.loads(pickle.dumps(marker)) if way == "pickled" else copy.deepcopy(marker)

    assert isinstance(copied, Deferred)
    assert (copied, bool(copied)) == (marker, True)
    assert (copied.state_fn, copied.asked) == ("fit", None)
    assert copied.options == {"model_provided": True}


# Several ranks ------------------------------------------------------------------------------------


PLACES: dict[str, tuple[int, tuple[Rule, ...], list[str]]] = {
    "one rank": (1, (), ["last.ckpt"]),
    "two ranks": (2, (), ["last.ckpt"]),
    "four ranks": (4, (), ["last.ckpt"]),
    "nothing": (2, (), []),
    "torn": (2, (), ["last.ckpt", "last-v1.ckpt"]),
    "torn, and nobody minds": (2, (), ["last.ckpt"]),
    "rank 0 only": (2, (), ["a.ckpt"]),
    "rank 1 only": (2, (), ["a.ckpt"]),
    # The first listing is that of the checkpoint callback, the second is for the spool.
    "outage": (2, (Rule(operations=("ls",), error="reset", first=3, lasting_s=OUTAGE_S),), []),
}
GIVEN = {"rank 0 only": 0, "rank 1 only": 1}
Jobs = dict[str, Running]


class GivenTo:
    """Lets the user's program give a path to one rank only; a class, so that it can be sent."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank = rank
        self.path = path

    def __call__(self, trainer: Any) -> None:
        """Do what ``os.path.exists`` in a user's program does, where it differs."""
        if os.environ["RANK"] == str(self.rank):
            trainer.ckpt_path = self.path


@pytest.fixture(scope="module")
def jobs(
    warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[Jobs]:
    """Start all jobs at the same time."""
    with contextlib.ExitStack() as servers:
        found = {}
        for place, (ranks, rules, names) in PLACES.items():
            home = tmp_path_factory.mktemp(place.replace(" ", "-"))
            (home / "checkpoints").mkdir()
            for name in names:
                data = checkpoint.read_bytes()[: -100 if "torn" in place else None]
                (home / "checkpoints" / name).write_bytes(data)
            folder = f"faulty://{home}/checkpoints"
            options: dict[str, Any] = {"resume": "last"}
            if place == "torn, and nobody minds":
                options["options"] = {"checkpoints": {"allow_fresh_start": True}}
            if place in GIVEN:
                options = {"before": GivenTo(GIVEN[place], f"{folder}/a.ckpt")}
            found[place] = lightning_job.start(
                warm_python,
                Job(folder=folder, ranks=ranks, **options),
                home / "job",
                port=servers.enter_context(store_server()) if ranks > 1 else 0,
                plan=FaultPlan.write(home / "plan", *rules),
            )
        yield found


@pytest.mark.multiprocess
def test_the_number_of_requests_does_not_depend_on_the_number_of_ranks(jobs: Jobs) -> None:
    """One rank lists and looks, one fetches it to their node, and the others ask for nothing."""
    requests = []
    for place in ("one rank", "two ranks", "four ranks"):
        running = jobs[place]
        reports = running.wait()
        assert [report["code"] for report in reports] == [0] * len(reports), running.told()
        assert {report["resumed"] for report in reports} == {f"{running.job.folder}/last.ckpt"}
        folder = running.job.folder.removeprefix("faulty://")
        searching = [call["operation"] for call in running.plan.calls() if call["path"] == folder]
        requests.append((searching, len(running.plan.calls("open", name="last.ckpt"))))

    # That of the checkpoint callback, one for the spool, and the search.
    assert requests[0][0].count("ls") == 3
    assert requests[0][1] == 2
    assert requests == [requests[0]] * 3


@pytest.mark.multiprocess
def test_all_ranks_start_from_the_beginning_in_an_empty_directory(jobs: Jobs) -> None:
    """A first run is no error, on any rank."""
    running = jobs["nothing"]

    reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert [report["resumed"] for report in reports] == [None, None]
    assert running.steps() == [2, 4]


@pytest.mark.multiprocess
def test_all_ranks_raise_where_no_checkpoint_can_be_loaded(jobs: Jobs) -> None:
    """The same error with the same text, which names each of them; and they stay."""
    running = jobs["torn"]

    first, second = running.wait()

    assert first["error"] == second["error"] == "CheckpointError", running.told()
    assert first["text"] == second["text"]
    assert "last.ckpt: it is damaged" in first["text"]
    assert "last-v1.ckpt: it is damaged" in first["text"]
    assert (first["patched"], first["threads"]) == ([], [])
    assert running.names() == ["last.ckpt", "last-v1.ckpt"]


@pytest.mark.multiprocess
def test_all_ranks_start_from_the_beginning_where_they_are_told_to(jobs: Jobs) -> None:
    """What is left unused is named once, and is not written over."""
    running = jobs["torn, and nobody minds"]

    reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert [report["resumed"] for report in reports] == [None, None]
    assert running.told().count("allow_fresh_start is set") == 1
    assert running.steps() == [2, 4]


@pytest.mark.multiprocess
def test_an_outage_in_the_search_is_waited_for_by_all_ranks(jobs: Jobs) -> None:
    """It lasts longer than the group's timeout, and no rank is in a collective meanwhile."""
    running = jobs["outage"]

    reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    assert [report["resumed"] for report in reports] == [None, None]
    struck = [call for call in running.plan.calls("ls") if call["struck"]]
    assert {call["rank"] for call in struck} == {"0"}
    assert running.steps() == [2, 4]


@pytest.mark.multiprocess
@pytest.mark.parametrize("place", GIVEN)
def test_what_rank_zero_was_given_counts(place: str, jobs: Jobs) -> None:
    """A path that a user's program found on one rank only does not part the ranks."""
    running = jobs[place]

    reports = running.wait()

    assert [report["code"] for report in reports] == [0, 0], running.told()
    path = f"{running.job.folder}/a.ckpt" if place == "rank 0 only" else None
    assert [report["resumed"] for report in reports] == [path, path]
    assert "all ranks start from what rank 0 was given" in running.ranks[1].text()
    assert "all ranks start from what rank 0 was given" not in running.ranks[0].text()
