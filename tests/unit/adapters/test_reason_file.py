# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a job has ended, in a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lightning_resilience.adapters.reason_file import forget_reason, write_reason
from lightning_resilience.core.quota import Ending


if TYPE_CHECKING:
    from pathlib import Path

    import pytest


ENDING = Ending(code=86, reason="ValueError at https://me:secret@host/x", incarnation="4-n")


def test_a_program_can_read_it_and_so_can_a_person(tmp_path: Path) -> None:
    """With what to do next, and without a secret."""
    path = tmp_path / "reason.json"

    write_reason(str(path), ENDING, run_id="job1")

    found = json.loads(path.read_text())
    assert (found["code"], found["name"], found["may_start_again"]) == (86, "dead-lettered", False)
    assert (found["run_id"], found["incarnation"]) == ("job1", "4-n")
    assert "release it" in found["next"]
    assert "secret" not in path.read_text()


def test_it_is_as_short_as_kubernetes_shows_it(tmp_path: Path) -> None:
    """The text is cut, and what is left is whole."""
    path = tmp_path / "reason.json"

    write_reason(str(path), Ending(code=160, reason=10_000 * "ü"), run_id="job1")

    assert len(path.read_bytes()) <= 4096
    assert json.loads(path.read_text())["reason"].endswith("…")


def test_a_file_that_cannot_be_written_is_no_other_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and the agent leaves with its status."""
    write_reason(str(tmp_path / "no" / "such"), ENDING, run_id="job1")

    assert "could not be written" in caplog.text


def test_without_a_path_only_kubernetes_own_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, none is made."""
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.touch()
    for path in (there, absent):
        monkeypatch.setattr("lightning_resilience.adapters.reason_file.KUBERNETES_LOG", str(path))
        write_reason(None, ENDING, run_id="job1")

    assert json.loads(there.read_text())["code"] == 86
    assert not absent.exists()


def test_what_an_earlier_start_has_written_does_not_stand_beside_a_good_end(tmp_path: Path) -> None:
    """It is emptied by the next start, and a file of somebody else's is not."""
    ours, others, absent = tmp_path / "ours", tmp_path / "others", tmp_path / "absent"
    write_reason(str(ours), ENDING, run_id="job1")
    for content in ('{"code": 1}', "a text", "[]"):
        others.write_text(content)

        for path in (ours, others, absent, tmp_path):
            forget_reason(str(path))

        assert (ours.read_bytes(), others.read_text(), absent.exists()) == (b"", content, False)
