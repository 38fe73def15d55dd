# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The object store on a real server of the S3 protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.core.outcome import classify
from tests.contracts.parted_object_store import PartedObjectStoreContract
from tests.s3_server import failing_server
from tests.uploads import S3Side


if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3_server import S3Server
    from tests.uploads import Side


pytest.importorskip("s3fs")


class TestS3ObjectStore(PartedObjectStoreContract):
    """Published by one PutObject, or a multipart upload."""

    @pytest.fixture
    def side(self, s3_server: S3Server) -> Side:
        """The server."""
        return S3Side(s3_server)

    @pytest.mark.parametrize("mode", ["503", "500", "reset"])
    def test_a_size_that_cannot_be_told_raises(self, mode: str, tmp_path: Path) -> None:
        """An outage is never reported as an absent object (C28)."""
        with failing_server(mode) as failing:
            fs, _ = private_filesystem("s3://", failing.storage_options)
            store = FsspecObjectStore(fs, spool_directory=str(tmp_path))

            with pytest.raises(Exception) as caught:  # noqa: PT011 - one type for each mode
                store.size("s3://bucket/a.ckpt")

        assert classify(caught.value, reading=True).counts
