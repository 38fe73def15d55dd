# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Manifests: where they are, what they hold, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import xxhash

from lightning_resilience.core.manifest import (
    Origin,
    decode_manifest,
    difference,
    encode_manifest,
    manifest_of,
    manifest_path,
)
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.errors import ConfigError, CorruptCheckpointError


def digest(data: bytes) -> str:
    """The digest of these bytes."""
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


ORIGIN = Origin(step=4, epoch=1, run="run-7", versions={"torch": "2.13.0"})
FILE = manifest_of("s3-bucket/run/step=4.ckpt", {"": (7, digest(b"weights"))}, ORIGIN)
SHARDS = {"rank-1.pt": (3, digest(b"one")), "rank-0.pt": (4, digest(b"zero"))}
DIRECTORY = manifest_of("/runs/step=4.ckpt/", SHARDS, ORIGIN)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/runs/1/step=4.ckpt", "/runs/1/.resilience/step=4.ckpt.json"),
        ("bucket/step=4.ckpt", "bucket/.resilience/step=4.ckpt.json"),
        ("/runs/sharded/", "/runs/.resilience/sharded.json"),
        ("/a.ckpt", "/.resilience/a.ckpt.json"),
        ("a.ckpt", ".resilience/a.ckpt.json"),
    ],
)
def test_a_manifest_is_in_a_directory_beside_its_checkpoint(path: str, expected: str) -> None:
    """Its name holds that of the checkpoint, so that two never share one."""
    assert manifest_path(path) == expected


def test_a_manifest_says_what_where_from_and_when() -> None:
    """Its fields are in the order in which they are described, and read by any program."""
    assert json.loads(encode_manifest(FILE)) == {
        "v": 1,
        "path": "step=4.ckpt",
        "size_bytes": 7,
        "digest": digest(b"weights"),
        "files": [],
        "step": 4,
        "epoch": 1,
        "run": "run-7",
        "training": "",
        "versions": {"torch": "2.13.0"},
    }


@pytest.mark.parametrize("manifest", [FILE, DIRECTORY], ids=["file", "directory"])
def test_what_is_written_is_read(manifest: Any) -> None:
    """Encoding and decoding are each other's inverse."""
    assert decode_manifest(encode_manifest(manifest), path="p") == manifest


def test_a_directory_lists_its_files_by_name() -> None:
    """Whoever wrote which first does not matter, and each can be verified by itself."""
    reordered = manifest_of("/runs/step=4.ckpt", dict(reversed(SHARDS.items())), ORIGIN)

    assert reordered == DIRECTORY
    assert [file.name for file in DIRECTORY.files] == ["rank-0.pt", "rank-1.pt"]
    assert (DIRECTORY.size_bytes, dict(DIRECTORY.contents)) == (7, SHARDS)
    assert DIRECTORY.digest != manifest_of("a", {**SHARDS, "x": (0, digest(b""))}, ORIGIN).digest


def test_fields_of_a_newer_minor_version_are_ignored() -> None:
    """They may be added without a new version."""
    raw = encode_manifest(FILE)[:-1] + b',"new":{"a":[1]}}'

    assert decode_manifest(raw, path="p") == FILE


def test_what_a_later_version_has_written_is_not_damaged() -> None:
    """Else a run that goes back one version would move the newest away, and load an older one."""
    with pytest.raises(ConfigError, match=r"a\.json has version 2.* Install that one"):
        decode_manifest(changed(v=2, files="of another kind"), path="a.json")


def changed(manifest: Any = FILE, **fields: Any) -> bytes:
    """The bytes of a manifest with other fields."""
    return json.dumps({**msgspec.to_builtins(manifest), **fields}).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00" * 64,
        b"<html>not found</html>",
        encode_manifest(FILE)[:-9],
        b"[" * 100_000,
        changed(v=0),
        changed(v="1"),
        changed(path="a/b"),
        changed(path=""),
        changed(size_bytes=-1),
        changed(size_bytes="7"),
        changed(digest="md5:0"),
        changed(step=-1),
        changed(run=None),
        changed(versions={"torch": 2}),
        changed(DIRECTORY, size_bytes=8),
        changed(DIRECTORY, digest=digest(b"another")),
        changed(DIRECTORY, files=[*msgspec.to_builtins(DIRECTORY.files)] * 2),
        changed(files=[{"name": "../step=4.ckpt", "size_bytes": 7, "digest": digest(b"weights")}]),
        changed(files=[{"name": "/etc/passwd", "size_bytes": 7, "digest": digest(b"weights")}]),
    ],
)
def test_what_is_no_manifest_is_refused_for_good(raw: bytes) -> None:
    """The text names the file and says what to do; repeating cannot help."""
    with pytest.raises(CorruptCheckpointError, match=r"run/\.resilience/a\.json") as caught:
        decode_manifest(raw, path="run/.resilience/a.json")

    assert "remove the manifest" in str(caught.value)
    assert classify(caught.value).failure is FailureClass.PERMANENT


@pytest.mark.parametrize(
    ("manifest", "found", "expected"),
    [
        (FILE, {"": (7, digest(b"weights"))}, ""),
        (FILE, {"": (7, None)}, ""),
        (FILE, {"": (6, None)}, "it has 6 bytes, 7 were saved"),
        (FILE, {"": (7, digest(b"veights"))}, f"it has the digest {digest(b'veights')}"),
        (FILE, {"a": (7, None)}, "it is missing"),
        (DIRECTORY, SHARDS, ""),
        (DIRECTORY, {"rank-0.pt": (4, None)}, "rank-1.pt is missing"),
        (DIRECTORY, {**SHARDS, "x": (0, None)}, "x was not there when it was saved"),
        (DIRECTORY, {**SHARDS, "rank-0.pt": (5, None)}, "rank-0.pt has 5 bytes, 4 were saved"),
    ],
)
def test_a_difference_is_named(manifest: Any, found: Any, expected: str) -> None:
    """Sizes are compared always, digests where they are known."""
    what = difference(manifest, found)

    assert what.startswith(expected)
    assert bool(what) == bool(expected)
