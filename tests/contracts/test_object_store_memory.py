# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store on fsspec's memory filesystem."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import fsspec
import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore
from tests.contracts.object_store import ObjectStoreContract


if TYPE_CHECKING:
    from pathlib import Path


class TestMemoryObjectStore(ObjectStoreContract):
    """Published by one assignment."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> FsspecObjectStore:
        """A store in memory."""
        return FsspecObjectStore(fsspec.filesystem("memory"), spool_directory=str(tmp_path))

    @pytest.fixture
    def folder(self) -> str:
        """A folder that no other test uses: the memory is one for the process."""
        return f"memory://{uuid.uuid4().hex}"

    def read(self, path: str) -> bytes | None:
        """Read through another instance."""
        fs = fsspec.filesystem("memory", skip_instance_cache=True)
        return bytes(fs.cat_file(path)) if fs.isfile(path) else None
