# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``lightning-resilience restarts``: a person looks at a job's record, and releases the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from torch.distributed import TCPStore
from typer.testing import CliRunner

from lightning_resilience.adapters.agent_store import AgentStore
from lightning_resilience.cli.main import app
from lightning_resilience.core import quota
from lightning_resilience.core.quota import Charge, Ending, RestartRecord
from lightning_resilience.core.records import decode, encode
from tests.ports import free_port


if TYPE_CHECKING:
    from pathlib import Path


def kept(folder: Path, *, code: int | None = 86) -> Path:
    """Write the record of a job; return where it is."""
    record = quota.created(writer="w")
    charged = RestartRecord(
        epoch=4,
        charges=(Charge(incarnation="3-n", cause="failed", step=7, age_s=60.0),),
        restarts=4,
        writer="v",
    )
    if code is not None:
        charged = quota.ended(charged, Ending(code=code, reason="ValueError: bad."), writer="u")
    assert record.epoch < charged.epoch
    path = folder / "job1.restarts.json"
    path.write_bytes(encode(charged))
    return path


def ran(*arguments: str) -> tuple[int, str]:
    """Run the command; return its exit status and what it has printed."""
    result = CliRunner().invoke(app, ["restarts", *arguments])
    return result.exit_code, result.output


def test_a_job_that_was_left_for_a_person_is_shown(tmp_path: Path) -> None:
    """With the reason, and what to do next."""
    kept(tmp_path)

    code, shown = ran("show", "--run-id", "job1", "--restarts", str(tmp_path))

    assert code == 1
    assert "4 restarts charged, 1 of them within the window" in shown
    assert "3-n  failed  step 7" in shown
    assert "86 (dead-lettered). ValueError: bad." in shown
    assert "release it" in shown


def test_a_job_that_goes_on_is_shown(tmp_path: Path) -> None:
    """As a program reads it, too."""
    kept(tmp_path, code=None)

    code, shown = ran("show", "--run-id", "job1", "--restarts", str(tmp_path), "--json")

    assert code == 0
    assert json.loads(shown)["restarts"] == 4


def test_a_person_releases_it(tmp_path: Path) -> None:
    """What was kept says so, with all quotas refilled; the count of all restarts stays."""
    path = kept(tmp_path)

    code, shown = ran("release", "--run-id", "job1", "--restarts", str(tmp_path))

    record = decode(RestartRecord, path.read_bytes(), key="kept")
    assert code == 0
    assert "the job may start" in shown
    assert (record.ending, record.charges, record.restarts) == (None, (), 4)


@pytest.mark.parametrize(
    ("place", "said"),
    [("nosuch://bucket/kept", "Protocol not known"), ("file:///proc/nowhere/kept", "no record")],
)
@pytest.mark.parametrize("command", ["show", "release"])
def test_a_place_that_cannot_be_used_is_no_job_that_may_start(
    command: str, place: str, said: str
) -> None:
    """A person would take it for released, and the launcher for what it was."""
    code, shown = ran(command, "--run-id", "job1", "--restarts", place)

    assert code == 2
    assert said in shown
    assert "the job may start" not in shown


def test_a_record_that_does_not_decode_is_not_shown_as_none(tmp_path: Path) -> None:
    """It says what is wrong with it and where it is, for a person to look at; it stays."""
    path = tmp_path / "job1.restarts.json"
    path.write_bytes(b"{")

    for command in ("show", "release"):
        code, shown = ran(command, "--run-id", "job1", "--restarts", str(tmp_path))

        assert code == 2
        assert f"{path}' does not decode" in shown
    assert path.read_bytes() == b"{"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--store tcp://HOST:PORT or etcd://HOST:PORT/DIRECTORY, --restarts URL"),
        (("--store", "host:1"), "--store='host:1' is not allowed"),
    ],
)
def test_it_says_where_it_cannot_look(arguments: tuple[str, ...], said: str) -> None:
    """And ends with the status for what cannot be told."""
    code, shown = ran("show", "--run-id", "job1", *arguments)

    assert code == 2
    assert said in shown


@pytest.mark.parametrize("command", ["show", "release"])
def test_a_run_that_nobody_knows_is_no_job_that_may_start(tmp_path: Path, command: str) -> None:
    """Whoever has mistyped its name is told so, and which names there are; nothing is written."""
    kept(tmp_path)
    before = sorted(tmp_path.iterdir())

    code, shown = ran(command, "--run-id", "job2", "--restarts", str(tmp_path))

    assert code == 2
    assert f"there is no record of run job2 at {tmp_path}" in shown
    assert "there are records of: job1" in shown
    assert "may start" not in shown
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["show", "release"])
def test_a_mistyped_directory_is_not_made(tmp_path: Path, command: str) -> None:
    """As ``release`` did, with a record in it that no job ever looked at."""
    kept(tmp_path)
    wrong = tmp_path / "wrong" / "place"

    code, shown = ran(command, "--run-id", "job1", "--restarts", str(wrong))

    assert code == 2
    assert f"there is no record of run job1 at {wrong}" in shown
    assert "there are none of any other run" in shown
    assert not wrong.parent.exists()


@pytest.mark.parametrize("command", ["show", "release"])
def test_a_place_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, command: str) -> None:
    """Nobody can tell then what is there, and nothing is changed."""
    path = kept(tmp_path)
    path.write_bytes(b"no record")

    code, shown = ran(command, "--run-id", "job1", "--restarts", str(tmp_path))

    assert code == 2
    assert "may start" not in shown
    assert path.read_bytes() == b"no record"


def test_a_release_that_cannot_be_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launcher would start nothing, though it was said that the job may start."""
    kept(tmp_path)

    def fail(*_: object, **__: object) -> None:
        message = "read-only"
        raise OSError(message)

    monkeypatch.setattr("lightning_resilience.adapters.rendezvous_gate.put", fail)

    code, shown = ran("release", "--run-id", "job1", "--restarts", str(tmp_path))

    assert (code, "read-only" in shown, "may start" in shown) == (2, True, False)


@pytest.mark.parametrize("command", ["show", "release"])
def test_a_store_of_another_run_is_left_as_it_is(tmp_path: Path, command: str) -> None:
    """Its host has said whose it is."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    url = f"tcp://127.0.0.1:{server.port}"
    store = AgentStore.open(url, run_id="job1")
    store.owner(is_host=True)
    store.close()
    before = server.num_keys()

    places = ("--store", url, "--restarts", str(tmp_path))
    code, shown = ran(command, "--run-id", "job2", *places)

    assert code == 2
    assert f"there is no record of run job2 at {url}, nor at {tmp_path}" in shown
    assert f"{url} is of run job1" in shown
    assert server.num_keys() == before


def test_a_store_that_is_away_is_one_line() -> None:
    """Torch's own words for it, with two stack traces, said less."""
    url = f"tcp://127.0.0.1:{free_port()}"
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    command = ["restarts", "show", "--run-id", "job1", "--store", url]

    done = subprocess.run(
        [sys.executable, "-m", "lightning_resilience", *command],
        env={**environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"on {url} failed" in done.stderr
    assert ".." not in done.stderr
