# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""``lightning-resilience verify`` says what is known of each checkpoint, and ends accordingly."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from typer.testing import CliRunner

from lightning_resilience.adapters.manifests import write_manifest
from lightning_resilience.adapters.storage import Storage
from lightning_resilience.adapters.trees import measure
from lightning_resilience.cli.main import app
from lightning_resilience.core.manifest import Origin, manifest_of
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from typer.testing import Result

    from tests.s3_server import S3Server


def save(path: Path, *, step: int) -> None:
    """Write a checkpoint with its manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": torch.arange(500), "global_step": step}, path)
    contents = measure(str(path), RecordingToken()).contents
    place = Storage({}, spool=str).place(str(path))
    manifest = manifest_of(str(path), contents, Origin(step=step))
    write_manifest(place, manifest, nonce=f"n{step}", token=RecordingToken())


def cut(path: Path) -> None:
    """Take the last byte away."""
    path.write_bytes(path.read_bytes()[:-1])


def verify(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_a_good_newest_checkpoint_ends_with_0(tmp_path: Path) -> None:
    """One line for each, the newest first; what it means goes to stderr."""
    save(tmp_path / "a.ckpt", step=4)
    save(tmp_path / "b.ckpt", step=8)
    cut(tmp_path / "a.ckpt")

    result = verify(tmp_path)

    first, second = result.stdout.splitlines()
    size = (tmp_path / "b.ckpt").stat().st_size
    assert result.exit_code == 0
    assert first.split() == ["verified", "step", "8", str(size), "bytes", "b.ckpt"]
    assert second.startswith("corrupt")
    assert f"it has {size - 1} bytes, {size} were saved" in second
    assert "the newest, b.ckpt, is verified" in result.stderr


def test_an_unverified_newest_checkpoint_is_good(tmp_path: Path) -> None:
    """Plain Lightning writes no manifests."""
    torch.save({"weights": torch.arange(500)}, tmp_path / "step=4.ckpt")

    result = verify(tmp_path)

    assert result.exit_code == 0
    assert result.stdout.startswith("unverified")
    assert "every record of its archive has its checksum" in result.stdout


def test_a_corrupt_newest_checkpoint_ends_with_1(tmp_path: Path) -> None:
    """Though an older one is good."""
    save(tmp_path / "a.ckpt", step=4)
    save(tmp_path / "b.ckpt", step=8)
    cut(tmp_path / "b.ckpt")

    result = verify(tmp_path)

    assert result.exit_code == 1
    assert "the newest, b.ckpt, is corrupt" in result.stderr


def test_a_directory_without_a_checkpoint_ends_with_1(tmp_path: Path) -> None:
    """There is nothing to start from; a manifest alone is no checkpoint."""
    save(tmp_path / "a.ckpt", step=4)
    (tmp_path / "a.ckpt").unlink()
    (tmp_path / "empty").mkdir()

    orphaned, empty = verify(tmp_path), verify(tmp_path / "empty")

    assert (orphaned.exit_code, empty.exit_code) == (1, 1)
    assert orphaned.stdout.startswith("orphan")
    assert empty.stdout == ""
    assert "nothing to start from" in empty.stderr


def test_what_cannot_be_asked_ends_with_2(tmp_path: Path) -> None:
    """Nothing is known then, and stdout is empty."""
    (tmp_path / "file").touch()

    results = [verify(tmp_path / "gone"), verify(tmp_path / "file"), verify()]

    assert [result.exit_code for result in results] == [2, 2, 2]
    assert {result.stdout for result in results} == {""}
    assert "there is no such directory" in results[0].stderr
    assert "it is a file" in results[1].stderr


def test_a_bucket_that_does_not_exist_ends_with_2(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is a mistake, and no empty directory."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)

    result = verify("s3://no-such-bucket/run")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "s3://no-such-bucket/run cannot be verified" in result.stderr


def test_object_storage_is_asked_by_its_url(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the credentials of the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    buffer = io.BytesIO()
    torch.save({"weights": torch.arange(500)}, buffer)
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="run/step=1.ckpt", Body=buffer.getvalue())
    client.put_object(Bucket=bucket, Key="run/step=2.ckpt", Body=buffer.getvalue()[:-1])

    result = verify(f"s3://{bucket}/run/")

    assert result.exit_code == 1
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["corrupt", "unverified"]


def test_json_is_for_programs(tmp_path: Path) -> None:
    """The same rows, and the exit code as without."""
    save(tmp_path / "a.ckpt", step=4)
    save(tmp_path / "b.ckpt", step=8)
    cut(tmp_path / "b.ckpt")

    result = verify(tmp_path, "--json")

    rows = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [(row["name"], row["state"], row["step"]) for row in rows] == [
        ("b.ckpt", "corrupt", 8),
        ("a.ckpt", "verified", 4),
    ]
    assert set(rows[0]) == {"name", "state", "reason", "step", "size_bytes", "modified_s"}


def test_a_quick_look_verifies_nothing(tmp_path: Path) -> None:
    """It finds a wrong size only."""
    save(tmp_path / "a.ckpt", step=4)

    quick = verify(tmp_path, "--quick")
    cut(tmp_path / "a.ckpt")
    damaged = verify(tmp_path, "--quick")

    assert (quick.exit_code, damaged.exit_code) == (0, 1)
    assert quick.stdout.startswith("unverified")
    assert damaged.stdout.startswith("corrupt")


def test_it_needs_no_framework(tmp_path: Path) -> None:
    """It answers on a machine without torch, and makes no directory for staged files."""
    save(tmp_path / "run" / "a.ckpt", step=4)
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'lightning', 'pytorch_lightning')))\n"
        "from lightning_resilience.cli.main import app\n"
        f"app(['verify', {str(tmp_path / 'run')!r}], prog_name='lightning-resilience')"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": str(tmp_path / "spool")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.split()[:1]) == (0, ["verified"]), done.stderr
    assert not (tmp_path / "spool").exists()
