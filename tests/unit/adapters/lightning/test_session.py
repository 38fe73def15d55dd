# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a session derives from a URL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_resilience import BreakerConfig, BudgetConfig, ResilienceCallback, RetryPolicy
from lightning_resilience.adapters.lightning.breakers import Breakers, Policy
from lightning_resilience.adapters.storage import parent_of
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.protocols.circuit_memory import Link
from lightning_resilience.protocols.joint import Member
from tests.faulty_filesystem import Rule
from tests.lightning_job import find, make_data, make_model, make_trainer
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning_job import Job


@pytest.mark.parametrize(
    ("url", "directory"),
    [
        ("/a/b/c.ckpt", "/a/b"),
        ("c.ckpt", "."),
        ("s3://bucket/a/c.ckpt", "s3://bucket/a"),
        ("s3://bucket/c.ckpt", "s3://bucket"),
        ("s3://bucket/a/", "s3://bucket/a"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket", "s3://bucket"),
        ("memory://a/c.ckpt", "memory://a"),
        ("file:///a/c.ckpt", "file:///a"),
    ],
)
def test_a_probe_works_where_the_checkpoint_is(url: str, directory: str) -> None:
    """It is the folder of the file, or the folder itself, never a name that does not exist."""
    assert parent_of(url) == directory


def test_every_host_reads_and_one_writes(tmp_path: Path) -> None:
    """Of a breaker's hosts a quorum must vote, so there are as many as use the storage."""
    keys = Keys(run_id="run", incarnation="1")
    member = Member(
        keys=keys,
        rank=3,
        world_size=4,
        timeout_s=10.0,
        beat_s=1.0,
        on_outage="wait",
        store_patience_s=10.0,
    )
    driver: Any = SimpleNamespace(run=lambda *_args: None, site=None)
    policy = Policy(retry=RetryPolicy(), breaker=BreakerConfig(), classify=classify)

    breakers = Breakers(member, policy=policy, driver=driver, link=Link(), hosts=4)

    hosts = [breakers.circuit(f"{tmp_path}/a.ckpt", kind).hosts for kind in ("read", "write")]
    assert hosts == [4, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zero_looks_at_the_site_for_all(rank: int) -> None:
    """Every rank may hold the probe and then asks it; without a site nobody does."""
    member = Member(
        keys=Keys(run_id="run", incarnation="1"),
        rank=rank,
        world_size=4,
        timeout_s=10.0,
        beat_s=1.0,
        on_outage="wait",
        store_patience_s=10.0,
    )
    policy = Policy(retry=RetryPolicy(), breaker=BreakerConfig(), classify=classify)

    def of(site: object) -> Any:
        driver: Any = SimpleNamespace(run=lambda *_args: None, site=site)
        return Breakers(member, policy=policy, driver=driver, link=Link()).circuit(
            "memory://x", "read"
        )

    assert of(None).upstream is None
    assert of(object()).upstream.looks is (rank == 0)
    assert of(object()).upstream.circuit.host == member.keys.run_id


def test_the_limits_are_those_that_were_given(spool: Path) -> None:
    """What the user gives the callback reaches the breaker, with the Trainer's number of hosts."""
    del spool
    callback: Any = ResilienceCallback(
        breaker={"max_concurrent": 8},
        budget={"retry_floor": 40},
        admission={"slot_lease_s": 45.0},
    )
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[callback])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "num_nodes", 3)
        callback.setup(trainer, None, "fit")
    try:
        circuit = callback._session.alone.breakers.circuit("memory://x", "read")
    finally:
        callback._close()

    assert circuit.hosts == 3
    assert circuit.admission.slot_lease_s == 45.0
    assert (circuit.config.max_concurrent, circuit.ledger.config.retry_floor) == (8, 40)


def test_a_rank_that_is_alone_has_its_share() -> None:
    """Of four ranks that the store does not answer, each has a quarter of the limits."""
    member = Member(
        keys=Keys(run_id="run", incarnation="1"),
        rank=3,
        world_size=4,
        timeout_s=10.0,
        beat_s=1.0,
        on_outage="wait",
        store_patience_s=10.0,
    )
    driver: Any = SimpleNamespace(run=lambda *_args: None, site=None)
    policy = Policy(retry=RetryPolicy(), breaker=BreakerConfig(), classify=classify)

    circuit = Breakers(member, policy=policy, driver=driver, link=Link()).circuit(
        "memory://x", "read"
    )

    detour = circuit.detour
    assert detour is not None
    assert detour.circuit.config.max_concurrent == BreakerConfig().max_concurrent // 4
    assert detour.circuit.ledger.config.retry_floor == BudgetConfig().retry_floor // 4


@pytest.mark.integration
def test_a_listing_is_probed_in_the_listed_folder(faulty: Callable[..., Job]) -> None:
    """Its parent may be no place at all: above a bucket there is nothing to ask."""
    job = faulty(Rule(operations=("isdir", "ls"), error="reset", last=3))

    fit(job)

    assert names(job) == job.expected
    probed = next(call["path"] for call in plan_in_use().calls("info"))
    assert probed == job.folder.removeprefix("faulty://")


class AsksForWhatIsNotThere(Callback):
    """A user's own question to the filesystem of the checkpoints, outside any joint operation."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def on_train_end(self, trainer: Any, *_args: Any) -> None:
        """Ask."""
        books = find(trainer, "ModelCheckpoint")
        try:
            books._fs.info(f"{books.dirpath}/missing")
        except OSError as error:
            self.error = error


@pytest.mark.integration
@pytest.mark.parametrize(
    ("error", "kind"), [("denied", PermissionError), ("", FileNotFoundError)], ids=["denied", "-"]
)
def test_what_storage_answers_is_raised_as_it_is(
    error: str, kind: type[Exception], faulty: Callable[..., Job]
) -> None:
    """Code around the filesystem catches these by their types; nothing is wrapped around them."""
    job = faulty(Rule(operations=("info",), name="/missing", error=error))
    asks = AsksForWhatIsNotThere()
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, asks)

    trainer.fit(make_model(), make_data())

    assert type(asks.error) is kind
    assert asks.error.__context__ is None
    assert len(plan_in_use().calls("info", name="/missing")) == 1


class SavesWithAToken(Callback):
    """A user's own save, with options of the storage for this call."""

    def on_train_end(self, trainer: Any, *_args: Any) -> None:
        """Save."""
        folder = find(trainer, "ModelCheckpoint").dirpath
        options = {"token": "mine", "skip_instance_cache": True}
        trainer.save_checkpoint(f"{folder}/mine.ckpt", storage_options=options)


@pytest.mark.integration
@pytest.mark.parametrize("error", ["expired", "reset"])
def test_a_save_with_options_of_its_own_has_them_at_every_attempt(
    error: str, faulty: Callable[..., Job]
) -> None:
    """A client that is made anew, and the client of a probe, have the options of that call."""
    failures = {"expired": 1, "reset": 4}[error]
    job = faulty(Rule(operations=("put_file",), name="mine", error=error, last=failures))
    trainer = make_trainer(job)
    trainer.callbacks.insert(0, SavesWithAToken())

    trainer.fit(make_model(), make_data())

    assert [name for name in names(job) if name.endswith("ckpt")] == ["mine.ckpt", *job.expected]
    connected = [call["path"] for call in plan_in_use().calls("connect")]
    mine = connected[connected.index("mine") :]
    # fsspec makes one to look at the URL, and then we make ours: two for each client.
    assert mine == ["mine"] * {"expired": 4, "reset": 2}[error]
