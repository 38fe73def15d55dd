# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A small training job of one or two ranks, and everything that a test wants to know of it.

``run_rank`` is what each rank's process runs. ``start`` starts the ranks as torchrun would: with
its environment variables and with a store server that outlives them. What a rank found out is in
its report, a JSON file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
import uuid
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch
import torch
import torch.distributed as dist

from lightning_resilience import ResilienceCallback
from tests import faulty_filesystem
from tests.faulty_filesystem import FaultPlan


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.warm_python import Process, WarmPython


# Here, because a spawned process imports this module and runs none of its functions first.
faulty_filesystem.register()

HANG_S = 60.0
"""No job of these tests takes nearly as long; longer than this is a hang."""

RETRY = {
    "base_delay_s": 0.05,
    "max_delay_s": 0.2,
    "throttle_base_delay_s": 0.1,
    "stall_timeout_s": 10.0,
    "deadline_s": 60.0,
}
BREAKER = {
    "view_max_age_s": 0.3,
    "probe_timeout_s": 0.4,
    "probe_lease_s": 2.4,
    "open_for_s": 2.5,
    "max_open_for_s": 2.5,
}
SPOOL = {"same_path_interval_s": 0.1}
"""The defaults, scaled down as far as their relations allow."""

WAIT = {"on_outage": "wait"}
"""For a test whose claim is about a save that waits for storage, which by default none does."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and how to save.

    Args:
        folder: Where checkpoints go: path or URL.
        steps: Steps to train.
        every: Steps between checkpoints.
        options: Options of the callback; None trains without it.
        checkpoint: More options of ``ModelCheckpoint``.
        trainer: More options of the ``Trainer``.
        group_timeout_s: The process group's timeout, in seconds.
        ranks: Number of ranks.
        before: Called in each rank with the Trainer before it fits, for what a job cannot say.
        home: Name of the Lightning distribution.
        resume: The checkpoint to start from, if any.
        strategy: Makes the strategy; None for DDP, or for a single device.
        model: Makes the model; None for the small one of these tests.
        workers: Data-loader workers of each rank.
    """

    folder: str
    steps: int = 4
    every: int = 2
    options: Mapping[str, Any] | None = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    group_timeout_s: float = 6.0
    ranks: int = 2
    before: Callable[[Any], None] | None = None
    home: str = "lightning.pytorch"
    resume: str | None = None
    strategy: Callable[[Job], Any] | None = None
    model: Callable[[], Any] | None = None
    workers: int = 0

    @property
    def expected(self) -> list[str]:
        """Names of the checkpoints of a job that ended well, where all are kept."""
        return [f"step={step}.ckpt" for step in range(self.every, self.steps + 1, self.every)]


def make_callback(options: Mapping[str, Any]) -> ResilienceCallback:
    """Make the callback with times for tests."""
    scaled = {
        "retry": {**RETRY, **options.get("retry", {})},
        "breaker": {**BREAKER, **options.get("breaker", {})},
        "spool": {**SPOOL, **options.get("spool", {})},
    }
    return ResilienceCallback(**{**options, **scaled})


class Steps:
    """What a model does, for a ``LightningModule`` of either distribution to mix in."""

    layer: torch.nn.Module
    log: Callable[..., None]

    def configure_model(self) -> None:
        """Make the layer once."""
        if not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, _index: int) -> Any:
        """Train with noise, so that the stream of chance matters."""
        loss = self.layer(batch[0] + torch.rand_like(batch[0])).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Train by plain descent."""
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class Model(Steps, lightning.pytorch.LightningModule):
    """The model, at a place where a spawned process finds it."""


class EvaluatedModel(Model):
    """A model that can be validated, tested and asked as well."""

    def validation_step(self, batch: Any, _index: int) -> Any:
        """Validate, and test."""
        return self.layer(batch[0]).square().mean()

    test_step = validation_step

    def predict_step(self, batch: Any, _index: int) -> Any:
        """Predict."""
        return self.layer(batch[0])


def make_model(home: str = "lightning.pytorch") -> Any:
    """Make a model of a distribution."""
    if home == "lightning.pytorch":
        return Model()
    return type("Model", (Steps, import_module(home).LightningModule), {})()


def make_data(batches: int = 64, workers: int = 0) -> Any:
    """Make the training data; with workers, they are forked and live for the whole fit."""
    values = torch.linspace(-1, 1, 4 * 4 * batches).reshape(-1, 4)
    options: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(values),
        batch_size=4,
        num_workers=workers,
        **(options if workers else {}),
    )


def make_trainer(job: Job) -> Any:
    """Make the Trainer of a job, with both callbacks."""
    home = import_module(job.home)
    checkpoint = {
        "dirpath": job.folder,
        "filename": "{step}",
        "every_n_train_steps": job.every,
        "save_top_k": -1,
        **job.checkpoint,
    }
    callbacks: list[Any] = [import_module(f"{job.home}.callbacks").ModelCheckpoint(**checkpoint)]
    if job.options is not None:
        callbacks.append(make_callback(job.options))
    strategy: Any = "auto"
    if job.strategy is not None:
        strategy = job.strategy(job)
    elif job.ranks > 1:
        kind = import_module(f"{job.home}.strategies").DDPStrategy
        timeout = timedelta(seconds=job.group_timeout_s)
        strategy = kind(timeout=timeout, process_group_backend="gloo")
    options = {
        "accelerator": "cpu",
        "devices": job.ranks,
        "strategy": strategy,
        "max_steps": job.steps,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": callbacks,
        **job.trainer,
    }
    return home.Trainer(**options)


def find(trainer: Any, name: str) -> Any:
    """Return the Trainer's callback whose class has this name."""
    named = (callback for callback in trainer.callbacks if type(callback).__name__ == name)
    return next(named, None)


