# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The commit mark of a checkpoint: a small file beside it, written last, that says what it is.

``<directory>/.resilience/<name>.json`` is a JSON object, strictly typed, with a version first::

    {
        "v": 1,
        "path": "step=4.ckpt",
        "size_bytes": 1234,
        "digest": "xxh3-128:…",
        "step": 4,
        "epoch": 0,
        "run": "…",
        "training": "…",
        "versions": {"torch": "…"},
    }

``path`` is the checkpoint's name in its directory, so that a directory may be moved as a whole. A
checkpoint of several files lists them in ``files``, each with a size and a digest of its own: they
may have been written by several ranks, of which none has read all, and they can be verified one by
one. ``digest`` is then that of the list. Unknown fields are ignored, an unknown version is not.

A checkpoint with a manifest that it matches is what was saved. One with a manifest that it does not
match is damaged, or was written since by a program that knows of no manifests. One without may be
anything: older, foreign, or published by a call that nobody waited for any more. So a manifest is
removed before its checkpoint is written again or removed, and never outlives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

import msgspec
import xxhash

from lightning_resilience.errors import ConfigError, CorruptCheckpointError


__all__ = [
    "DIRECTORY",
    "MANIFEST_SUFFIX",
    "Contents",
    "FileRecord",
    "Manifest",
    "Origin",
    "decode_manifest",
    "difference",
    "digest_of",
    "encode_manifest",
    "manifest_of",
    "manifest_path",
]

DIRECTORY: Final = ".resilience"
"""Name of the directory, in that of the checkpoints, that holds what we write besides them."""

MANIFEST_SUFFIX: Final = ".json"
"""What is added to a checkpoint's name for that of its manifest."""

_VERSION: Final = 1

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\Axxh3-128:[0-9a-f]{32}\Z")]
_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[^/]+\Z")]
# Below the checkpoint, and never outside it.
_Below: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A(?!/)(?!(.*/)?\.\.(/|\Z)).+\Z")]

Contents: TypeAlias = Mapping[str, tuple[int, str]]
"""Size in bytes and digest of each file by its name below the checkpoint; a file itself has the
empty name."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One of several files of a checkpoint.

    Args:
        name: Its path below the checkpoint.
        size_bytes: Its length.
        digest: ``xxh3-128:`` and 32 hexadecimal digits.
    """

    name: _Below
    size_bytes: _Count
    digest: _Digest


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is, once it is complete and verified.

    Args:
        v: Version of the format.
        path: Name of the checkpoint in its directory.
        size_bytes: Length of all its files.
        digest: Of its bytes; of a directory, of the list of its files.
        files: Its files by name, where it is a directory; empty where it is one file.
        step: Optimizer steps that it has been trained for, where it says so.
        epoch: Its epoch, where it says so.
        run: Name of the run that saved it.
        training: The training that can go on from it (``core.candidates``); empty where none can,
            because it holds weights only, or where it says no step.
        versions: Versions of what wrote it, by name.
    """

    v: int = _VERSION
    path: _Name
    size_bytes: _Count
    digest: _Digest
    files: tuple[FileRecord, ...] = ()
    step: _Count | None = None
    epoch: _Count | None = None
    run: str = ""
    training: str = ""
    versions: dict[str, str] = {}

    @property
    def contents(self) -> Contents:
        """Size and digest of each file."""
        if not self.files:
            return {"": (self.size_bytes, self.digest)}
        return {file.name: (file.size_bytes, file.digest) for file in self.files}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a checkpoint comes from.

    Args:
        step: Optimizer steps that it has been trained for, None if unknown.
        epoch: Its epoch, None if unknown.
        run: Name of the run.
        training: The training that can go on from it; empty for none.
        versions: Versions of what writes it, by name.
    """

    step: int | None = None
    epoch: int | None = None
    run: str = ""
    training: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def manifest_path(path: str) -> str:
    """Return where the manifest of the checkpoint at ``path`` is; a path as its filesystem has it.

    A path without a directory has its manifest in ``.resilience`` of the same place.
    """
    directory, separator, name = path.rstrip("/").rpartition("/")
    return f"{directory}{separator}{DIRECTORY}/{name}{MANIFEST_SUFFIX}"


