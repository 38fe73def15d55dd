# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Where the callback does nothing, where it refuses, and what it never changes."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_resilience import ConfigError, JointError, ResilienceCallback
from tests import lightning_job
from tests.faulty_filesystem import FaultPlan, Rule
from tests.lightning_job import (
    EvaluatedModel,
    Job,
    make_callback,
    make_data,
    make_model,
    make_trainer,
    patched,
)
from tests.single_rank import fit, names


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration]


@pytest.fixture
def job(tmp_path: Path, spool: Path) -> Job:
    """A job of one rank that saves to a local folder."""
    assert spool.exists()
    return Job(folder=str(tmp_path / "checkpoints"), ranks=1)


class Spy(Callback):
    """Notes what is patched while training runs, and may end it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Look, and raise."""
        self.seen = patched(trainer)
        if self.error is not None:
            raise self.error


def with_spy(job: Job, error: BaseException | None = None) -> tuple[Any, Spy]:
    """Make the Trainer with a spy."""
    trainer, spy = make_trainer(job), Spy(error)
    trainer.callbacks.insert(0, spy)
    return trainer, spy


# Off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false", "no"])
def test_off_changes_nothing(word: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``LIGHTNING_RESILIENCE=off`` no method is replaced, and Lightning saves by itself."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", word)
    trainer, spy = with_spy(job)

    trainer.fit(make_model(), make_data())

    assert spy.seen == []
    assert names(job) == job.expected
    assert lightning_job.find(trainer, "ResilienceCallback").breaker_report() == {}