def show_bar(trainer: Any) -> None:
    """Let a Trainer have a progress bar that is written into the log."""
    home = type(trainer).__module__.partition(".trainer.")[0]
    trainer.callbacks.append(import_module(f"{home}.callbacks").TQDMProgressBar())


# What may be left behind --------------------------------------------------------------------------

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PATCHED = [
    "save_checkpoint",
    "load_checkpoint",
    "remove_checkpoint",
    "teardown",
    "on_exception",
    "setup",
    "file_exists",
    "_link_checkpoint",
    "_save_topk_checkpoint",
    "_save_last_checkpoint",
    "broadcast",
    "_sigterm_notifier_fn",
    "_run_stage",
    "barrier",
    "_slurm_sigusr_handler_fn",
    "_sigterm_handler_fn",
    "register_signal_handlers",
    "_broadcast_sigterm_tensor",
    "advance",
    "run",
    "_ModelCheckpoint__warn_if_dir_not_empty",
]


def patched(trainer: Any) -> list[str]:
    """Return which methods are replaced on the Trainer's parts now."""
    loop = trainer.fit_loop.epoch_loop
    parts = (trainer.strategy, trainer._signal_connector, loop, loop.val_loop)
    owners = (trainer, *parts, *trainer.callbacks)
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name in _PATCHED
        if name in vars(owner)
    ]


def our_threads(prefix: str = "lightning-resilience", *, within_s: float = 5.0) -> list[str]:
    """Return the names of our threads that still run after a while."""
    until_s = time.monotonic() + within_s
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
    for thread in ours:
        thread.join(max(0.0, until_s - time.monotonic()))
    return [thread.name for thread in ours if thread.is_alive()]


def handlers() -> list[Any]:
    """Return the signal handlers that a Trainer might leave behind."""
    return [signal.getsignal(number) for number in _HANDLED]


def restore(before: list[Any]) -> None:
    """Put the signal handlers back."""
    for number, handler in zip(_HANDLED, before, strict=True):
        signal.signal(number, handler)


# One rank -----------------------------------------------------------------------------------------


def run_rank(job: Job, report: str) -> None:
    """Train, and write down how it went; raise what ``fit`` raised."""
    warnings.filterwarnings("ignore")
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("lightning_resilience").setLevel(logging.DEBUG)
    torch.manual_seed(7)
    trainer = make_trainer(job)
    before = handlers()
    found: dict[str, Any] = {"rank": int(os.environ.get("RANK", "0"))}
    if job.before is not None:
        job.before(trainer)
    try:
        model = make_model(job.home) if job.model is None else job.model()
        trainer.fit(model, make_data(workers=job.workers), ckpt_path=job.resume)
    except BaseException as error:
        found |= _told(error)
        raise
    finally:
        found |= {"ended_at_s": time.monotonic(), "step": trainer.global_step}
        found |= {"resumed": trainer.ckpt_path}
        found |= _books(find(trainer, "ModelCheckpoint"))
        found |= _left_behind(trainer, before)
        Path(report).write_text(json.dumps(found), encoding="utf-8")
        if dist.is_initialized() and "error" not in found:
            dist.destroy_process_group()


def _told(error: BaseException) -> dict[str, Any]:
    causes, link = [], error.__cause__
    while link is not None:
        causes.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    return {
        "error": type(error).__name__,
        "text": str(error),
        "causes": causes,
        "notes": getattr(error, "__notes__", []),
        "first_rank": getattr(error, "first_rank", None),
        "outcome": getattr(error, "outcome", None),
    }


def _books(callback: Any) -> dict[str, Any]:
    if callback is None:
        return {}
    return {
        "best": callback.best_model_path,
        "last": callback.last_model_path,
        "kth": callback.kth_best_model_path,
        "best_k": sorted(callback.best_k_models),
    }


