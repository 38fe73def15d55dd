# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a start does about a checkpoint that was chosen, and turned out damaged while it was loaded.

Of what is in object storage only its size and its manifest are looked at before the choice, or a
table of contents: the rest is read once, by one rank of each node, while it is loaded. Damage that
leaves the size as it was shows then, on all ranks as the same error. So the search is made again,
and reads that candidate through before it may be chosen: where it is damaged in storage, it is set
aside and the next older one is taken. Where it is not, the bytes have suffered on their way, and it
is loaded once more.

==========================================  ========================================================
the load has failed with                    then
==========================================  ========================================================
damaged bytes, of one that was searched     all ranks search again, that one read through
damaged bytes, of the same one again        all ranks raise: what storage has is good
damaged bytes, of a path that was given     all ranks raise: nobody else has said what to start from
anything else, or not on all ranks          raised
==========================================  ========================================================

Each turn adds a candidate, and the error of load number ``MAX_STARTS`` is raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.errors import CorruptCheckpointError


if TYPE_CHECKING:
    from lightning_resilience.errors import JointError


__all__ = ["MAX_STARTS", "Doubts"]

MAX_STARTS: Final = 8
"""Loads that a start tries: more damaged ones in a row are no accident, and a person's to look at.
"""


class Doubts:
    """Checkpoints that have failed to load, of one start. Every rank has the same; one thread."""

    def __init__(self) -> None:
        self._urls: set[str] = set()

    def __contains__(self, url: object) -> bool:
        """Whether a candidate has to be read through before it is chosen."""
        return url in self._urls

    def adds(self, url: str, error: JointError) -> bool:
        """Note that a load has failed; return whether all ranks search again.

        Args:
            url: What was loaded, as a search has found it; empty for what nobody searched for.
            error: What all ranks raise.
        """
        is_damage = error.in_step and error.cause == CorruptCheckpointError.__name__
        is_last = len(self._urls) + 1 == MAX_STARTS
        if not url or not is_damage or url in self._urls or is_last:
            return False
        self._urls.add(url)
        return True
