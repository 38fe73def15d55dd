# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What all events have in common: they are values, and a sink can tell them from anything else."""

from __future__ import annotations

from dataclasses import dataclass


__all__ = ["Event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; see ``core.events``."""
