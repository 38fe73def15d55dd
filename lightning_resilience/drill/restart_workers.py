# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One start of the workers of a simulated job: when it ends on which node, and what workers say.

Workers speak for themselves, before their agents notice anything: so they are processes of their
own, which may be late, be paused, and lose what they say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.incident import IncidentKind, IncidentRecord, fingerprint_of
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.drill.restart_plan import Fate, FateKind
from lightning_resilience.protocols.effects import Nonce
from lightning_resilience.protocols.incarnation import tell_progress
from lightning_resilience.protocols.incident import publish_incident


if TYPE_CHECKING:
    from lightning_resilience.core.keys import Keys
    from lightning_resilience.drill.virtual import SeededDice
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["FAILS", "SPEAKS", "WORKERS_PER_NODE", "Start"]

FAILS: Final = frozenset(
    {FateKind.ERROR, FateKind.SAME, FateKind.PERMANENT, FateKind.KILLED, FateKind.SILENT}
)
"""Ends that are a failure of the workers."""

SPEAKS: Final = frozenset({FateKind.ERROR, FateKind.SAME, FateKind.PERMANENT, FateKind.SIGNAL})
"""Ends of which a worker tells itself."""

WORKERS_PER_NODE: Final = 8
_ENDLESS_S: Final = 40.0
_NEVER_S: Final = float("inf")
_STATUS: Final = {FateKind.KILLED: -9, FateKind.SIGNAL: -15, FateKind.TOLD: -15}
_ERROR_STATUS: Final = 1


@dataclass(slots=True, kw_only=True)
class Start:
    """One start of the workers.

    Args:
        number: Which one of the job, from 1.
        incarnation: Its name.
        nodes: Nodes that have part in it.
        fate: How it ends.
        began_at_s: When it has begun, on the virtual clock.
        dice: Its chance.

    Attributes:
        ends_at_s: When it ends on which node.
    """

    number: int
    incarnation: str
    nodes: tuple[int, ...]
    fate: Fate
    began_at_s: float
    dice: SeededDice
    ends_at_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fate = self.fate
        after_s = _ENDLESS_S if fate.kind is FateKind.CALM else fate.after_s
        first_s = self.began_at_s + after_s
        for node in self.nodes:
            if node == self.culprit or self.is_good:
                self.ends_at_s[node] = first_s
            elif fate.kind is FateKind.SIGNAL or (fate.echo_s and fate.kind is not FateKind.TOLD):
                self.ends_at_s[node] = first_s + self.dice.draw() * (fate.echo_s or 1.0)
            else:
                self.ends_at_s[node] = _NEVER_S

    @property
    def culprit(self) -> int:
        """The node on which it ends first."""
        return self.nodes[self.fate.node % len(self.nodes)]

    @property
    def is_good(self) -> bool:
        """Whether the workers train to the end, if nothing else ends them."""
        return self.fate.kind in {FateKind.DONE, FateKind.CALM}

    def has_failed(self, now_s: float) -> bool:
        """Tell whether workers have failed by themselves by then."""
        return self.fate.kind in FAILS and now_s >= self.ends_at_s[self.culprit]

    def is_told(self, node: int) -> bool:
        """Tell whether it ends on a node because its agent was told to stop."""
        return self.fate.kind is FateKind.TOLD and node == self.culprit

    def status(self, node: int) -> int:
        """Return with which status workers of a node end."""
        kind = self.fate.kind
        if node != self.culprit and kind is FateKind.KILLED:
            return _ERROR_STATUS
        return _STATUS.get(kind, _ERROR_STATUS)

    def word(self, keys: Keys) -> Protocol[None]:
        """Tell why a worker leaves. In a worker."""
        fate = self.fate
        is_same = fate.kind is FateKind.SAME
        error = "SIGTERMException: told to stop"
        if fate.kind is not FateKind.SIGNAL:
            error = f"ValueError: {'the same' if is_same else 'x' * self.number}"
        kind = IncidentKind.SIGNAL if fate.kind is FateKind.SIGNAL else IncidentKind.ERROR
        is_permanent = fate.kind is FateKind.PERMANENT
        writer: str = yield Nonce()
        mine = IncidentRecord(
            rank=self.culprit * WORKERS_PER_NODE,
            kind=kind.value,
            error=error,
            step=1 if is_same else self.number,
            failure=FailureClass.PERMANENT.value if is_permanent else "",
            fingerprint=fingerprint_of(error) if kind is IncidentKind.ERROR else "",
            writer=writer,
        )
        yield from publish_incident(keys, mine)

    def progress(self, keys: Keys, *, step: int) -> Protocol[None]:
        """Tell of a checkpoint that was verified. In a worker of rank 0."""
        yield from tell_progress(keys, step=step, checkpoint_step=step)