def _left_behind(trainer: Any, before: list[Any]) -> dict[str, Any]:
    callback = find(trainer, "ResilienceCallback")
    reports = {} if callback is None else callback.breaker_report()
    return {
        "patched": patched(trainer),
        # Lightning itself ignores Ctrl-C from the first one on; that is not ours to undo.
        "handlers": [
            str(number)
            for number, old, new in zip(_HANDLED, before, handlers(), strict=True)
            if old != new and not (number == signal.SIGINT and new == signal.SIG_IGN)
        ],
        "threads": our_threads(within_s=2.0),
        "breakers": {
            name: {"state": report.state, "history": report.history, "seen": report.seen}
            for name, report in reports.items()
        },
    }


# All ranks ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Running:
    """A job that has been started.

    Args:
        job: What it does.
        home: Folder with logs and reports.
        ranks: One process per rank.
        plan: The faults of its filesystem.
    """

    job: Job
    home: Path
    ranks: list[Process]
    plan: FaultPlan

    def wait(self, within_s: float = HANG_S) -> list[dict[str, Any]]:
        """Return the ranks' reports, with their exit codes, once all have ended."""
        codes = [process.wait(within_s) for process in self.ranks]
        return [{**self.report(rank), "code": code} for rank, code in enumerate(codes)]

    def report(self, rank: int) -> dict[str, Any]:
        """Return the report of a rank that has ended; little is in it if the rank was killed."""
        path = self.home / f"report-{rank}.json"
        text = path.read_text(encoding="utf-8") if path.exists() else "{}"
        return {"rank": rank, **json.loads(text)}

    def until(self, done: Callable[[], bool], *, what: str, within_s: float = HANG_S) -> None:
        """Return once ``done``; it is asked again and again."""
        self.ranks[0].listen(done, within_s=within_s)
        assert done(), f"not within {within_s:g} s: {what}\n{self.told()}"

    def told(self) -> str:
        """Return all logs, for the message of a failed assertion."""
        logs = (f"--- {process.log.name}\n{process.text()}" for process in self.ranks)
        return "\n".join(logs)

    def names(self) -> list[str]:
        """Return the names of the checkpoints that are there, in the order of their steps."""
        path = Path(self.job.folder.removeprefix("faulty://"))
        found = [item.name for item in path.glob("*.ckpt")]
        return sorted(found, key=lambda name: (len(name), name))

    def steps(self) -> list[int]:
        """Load every checkpoint; return the steps in them, in their order."""
        folder = Path(self.job.folder.removeprefix("faulty://"))
        return [
            torch.load(folder / name, weights_only=True)["global_step"] for name in self.names()
        ]


@contextlib.contextmanager
def store_server() -> Iterator[int]:
    """Run a store server that outlives the ranks, as torchrun's agent does; yield its port."""
    server = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False
    )
    yield server.port
    del server


def forget_group(port: int) -> None:
    """Remove the process group's own keys from a store server, and leave ours.

    gloo's ranks look for each other under keys that a restart does not change, so those of an
    earlier attempt may be taken for the new ones, and then nobody connects.
    """
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10))
    for key in store.list_keys():
        if key.startswith("default_pg"):
            store.delete_key(key)


def start(
    warm: WarmPython,
    job: Job,
    home: Path,
    *,
    port: int = 0,
    plan: FaultPlan | None = None,
    run_id: str = "",
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    function: Callable[..., None] = run_rank,
) -> Running:
    """Start all ranks of a job.

    Args:
        warm: Makes the processes.
        job: What they do.
        home: Folder for logs and reports.
        port: Port of the store server; a job of one rank needs none.
        plan: The faults of its filesystem.
        run_id: The launcher's name for the run.
        restarts: How many attempts the launcher has made before.
        environment: More variables.
        function: What each process runs, with the job and the name of its report.
    """
    home.mkdir(parents=True, exist_ok=True)
    plan = plan or FaultPlan.write(home / "no-faults")
    common = {
        **plan.environment,
        "TMPDIR": str(home),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **(environment or {}),
    }
    run_id = run_id or uuid.uuid4().hex
    ranks = []
    for rank in range(job.ranks):
        own = launched(rank, job.ranks, port=port, run_id=run_id, restarts=restarts)
        report = str(home / f"report-{rank}.json")
        process = warm.start(
            function, job, report, log=home / f"rank-{rank}.log", environment=common | own
        )
        ranks.append(process)
    return Running(job=job, home=home, ranks=ranks, plan=plan)


def launched(rank: int, ranks: int, *, port: int, run_id: str, restarts: int) -> dict[str, str]:
    """Return what torchrun puts into a rank's environment; nothing for a job of one rank."""
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def main() -> None:
    """Be one rank that torchrun started: arguments are a pickled job and the folder of reports."""
    job = pickle.loads(Path(sys.argv[1]).read_bytes())
    run_rank(job, str(Path(sys.argv[2]) / f"report-{os.environ['RANK']}.json"))


if __name__ == "__main__":
    main()
