# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C65: a rendezvous backend is registered as torch does not take it, and is silently absent.

Torch logs a warning and goes on, so each part of its contract is held here. Reported for pytorch as
#127519.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lightning_resilience.adapters.rendezvous import BACKEND
from lightning_resilience.adapters.rendezvous_entry import resilient
from tests.agents import register_backend
from tests.warm_python import ROOT


if TYPE_CHECKING:
    from pathlib import Path

    import pytest


LOAD = """
import sys
from lightning_resilience.adapters.rendezvous_entry import resilient
resilient()
print(*(name for name in ("torch", "lightning", "pytorch_lightning") if name in sys.modules))
"""


def test_it_is_called_without_arguments_and_returns_what_makes_the_handler() -> None:
    """That takes the launcher's parameters."""
    make = resilient()

    assert not inspect.signature(resilient).parameters
    assert len(inspect.signature(make).parameters) == 1


def test_it_imports_next_to_nothing() -> None:
    """Since every process that imports torch's rendezvous loads it."""
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert loaded.stdout.split() == []


def test_torch_finds_it_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the metadata of an installation; and the handler says the same name."""
    handlers: Any = rendezvous_handler_registry
    others = {name: made for name, made in handlers._registry.items() if name != BACKEND}
    monkeypatch.setattr(handlers, "_registry", others)
    monkeypatch.setattr(sys, "path", list(sys.path))

    register_backend(tmp_path)
    parameters = RendezvousParameters(BACKEND, "127.0.0.1:7", "job", 1, 1)

    assert get_rendezvous_handler(parameters).get_backend() == BACKEND == "resilient"
