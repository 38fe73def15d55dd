# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A small world in which ranks leave training, each for a reason of its own, at the same time.

What is looked at are the bytes in the store and what the ranks return: the incident that stands is
a cause wherever a rank with a cause has come through, a cause is never replaced, and whoever is
woken by the bell finds what it stands for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.incident import IncidentKind, IncidentRecord
from lightning_resilience.core.records import decode
from lightning_resilience.drill.explored_process import Cast, Over
from lightning_resilience.drill.explored_programs import KEYS
from lightning_resilience.drill.explored_world import Scene
from lightning_resilience.protocols.effects import Nonce
from lightning_resilience.protocols.incident import publish_incident


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_resilience.drill.explored_world import EndCheck, State, Step
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["leaving"]

_INCIDENT: Final = KEYS.joint("incident", 0)
_BELL: Final = KEYS.joint("failed", 0)
_CAUSE: Final = IncidentKind.ERROR.value
_NAMES: Final = ("a", "b", "c")
_MANY: Final = 4096


@lru_cache(maxsize=_MANY)
def _incident(raw: bytes) -> IncidentRecord:
    return decode(IncidentRecord, raw, key=_INCIDENT)


def _leaver(rank: int, kind: str) -> Callable[[], Protocol[IncidentRecord]]:
    def program() -> Protocol[IncidentRecord]:
        writer: str = yield Nonce()
        mine = IncidentRecord(rank=rank, kind=kind, error=f"rank {rank}", step=1, writer=writer)
        return (yield from publish_incident(KEYS, mine))

    return program


def _a_cause_stays(step: Step) -> str:
    """Check who changes the incident into what."""
    before, after = (state.values.get(_INCIDENT) for state in (step.before, step.after))
    if step.actor is None or before == after:
        return ""
    who = step.choice.who
    if after is None:
        return f"{who} removed the incident"
    if not _incident(after).writer.startswith(f"{who}."):
        return f"{who} wrote the incident of another, {_incident(after)}"
    if before is not None and (_incident(before).kind == _CAUSE or _incident(after).kind != _CAUSE):
        return f"{who} replaced {_incident(before)} by {_incident(after)}"
    return ""


def _the_bell_has_a_reason(step: Step) -> str:
    """Check that who rings has written before, or has found what is there.

    Not where the store has not answered: then a rank rings for what it could not write.
    """
    rang = _BELL in step.after.values and _BELL not in step.before.values
    if rang and _INCIDENT not in step.after.values:
        return f"{step.choice.who} rang, and no incident is there"
    return ""


def _who_came_through_is_heard(kinds: Mapping[str, str]) -> EndCheck:
    def check(state: State) -> str:
        raw = state.values.get(_INCIDENT)
        standing = None if raw is None else _incident(raw)
        for process in state.processes:
            result = process.result if isinstance(process, Over) else None
            if state.lives or not isinstance(result, IncidentRecord):
                continue
            if _BELL not in state.values:
                return f"{process.name} came through, and nobody was woken"
            if kinds[process.name] == _CAUSE and result != standing:
                return f"{process.name} returned {result}, and {standing} stands"
            if kinds[process.name] == _CAUSE and result.kind != _CAUSE:
                return f"{process.name} has a cause, and {standing} stands"
        return ""

    return check


def leaving(*, kinds: tuple[str, ...], **numbers: Any) -> Scene:  # noqa: ANN401 - fields of a scene
    """Ranks that leave at the same time.

    Args:
        kinds: For each rank, the kind of what it leaves with.
        **numbers: Fields of the scene.
    """
    by_name = dict(zip(_NAMES, kinds, strict=False))
    is_answered = numbers.get("most_faults") == 0
    return Scene(
        **{
            "name": f"{len(kinds)} leave",
            "cast": tuple(
                Cast(name=who, program=_leaver(rank, kind))
                for rank, (who, kind) in enumerate(by_name.items())
            ),
            "values": {},
            "checks": (_a_cause_stays, *((_the_bell_has_a_reason,) if is_answered else ())),
            "end_checks": (_who_came_through_is_heard({**by_name, "n": _CAUSE}),),
            "newcomer": Cast(name="n", program=_leaver(len(kinds), _CAUSE)),
            **numbers,
        }
    )
