# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent's exit status tells a scheduler: below 128, do not start it again; else, it may.

=======  ==================  =======================================================================
status   name                when
=======  ==================  =======================================================================
0        done                the workers have ended well
64       usage               an option is wrong, or names the store of another job
78       permanent           the same attempt would fail in the same way: mend the cause first
79       closed              the rendezvous of this run id was closed by an earlier run
86       dead-lettered       restarts did not help, within the quota; a person must release the job
143      preempted           somebody asked it to stop
160      outage              what the job shares was ill for longer than it may wait
=======  ==================  =======================================================================

They keep clear of what shells and kernels use (126, 127, 128 and a signal's number, but for SIGTERM
itself) and follow ``sysexits.h`` where that has a word for it. 1 is what torchrun makes of
everything else.
"""

from __future__ import annotations

import enum
from typing import Final


__all__ = ["ExitCode", "may_start_again", "words_of"]

_FIRST_RESTARTABLE: Final = 128


class ExitCode(enum.IntEnum):
    """An agent's exit status; see the table above."""

    DONE = 0
    USAGE = 64
    PERMANENT = 78
    CLOSED = 79
    DEAD_LETTERED = 86
    PREEMPTED = 143
    OUTAGE = 160


_WORDS: Final = {
    ExitCode.DONE: ("done", "Nothing is left to do."),
    ExitCode.USAGE: ("usage", "Mend the option that is named, then start again."),
    ExitCode.PERMANENT: (
        "permanent",
        "Every attempt would fail in the same way. Mend the cause, then start again.",
    ),
    ExitCode.CLOSED: (
        "closed",
        "Start with a run id (--rdzv-id) that no earlier run has used, or a store of its own.",
    ),
    ExitCode.DEAD_LETTERED: (
        "dead-lettered",
        "Restarts did not help. Look at the cause; to let the job start again, release it.",
    ),
    ExitCode.PREEMPTED: ("preempted", "Nothing is known to be wrong: start it again."),
    ExitCode.OUTAGE: (
        "outage",
        "Start it again when the dependency is well. Nothing is known to be wrong with the job.",
    ),
}


def may_start_again(code: int) -> bool:
    """Tell whether a scheduler may start the job again by itself."""
    return code >= _FIRST_RESTARTABLE


def words_of(code: ExitCode) -> tuple[str, str]:
    """Return the name of a status, and what to do next, in one or two sentences."""
    return _WORDS[code]
