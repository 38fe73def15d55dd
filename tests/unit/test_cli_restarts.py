# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``lightning-resilience restarts``: a person looks at a job's record, and releases the job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from lightning_resilience.cli.main import app
from lightning_resilience.core import quota
from lightning_resilience.core.quota import Charge, Ending, RestartRecord
from lightning_resilience.core.records import decode, encode


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
    ("command", "place"),
    [
        ("show", "nosuch://bucket/kept"),
        ("release", "nosuch://bucket/kept"),
        # To read there is to find nothing, as before the first restart.
        ("release", "file:///proc/nowhere/kept"),
    ],
)
def test_a_place_that_cannot_be_used_is_no_job_that_may_start(command: str, place: str) -> None:
    """A person would take it for released, and the launcher for what it was."""
    code, shown = ran(command, "--run-id", "job1", "--restarts", place)

    assert code == 2
    assert f"What is kept in {place} could not be" in shown
    assert "the job may start" not in shown


def test_a_record_that_does_not_decode_is_not_shown_as_none(tmp_path: Path) -> None:
    """It says what is wrong with it; a release writes it anew."""
    (tmp_path / "job1.restarts.json").write_bytes(b"{")

    code, shown = ran("show", "--run-id", "job1", "--restarts", str(tmp_path))

    assert code == 2
    assert "CorruptRecordError" in shown
    assert ran("release", "--run-id", "job1", "--restarts", str(tmp_path))[0] == 0
    assert ran("show", "--run-id", "job1", "--restarts", str(tmp_path))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--store tcp://HOST:PORT, --restarts URL"),
        (("--store", "host:1"), "--store='host:1' is not allowed"),
    ],
)
def test_it_says_where_it_cannot_look(arguments: tuple[str, ...], said: str) -> None:
    """And ends with the status for what cannot be told."""
    code, shown = ran("show", "--run-id", "job1", *arguments)

    assert code == 2
    assert said in shown
