# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a session derives from a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.lightning.breakers import _parent
from tests.faulty_filesystem import Rule
from tests.single_rank import fit, names, plan_in_use


if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lightning_job import Job


@pytest.mark.parametrize(
    ("url", "directory"),
    [
        ("/a/b/c.ckpt", "/a/b"),
        ("c.ckpt", "."),
        ("s3://bucket/a/c.ckpt", "s3://bucket/a"),
        ("s3://bucket/c.ckpt", "s3://bucket"),
        ("s3://bucket/a/", "s3://bucket/a"),
        ("s3://bucket/", "s3://bucket"),
        ("memory://a/c.ckpt", "memory://a"),
        ("file:///a/c.ckpt", "file:///a"),
    ],
)
def test_a_probe_works_where_the_checkpoint_is(url: str, directory: str) -> None:
    """It is the folder of the file, or the folder itself, never a name that does not exist."""
    assert _parent(url) == directory


@pytest.mark.integration
def test_a_listing_is_probed_in_the_listed_folder(faulty: Callable[..., Job]) -> None:
    """Its parent may be no place at all: above a bucket there is nothing to ask."""
    job = faulty(Rule(operations=("isdir", "ls"), error="reset", last=3))

    fit(job)

    assert names(job) == job.expected
    probed = next(call["path"] for call in plan_in_use().calls("info"))
    assert probed == job.folder.removeprefix("faulty://")
