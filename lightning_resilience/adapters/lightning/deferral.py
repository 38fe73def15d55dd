# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Put off the choice of the checkpoint to start from until all ranks can make it together.

Lightning chooses ``"last"`` and ``"hpc"`` before any hook of a callback runs and before the process
group exists, by a search of each rank's own. So three methods of its checkpoint connector are
wrapped **on the class**, once for each distribution and process. Two choose: they return a marker
in place of a path that would have to be searched for, and note it. The third runs after ``setup``,
in which rank 0 has told the others what it was asked for, and has that resolved. All pass straight
on for every Trainer without a callback that covers it, and they stay when a run ends.

They are installed when a callback is made or unpickled: a spawned process makes none.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.flushing import publish_what_was_left
from lightning_resilience.adapters.lightning.namespaces import (
    checkpoint_connectors,
    is_fitting,
    on_slurm,
    resumes_exceptions,
)
from lightning_resilience.adapters.lightning.resolving import choose, share
from lightning_resilience.core.doubts import MAX_STARTS, Doubts
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.resolution import Search, searches
from lightning_resilience.errors import JointError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.core.resolution import Inspection


__all__ = ["Deferred", "defer"]

_log = logging.getLogger(__name__)

_parses: dict[type, Callable[..., Any]] = {}
"""What the connectors' own methods were."""


class Deferred(str):
    """Stands for the path of a checkpoint that has yet to be searched for.

    A string that is not empty, since Lightning asks it whether there is something to load.
    """

    __slots__ = ("asked", "options", "state_fn")

    asked: str | None
    """The user's ``ckpt_path``."""
    state_fn: Any
    options: dict[str, Any]

    @classmethod
    def of(cls, state_fn: Any, asked: str | None, options: dict[str, Any]) -> Deferred:
        """Make one from the arguments with which Lightning asked for a path."""
        marker = cls(asked or "default")
        marker.state_fn, marker.asked, marker.options = state_fn, asked, options
        return marker


def defer(callback_of: Callable[[Any], Any]) -> None:
    """Wrap the connectors of the distributions in use. Idempotent.

    Args:
        callback_of: The callback that covers a Trainer; None without one that is switched on.

    Note:
        Any thread that makes callbacks.
    """
    for connector in checkpoint_connectors():
        if connector not in _parses:
            _wrap_choice(connector, callback_of)
            _wrap_resume(connector, callback_of)


def _wrap_choice(connector: Any, callback_of: Callable[[Any], Any]) -> None:
    parse, select = connector._parse_ckpt_path, connector._select_ckpt_path

    @functools.wraps(parse)
    def parse_or_defer(self: Any, state_fn: Any, ckpt_path: Any, **options: Any) -> Any:
        if callback_of(self.trainer) is not None and _searches(self.trainer, ckpt_path):
            return Deferred.of(state_fn, ckpt_path, options)
        return parse(self, state_fn, ckpt_path, **options)

    @functools.wraps(select)
    def select_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = select(self, *args, **kwargs)
        callback = callback_of(self.trainer)
        if callback is not None:
            callback._asked = asked
        return asked

    connector._parse_ckpt_path, connector._select_ckpt_path = parse_or_defer, select_and_note
    _parses[connector] = parse


