# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C56: what was recorded of a failed job was a secondary SIGTERM, not the first cause.

``flyteorg/flytekit#2064``, ``pytorch/pytorch#160908``: one rank raised, the launcher ended the
others, and theirs were the exits that people saw; a preemption looked like an error of the user's.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests import lightning_job
from tests.failing_ranks import GROUP_TIMEOUT_S, assert_clean, fail, incident_in, incidents_in
from tests.lightning_job import Job, store_server
from tests.signalled_job import MANY


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning_job import Running
    from tests.warm_python import WarmPython


pytestmark = [pytest.mark.integration, pytest.mark.multiprocess]


def start(
    warm: WarmPython,
    home: Path,
    port: int,
    *,
    failing: int,
    act: Callable[[int], None] | None = None,
) -> Running:
    """Start two ranks of which one comes to its end."""
    job = Job(
        folder=f"{home}/checkpoints",
        group_timeout_s=GROUP_TIMEOUT_S,
        steps=MANY,
        every=MANY,
        before=partial(fail, (failing,), 3, act=act),
    )
    return lightning_job.start(warm, job, home / "job", port=port)


def test_a_sigterm_that_follows_an_error_does_not_replace_it(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """A launcher that ends the other ranks at once changes neither the record nor their error."""
    with store_server() as port:
        running = start(warm_python, tmp_path, port, failing=1)
        running.until(lambda: "failing_at" in running.ranks[1].text(), what="rank 1 fails")
        running.ranks[1].wait(lightning_job.HANG_S)
        if running.ranks[0].code is None:
            running.ranks[0].signal(signal.SIGTERM)
        peer, own = running.wait()
        incident = incident_in(port)

    assert own["error"] == "ValueError", running.told()
    assert peer["error"] == "PeerFailedError", running.told()
    assert (incident["rank"], incident["kind"]) == (1, "error")
    assert incident["error"] == "ValueError: a bad batch on rank 1"
    assert_clean([peer, own])


def stop(_rank: int) -> None:
    """Be told to stop, as by a scheduler, in the middle of a step."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_preemption_is_no_error(warm_python: WarmPython, tmp_path: Path) -> None:
    """All ranks stop together for the one that was told to, and nothing is recorded as a cause."""
    with store_server() as port:
        running = start(warm_python, tmp_path, port, failing=1, act=stop)
        reports = running.wait()
        incidents = incidents_in(port)

    assert [each["error"] for each in reports] == ["SIGTERMException"] * 2, running.told()
    assert incidents == []
    assert_clean(reports)


def die(_rank: int) -> None:
    """End without a word, as a process that the kernel kills for memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(lightning_job.HANG_S)


def test_a_rank_that_was_killed_is_noticed_by_the_others(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """It cannot say why, so the record says who noticed, and where a person has to look."""
    with store_server() as port:
        running = start(warm_python, tmp_path, port, failing=1, act=die)
        peer, own = running.wait()
        incident = incident_in(port)

    assert own["code"] == -signal.SIGKILL
    assert peer["error"] == "RuntimeError", running.told()
    assert all("A rank that was killed says nothing" in note for note in peer["notes"])
    assert (incident["rank"], incident["kind"]) == (0, "echo")
