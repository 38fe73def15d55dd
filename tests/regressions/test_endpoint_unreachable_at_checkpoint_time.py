# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C19: the endpoint could not be reached, and the error was no OSError."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.object_store import FsspecObjectStore
from lightning_resilience.adapters.private_filesystem import private_filesystem
from lightning_resilience.core.outcome import FailureClass, classify
from tests.faulty_filesystem import Rule
from tests.ports import free_port
from tests.s3_server import S3Server
from tests.single_rank import fit, names, plan_in_use
from tests.tokens import RecordingToken


if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lightning_job import Job


pytest.importorskip("s3fs")


def test_an_endpoint_that_refuses_is_transient(tmp_path: Path) -> None:
    """Writing, looking and removing all fail as an outage, none as an absent object."""
    server = S3Server(url=f"http://127.0.0.1:{free_port()}")
    fs, path = private_filesystem("s3://bucket/x.ckpt", server.storage_options)
    store = FsspecObjectStore(fs, spool_directory=str(tmp_path))
    (tmp_path / "staged").write_bytes(b"x")

    for call in (
        lambda: store.publish(str(tmp_path / "staged"), path, RecordingToken()),
        lambda: store.size(path),
        lambda: store.remove(path),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - that it is no OSError is the case
            call()
        assert not isinstance(caught.value, OSError)
        assert classify(caught.value).failure is FailureClass.TRANSIENT
        assert classify(caught.value, reading=True).counts


@pytest.mark.integration
def test_training_outlives_an_endpoint_that_is_not_there(faulty: Callable[..., Job]) -> None:
    """Four checkpoint-time failures that are no ``OSError``, and training ends well."""
    job = faulty(Rule(operations=("put_file",), error="endpoint", last=4))

    fit(job)

    assert set(names(job)) >= set(job.expected)
    assert [call["struck"] for call in plan_in_use().calls("put_file")][:5] == [True] * 4 + [False]
