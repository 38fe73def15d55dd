# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What torch's own ``FileSystemWriter`` writes, caught in staged files before anybody sees it.

The format is torch's, and stays so with every release: its writer lays out tensors and metadata.
It opens its files through a small filesystem of its own, which is replaced here by one that stages
them, digests them while they are written, and publishes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from lightning_resilience.adapters.staging import StagedWriter, discard
from lightning_resilience.core.portions import Entry


if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from lightning_resilience.adapters.staging import Staged
    from lightning_resilience.core.portions import Portion
    from lightning_resilience.ports import CancelToken


__all__ = ["StagedFiles", "entries_of", "results_of", "stage_metadata", "stage_shards"]


class StagedFiles(FileSystemBase):
    """The files of one attempt, by name. Any thread of it may write.

    Args:
        path_of: Names the staged file for a file's name.
        token: Told of progress, and asked whether the caller has given up.

    Attributes:
        files: What is complete.
    """

    def __init__(self, path_of: Callable[[str], str], token: CancelToken) -> None:
        self.files: dict[str, Staged] = {}
        self._path_of = path_of
        self._token = token

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[StagedWriter]:
        """Open a new file; it is complete when the context ends."""
        del mode
        staged_path = self._path_of(str(path))
        Path(staged_path).parent.mkdir(parents=True, exist_ok=True)
        writer = StagedWriter(staged_path, self._token)
        try:
            yield writer
            self._token.raise_if_cancelled()
            self.files[str(path)] = writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the name of a file: all are in one directory."""
        del path
        return suffix

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the path as it is."""
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a complete file another name, which it will be published under."""
        self.files[str(new_path)] = self.files.pop(str(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: who publishes makes the directory."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True."""
        del checkpoint_id
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Tell whether this attempt has written it: what is in storage is not asked about."""
        return str(path) in self.files

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a complete file."""
        discard(self.files.pop(str(path)).path)

    def discard(self) -> None:
        """Remove all that is complete."""
        for staged in self.files.values():
            discard(staged.path)
        self.files.clear()


def _writer(files: StagedFiles, url: str, **options: Any) -> FileSystemWriter:
    # Not synchronised by torch: a staged file does so itself.
    writer = FileSystemWriter(url, sync_files=False, **options)
    writer.fs, writer.path = files, url  # type: ignore[assignment] # torch's own subclass does so
    return writer


def stage_shards(
    files: StagedFiles, prefix: str, *, plan: SavePlan, planner: SavePlanner, thread_count: int
) -> list[WriteResult]:
    """Write one rank's shards.

    Args:
        files: Where to.
        prefix: What their names begin with.
        plan: What to write.
        planner: Has the data.
        thread_count: How many files are written at once, ≥ 1.

    Returns:
        Where everything is.
    """
    writer = _writer(files, prefix, thread_count=thread_count)
    plan = dataclasses.replace(plan, storage_data=_StoragePrefix(prefix))
    try:
        done: list[WriteResult] = writer.write_data(plan, planner).wait()
    except BaseException:
        files.discard()
        raise
    return done


def stage_metadata(
    files: StagedFiles, url: str, metadata: Metadata, *, portions: Iterable[Portion], save_id: str
) -> None:
    """Write the metadata, and complete the object itself as torch's writer does.

    Args:
        files: Where to.
        url: The checkpoint.
        metadata: What the planner has made.
        portions: What every rank has written.
        save_id: Names the save in the metadata.
    """
    writer = _writer(files, url)
    writer.save_id = save_id
    writer.finish(metadata, [results_of(portion.entries) for portion in portions])


def entries_of(results: Iterable[WriteResult]) -> tuple[Entry, ...]:
    """Return what torch's writer says of what it has written, as data."""
    return tuple(_entry_of(result) for result in results)


def _entry_of(result: WriteResult) -> Entry:
    index, info = result.index, result.storage_data
    transforms = getattr(info, "transform_descriptors", None)
    return Entry(
        name=index.fqn,
        offset=None if index.offset is None else tuple(index.offset),
        index=index.index,
        size_bytes=result.size_in_bytes,
        file=info.relative_path,
        start=info.offset,
        length=info.length,
        transforms=None if transforms is None else tuple(transforms),
    )


def results_of(entries: Iterable[Entry]) -> list[WriteResult]:
    """Return the same as torch's writer has said it."""
    return [
        WriteResult(
            index=MetadataIndex(entry.name, entry.offset, entry.index),
            size_in_bytes=entry.size_bytes,
            storage_data=_info_of(entry),
        )
        for entry in entries
    ]


def _info_of(entry: Entry) -> _StorageInfo:
    # Releases before 2.7 know of no transforms, and write none.
    transforms = {} if entry.transforms is None else {"transform_descriptors": [*entry.transforms]}
    return _StorageInfo(entry.file, entry.start, entry.length, **transforms)
