# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A process that is killed in the middle of a file leaves nothing under the file's name."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.core import url_to_fs


if TYPE_CHECKING:
    from tests.s3_server import S3Server


ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import json, sys
import fsspec
from tests.chained import register
register()
url, options = json.loads(sys.argv[1])
how = sys.argv[2]
fs, path = fsspec.core.url_to_fs(url, **options)
if how == "transaction":
    fs.start_transaction()
file = fs.open(path, "wb")
for _ in range(64):
    file.write(b"x" * 2**18)
if how == "transaction":
    file.close()
print("half", flush=True)
sys.stdin.read()
"""


def kill_halfway(url: str, options: dict[str, Any], how: str) -> int:
    """Let a process write 16 MiB to ``url`` and kill it before it closes the file."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, json.dumps([url, options]), how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        said = writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        code = writer.wait(30)
    assert said == "half\n"
    return code


@pytest.mark.integration
@pytest.mark.parametrize("how", ["open", "transaction"])
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_killed_writer_leaves_nothing(
    kind: str, how: str, s3_server: S3Server, tmp_path: Path, spool: Path
) -> None:
    """An older file stays as it is, and where there was none, there is none."""
    del spool
    options: dict[str, Any] = {"s3": s3_server.storage_options} if kind == "s3" else {}
    place = f"s3://{s3_server.new_bucket()}" if kind == "s3" else f"file://{tmp_path}"
    fs, folder = url_to_fs(place, **options.get("s3", {}), skip_instance_cache=True)
    fs.pipe_file(f"{folder}/older", b"older")

    codes = [kill_halfway(f"resilient::{place}/{name}", options, how) for name in ("new", "older")]

    fs.invalidate_cache()
    assert codes == [-signal.SIGKILL] * 2
    assert not fs.exists(f"{folder}/new")
    assert fs.cat_file(f"{folder}/older") == b"older"
    if kind == "s3":
        assert "Uploads" not in s3_server.client().list_multipart_uploads(Bucket=folder)
