# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Storage is named without asking it, and probed without leaving anything behind."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_resilience.adapters.storage import Storage, dependency_of
from lightning_resilience.core.evidence import redacted
from tests.tokens import RecordingToken


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memory://a/b", "memory://a"),
        ("s3://bucket/key", "s3://bucket"),
        ("s3://user:secret@bucket/key", "s3://bucket"),
        ("gs://bucket/a/b", "gs://bucket"),
        ("sftp://user:secret@host:22/a", "sftp://host:22"),
    ],
)
def test_a_dependency_is_named_without_credentials(url: str, expected: str) -> None:
    """One breaker for each bucket or host, and no secret in its name."""
    assert dependency_of(url) == expected
    assert "secret" not in redacted(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/a/b.ckpt", "/a/b.ckpt"),
        ("/a/step=4@best.ckpt", "/a/step=4@best.ckpt"),
        ("s3://bucket/a@b.ckpt", "s3://bucket/a@b.ckpt"),
        ("sftp://user:secret@host:22/a", "sftp://host:22/a"),
        ("sftp://user:half@secret@host/a", "sftp://host/a"),
        ("https://host/a.ckpt?X-Amz-Signature=secret", "https://host/a.ckpt?X-Amz-Signature=***"),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str) -> None:
    """Neither a name before the host nor a signature behind the path; the rest stays."""
    assert redacted(url) == shown


class Profile(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
    """A filesystem whose only name has the letters of ``file`` in it."""

    protocol = "profile"


def test_a_name_that_only_sounds_local_is_not(tmp_path: Path) -> None:
    """What is no filesystem of this node has its files staged in the spool directory."""
    fsspec.register_implementation("profile", Profile, clobber=True)
    store = Storage({}, spool=lambda: str(tmp_path)).place("profile://a/b.ckpt").store

    assert not store.is_local
    assert Path(store.staging_path("/a/b.ckpt", "n1")).parent == tmp_path


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_local_dependency_is_its_mount_point(tmp_path: Path, prefix: str) -> None:
    """Paths on one filesystem share a breaker, also those that do not exist yet."""
    name = dependency_of(f"{prefix}{tmp_path / 'not' / 'yet'}")

    mount = Path(name.removeprefix("file://"))

    assert mount.is_mount()
    assert tmp_path.resolve().is_relative_to(mount)


@pytest.mark.parametrize("url", ["//proc/a.ckpt", "file:////proc/a.ckpt", "///proc/a.ckpt"])
def test_slashes_too_many_name_the_same_dependency(url: str) -> None:
    """Two slashes in front are one to Linux, though not to ``pathlib``."""
    assert dependency_of(url) == "file:///proc"


@pytest.mark.parametrize("mounts", [b"", b"none /elsewhere tmpfs\n", b"none /\xff tmpfs\n"])
def test_a_list_of_mounts_without_the_root_names_the_root(
    mounts: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a changed root the kernel lists no mount at ``/``, and names may be any bytes."""

    def read(_path: Path, encoding: str, errors: str = "strict") -> str:
        return mounts.decode(encoding, errors)

    monkeypatch.setattr(Path, "read_text", read)

    assert dependency_of("/data/a.ckpt") == "file:///"


def test_a_local_dependency_is_named_without_asking_the_filesystem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mount that answers nothing but errors still has its name, so that a breaker can open."""

    def stale(*_args: object, **_kwargs: object) -> NoReturn:
        raise OSError(116, "Stale file handle")

    for question in ("stat", "lstat", "resolve", "is_mount"):
        monkeypatch.setattr(Path, question, stale)

    assert dependency_of("/proc/some/where.ckpt") == "file:///proc"


def test_a_mount_point_with_white_space_is_read_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel's list escapes blanks; the name does not."""
    table = "disk / ext4 rw 0 0\nnas /mnt/my\\040disk nfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda _path, **_kwargs: table)

    assert dependency_of("/mnt/my disk/a.ckpt") == "file:///mnt/my disk"


def test_a_probe_of_a_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    """What a probe has written it removes, with the directories that it made for it."""
    storage = Storage({}, spool=lambda: str(tmp_path))

    storage.probe_write(str(tmp_path / "checkpoints"), "abc", RecordingToken())

    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_probe_leaves_what_others_keep_beside_it(tmp_path: Path) -> None:
    """Another file of ours in the same place stays."""
    storage = Storage({}, spool=lambda: str(tmp_path))
    neighbour = tmp_path / ".resilience" / "manifest.json"
    neighbour.parent.mkdir()
    neighbour.touch()

    storage.probe_write(str(tmp_path), "abc", RecordingToken())

    assert [path.name for path in neighbour.parent.iterdir()] == ["manifest.json"]
