# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What workers are told by their environment is there for one job only."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from lightning_resilience.adapters.worker_environment import (
    INCARNATION,
    STORE,
    WorkerEnvironment,
)
from lightning_resilience.config import SITE_STORE
from tests.handlers import server, status_of


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.rendezvous import ResilientHandler
    from tests.handlers import Handlers


NAMES = (INCARNATION, STORE, SITE_STORE)
SITE = "tcp://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment say nothing, now and after the test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_what_was_there_before_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was told anew in between."""
    monkeypatch.setenv(SITE_STORE, "tcp://other:1")
    environment = WorkerEnvironment()

    for number in range(2):
        environment.tell(incarnation=f"{number}-n", store="tcp://host:1", site_store=SITE)
    told = [os.environ[name] for name in NAMES]
    environment.restore()

    assert told == ["1-n", "tcp://host:1", SITE]
    assert [os.environ.get(name) for name in NAMES] == [None, None, "tcp://other:1"]


def test_what_is_not_told_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that the user has named is the workers' as well."""
    monkeypatch.setenv(STORE, "tcp://host:1")

    WorkerEnvironment().tell(incarnation="1-n", store=None, site_store=None)

    assert [os.environ.get(name) for name in NAMES] == ["1-n", "tcp://host:1", None]


def _leaves_well(handler: ResilientHandler) -> None:
    handler.shutdown()


def _is_told_to_stop(handler: ResilientHandler) -> None:
    def stop() -> None:
        try:
            interrupted()
        except SignalException:
            handler.get_run_id()

    assert status_of(stop) == 143


def interrupted() -> None:
    """Do what torch's handler of signals does."""
    message = "told to stop"
    raise SignalException(message, signal.SIGTERM)


@pytest.mark.parametrize("ends", [_leaves_well, _is_told_to_stop])
def test_a_program_that_starts_two_jobs_keeps_nothing_of_the_first(
    handlers: Handlers, ends: Callable[[ResilientHandler], None]
) -> None:
    """The second would take the store of the first, which is gone, for one that was named."""
    store = server()
    handler = handlers.make(store.port, site_store=SITE)
    handlers.join(handler)
    told = [name for name in NAMES if os.environ.get(name)]

    ends(handler)

    assert told == list(NAMES)
    assert not any(os.environ.get(name) for name in NAMES)
