# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A signal to any rank in the middle of a validation stops all of them after the same batch."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from tests import lightning_job
from tests.integration.store_server import Server
from tests.lightning_job import EvaluatedModel, Job, make_data, store_server
from tests.sharded_job import ShardedModel, model_parallel
from tests.signalled_job import AT, Signalled, left_together, signalled_job


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]

LEFT = "left after batch "
VALIDATED = "has validated batches: "
AFTER = 20
"""The batch of the validation in which the signal comes."""


@dataclass
class SignalledLater(Signalled):
    """Sends the signal in a later batch of a validation, and tells after which this rank leaves."""

    is_sanity: bool = False
    begun: int = 0

    def on_validation_start(self, *_: Any) -> None:
        """Count the batches anew."""
        self.begun = 0

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        """Send it, if it is time."""
        self.begun += 1
        is_now = self.begun == AFTER and trainer.sanity_checking == self.is_sanity
        self._send(trainer, self.where, is_now=is_now)

    def on_train_batch_start(self, *_: Any) -> None:
        """Send nothing then."""

    def on_validation_end(self, *_: Any) -> None:
        """Tell how many batches there were."""
        os.write(1, f"{VALIDATED}{self.begun}\n".encode())

    def on_exception(self, *_: Any) -> None:
        """Tell how many batches were begun."""
        os.write(1, f"{LEFT}{self.begun}\n".encode())


class LongValidated(EvaluatedModel):
    """A model whose validation takes as long as a test lets it."""

    batches = 10**5

    def val_dataloader(self) -> Any:
        """Make many small batches."""
        return make_data(batches=self.batches)

    def training_step(self, batch: Any, _index: int) -> Any:
        """Train without noise, whose stream no checkpoint has."""
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, index: int) -> Any:
        """Validate for a few milliseconds, the longer the higher the rank."""
        time.sleep(0.002 * (1 + self.trainer.global_rank))
        return super().validation_step(batch, index)


class Short(LongValidated):
    """A model with a short validation."""

    batches = 60


class Reducing(LongValidated):
    """A model whose ranks meet in a collective in every hundredth batch."""

    def validation_step(self, batch: Any, index: int) -> Any:
        """Validate, and meet."""
        loss = super().validation_step(batch, index)
        if index % 100 == 99 and dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        return loss


class Uneven(LongValidated):
    """A model whose ranks validate on different numbers of batches."""

    def val_dataloader(self) -> Any:
        """Make more of them for a higher rank, and let nobody share them out."""
        sampler = torch.utils.data.RandomSampler(
            range(4), replacement=True, num_samples=10**5 * (1 + self.trainer.global_rank)
        )
        data = make_data(batches=4).dataset
        return torch.utils.data.DataLoader(data, sampler=sampler)


TRAINER = {"num_sanity_val_steps": 0, "val_check_interval": AT}


@pytest.fixture
def run(
    warm_python: WarmPython, tmp_path: Path
) -> Callable[..., tuple[Running, list[dict[str, Any]]]]:
    """Run a job in which a signal comes, to its end."""

    def run_job(signalled: Signalled, **job: Any) -> tuple[Running, list[dict[str, Any]]]:
        made = signalled_job(
            f"{tmp_path}/files",
            signalled,
            **{"model": LongValidated, "trainer": TRAINER, **job},
        )
        with store_server() as port:
            running = lightning_job.start(warm_python, made, tmp_path / "job", port=port)
            return running, running.wait()

    return run_job


def left_after(running: Running) -> list[int]:
    """Return after how many batches each rank has left."""
    found = [re.search(rf"^{LEFT}(\d+)$", rank.text(), re.MULTILINE) for rank in running.ranks]
    return [int(one[1]) if one else -1 for one in found]


def validated(running: Running) -> list[list[int]]:
    """Return how many batches each validation of each rank had."""
    texts = [rank.text() for rank in running.ranks]
    pattern = rf"^{VALIDATED}(\d+)$"
    return [[int(one) for one in re.findall(pattern, text, re.MULTILINE)] for text in texts]


@pytest.mark.parametrize(
    ("number", "ranks", "told", "model"),
    [
        (signal.SIGTERM, 2, (0,), LongValidated),
        (signal.SIGTERM, 2, (1,), Reducing),
        (signal.SIGUSR1, 2, (0, 1), LongValidated),
        (signal.SIGTERM, 4, (2,), LongValidated),
        (signal.SIGTERM, 4, (0, 1, 2, 3), Reducing),
        (signal.SIGTERM, 1, (0,), LongValidated),
    ],
)
def test_all_ranks_leave_the_validation_after_the_same_batch(
    number: signal.Signals, ranks: int, told: tuple[int, ...], model: Any, run: Callable[..., Any]
) -> None:
    """They save and leave long before its end, whoever was told, and however far apart they are."""
    running, reports = run(SignalledLater(number, ranks=told), ranks=ranks, model=model)

    left_together(running, reports)
    assert {report["step"] for report in reports} == {AT}, running.told()
    (batch,) = set(left_after(running))
    assert AFTER <= batch < LongValidated.batches / ranks, running.told()
    assert (running.names(), running.steps()) == (["last.ckpt"], [AT]), running.told()


class LongSharded(ShardedModel):
    """A sharded model, whose ranks meet in every batch of a validation."""

    def val_dataloader(self) -> Any:
        """Make many small batches."""
        return make_data(batches=LongValidated.batches)

    def validation_step(self, batch: Any, _index: int) -> Any:
        """Validate."""
        return self.layer(batch[0]).square().mean()


