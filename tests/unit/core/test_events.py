# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Events are facts: frozen, named in the past tense, without instants, and equal by value."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from lightning_resilience.core import events


KINDS = [
    getattr(events, name) for name in events.__all__ if getattr(events, name) is not events.Event
]
# Past participles that do not end in "ed".
IRREGULAR = ("Cast", "Forgiven", "Kept", "Left", "Lost", "SetAside")


@pytest.mark.parametrize("kind", KINDS)
def test_events_are_named_in_the_past_tense(kind: type) -> None:
    """An event says what has happened, never what should."""
    assert kind.__name__.endswith(("ed", *IRREGULAR))


@pytest.mark.parametrize("kind", KINDS)
def test_events_are_frozen_and_say_what_they_mean(kind: type) -> None:
    """No sink can change an event on its way to the next, and each explains itself."""
    assert issubclass(kind, events.Event)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind.__doc__
    assert not kind.__doc__.startswith(kind.__name__ + "(")


@pytest.mark.parametrize("kind", KINDS)
def test_events_hold_durations_and_no_instants(kind: type) -> None:
    """An event may be read on another host, whose clock says something else."""
    names = [field.name for field in dataclasses.fields(kind)]

    assert names
    assert not [name for name in names if name.endswith(("_at_s", "_at", "now_s"))]


@pytest.mark.parametrize("kind", KINDS)
def test_events_are_made_by_keyword(kind: type) -> None:
    """No two fields of an event can be confused by their order."""
    parameters = inspect.signature(kind).parameters.values()

    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


def test_every_event_is_exported() -> None:
    """A sink finds every event that may come under its name."""
    defined = {
        name
        for name, value in vars(events).items()
        if inspect.isclass(value) and issubclass(value, events.Event)
    }

    assert defined == set(events.__all__)
