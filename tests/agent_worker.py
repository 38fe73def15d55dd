# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A worker of an elastic job that imports next to nothing: it notes that it was started, and acts.

Run as a program by an agent of torch's. What it does is in the plan of the job, a JSON object: the
first of ``N.RANK``, ``N``, ``*.RANK`` and ``*`` that is there, N being the number of its start.

===============  ===================================================================================
``ok``           it ends well
``wait``         it ends well once the job's folder has a file ``finish``
``fail``         it ends with status 1, without a word
``raise:TEXT``   it leaves an error file as torch's ``@record`` does, and ends with status 1
``kill``         it kills itself
``stop``         it sends itself the signal by which a scheduler asks it to stop
===============  ===================================================================================
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from collections.abc import Callable


_MOST_S = 150.0


def main(folder: Path) -> int:
    """Note the start, and act."""
    rank, incarnation = os.environ["RANK"], os.environ.get("LIGHTNING_RESILIENCE_INCARNATION", "")
    note = {
        "node": int(os.environ["TEST_NODE"]),
        "rank": int(rank),
        "world": int(os.environ["WORLD_SIZE"]),
        "incarnation": incarnation,
        "store": os.environ.get("LIGHTNING_RESILIENCE_STORE", ""),
        "count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "at_s": time.monotonic(),
        "pid": os.getpid(),
    }
    with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\n")
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    number = incarnation.partition("-")[0]
    names = (f"{number}.{rank}", number, f"*.{rank}", "*")
    action, _, text = next(plan[name] for name in names if name in plan).partition(":")
    if action == "wait":
        _wait((folder / "finish").exists)
    else:
        # So that a test finds each start on every node.
        _wait(partial(_are_all_there, folder, note))
    if action in {"kill", "stop"}:
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGTERM)
    if action == "raise":
        _leave_error(text)
    return int(action in {"fail", "raise"})


def _wait(done: Callable[[], bool]) -> None:
    ends_at_s = time.monotonic() + _MOST_S
    while not done() and time.monotonic() < ends_at_s:
        time.sleep(0.05)


def _are_all_there(folder: Path, note: dict[str, Any]) -> bool:
    text = (folder / "starts.jsonl").read_text(encoding="utf-8")
    return text.count(json.dumps(note["incarnation"])) >= int(note["world"])


def _leave_error(text: str) -> None:
    content = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    path.write_text(json.dumps({"message": content}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
