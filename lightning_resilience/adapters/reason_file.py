# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How a job has ended, in a file that schedulers and people read: a small JSON object.

Kubernetes shows what a container leaves in ``/dev/termination-log``, up to 4096 bytes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from lightning_resilience.core.evidence import without_credentials
from lightning_resilience.core.exit_codes import ExitCode, may_start_again, words_of
from lightning_resilience.core.quota import Ending


__all__ = ["KUBERNETES_LOG", "forget_reason", "leave_unstarted", "write_reason"]

KUBERNETES_LOG: Final = "/dev/termination-log"
_MOST_BYTES: Final = 4096
_SHARE: Final = 2
_KEYS: Final = frozenset({"code", "may_start_again", "run_id", "incarnation"})

_log = logging.getLogger(__name__)


def write_reason(path: str | None, ending: Ending, *, run_id: str) -> None:
    """Write why a job has ended. A file that cannot be written is no reason to end otherwise.

    Args:
        path: Where; None for Kubernetes' own file, where that exists.
        ending: How it has ended.
        run_id: Name of the run.
    """
    target = Path(KUBERNETES_LOG if path is None else path)
    if path is None and not target.exists():
        return
    data = _encoded(ending, ending.reason, run_id=run_id)
    reason = ending.reason
    while len(data) > _MOST_BYTES and reason:
        # Each turn halves the text, so there are a dozen at most.
        reason = reason[: len(reason) // _SHARE]
        data = _encoded(ending, f"{reason}…", run_id=run_id)
    try:
        target.write_bytes(data)
    except OSError as error:
        _log.warning("the reason of the end could not be written to %s: %s", target, error)


def forget_reason(path: str | None) -> None:
    """Empty the file, where it says how an earlier start of the launcher has ended.

    An agent that ends well writes nothing, and must not seem to have ended as another one did.
    What is not ours is left as it is.

    Args:
        path: As for ``write_reason``.
    """
    target = Path(KUBERNETES_LOG if path is None else path)
    try:
        if target.is_file() and _is_ours(target.read_bytes()):
            # Emptied and not removed: Kubernetes has mounted it.
            target.write_bytes(b"")
    except OSError as error:
        _log.warning("what an earlier start has written to %s stays there: %s", target, error)


def leave_unstarted(error: Exception, path: object, *, run_id: str) -> NoReturn:
    """Leave because an option is wrong: nothing was started, and nobody waits for this agent.

    Args:
        error: What is wrong with it.
        path: As for ``write_reason``, unchecked.
        run_id: Name of the run.

    Raises:
        SystemExit: 64.
    """
    _log.error("%s", error)
    target = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    write_reason(target or None, Ending(code=ExitCode.USAGE, reason=str(error)), run_id=run_id)
    raise SystemExit(int(ExitCode.USAGE)) from error


def _is_ours(data: bytes) -> bool:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return False
    return isinstance(found, dict) and _KEYS.issubset(found)


def _encoded(ending: Ending, reason: str, *, run_id: str) -> bytes:
    code = ExitCode(ending.code)
    name, next_ = words_of(code)
    content = {
        "code": ending.code,
        "name": name,
        "may_start_again": may_start_again(code),
        "reason": without_credentials(reason),
        "next": next_,
        "run_id": run_id,
        "incarnation": ending.incarnation,
    }
    return msgspec.json.encode(content) + b"\n"