def test_off_behaves_as_lightning_does_in_an_outage(
    faulty: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off, a storage error is Lightning's, at once, and not ours."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")
    job = faulty(Rule(operations=("open", "put_file"), error="reset"))

    with pytest.raises(ConnectionResetError):
        fit(job)


def test_on_by_default_replaces_methods_while_it_fits(job: Job) -> None:
    """Unset, it is on: the strategy's methods are ours until the end of ``fit``."""
    trainer, spy = with_spy(job)

    trainer.fit(make_model(), make_data())

    assert "SingleDeviceStrategy.save_checkpoint" in spy.seen
    assert patched(trainer) == []


def test_a_bad_switch_is_refused_before_training(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is neither on nor off is an error that names the variable and what it may be."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "maybe")

    with pytest.raises(ConfigError, match=r"LIGHTNING_RESILIENCE='maybe'.*on, 1.*off"):
        fit(job)

    assert names(job) == []


def test_two_callbacks_are_refused_before_training(job: Job) -> None:
    """A Trainer with two of them does not start."""
    trainer, spy = with_spy(job)
    trainer.callbacks.append(make_callback({}))

    with pytest.raises(ConfigError, match="two ResilienceCallbacks"):
        trainer.fit(make_model(), make_data())

    assert trainer.global_step == 0
    assert (spy.seen, patched(trainer), names(job)) == ([], [], [])


def test_two_callbacks_are_no_error_where_it_is_off(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off, nothing is checked either."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")
    trainer, _spy = with_spy(job)
    trainer.callbacks.append(make_callback({}))

    trainer.fit(make_model(), make_data())

    assert names(job) == job.expected


# Everything that a Trainer does besides -----------------------------------------------------------


def test_a_fast_dev_run_runs(job: Job) -> None:
    """A trial run saves nothing, and patches nothing for good."""
    trainer = make_trainer(
        Job(folder=job.folder, ranks=1, trainer={"max_steps": -1, "fast_dev_run": 2})
    )

    trainer.fit(make_model(), make_data())

    assert names(job) == []
    assert patched(trainer) == []


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_other_entry_points_are_covered_while_they_run(name: str, job: Job) -> None:
    """They load checkpoints and save none: the strategy is hooked, the checkpoint callbacks not."""
    trainer, spy = with_spy(job)
    seen: list[Any] = []
    setattr(spy, f"on_{name.replace('validate', 'validation')}_start", looking(seen))

    getattr(trainer, name)(EvaluatedModel(), make_data(2), **quiet(name))

    assert trainer.state.finished
    assert "SingleDeviceStrategy.load_checkpoint" in seen[0]
    assert not [name for name in seen[0] if name.startswith("ModelCheckpoint")]
    assert patched(trainer) == []


def looking(seen: list[Any]) -> Callable[..., None]:
    """Return a hook that notes what is patched."""

    def look(trainer: Any, *_args: Any) -> None:
        seen.append(patched(trainer))

    return look


def quiet(name: str) -> dict[str, Any]:
    """Return what keeps an entry point from printing tables."""
    return {} if name == "predict" else {"verbose": False}


def test_two_fits_in_a_row_work_with_one_trainer(job: Job) -> None:
    """The second ``fit`` of a Trainer is set up anew, and saves as the first did."""
    trainer = make_trainer(job)
    model = make_model()

    trainer.fit(model, make_data())
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(model, make_data())

    assert names(job) == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    assert patched(trainer) == []


@pytest.mark.multiprocess
def test_two_fits_in_a_row_work_on_two_ranks(warm_python: WarmPython, tmp_path: Path) -> None:
    """The second ``fit`` counts its joint operations anew, and believes no key of the first."""
    job = Job(folder=f"faulty://{tmp_path}/checkpoints", checkpoint={"save_top_k": 1})
    with lightning_job.store_server() as port:
        running = lightning_job.start(
            warm_python, job, tmp_path / "job", port=port, function=fit_twice
        )
        codes = [process.wait(lightning_job.HANG_S) for process in running.ranks]

    assert codes == [0, 0], running.told()
    put = [Path(call["path"]).name for call in running.plan.calls("put_file")]
    assert put == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    assert running.names() == ["step=8.ckpt"]
    assert running.steps() == [8]


def fit_twice(job: Job, _report: str) -> None:
    """Train, and go on with the same Trainer."""
    warnings.filterwarnings("ignore")
    trainer, model = make_trainer(job), make_model()
    trainer.fit(model, make_data())
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(model, make_data())
    assert patched(trainer) == []
    torch.distributed.destroy_process_group()


def test_one_callback_serves_two_trainers_in_a_row(job: Job) -> None:
    """A callback that has served is as good as new."""
    callback = make_callback({})
    for folder in ("one", "two"):
        trainer = make_trainer(Job(folder=f"{job.folder}/{folder}", ranks=1, options=None))
        trainer.callbacks.insert(0, callback)
        trainer.fit(make_model(), make_data())

    assert names(job) == ["one", "two"]
    assert sorted(path.name for path in Path(job.folder, "two").glob("*.ckpt")) == job.expected
    assert next(iter(callback.breaker_report().values())).state == "closed"


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_callback_can_be_copied(way: str, when: str, job: Job) -> None:
    """A copy has the options, and works, whether it was made before or after a ``fit``."""
    callback = make_callback({"on_outage": "fail", "run_id": "mine"})
    if when == "after":
        trainer = make_trainer(Job(folder=f"{job.folder}/first", ranks=1, options=None))
        trainer.callbacks.insert(0, callback)
        trainer.fit(make_model(), make_data())

    copied = pickle.loads(pickle.dumps(callback)) if way == "pickle" else copy.deepcopy(callback)
    trainer = make_trainer(Job(folder=f"{job.folder}/second", ranks=1, options=None))
    trainer.callbacks.insert(0, copied)
    trainer.fit(make_model(), make_data())

    assert sorted(path.name for path in Path(job.folder, "second").glob("*.ckpt")) == job.expected
    assert (copied._joint.on_outage, copied._options.run_id) == ("fail", "mine")
    assert copied._options == callback._options


class Copier(Callback):
    """Copies the callback in the middle of a ``fit``."""

    copies: list[ResilienceCallback]

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        """Copy it both ways."""
        callback = lightning_job.find(trainer, "ResilienceCallback")
        self.copies = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]


def test_a_copy_made_while_training_does_not_share_what_runs(job: Job) -> None:
    """Copies made in the middle of a ``fit`` have nothing running."""
    trainer, copier = make_trainer(job), Copier()
    trainer.callbacks.insert(0, copier)

    trainer.fit(make_model(), make_data())

    assert [copied._session for copied in copier.copies] == [None, None]
    assert names(job) == job.expected


# Everything is put back ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("mine"), ValueError),
        (KeyboardInterrupt(), SystemExit),
        (SystemExit(3), SystemExit),
    ],
)
def test_everything_is_put_back_after_an_exception(
    raised: BaseException, seen: type[BaseException], job: Job
) -> None:
    """Whatever ends training, methods, handlers and threads are as before."""
    trainer, spy = with_spy(job, raised)
    handlers = lightning_job.handlers()

    with pytest.raises(seen) as caught:
        trainer.fit(make_model(), make_data())

    left = lightning_job.handlers()[1:]
    lightning_job.restore(handlers)
    assert caught.value is raised or isinstance(raised, KeyboardInterrupt)
    assert "SingleDeviceStrategy.save_checkpoint" in spy.seen
    assert patched(trainer) == []
    assert left == handlers[1:]
    assert lightning_job.our_threads() == []


