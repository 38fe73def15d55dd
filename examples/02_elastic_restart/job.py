# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What the two nodes run: one job, and the diary in which its processes note what happens."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NODE = "DEMO_NODE"
"""The variable that says to a worker which node it is on."""
STRIKE = "/-/strike"
"""A request of the storage for this path makes it ill: part of the story, not of S3."""
STEPS = 12
SAVE_EVERY = 4
MISHAP_STEP = 6
PACE_S = 0.1
# Times of the circuit breaker, scaled down; agents and workers have the same.
BREAKER: Mapping[str, float] = {
    "open_for_s": 4,
    "max_open_for_s": 4,
    "view_max_age_s": 1,
    "probe_timeout_s": 1,
    "probe_lease_s": 3.5,
}
TOLD = {
    r"joining again, ([\d.]+ s) after it was agreed": r"joins again, \1 after all have agreed",
    r"the job has ended with status (\d+)": r"ends the job with status \1",
    r"alone stays away from (\S+): (\d+) failures in a row": r"stays away from \1: \2 failures",
    r"probe of (\S+) .* (failed|succeeded): ": r"probes \1: it \2",
    r"circuit of (\S+): (\w+) -> ((?!\2)\w+) ": r"circuit of \1: \2 -> \3",
    r"all ranks start from \S+/(\S+)\Z": r"all ranks start from \1",
}
"""Lines of our log that belong into the diary, and how they read there."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the job.

    Args:
        name: Its name, and that of its bucket.
        home: Folder for its diary and logs.
        storage: Where the storage is.
        is_looping: Whether the worker of node 1 fails at ``MISHAP_STEP`` in every start. Otherwise
            only in the first one, and the storage falls ill at that moment.
        is_guarded: Whether it has the callback, and its agents the rendezvous backend.
        max_restarts: Torch's own limit, which each agent counts for itself.
    """

    name: str
    home: Path
    storage: str
    is_looping: bool
    is_guarded: bool
    max_restarts: int

    @property
    def folder(self) -> str:
        """Where checkpoints go."""
        return f"s3://{self.name}/checkpoints"


class Diary(logging.Handler):
    """Appends lines to a file that all processes of a job share.

    Args:
        job: The job.
        who: Whose lines these are.
    """

    def __init__(self, job: Job, who: str) -> None:
        super().__init__()
        self._path = job.home / "diary.jsonl"
        self._who = who

    def note(self, what: str) -> None:
        """Write one line, with the time of a clock that all processes of this host have."""
        line = json.dumps({"at_s": time.monotonic(), "who": self._who, "what": what})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def count(self, what: str) -> int:
        """Return how often this was noted here before, of the same one."""
        lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        return sum((line["who"], line["what"]) == (self._who, what) for line in lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Write what the package has logged, where it belongs here."""
        for pattern, words in TOLD.items():
            found = re.search(pattern, record.getMessage())
            if found:
                self.note(found.expand(words))

    def listen(self) -> Diary:
        """Take the package's log from now on, in the place of whoever had it."""
        logger = logging.getLogger("lightning_resilience")
        logger.setLevel(logging.INFO)
        logger.handlers = [self]
        return self


def leave_with_parent() -> None:
    """End this process once the one that has started it is gone: nothing outlives the example."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
