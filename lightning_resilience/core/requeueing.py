# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints of earlier starts a requeued job needs no more: those that are surely its own.

Each time that SLURM requeues a job, Lightning saves ``hpc_ckpt_<n>.ckpt`` under the next free
number, and starts from the highest. Nobody has asked for the removal of the others, and their
directory may be that of several jobs. So one is needless only where its manifest says all of this,
beside that of the one that was just saved:

==============  ====================================================================================
what            why
==============  ====================================================================================
a lower number  a search takes the highest
the same run    under SLURM the number of the job, which a requeued job keeps: another job may have
                started from a checkpoint of this one, and then belongs to the same training
that training   a run that began anew, or from a checkpoint that was named, is another one
no later step   a run that went back to an older checkpoint has not replaced what came after it
==============  ====================================================================================

What has no manifest, or one that cannot be read, stays; ``core.retention`` keeps what the run has
started from. So two stay of each job.

All of it comes between the save and the request to be requeued, so it has a part of the time that
is left, and what does not fit stays for the next stop.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_resilience.core.manifest import Manifest


__all__ = ["clearing_s", "earlier", "is_needless"]

_NAME: Final = re.compile(r"hpc_ckpt_([0-9]{1,18})\.ckpt")
_MAX_LOOKS: Final = 32
"""A directory that was never cleared is cleared over several stops, the latest first."""
_LONGEST_S: Final = 10.0
_LEAVING_S: Final = 2.0
_SHARES: Final = 3
"""Looking and removing have one, a removal that was begun in time may take another, and the last is
left for the request to be requeued."""
_SHORTEST_S: Final = 0.5


def earlier(saved: str, names: Iterable[str]) -> list[str]:
    """Return which checkpoints of a directory are looked at.

    Args:
        saved: Name of the one that was just saved.
        names: All that is in its directory.

    Returns:
        Those with a lower number, the highest first, at most 32; none where ``saved`` is no
        checkpoint of a requeued job.
    """
    limit = _number_of(saved)
    numbered = {name: _number_of(name) for name in names}
    found = [name for name, number in numbered.items() if 0 <= number < limit]
    return sorted(found, key=lambda name: (-numbered[name], name))[:_MAX_LOOKS]


def is_needless(older: Manifest | None, *, name: str, saved: Manifest | None) -> bool:
    """Tell whether a checkpoint with a lower number is replaced by the one that was just saved.

    Args:
        older: Its manifest, as it is in storage; None where it has none, or none that can be read.
        name: Its name.
        saved: The manifest of the one that was just saved, as it is in storage.
    """
    if older is None or saved is None or older.path != name:
        return False
    if not (saved.run and saved.training) or older.step is None or saved.step is None:
        return False
    is_own = (older.run, older.training) == (saved.run, saved.training)
    return is_own and older.step <= saved.step


def clearing_s(left_s: float | None) -> float:
    """Return how long needless checkpoints may be looked for and removed, in seconds.

    Args:
        left_s: How long the process may still run, in seconds; None for as long as it likes.

    Returns:
        At most 10 s, and 0 where there is no time for it.
    """
    if left_s is None:
        return _LONGEST_S
    share_s = (left_s - _LEAVING_S) / _SHARES
    return min(share_s, _LONGEST_S) if share_s >= _SHORTEST_S else 0.0


def _number_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    return -1 if found is None else int(found.group(1))