def manifest_of(path: str, contents: Contents, origin: Origin) -> Manifest:
    """Describe a checkpoint.

    Args:
        path: Where it is.
        contents: What was written.
        origin: Where it comes from.
    """
    name = path.rstrip("/").rpartition("/")[2]
    files = tuple(
        FileRecord(name=below, size_bytes=size_bytes, digest=digest)
        for below, (size_bytes, digest) in sorted(contents.items())
        if below
    )
    return Manifest(
        path=name,
        size_bytes=sum(size_bytes for size_bytes, _ in contents.values()),
        digest=digest_of(contents),
        files=files,
        step=origin.step,
        epoch=origin.epoch,
        run=origin.run,
        training=origin.training,
        versions=dict(origin.versions),
    )


def digest_of(contents: Contents) -> str:
    """Return the digest of a checkpoint: that of its only file, or that of the list of its files.

    The list has a line for each file, by name: its digest, its size in bytes, and its name.
    """
    if "" in contents:
        return contents[""][1]
    lines = [f"{digest} {size} {name}\n" for name, (size, digest) in sorted(contents.items())]
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(''.join(lines).encode())}"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest: compact JSON, fields in the struct's order."""
    return msgspec.json.encode(manifest)


class _Versioned(msgspec.Struct):
    v: int


def decode_manifest(raw: bytes, *, path: str) -> Manifest:
    """Decode a manifest strictly.

    Args:
        raw: Its bytes.
        path: Where it was read, for the error.

    Raises:
        ConfigError: A later version of this package has written it. So the checkpoint is not
            damaged, and neither moved nor passed over for an older one.
        CorruptCheckpointError: It is no manifest of this version, or contradicts itself.
    """
    try:
        version = msgspec.json.decode(raw, type=_Versioned).v
        if version > _VERSION:
            message = (
                f"The manifest {path} has version {version}, this package reads version {_VERSION}:"
                " a later version of it has saved that checkpoint. Install that one, or remove the "
                "manifest to load the checkpoint unverified."
            )
            raise ConfigError(message)
        if version != _VERSION:
            raise _refused(path, f"has version {version}, this package reads version {_VERSION}")
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(path, f"does not decode ({error}; {len(raw)} bytes)") from error
    contents = manifest.contents
    agrees = (
        len(contents) == max(1, len(manifest.files))
        and sum(size for size, _ in contents.values()) == manifest.size_bytes
        and digest_of(contents) == manifest.digest
    )
    if not agrees:
        raise _refused(path, "contradicts itself: its sum or digest is not that of its files")
    return manifest


def _refused(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"The manifest {path} {what}. So it cannot be told whether the checkpoint is what was "
        "saved; load another one, or remove the manifest to load this one unverified."
    )


def difference(manifest: Manifest, found: Mapping[str, tuple[int, str | None]]) -> str:
    """Say in what a checkpoint differs from its manifest.

    Args:
        manifest: Its manifest.
        found: Size and digest of each file that was found; a digest of None is not compared.

    Returns:
        One line, empty where nothing differs.
    """
    expected = manifest.contents
    missing = sorted(expected.keys() - found.keys())
    if missing:
        return f"{_named(missing[0])} is missing"
    for name, (size_bytes, digest) in sorted(found.items()):
        if name not in expected:
            return f"{_named(name)} was not there when it was saved"
        expected_bytes, expected_digest = expected[name]
        if size_bytes != expected_bytes:
            return f"{_named(name)} has {size_bytes} bytes, {expected_bytes} were saved"
        if digest not in {None, expected_digest}:
            return f"{_named(name)} has the digest {digest}, saved was {expected_digest}"
    return ""


def _named(name: str) -> str:
    return name or "it"