def _wrap_resume(connector: Any, callback_of: Callable[[Any], Any]) -> None:
    resume = connector.resume_start

    @functools.wraps(resume)
    def resume_together(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        callback = callback_of(self.trainer)
        parse = functools.partial(_parses[connector], self)
        if callback is None or callback._session is None:
            resume(self, _alone(checkpoint_path, parse), *args, **kwargs)
            return
        session = callback._session
        if checkpoint_path is callback._asked:
            checkpoint_path = _of_rank_zero(session, checkpoint_path)
        if is_fitting(self.trainer) and session.member.on_outage == "spool":
            publish_what_was_left(self.trainer, session, checkpoint_path)
        choice = _Choice(
            trainer=self.trainer, session=session, parse=parse, doubts=Doubts(), passed=[]
        )
        for _ in range(MAX_STARTS):
            if choice.starts(checkpoint_path, lambda path: resume(self, path, *args, **kwargs)):
                break

    connector.resume_start = resume_together


def _of_rank_zero(session: Session, own: Any) -> Any:
    """Return what rank 0 was asked to start from; ``own`` where that is the same."""
    asked = session.asked
    if asked == own:
        return own
    _log.warning(
        "rank %d was given ckpt_path=%s and rank 0 %s: all ranks start from what rank 0 was given. "
        "Give all ranks the same, and do not ask storage for it on each of them.",
        session.member.rank,
        None if own is None else redacted(os.fspath(own)),
        None if asked is None else redacted(os.fspath(asked)),
    )
    return asked


def _searches(trainer: Any, asked: Any) -> tuple[Search, ...]:
    return searches(
        asked, on_slurm=on_slurm(trainer), resumes_exceptions=resumes_exceptions(trainer)
    )


def _alone(path: Any, parse: Callable[..., Any]) -> Any:
    # A strategy that is not covered: Lightning searches, as it would have done before.
    if isinstance(path, Deferred):
        return parse(path.state_fn, path.asked, **path.options)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Where one run starts from, as all ranks choose it."""

    trainer: Any
    session: Session
    parse: Callable[..., Any]
    doubts: Doubts
    passed: list[Inspection]

    def starts(self, asked: Any, resume: Callable[[Any], None]) -> bool:
        """Load what all ranks choose; return False where all of them have to search again."""
        path, seen = self.of(asked)
        if path:
            self.session.alone.retaining.start_from(path)
        self.session.chosen = seen
        try:
            resume(path)
        except JointError as error:
            is_found = isinstance(asked, Deferred) and seen is not None
            if not self.doubts.adds(path if is_found else "", error):
                raise
            _log.warning("%s", error)
            return False
        finally:
            self.session.chosen = None
        return True

    def of(self, path: Any) -> tuple[Any, Inspection | None]:
        """Return what to load and what rank 0 has seen of it."""
        background = self.session.background
        if isinstance(path, Deferred):
            if background is not None:
                # Whatever is still on its way may be the one that is searched for.
                background.settle()
            seen, path = self._searched(path)
            if seen is not None:
                return seen.path, seen
        if not path:
            return None, None
        if background is not None:
            background.await_written(path)
        seen = share(self.trainer, self.session, path)
        # The user's own object where it says the same, since ``trainer.ckpt_path`` returns it.
        return (path if os.fspath(path) == seen.path else seen.path), seen

    def _searched(self, marker: Deferred) -> tuple[Inspection | None, Any]:
        is_overridden = False
        for what in _searches(self.trainer, marker.asked):
            if what is Search.DEFAULT:
                return None, self._default(marker)
            choice = choose(
                self.trainer, self.session, what, doubts=self.doubts, passed=self.passed
            )
            if choice.seen is not None:
                return choice.seen, None
            is_overridden = is_overridden or choice.is_overridden
        missing = "last checkpoint yet"
        if marker.asked == Search.HPC.value:
            missing = f"hpc_ckpt_<n>.ckpt in {self.trainer.default_root_dir} yet"
            if not is_overridden and not is_fitting(self.trainer):
                message = f'ckpt_path="hpc": there is no {missing}. Pass the path of a checkpoint.'
                raise ValueError(message)
        if self.trainer.is_global_zero:
            _log.warning(
                "ckpt_path=%r: there is no %s, so all ranks start from the beginning.",
                marker.asked,
                "checkpoint that can be loaded" if is_overridden else missing,
            )
        return None, None

    def _default(self, marker: Deferred) -> Any:
        if marker.options.get("model_provided"):
            return None
        return self.parse(marker.state_fn, "best", **marker.options)
