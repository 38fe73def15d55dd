# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs that resume: a bound that is not kept, and one that never ends, are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.drill import load_world
from lightning_resilience.drill.job_kinds import LOADS


if TYPE_CHECKING:
    import pytest


def test_more_reads_at_once_than_slots_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everybody is let in, the check of the bound is what says so."""
    monkeypatch.setattr(load_world.LoadWorld, "has_slot", lambda _: True)

    *_, failed = LOADS.sweep(range(100))

    assert failed.check == "I5 AdmittedLoads"


def test_a_job_that_never_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for what nobody does is named."""
    monkeypatch.setattr(load_world.LoadWorld, "has_slot", lambda _: False)

    *_, failed = LOADS.sweep(range(100))

    assert failed.check == "I3 EndedLoads"
    assert "do not come to an end" in failed.what