def test_ranks_that_all_write_the_checkpoint_stop_alike(run: Callable[..., Any]) -> None:
    """Each batch is a collective, and so is the checkpoint."""
    running, reports = run(
        SignalledLater(signal.SIGTERM, ranks=(1,)),
        model=LongSharded,
        strategy=partial(model_parallel, sharded=True),
    )

    left_together(running, reports)
    assert {report["step"] for report in reports} == {AT}, running.told()
    assert len(set(left_after(running))) == 1, running.told()
    assert (Path(running.job.folder) / "last.ckpt" / "meta.pt").exists(), running.told()


@dataclass(frozen=True)
class Fit:
    """One fit of three in a row.

    Args:
        name: What it is.
        folder: Where its checkpoint is.
        model: What it trains.
        told: Ranks that are told to stop.
        resume: What it starts from.
    """

    name: str
    folder: str
    model: Any
    told: tuple[int, ...] = ()
    resume: str | None = None


FITS = (
    Fit("undisturbed", "a", Short),
    Fit("stopped", "b", LongValidated, told=(1,)),
    Fit("resumed", "b", Short, resume="last"),
)


def test_whoever_goes_on_validates_anew_and_trains_as_if_nothing_had_been(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The whole validation, once; the weights in the end are those of an undisturbed training."""
    done = {}
    for fit in FITS:
        job = signalled_job(
            f"{tmp_path}/{fit.folder}",
            SignalledLater(signal.SIGTERM, ranks=fit.told),
            steps=2 * AT,
            every=2 * AT,
            model=fit.model,
            trainer={"num_sanity_val_steps": 0, "limit_train_batches": AT},
            resume=fit.resume,
        )
        with store_server() as port:
            running = lightning_job.start(warm_python, job, tmp_path / fit.name, port=port)
            done[fit.name] = running.wait(), running

    left_together(done["stopped"][1], done["stopped"][0])
    undisturbed, resumed = (done[name][1] for name in ("undisturbed", "resumed"))
    assert [report["code"] for report in done["resumed"][0]] == [0, 0], resumed.told()
    assert validated(undisturbed) == [[30, 30], [30, 30]], undisturbed.told()
    assert validated(resumed) == [[30, 30], [30, 30]], resumed.told()
    first, second = (
        torch.load(f"{one.job.folder}/step={2 * AT}.ckpt", weights_only=True)["state_dict"]
        for one in (undisturbed, resumed)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_sanity_check_is_left_without_a_checkpoint(run: Callable[..., Any]) -> None:
    """Nothing has been trained that could be saved."""
    running, reports = run(
        SignalledLater(signal.SIGTERM, ranks=(1,), is_sanity=True),
        trainer={"num_sanity_val_steps": -1, "val_check_interval": AT},
    )

    left_together(running, reports)
    assert {report["step"] for report in reports} == {0}
    assert len(set(left_after(running))) == 1, running.told()
    assert running.names() == []
    assert "no checkpoint is saved" in running.ranks[0].text()


def test_a_validation_that_ends_before_ranks_agree_is_followed_by_a_stop(
    run: Callable[..., Any],
) -> None:
    """At the next step, or the one that rank 0 has begun already, as without a validation."""
    running, reports = run(SignalledLater(signal.SIGTERM, ranks=(1,)), model=Short)

    left_together(running, reports)
    step = reports[0]["step"]
    assert AT <= step <= AT + 1, running.told()
    assert running.steps() == [step]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_validations_are_not_equally_long_the_rank_leaves_in_time(
    rank: int, run: Callable[..., Any]
) -> None:
    """There is no batch that all ranks have; the others name it at once."""
    running, reports = run(
        SignalledLater(signal.SIGTERM, ranks=(rank,)),
        model=Uneven,
        options={"termination_grace_s": 8.0},
        trainer={**TRAINER, "use_distributed_sampler": False},
    )

    told = running.told()
    assert reports[rank]["error"] == "SIGTERMException", told
    assert "this one leaves alone" in running.ranks[rank].text(), told
    assert reports[1 - rank]["error"] == "PeerFailedError", told
    assert f"Rank {rank} was told to stop first" in reports[1 - rank]["text"], told
    assert abs(reports[0]["ended_at_s"] - reports[1]["ended_at_s"]) < 5.0, told


VALIDATING = "this rank validates"


class Telling(Callback):
    """Tells when a validation is under way."""

    def on_validation_batch_start(self, *_: Any) -> None:
        """Tell it, once for all."""
        if not vars(self).setdefault("told", False):
            self.told = True
            os.write(1, f"{VALIDATING}\n".encode())


def tell_when_validating(trainer: Any) -> None:
    """Let a Trainer say that it validates."""
    trainer.callbacks.append(Telling())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_ask_leaves_alone_in_a_validation_as_well(
    rank: int, warm_python: WarmPython, tmp_path: Path
) -> None:
    """Where the shared store is frozen, nobody can agree; half of the time is then enough."""
    server = Server()
    job = Job(
        folder=f"{tmp_path}/files",
        steps=10**6,
        every=10**6,
        group_timeout_s=20.0,
        model=LongValidated,
        trainer=TRAINER,
        options={"termination_grace_s": 6.0},
        before=tell_when_validating,
    )
    running = lightning_job.start(warm_python, job, tmp_path / "job", port=server.port)
    running.until(lambda: VALIDATING in running.ranks[rank].text(), what="it validates")

    server.freeze()
    running.ranks[rank].signal(signal.SIGTERM)
    running.ranks[rank].wait(lightning_job.HANG_S)
    report = running.report(rank)

    server.thaw()
    # It is in no collective, and nobody could tell it anything.
    running.ranks[1 - rank].signal(signal.SIGTERM)
    running.wait()
    server.kill()
    assert report["error"] == "SIGTERMException", running.told()
    assert "this one leaves alone" in running.ranks[rank].text()
    assert (report["patched"], report["handlers"]) == ([], [])
