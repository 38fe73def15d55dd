# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A job keeps one checkpoint through random faults, and is looked at after every storage operation.

Each schedule is made from its seed alone; a failure names it as the test's parameter. With two
ranks, six of them are in ``test_retention.py``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_resilience import JointError
from tests.faulty_filesystem import FaultyFileSystem, Rule
from tests.lightning_job import find
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


pytestmark = [pytest.mark.integration]

STEPS = 6
SEEDS = 100
OPERATIONS = ("put_file", "info", "rm_file", "manifest_put_file", "manifest_rm_file")
CHANGES = ("put_file", "rm_file", "rm")
FAST = {"base_delay_s": 0.002, "max_delay_s": 0.01, "throttle_base_delay_s": 0.004}


def random_rules(chance: random.Random) -> list[Rule]:
    """Return faults that pass: errors of some calls in a row, and files that are silently lost."""
    rules = []
    for _ in range(chance.randint(2, 5)):
        first = chance.randint(1, 10)
        name = chance.choice(["ckpt", "last.ckpt", f"step={chance.randint(1, STEPS)}.ckpt"])
        lost = chance.random() < 0.2
        rules.append(
            Rule(
                operations=("put_file",) if lost else (chance.choice(OPERATIONS),),
                name=name,
                error="" if lost else chance.choice(["reset", "busy", "throttled", "endpoint"]),
                swallow=lost,
                first=first,
                # Three in a row open the circuit, which takes seconds, so few do.
                last=first if lost else first + min(chance.randint(0, 12) // 6, 2),
            )
        )
    return rules


def random_job(seed: int, faulty: Callable[..., Job]) -> Job:
    """Make a job that keeps one checkpoint, maybe a last one, and may write in the background."""
    chance = random.Random(seed)
    rules = random_rules(chance)
    save_last = chance.choice([None, True])
    plugins: list[Any] = [AsyncCheckpointIO()] if chance.random() < 0.4 else []
    # What cannot be written in the background ends training when later saves have built on it.
    if not plugins and chance.random() < 0.4:
        step = chance.randint(2, STEPS)
        denied = Rule(operations=("put_file",), name=f"step={step}.ckpt", error="denied")
        rules.insert(0, denied)
    return faulty(
        *rules,
        steps=STEPS,
        every=1,
        checkpoint={"save_top_k": 1, "save_last": save_last},
        trainer={"plugins": plugins},
        options={
            "retry": FAST,
            "checkpoints": {"max_consecutive_save_failures": chance.choice([1, 9])},
            "on_outage": chance.choice(["spool", "wait"]),
        },
    )


def verified(folder: Path) -> list[str]:
    """Return the names of checkpoints that are what their manifests say."""
    found = []
    for path in folder.glob("*.ckpt"):
        manifest = folder / ".resilience" / f"{path.name}.json"
        if manifest.exists():
            digest = json.loads(manifest.read_bytes())["digest"]
            is_whole = digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(path.read_bytes())}"
            found += [path.name] if is_whole else []
    return found


class Watch:
    """Counts the verified checkpoints after every operation that changes something.

    Args:
        folder: Where they are.
        monkeypatch: Wraps the filesystem.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.counts: list[int] = []
        self.lost: list[str] = []
        for name in CHANGES:
            monkeypatch.setattr(FaultyFileSystem, name, self._watched(name))

    def _watched(self, name: str) -> Callable[..., Any]:
        method = getattr(FaultyFileSystem, name)

        def watched(fs: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(fs, path, *args, **kwargs)
            finally:
                self._look(f"{name} {path}")

        return watched

    def _look(self, after: str) -> None:
        self.counts.append(len(verified(self._folder)))
        if max(self.counts) and not self.counts[-1]:
            self.lost.append(after)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_there_is_always_one_and_in_the_end_those_of_the_books(
    seed: int,
    faulty: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once one was verified, one is at any time; in the end what is there is what is believed.

    Nobody waits at the end of a run for a removal that fails there: then the log names the file.
    A checkpoint that had waited on the node and is denied then is not there: the run fails for it,
    names the file on the node, and keeps the one that was to be removed for it.
    """
    job = random_job(seed, faulty)
    folder = Path(job.folder.removeprefix("faulty://"))
    watch = Watch(folder, monkeypatch)
    trainers: list[Any] = []
    monkeypatch.setattr("tests.lightning_job.make_trainer", remembered(trainers))

    outcome = "ok"
    try:
        with caplog.at_level("INFO", logger="lightning_resilience"):
            fit(job)
    except JointError as error:
        outcome = str(error.outcome)

    books = find(trainers[0], "ModelCheckpoint")
    believed = {Path(name).name for name in (books.best_model_path, books.last_model_path)} - {""}
    assert watch.lost == []
    assert watch.counts[-1]
    left = set(names(job)) - believed
    why = ("not removed at the end of the run", "is not removed: the run has ended before")
    said = [line for line in caplog.messages if any(each in line for each in why)]
    waits = [line for line in caplog.messages if "could not be published" in line]
    denied_late = {name for name in believed if any(f"/{name} lies at" in line for line in waits)}
    assert not denied_late or outcome == "permanent"
    assert set(verified(folder)) & set(names(job)) >= believed - denied_late
    assert [name for name in left if not any(name in line for line in said)] == []
    denied = [call for call in plan_in_use().calls("put_file") if call["struck"]]
    assert outcome == "ok" or (outcome == "permanent" and denied)


def remembered(trainers: list[Any]) -> Callable[[Job], Any]:
    """Return what makes a Trainer, and remembers it."""
    from tests.lightning_job import make_trainer  # noqa: PLC0415 - before it is replaced

    def make(job: Job) -> Any:
        trainers.append(make_trainer(job))
        return trainers[-1]

    return make
