# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store on local directories."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.staging import is_staging_name
from lightning_resilience.errors import CheckpointError
from tests.contracts.object_store import ObjectStoreContract


if TYPE_CHECKING:
    from tests.tokens import RecordingToken


class TestLocalObjectStore(ObjectStoreContract):
    """Staged beside the target, published by rename."""

    @pytest.fixture
    def store(self) -> FsspecObjectStore:
        """A store on the local filesystem."""
        return FsspecObjectStore(fsspec.filesystem("file", skip_instance_cache=True))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        """A folder that publishing has to make."""
        return str(tmp_path / "runs" / "1")

    def read(self, path: str) -> bytes | None:
        """Read the file itself."""
        return Path(path).read_bytes() if Path(path).exists() else None

    def test_permissions_are_those_of_any_new_file(
        self, store: FsspecObjectStore, path: str, token: RecordingToken
    ) -> None:
        """Colleagues who could read plain Lightning's checkpoints can read ours."""
        umask = os.umask(0o027)
        try:
            store.publish(self.stage(store, path).path, path, token)
        finally:
            os.umask(umask)

        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o640

    def test_a_rename_that_was_dropped_over_one_of_the_same_length_is_noticed(
        self,
        store: FsspecObjectStore,
        path: str,
        token: RecordingToken,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The filesystem says that it is done, and has the older file."""
        store.publish(self.stage(store, path, b"older").path, path, token)
        assert store.size(path) == 5
        os.utime(path, (1e9, 1e9))
        monkeypatch.setattr(Path, "replace", lambda self, _: self)
        store.publish(self.stage(store, path, b"newer").path, path, token)

        with pytest.raises(CheckpointError, match="is not what was written"):
            store.size(path)

        assert store.size(path) == 5

    def test_a_link_is_replaced_itself(
        self, store: FsspecObjectStore, folder: str, token: RecordingToken
    ) -> None:
        """Writing to a linked ``last.ckpt`` leaves the checkpoint alone that it points to."""
        linked, last = Path(folder) / "epoch=1.ckpt", Path(folder) / "last.ckpt"
        linked.parent.mkdir(parents=True)
        linked.write_bytes(b"linked")
        last.symlink_to(linked)

        store.publish(self.stage(store, str(last), b"last").path, str(last), token)

        assert linked.read_bytes() == b"linked"
        assert last.read_bytes() == b"last"
        assert not last.is_symlink()

    def test_removing_a_link_keeps_what_it_points_to(
        self, store: FsspecObjectStore, folder: str
    ) -> None:
        """A link to a folder is removed as a link."""
        shards, last = Path(folder) / "shards", Path(folder) / "last.ckpt"
        shards.mkdir(parents=True)
        (shards / "0.pt").write_bytes(b"x")
        last.symlink_to(shards)

        store.remove(str(last))

        assert not last.is_symlink()
        assert (shards / "0.pt").read_bytes() == b"x"

    def test_a_folder_with_the_name_is_not_an_absent_object(
        self, store: FsspecObjectStore, path: str
    ) -> None:
        """What cannot be a checkpoint file is not reported as missing either."""
        Path(path).mkdir(parents=True)

        with pytest.raises(IsADirectoryError):
            store.size(path)

    def test_publishing_leaves_no_staged_file(
        self, store: FsspecObjectStore, path: str, token: RecordingToken
    ) -> None:
        """The rename takes the staged file away."""
        store.publish(self.stage(store, path).path, path, token)

        assert not any(is_staging_name(found.name) for found in Path(path).parent.iterdir())

    def test_killed_in_the_middle_of_a_write_the_old_checkpoint_is_complete(
        self, store: FsspecObjectStore, path: str, token: RecordingToken
    ) -> None:
        """SIGKILL while the new file is half written leaves the old one under the name (C03)."""
        store.publish(self.stage(store, path, b"old and complete").path, path, token)
        child = subprocess.Popen(
            [sys.executable, "-c", HALF_WRITER, store.staging_path(path, "killed")],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"half written\n"

        child.send_signal(signal.SIGKILL)

        assert child.wait(timeout=30) == -signal.SIGKILL
        child.stdout.close()
        assert self.read(path) == b"old and complete"
        left = {found.name for found in Path(path).parent.iterdir()} - {Path(path).name}
        assert len(left) == 1
        assert is_staging_name(left.pop())


HALF_WRITER = """
import sys, threading
from lightning_resilience.adapters.staging import stage

class Token:
    cancelled = False
    def progress(self, **moved): pass
    def raise_if_cancelled(self): pass

def write(file):
    file.write(b"new, but only half of ")
    print("half written", flush=True)
    threading.Event().wait()

stage(write, sys.argv[1], Token())
"""