class FailsInSetup(Callback):
    """A neighbour whose ``setup`` fails after ours has run."""

    def setup(self, *_args: Any, **_kwargs: Any) -> None:
        """Fail."""
        message = "a neighbour's setup"
        raise RuntimeError(message)


def test_everything_is_put_back_when_a_later_setup_fails(job: Job) -> None:
    """A callback that fails in ``setup`` after ours leaves nothing patched."""
    trainer = make_trainer(job)
    position = [type(callback).__name__ for callback in trainer.callbacks]
    trainer.callbacks.insert(position.index("ResilienceCallback") + 1, FailsInSetup())

    with pytest.raises(RuntimeError, match="a neighbour's setup"):
        trainer.fit(make_model(), make_data())

    assert patched(trainer) == []
    assert lightning_job.our_threads() == []


def test_what_was_set_on_an_instance_before_is_set_again(job: Job) -> None:
    """A method that somebody else had replaced is that again afterwards, and was not lost."""
    trainer = make_trainer(job)
    saved = []
    inner = trainer.strategy.teardown

    def teardown() -> None:
        saved.append("torn down")
        inner()

    trainer.strategy.teardown = teardown

    trainer.fit(make_model(), make_data())

    assert trainer.strategy.teardown is teardown
    assert saved == ["torn down"]


class Sharded(SingleDeviceStrategy):
    """A strategy that writes checkpoints in a way of its own."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write it as the base does; we cannot know."""
        super().save_checkpoint(*args, **kwargs)


def test_a_strategy_that_is_not_covered_is_left_alone_with_a_warning(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """With a strategy that saves in its own way, it says so once and changes nothing."""
    trainer, spy = with_spy(Job(folder=job.folder, ranks=1, trainer={"strategy": Sharded("cpu")}))

    with caplog.at_level(logging.WARNING):
        trainer.fit(make_model(), make_data())

    assert spy.seen == []
    assert names(job) == job.expected
    said = [line for line in caplog.messages if "ResilienceCallback does not cover Sharded" in line]
    assert len(said) == 1


# Training is not disturbed ------------------------------------------------------------------------


def trained(job: Job) -> dict[str, Any]:
    """Train from a fixed seed; return everything that may differ."""
    seed_everything(42, verbose=False)
    trainer = fit(job)
    folder = Path(job.folder.removeprefix("faulty://"))
    found = {
        "weights": [weight.tolist() for weight in trainer.model.parameters()],
        "random": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),  # noqa: NPY002 - the stream that users seed
        "torch": torch.get_rng_state().tolist(),
        "files": {path.name: path.read_bytes() for path in sorted(folder.glob("*.ckpt"))},
    }
    shutil.rmtree(folder)
    return found


