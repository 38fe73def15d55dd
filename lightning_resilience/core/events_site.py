# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Events about the store that a job shares with others; see ``core.events`` for what they are."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_resilience.core.event import Event


__all__ = ["SiteLost", "SiteReturned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLost(Event):
    """The site's store is away: this job goes by its own breakers. Once, until it has returned."""

    dependency: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReturned(Event):
    """The site's store answers again."""

    dependency: str
    lost_for_s: float
