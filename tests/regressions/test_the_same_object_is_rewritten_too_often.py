# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C13: ``last.ckpt`` was written faster than the storage allows for one object, and the job died.

``fsspec/gcsfs#650``, ``nteract/papermill#312``: an answer 429 is a request to come less often, and
no reason to end a training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.private_filesystem import private_filesystem, private_instance
from lightning_resilience.core.outcome import FailureClass, classify
from tests.faulty_filesystem import Rule
from tests.http_server import Answer, s3_error, serving
from tests.s3_server import S3Server
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


MUTATED_TOO_OFTEN = json.dumps(
    {"error": {"code": 429, "message": "The object exceeded the rate limit for mutations."}}
).encode()


def test_gcsfs_says_throttle() -> None:
    """What gcsfs makes of a 429 is of class throttle, after one request."""
    core = pytest.importorskip("gcsfs.core")
    with serving(lambda _request: Answer(status=429, body=MUTATED_TOO_OFTEN)) as server:
        options = {"token": "anon", "endpoint_url": server.url}
        fs = private_instance(core.GCSFileSystem, (), options)

        with pytest.raises(Exception) as caught:  # noqa: PT011 - gcsfs's own HttpError
            fs.pipe_file("bucket/last.ckpt", b"weights")

    assert classify(caught.value).failure is FailureClass.THROTTLE
    assert len(server.requests) == 1


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable", "503", "TooManyRequests"])
def test_s3_says_throttle(code: str) -> None:
    """s3fs folds these into EBUSY or EIO, which the code inside tells apart from trouble."""
    pytest.importorskip("s3fs")
    with serving(lambda _request: s3_error(503, code)) as server:
        fs, path = private_filesystem(
            "s3://bucket/last.ckpt", S3Server(url=server.url).storage_options
        )

        with pytest.raises(OSError, match="no") as caught:
            fs.pipe_file(path, b"weights")

    assert classify(caught.value).failure is FailureClass.THROTTLE
    assert len(server.requests) == 1


@pytest.mark.integration
def test_by_default_the_object_is_not_rewritten_so_often(faulty: Callable[..., Job]) -> None:
    """No write comes too soon, and the newest is there in the end."""
    limited = Rule(operations=("put_file",), name="/last.ckpt", error="throttled", apart_s=0.5)
    job = faulty(
        limited,
        steps=5,
        every=1,
        checkpoint={"save_last": True, "save_top_k": 0},
        options={"spool": {"same_path_interval_s": 0.6}},
    )

    fit(job)

    writes = plan_in_use().calls("put_file", name="/last.ckpt")
    assert not any(call["struck"] for call in writes)
    manifest = Path(job.folder.removeprefix("faulty://"), ".resilience", "last.ckpt.json")
    assert json.loads(manifest.read_text())["step"] == job.steps


@pytest.mark.integration
def test_a_last_checkpoint_at_every_step_fails_no_training(faulty: Callable[..., Job]) -> None:
    """Each refused write of ``last.ckpt`` is repeated later, and all steps are trained.

    The saves wait: those that are spooled leave the name alone, so that no write is refused.
    """
    limited = Rule(operations=("put_file",), name="/last.ckpt", error="throttled", apart_s=0.1)
    job = faulty(
        limited,
        steps=5,
        every=1,
        checkpoint={"save_last": True},
        options={
            "on_outage": "wait",
            "retry": {"throttle_base_delay_s": 0.15, "max_delay_s": 0.3},
        },
    )

    trainer = fit(job)

    writes = plan_in_use().calls("put_file", name="/last.ckpt")
    assert trainer.global_step == job.steps
    assert set(names(job)) >= {"last.ckpt", *job.expected}
    assert any(call["struck"] for call in writes)
    assert len([call for call in writes if not call["struck"]]) == job.steps
