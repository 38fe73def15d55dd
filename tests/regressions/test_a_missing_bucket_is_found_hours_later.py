# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C63, C02: the bucket is missing, or may only be read, and training has begun before that shows.

Before each save Lightning makes the directory, and s3fs then makes the bucket, where it may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience import JointError
from tests.lightning_job import Job, make_data, make_model, make_trainer
from tests.s3_server import denying_server


if TYPE_CHECKING:
    from pathlib import Path

    from tests.gcs_server import GcsServer
    from tests.s3_server import S3Server


pytestmark = pytest.mark.integration


def fails_before_it_begins(folder: str, options: dict[str, Any]) -> JointError:
    """Return the error of a job that is to fail without a single step."""
    job = Job(folder=folder, ranks=1, options={"storage_options": options})
    trainer = make_trainer(job)
    with pytest.raises(JointError) as caught:
        trainer.fit(make_model(), make_data())
    assert trainer.global_step == 0
    return caught.value


def test_a_bucket_that_does_not_exist(s3_server: S3Server, spool: Path) -> None:
    """It is an error before the first step that names the bucket, and the bucket is not made."""
    assert spool.exists()

    error = fails_before_it_begins("s3://a-mistyped-name/run", s3_server.storage_options)

    assert "preflight of s3://a-mistyped-name/run failed" in str(error)
    assert "NoSuchBucket" in str(error)
    buckets = [each["Name"] for each in s3_server.client().list_buckets()["Buckets"]]
    assert "a-mistyped-name" not in buckets


def test_a_bucket_of_google_that_does_not_exist(
    gcs_server: GcsServer, gcs_bucket: str, spool: Path
) -> None:
    """The same, although the client makes one error of a missing object and a missing bucket."""
    assert spool.exists()
    assert gcs_bucket

    error = fails_before_it_begins("gs://a-mistyped-name/run", gcs_server.storage_options)

    assert "a-mistyped-name" in str(error)
    assert error.outcome == "permanent"
    assert "a-mistyped-name" not in gcs_server.buckets()


def test_a_prefix_that_may_only_be_read(s3_server: S3Server, bucket: str, spool: Path) -> None:
    """One denied request says before the first step what would have shown at the first save."""
    assert spool.exists()

    with denying_server(s3_server, lambda method, _path: method in {"PUT", "POST"}) as denying:
        options = {**s3_server.storage_options, "endpoint_url": denying.url}
        error = fails_before_it_begins(f"s3://{bucket}/run", options)

    assert f"s3://{bucket}/run" in str(error)
    assert "writing there was refused to rank 0" in str(error)
    assert "AccessDenied" in str(error)
    assert error.outcome == "permanent"
    assert len([request for request in denying.requests if request.startswith("PUT")]) == 1