@pytest.mark.parametrize(
    "rules",
    [
        (),
        (Rule(operations=("put_file",), error="reset", last=2),),
        (Rule(operations=("put_file", "info"), error="busy", last=4),),
    ],
    ids=["well", "two failures", "an open circuit"],
)
def test_training_is_bit_equal_with_and_without(
    rules: tuple[Rule, ...], faulty: Callable[..., Job]
) -> None:
    """Weights, checkpoint files and all streams of chance are the same to the bit."""
    plain = faulty(options=None)
    without = trained(plain)

    protected = faulty(*rules)
    with_it = trained(protected)

    for what, value in without.items():
        assert with_it[what] == value, f"{what} differs"


# The other distribution, and other launchers ------------------------------------------------------

OTHER = """
import sys, warnings
warnings.filterwarnings("ignore")
{first}
from lightning_resilience import ResilienceCallback
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, _index):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), batch_size=4)
callback = ResilienceCallback()
options = dict(filename="{{step}}", every_n_train_steps=2, save_top_k=-1)
checkpoint = ModelCheckpoint(dirpath=sys.argv[1], **options)
options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
callbacks = [checkpoint, callback]
trainer = Trainer(accelerator="cpu", devices=1, max_steps=4, callbacks=callbacks, **options)
trainer.fit(Model(), data)
print("breakers", sorted(callback.breaker_report()), "lightning.pytorch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("first", "both"),
    [("import pytorch_lightning", False), ("import lightning.pytorch, pytorch_lightning", True)],
    ids=["alone", "beside the first"],
)
def test_the_other_distribution_works(
    first: str,
    both: bool,  # noqa: FBT001 - a parameter
    tmp_path: Path,
) -> None:
    """A ``Trainer`` of ``pytorch_lightning`` is covered, whether or not both are imported."""
    script = textwrap.dedent(OTHER.format(first=first))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "checkpoints")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert ":write" in ran.stdout
    assert ran.stdout.rstrip().endswith(str(both))
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")) == [
        "step=2.ckpt",
        "step=4.ckpt",
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_a_launcher_that_makes_processes_works(
    strategy: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Strategies that start the ranks by fork or spawn save as jointly as others."""
    job = Job(folder=f"faulty://{tmp_path}/checkpoints", trainer={"strategy": strategy})
    plan = FaultPlan.write(tmp_path / "plan", Rule(operations=("put_file",), error="reset", last=2))

    process = warm_python.start(
        run_launched, job, log=tmp_path / "log", environment=plan.environment
    )
    code = process.wait(lightning_job.HANG_S)

    assert code == 0, process.text()
    assert names(job) == job.expected
    assert len(plan.calls("put_file")) == 4
    assert {call["struck"] for call in plan.calls("put_file")} == {True, False}


def run_launched(job: Job) -> None:
    """Train from one process that starts the ranks itself."""
    warnings.filterwarnings("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    trainer = make_trainer(job)
    trainer.fit(make_model(), make_data())
    assert patched(trainer) == []


def test_an_error_of_a_joint_operation_is_pickled_whole() -> None:
    """A launcher that sends a rank's error to the parent process does not lose what it says."""
    error = JointError("text", op="save", seq=3, outcome="permanent", first_rank=1)

    copied = pickle.loads(pickle.dumps(error))

    assert (str(copied), copied.op, copied.seq) == ("text", "save", 3)
    assert (copied.outcome, copied.first_rank) == ("permanent", 1)


@pytest.fixture(autouse=True)
def _no_more_threads() -> Iterator[None]:
    """Nothing of ours runs after a test."""
    yield
    assert lightning_job.our_threads() == []
