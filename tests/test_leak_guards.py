# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The guards of ``conftest.py`` see what a test leaves behind, and clean up after it."""

from __future__ import annotations

from pathlib import Path

import pytest


pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py")
LEAKS = {
    "environment": (
        "import os; os.environ['LEFT_BEHIND'] = '1'",
        "*environment variables left changed: LEFT_BEHIND*",
    ),
    "signal": (
        "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "*signal handlers left changed: *SIGUSR1*",
    ),
    "thread": (
        "import threading as t, time; t.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "*threads still run * s after the test: *Thread*",
    ),
}


def run(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    """Run one test with the guards, and after it one that leaves nothing behind."""
    pytester.makeconftest(
        CONFTEST.read_text(encoding="utf-8").replace("GRACE_S = 10.0", "GRACE_S = 0")
    )
    pytester.makepyfile(f"def test_first():\n    {body}\n\n\ndef test_second():\n    pass\n")
    return pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider")


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_fails_the_test_that_leaks(pytester: pytest.Pytester, leak: str) -> None:
    """The leaking test ends in an error that names what was left; the next one is unharmed."""
    body, message = LEAKS[leak]

    result = run(pytester, body)

    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([message])


def test_what_is_put_back_is_no_leak(pytester: pytest.Pytester) -> None:
    """A thread that ends and a variable that is removed again are nobody's business."""
    body = (
        "import os, threading\n"
        "    os.environ['PUT_BACK'] = '1'\n"
        "    thread = threading.Thread(target=print)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    del os.environ['PUT_BACK']"
    )

    result = run(pytester, body)

    result.assert_outcomes(passed=2)


def test_a_process_group_is_seen_and_destroyed(pytester: pytest.Pytester) -> None:
    """A default process group that outlives its test is named, and gone before the next test."""
    body = (
        "import torch.distributed as distributed\n"
        "    distributed.init_process_group(\n"
        "        'gloo', store=distributed.HashStore(), rank=0, world_size=1\n"
        "    )"
    )

    result = run(pytester, body)

    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*the default process group was left initialised*"])
