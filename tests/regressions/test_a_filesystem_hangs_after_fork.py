# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C62: a filesystem that the parent has used hangs, or refuses to work, in a forked child.

Data loaders and spawned strategies fork; the client, its event loop and its connections stay with
the parent. Each parent here is a fresh process, because a fork of the test's own would copy its
threads' locks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest


if TYPE_CHECKING:
    from tests.s3_server import S3Server


pytest.importorskip("s3fs")

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 30.0
PARENT = """
import json, logging, os, sys, threading
import fsspec
from fsspec.core import url_to_fs
from tests.chained import fast, register
register()
url, options = json.loads(sys.argv[1])
fs, path = url_to_fs(url, **options)
print("parent", fs.ls(path, detail=False) != [])
if "busy" in sys.argv:
    # Another thread waits in the guard at the moment of the fork, for a server that is not there.
    waits = threading.Event()
    class Listener(logging.Handler):
        def emit(self, record):
            if "follows in" in record.getMessage():
                waits.set()
    logging.getLogger("lightning_resilience").addHandler(Listener())
    logging.getLogger("lightning_resilience").setLevel("INFO")
    away = {**options, "s3": {**options["s3"], "endpoint_url": "http://127.0.0.1:9"}}
    away["resilient"] = {"retry": {"base_delay_s": 30.0}}
    other, _ = url_to_fs(url, **away)
    threading.Thread(target=lambda: other.cat_file(f"{path}/x"), daemon=True).start()
    assert waits.wait(20)
def in_child(generation):
    sys.stdout.flush()
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        print("child", generation, os.waitstatus_to_exitcode(status))
        return
    print("child", generation, "reads", fs.cat_file(f"{path}/x").decode())
    fs.pipe_file(f"{path}/from-{generation}", b"y")
    with fs.transaction, fs.open(f"{path}/moved-{generation}", "wb") as file:
        file.write(b"in a transaction")
    with fsspec.open(f"{url}/x", "rb", **options) as file:
        print("child", generation, "opens", file.read().decode())
    if generation < 2:
        in_child(generation + 1)
    sys.stdout.flush()
    os._exit(0)
in_child(1)
fs.invalidate_cache()
print("parent", fs.cat_file(f"{path}/from-1").decode())
"""


def run_parent(url: str, options: dict[str, Any], *words: str) -> list[str]:
    """Run the parent, and return what it and its children say; fail if they hang."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT, json.dumps([url, options]), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


EXPECTED = [
    "parent True",
    "child 1 reads data",
    "child 1 opens data",
    "child 2 reads data",
    "child 2 opens data",
    "child 2 0",
    "child 1 0",
    "parent y",
]


@pytest.mark.parametrize("words", [[], ["busy"]], ids=["idle", "busy"])
def test_a_child_uses_what_its_parent_has_used(
    s3_server: S3Server, bucket: str, words: list[str]
) -> None:
    """A child, and a child's child, list, read and write with the very same object."""
    server = s3_server.client()
    server.put_object(Bucket=bucket, Key="data/x", Body=b"data")

    lines = run_parent(f"resilient::s3://{bucket}/data", {"s3": s3_server.storage_options}, *words)

    assert lines == EXPECTED
    names = [found["Key"] for found in server.list_objects_v2(Bucket=bucket)["Contents"]]
    assert names == [
        "data/from-1",
        "data/from-2",
        "data/moved-1",
        "data/moved-2",
        "data/x",
    ]


def test_a_child_uses_local_files(tmp_path: Path) -> None:
    """What has no client is not disturbed."""
    (tmp_path / "x").write_bytes(b"data")

    assert run_parent(f"resilient::file://{tmp_path}", {}) == EXPECTED


def test_plain_s3fs_refuses(s3_server: S3Server, bucket: str) -> None:
    """The symptom, so that this file notices when it is gone upstream."""
    s3_server.client().put_object(Bucket=bucket, Key="data/x", Body=b"data")

    with pytest.raises(AssertionError, match="This class is not fork-safe"):
        run_parent(f"s3://{bucket}/data", s3_server.storage_options)
