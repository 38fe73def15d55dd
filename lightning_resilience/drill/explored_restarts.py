# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The gate in a small world: agents that come to it at the same time, and what must hold of them.

What is looked at are the bytes in the store and what the agents return: one charge, one agreement,
the charge before the agreement, and nobody is told anything else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.core.quota import RestartRecord
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.restart import GoRecord
from lightning_resilience.core.restart_config import RestartConfig
from lightning_resilience.drill.explored_process import Cast, Over
from lightning_resilience.drill.explored_programs import KEYS
from lightning_resilience.drill.explored_world import Scene
from lightning_resilience.protocols.restart import Gate, pass_gate
from lightning_resilience.protocols.restart_record import Memory


if TYPE_CHECKING:
    from lightning_resilience.core.leaving import Apart
    from lightning_resilience.core.quota import Ending
    from lightning_resilience.drill.explored_world import State, Step
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["at_the_gate"]

_RECORD: Final = KEYS.restarts
_GO: Final = KEYS.joint("go", 0)
_INCIDENT: Final = KEYS.joint("incident", 0)
_NAMES: Final = ("a", "b", "c")
_MANY: Final = 4096
_TOLD: Final = IncidentRecord(rank=0, kind="error", error="ValueError: x", step=1, writer="w")


@lru_cache(maxsize=_MANY)
def _record(raw: bytes) -> RestartRecord:
    return decode(RestartRecord, raw, key=_RECORD)


@lru_cache(maxsize=_MANY)
def _go(raw: bytes) -> GoRecord:
    return decode(GoRecord, raw, key=_GO)


def _agent(quota: int) -> Protocol[GoRecord | Ending | Apart]:
    config = RestartConfig(settle_s=0.0, restart_quota=quota)
    return (yield from pass_gate(Gate(memory=Memory(KEYS), config=config, is_failure=True)))


def _it_is_charged_once(step: Step) -> str:
    """Check who changes the record into what."""
    before, after = (state.values.get(_RECORD) for state in (step.before, step.after))
    if step.actor is None or before == after:
        return ""
    who = step.choice.who
    if after is None:
        return f"{who} removed the record"
    found, written = None if before is None else _record(before), _record(after)
    if len(written.charges) > 1 or written.restarts > 1:
        return f"{who} charged it again: {written}"
    if found is not None and (found.charges or found.ending is not None):
        return f"{who} replaced {found} by {written}"
    return ""


def _the_charge_comes_before_the_agreement(step: Step) -> str:
    """Check that nobody may join for nothing, and that what is agreed is so for good."""
    before, after = (state.values.get(_GO) for state in (step.before, step.after))
    if step.actor is None or before == after or after is None:
        return ""
    who = step.choice.who
    if before is not None:
        return f"{who} replaced {_go(before)} by {_go(after)}"
    raw = step.after.values.get(_RECORD)
    if not step.after.lives and (raw is None or not _record(raw).charges):
        return f"{who} wrote {_go(after)}, and nothing is charged"
    return ""


def _all_are_told_the_same(state: State) -> str:
    results = {
        process.result
        for process in state.processes
        if isinstance(process, Over) and process.result is not None
    }
    if state.lives or not results:
        return ""
    raw = state.values.get(_GO)
    stands = None if raw is None else _go(raw)
    if stands is None:
        record = state.values.get(_RECORD)
        ending = None if record is None else _record(record).ending
        return "" if results == {ending} else f"{results} were told, and {ending} stands"
    return "" if results == {stands} else f"{results} were told, and {stands} stands"


def at_the_gate(*, agents: int, quota: int = 3, **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Agents that come to the gate at the same time.

    Args:
        agents: How many.
        quota: How many restarts the job may make.
        **numbers: Fields of the scene.
    """
    return Scene(
        **{
            "name": f"{agents} at the gate",
            "cast": tuple(
                Cast(name=name, program=lambda: _agent(quota), draw=0.25 * (at + 1))
                for at, name in enumerate(_NAMES[:agents])
            ),
            "values": {_INCIDENT: encode(_TOLD)},
            "checks": (_it_is_charged_once, _the_charge_comes_before_the_agreement),
            "end_checks": (_all_are_told_the_same,),
            "newcomer": Cast(name="n", program=lambda: _agent(quota)),
            **numbers,
        }
    )
