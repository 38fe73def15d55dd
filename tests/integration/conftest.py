# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Processes, a store and a dependency that the tests of contention share."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from tests.integration.breaker_ranks import HANG_S
from tests.integration.contention_ranks import Crew, Dependency, serving


if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def eight() -> Iterator[Crew]:
    """Eight processes, for all tests of a file."""
    crew = Crew(8)

    yield crew

    crew.end()


@pytest.fixture
def crew(eight: Crew, request: pytest.FixtureRequest) -> Iterator[Crew]:
    """The eight, of which none is left in the middle of something."""
    failed_before = request.session.testsfailed

    yield eight

    if request.session.testsfailed > failed_before:
        for rank in eight.pipes:
            eight.renew(rank)


@pytest.fixture(scope="module")
def tcp_store() -> dist.TCPStore:
    """A store's server in this process, for all tests of a file."""
    return dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=HANG_S), wait_for_workers=False
    )  # fmt: skip


@pytest.fixture
def dependency() -> Iterator[Dependency]:
    """A dependency that is well."""
    with serving() as running:
        yield running
