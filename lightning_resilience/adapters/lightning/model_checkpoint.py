# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks on checkpoint callbacks: joint questions to storage, and bookkeeping that stays true.

``ModelCheckpoint`` asks storage on rank 0 and then enters a collective, in which the other ranks
already wait: while rank 0 waits out an outage, their process-group timeout runs. So each such
question is answered jointly *before* the collective, and the collective is left out, because all
ranks have the answer.

=============================  ====================================================================
hook                           why
=============================  ====================================================================
``setup``                      lists the directory on rank 0; a barrier follows. Then the directory
                               is tried (``preflight``)
``file_exists``                asks rank 0's storage, then reduces over all ranks
``_link_checkpoint``           links on rank 0, then a barrier; the old link is there until then,
                               and until the file is written
``_save_topk_checkpoint``      writes down the new best path *before* it is saved: put back when
``_save_last_checkpoint``      the save fails; whether training goes on then, ``tolerance`` says
``on_exception``               a failure of this save must not hide the exception that led to it;
                               where ranks have left, rank 0 saves alone, without a collective
=============================  ====================================================================
"""

from __future__ import annotations

import logging
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.lightning.failing import add_note
from lightning_resilience.adapters.lightning.flushing import Flushing
from lightning_resilience.adapters.lightning.namespaces import (
    BOOKKEEPING,
    LIST_DIRECTORY,
    checkpoint_callbacks,
    checkpoint_directories,
    is_model_checkpoint,
    saves_on_exception,
    sigterm_exception,
)
from lightning_resilience.adapters.lightning.patches import Patches
from lightning_resilience.adapters.lightning.preflight import Preflight
from lightning_resilience.adapters.lightning.shelf import Link
from lightning_resilience.adapters.lightning.tolerance import Tolerance
from lightning_resilience.adapters.lightning.work import Asked
from lightning_resilience.adapters.manifests import remove_manifest
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.pipeline import Step, carry_out, linking
from lightning_resilience.core.store_loss import told_names
from lightning_resilience.errors import JointError, PeerFailedError, ResilienceError


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.adapters.lightning.failing import Failing
    from lightning_resilience.adapters.lightning.session import Session
    from lightning_resilience.ports import CancelToken


__all__ = ["hook_checkpoint_callbacks"]

_log = logging.getLogger(__name__)


def hook_checkpoint_callbacks(trainer: Any, session: Session, patches: Patches) -> None:
    """Replace the methods of the Trainer's checkpoint callbacks on the instances.

    Args:
        trainer: The Trainer; its checkpoint callbacks have not been set up yet.
        session: This rank's session.
        patches: Remembers what was replaced.
    """
    session.alone.retaining.directories = partial(checkpoint_directories, trainer)
    if session.member.on_outage == "spool":
        session.flushing = Flushing(trainer, session, patches)
    tolerance = Tolerance(trainer, session, patches)
    preflight = Preflight(trainer, session)
    for number, callback in enumerate(checkpoint_callbacks(trainer)):
        patches.replace(
            callback,
            "on_exception",
            partial(_on_exception, callback, callback.on_exception, session),
        )
        if not is_model_checkpoint(callback):
            continue
        look = partial(_look, callback, session, patches, preflight=preflight)
        patches.replace(callback, "setup", partial(_set_up, callback, callback.setup, look))
        patches.replace(callback, "file_exists", partial(_file_exists, session))
        patches.replace(
            callback, "_link_checkpoint", partial(_link, type(callback)._link_checkpoint, session)
        )
        for name in ("_save_topk_checkpoint", "_save_last_checkpoint"):
            inner = getattr(callback, name)
            save = partial(_keep_books, callback, inner, session)
            attempt = partial(tolerance.attempt, f"{number}{name}", save)
            patches.replace(callback, name, attempt)


def _set_up(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    callback: Any,
    inner: Callable[..., None],
    look: Callable[..., None],
    trainer: Any,
    pl_module: Any,
    stage: str,
) -> None:
    # The listing is held back until all ranks are there to wait for it together.
    listed: list[Any] = []
    chosen = callback.dirpath
    before = vars(callback).get(LIST_DIRECTORY)
    setattr(callback, LIST_DIRECTORY, listed.append)
    try:
        inner(trainer, pl_module, stage=stage)
    finally:
        vars(callback).pop(LIST_DIRECTORY, None)
        if before is not None:
            setattr(callback, LIST_DIRECTORY, before)
    if stage == "fit":
        look(chosen=chosen)


def _look(
    callback: Any, session: Session, patches: Patches, *, preflight: Preflight, chosen: Any
) -> None:
    preflight.warn_where_it_moves(chosen, callback.dirpath)
    answers = True
    if callback.save_top_k != 0 or session.member.on_outage == "spool":
        answers = _list(callback, session, patches, preflight=preflight)
    if answers:
        # Else it would be waited for a second time.
        preflight.check(callback)


def _list(callback: Any, session: Session, patches: Patches, *, preflight: Preflight) -> bool:
    """List the directory; return whether its storage has answered."""
    directory = os.fspath(callback.dirpath)
    made: list[Any] = []

    def work(token: CancelToken) -> str:
        token.raise_if_cancelled()
        # What is left for it afterwards are calls of rank 0 alone, such as to_yaml. It is made
        # here, because making a client may ask the storage.
        made[:] = [session.alone.guarded_filesystem(directory)]
        before = callback._fs
        callback._fs = session.storage.place(directory).fs
        try:
            if callback.save_top_k != 0:
                getattr(callback, LIST_DIRECTORY)(directory)
        finally:
            callback._fs = before
        return _names_in(session, directory, token)

    try:
        # With the slash it is a folder, and a probe asks for it and not for what is above it.
        url = f"{directory.rstrip('/')}/"
        told = session.on_rank_zero("list", url, work, kind="read", retry=preflight.policy).detail
        _note_names(session, directory, told)
        if made:
            patches.replace(callback, "_fs", made[0])
    except JointError as error:
        if error.outcome != FailureClass.PERMANENT.value:
            if preflight.survives(error, directory):
                return False
            raise
        # It serves a warning about a directory that is not empty, and roles that may write but not
        # list are common; the verdict is shared, so all ranks go on.
        _log.warning(
            "%s could not be listed, so whether it is empty is unknown: %s", directory, error
        )
    return True


def _names_in(session: Session, directory: str, token: CancelToken) -> str:
    if session.alone.spooling is None:
        return ""
    # While storage is ill, this is what says whether a name is taken; and on every rank, while the
    # shared store is gone.
    names = session.storage.names_in(directory, token)
    return told_names(session.alone.spooling.seen(directory, names))


def _note_names(session: Session, directory: str, told: str) -> None:
    if session.flushing is not None:
        session.flushing.storeless.listed(directory, told)


def _file_exists(session: Session, filepath: str | os.PathLike[str], trainer: Any) -> bool:
    del trainer  # the session knows who is who
    return session.exists(os.fspath(filepath))


def _link(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    inner: Callable[..., None], session: Session, trainer: Any, filepath: str, linkpath: str
) -> None:
    del trainer
    if os.path.abspath(filepath) == os.path.abspath(linkpath):  # noqa: PTH100 - as Lightning does
        return
    # The barrier after the link is what the other ranks would be waiting in.
    alone = SimpleNamespace(
        is_global_zero=True, strategy=SimpleNamespace(barrier=lambda *_args: None)
    )

    def link(token: CancelToken) -> None:
        place = session.storage.place(linkpath)

        def make(_: object) -> None:
            with place.store.landing(place.path, token) as landing:
                landing.send()
                _link_at_once(partial(inner, alone, filepath), Path(linkpath))

        unmark = partial(remove_manifest, place, token)
        hands = {Step.UNMARK: lambda _: unmark(), Step.LINK: make}
        session.alone.retaining.linking(linkpath, filepath)
        carry_out(linking(), hands)
        session.alone.retaining.linked(linkpath, filepath)

    background = session.background
    if background is None:
        _link_when_it_is_there(session, linkpath, Link(target=filepath, make=link))
        return
    # A link to what is not written yet would name nothing, and the one before is gone.
    make = _linking(session, Link(target=filepath, make=link))
    work = Asked(session.storage, linkpath, make["work"], instead=make["instead"])
    session.on_rank_zero(
        "link", linkpath, partial(background.link, filepath, work), is_guarded=False
    )


def _link_when_it_is_there(session: Session, linkpath: str, link: Link) -> None:
    # To what still waits on this node a link would point to nothing.
    session.on_rank_zero("link", linkpath, kind="write", **_linking(session, link))


def _linking(session: Session, link: Link) -> dict[str, Any]:
    spooling = session.alone.spooling
    if spooling is None:
        return {"work": link.make, "instead": None}
    return {
        "work": partial(spooling.link_or_later, link),
        "instead": partial(spooling.link_later, link),
    }


def _link_at_once(link_as: Callable[[str], None], linkpath: Path) -> None:
    # Lightning removes the old link first, which then is missing where the new one fails.
    made = linkpath.with_name(f"{linkpath.name}.link")
    try:
        link_as(os.fspath(made))
        if linkpath.is_dir() and not linkpath.is_symlink():
            shutil.rmtree(linkpath)
        made.replace(linkpath)
    finally:
        made.unlink(missing_ok=True)


def _keep_books(
    callback: Any, inner: Callable[..., None], session: Session, *args: Any, **kwargs: Any
) -> None:
    operations = session.operations
    books = vars(callback)
    before = {
        name: dict(books[name]) if isinstance(books[name], dict) else books[name]
        for name in BOOKKEEPING
        if name in books
    }
    session.is_saving = True
    try:
        inner(*args, **kwargs)
    except BaseException:
        for name in BOOKKEEPING:
            books.pop(name, None)
        books.update(before)
        raise
    finally:
        session.is_saving = False
    # Both conditions are the same on every rank, other than whether there is something to remove.
    if session.operations > operations and (callback.save_top_k > 0 or callback.save_last):
        session.clear_up(f"{os.fspath(callback.dirpath).rstrip('/')}/")


def _on_exception(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    callback: Any,
    inner: Callable[..., None],
    session: Session,
    trainer: Any,
    pl_module: Any,
    exception: BaseException,
) -> None:
    session.is_leaving = True
    if isinstance(exception, ResilienceError) and not isinstance(exception, PeerFailedError):
        add_note(
            exception, "No checkpoint was saved on this exception: the storage is what it is about."
        )
        return
    failing = session.failing
    if failing is not None and failing.leaves_alone:
        if trainer.is_global_zero and saves_on_exception(callback):
            inner = partial(_save_alone, inner, failing)
        else:
            return
    try:
        inner(trainer, pl_module, exception)
    except (Exception, sigterm_exception(trainer)) as error:  # noqa: BLE001 - the first one goes on
        add_note(exception, f"Saving a checkpoint on this exception failed as well: {error!r}")
        _log.warning("saving a checkpoint on an exception failed", exc_info=error)


def _save_alone(  # noqa: PLR0917 - a partial of ours, called with Lightning's arguments
    inner: Callable[..., None],
    failing: Failing,
    trainer: Any,
    pl_module: Any,
    exception: BaseException,
) -> None:
    why = failing.why_not_saved(trainer)
    if why:
        add_note(exception, f"No checkpoint was saved on this exception: {why}.")
        _log.warning("no checkpoint is saved on an exception: %s", why)
        return
    # The barrier after the save would wait for ranks that are not there.
    patches = Patches()
    patches.replace(trainer.strategy, "barrier", lambda *_args, **_options: None)
    try:
        inner(trainer, pl_module, exception)
    finally:
        patches.undo()
