# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a simulated run saves where, how much may go wrong, and who decides what does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from lightning_resilience.drill.save_looks import Format


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.drill.virtual import SeededDice


__all__ = ["Chance", "Names", "SavePlan", "Script", "SeededChance", "random_plan"]


class Names(str, Enum):
    """What the checkpoints of a run are called."""

    NUMBERED = "numbered"
    """``last-<step>.ckpt``: a new one each time, and the oldest is removed."""
    SAME = "same"
    """``last.ckpt``, over and over."""
    BOTH = "both"
    """``step=<step>.ckpt`` as above, and ``last.ckpt`` as another copy."""
    LINKED = "linked"
    """The same, and ``last.ckpt`` is a link to the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One simulated run.

    Args:
        renames: Whether the storage is a filesystem; else it is object storage.
        form: What a checkpoint is made of.
        names: What they are called.
        points: How often the run saves.
        keep: How many numbered ones are kept (``save_top_k``).
        attempts: How many attempts each operation has.
        in_background: Whether a save is handed over, and written only when the next is asked for.
        spools: Whether a save that has no attempt left waits on the node.
        faults: How many operations may fail, be lost, dropped or abandoned.
        crashes: How often the process may be killed.
        moves: How often something that was abandoned may go on by one operation.
        damages: How many checkpoints may be damaged by nobody's request.
    """

    renames: bool = True
    form: Format = Format.FILE
    names: Names = Names.NUMBERED
    points: int = 3
    keep: int = 1
    attempts: int = 2
    in_background: bool = False
    spools: bool = False
    faults: int = 0
    crashes: int = 0
    moves: int = 0
    damages: int = 0

    @property
    def is_spooling(self) -> bool:
        """Whether what it saves can be spooled: one file, written while it is waited for."""
        is_plain = self.form is Format.FILE and self.names is not Names.LINKED
        return self.spools and is_plain and not self.in_background

    def __str__(self) -> str:
        """Every field, in one line."""
        told = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{k}={v.value if isinstance(v, Enum) else v}" for k, v in told)


class Chance(Protocol):
    """Who decides what happens next."""

    @property
    def is_repeating(self) -> bool:
        """Whether what is decided was decided so in an earlier run."""
        ...

    def choose(self, options: Sequence[str], *, calm: float) -> int:
        """Return which of some possibilities comes true.

        Args:
            options: The possibilities; the first is that nothing goes wrong.
            calm: How often it should be the first.
        """
        ...


class Script:
    """The first decisions of a run; after them nothing goes wrong.

    Attributes:
        branches: How many possibilities there were, at each decision.

    Args:
        prefix: The decisions.
    """

    def __init__(self, prefix: Sequence[int] = ()) -> None:
        self.branches: list[int] = []
        self._prefix = tuple(prefix)

    @property
    def is_repeating(self) -> bool:
        """Whether the last decision of the prefix is still to come."""
        return len(self.branches) < len(self._prefix)

    def choose(self, options: Sequence[str], *, calm: float) -> int:
        """Decide as the prefix says."""
        del calm
        at = len(self.branches)
        self.branches.append(len(options))
        return self._prefix[at] if at < len(self._prefix) else 0


class SeededChance:
    """Decisions by dice.

    Args:
        dice: The dice.
    """

    is_repeating: Final = False

    def __init__(self, dice: SeededDice) -> None:
        self._dice = dice

    def choose(self, options: Sequence[str], *, calm: float) -> int:
        """Roll the dice."""
        if len(options) == 1 or self._dice.draw() < calm:
            return 0
        return 1 + int(self._dice.draw() * (len(options) - 1))


def random_plan(dice: SeededDice) -> SavePlan:
    """Draw a run.

    Args:
        dice: The dice.
    """
    chance = dice.random
    renames = chance.choice((True, False))
    form = chance.choice(list(Format))
    names = chance.choice([each for each in Names if fits(each, form, renames=renames)])
    return SavePlan(
        renames=renames,
        form=form,
        names=names,
        points=chance.randint(2, 6),
        keep=chance.choice((1, 1, 2, 3)),
        attempts=chance.randint(1, 3),
        in_background=names is Names.NUMBERED and chance.choice((True, False, False)),
        faults=chance.choice((0, 1, 2, 4, 8)),
        crashes=chance.choice((0, 1, 2, 3)),
        moves=chance.choice((0, 4, 40)),
        damages=chance.choice((0, 1, 2)),
        # Drawn last; what is handed over in the background, or linked, is not spooled here.
        spools=chance.choice((True, False)),
    )


def fits(names: Names, form: Format, *, renames: bool) -> bool:
    """Tell whether checkpoints of that form may have such names there.

    A link is made on filesystems. A directory in object storage cannot be replaced at once, so
    that a name that is used again is not the only one.
    """
    if names is Names.LINKED:
        return renames and form is Format.FILE
    return names is not Names.SAME or renames or form in {Format.FILE, Format.FOREIGN}
