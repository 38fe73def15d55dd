# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What carries out the steps of ``core.pipeline`` in a simulated storage, request by request.

A filesystem renames, also a directory; object storage puts one file after the other. Each request
goes the shipped way: it waits for earlier ones about its name, says that it is sent, and asks
whether it was abandoned.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_resilience.core.manifest import manifest_path
from lightning_resilience.core.pipeline import Sent, Step, publication
from lightning_resilience.core.set_aside import aside_path, note_path
from lightning_resilience.core.shards import METADATA_NAMES, metadata_of
from lightning_resilience.drill.save_attempt import Kind, Op, question, sending
from lightning_resilience.drill.save_looks import contents_of, manifest_blob, parts_of
from lightning_resilience.drill.save_storage import Blob, below
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from itertools import count

    from lightning_resilience.core.pipeline import Steps
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.drill.save_attempt import Attempt, Hand, Ops
    from lightning_resilience.drill.save_looks import Looks
    from lightning_resilience.drill.save_storage import SaveStorage


__all__ = ["Hands"]

_LOOKS_COMPLETE = frozenset({*METADATA_NAMES, "index"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """The hands of one attempt about one checkpoint.

    Args:
        attempt: The attempt.
        looks: Who looks at the storage.
        path: The checkpoint.
        number: Its training steps, where it is written.
        renames: Whether the storage is a filesystem.
        target: Where its files go until they have the checkpoint's name; empty for ``path``.
        staged: Makes names on the node, or beside the target.
        given: What is to be published as a tree, the latest last.
    """

    attempt: Attempt
    looks: Looks
    path: str
    number: int = 0
    renames: bool = True
    target: str = ""
    staged: count[int]
    given: list[str] = field(default_factory=list)

    # Steps ----------------------------------------------------------------------------------------

    def of_a_save(self) -> dict[Step, Hand]:
        """Return what saves."""
        return {
            Step.ASK: self._ask,
            Step.STAGE: self._stage,
            Step.DISCARD: self._discard,
            Step.UNMARK: self._unmark,
            Step.CLEAR: lambda _: self._remove_all(self._goal),
            Step.PUBLISH: self._publish,
            Step.VERIFY: question("ask for the size", self._verify),
            Step.MARK: self._mark,
        }

    def of_an_assembly(self) -> dict[Step, Hand]:
        """Return what makes a checkpoint of shards."""
        return {
            **self.of_a_save(),
            Step.VERIFY: question("list the shards", lambda _: self._verify_shards()),
            Step.PUBLISH: lambda _: self._publish_metadata(),
            Step.STAMP: question("look at it", lambda _: self._storage.identity(self._goal)),
            Step.IS_THERE: question(
                "look whether it was renamed",
                lambda stamp: self._storage.identity(self.path) == stamp,
            ),
            Step.MOVE: lambda stamp: self._rename(self._goal, self.path, stamp=stamp),
            Step.DISCARD: self._nothing,
        }

    def of_a_removal(self) -> dict[Step, Hand]:
        """Return what removes."""
        return {
            Step.ASK: self._ask,
            Step.NAMES: question("list it", lambda _: self._names()),
            Step.UNMARK: self._unmark,
            Step.REMOVE_FILE: lambda name: self._remove_file(below(self.path, name)),
            Step.REMOVE: lambda _: self._remove_all(self.path),
            Step.TIDY: self._nothing,
        }

    def of_a_link(self, to: str, linked: Callable[[], object]) -> dict[Step, Hand]:
        """Return what links.

        Args:
            to: What the link points to.
            linked: Called once it does.
        """

        def link(_: object) -> Ops:
            effect = partial(self._storage.link, self.path, to)
            yield from sending(self.attempt, self.path, lambda: [effect], what=f"link {self.path}")
            linked()

        return {Step.UNMARK: self._unmark, Step.LINK: link}

    def of_a_move_aside(self, damaged: Inspection) -> dict[Step, Hand]:
        """Return what sets a damaged checkpoint aside."""
        aside = aside_path(self.path, damaged.mark)
        return {
            Step.ASK: self._ask,
            Step.IS_THERE: question("look", lambda _: bool(self._storage.tree(self.path))),
            Step.IS_SAME: question(
                "identify it", lambda _: self.looks.identify(self.path) == damaged.mark
            ),
            Step.IS_ASIDE: question("look aside", lambda _: bool(self._storage.tree(aside))),
            Step.NOTE: lambda _: self._put(note_path(aside), Blob(data=b"{}", size_bytes=2)),
            Step.MOVE: lambda _: self._rename(self.path, aside),
            Step.NAMES: question("list it", lambda _: list(self._storage.tree(self.path))),
            Step.COPY: lambda name: self._copy(below(self.path, name), below(aside, name)),
            Step.REMOVE_FILE: lambda name: self._remove_file(below(self.path, name)),
            Step.TIDY: self._nothing,
            Step.UNMARK: self._unmark,
        }

    # Requests -------------------------------------------------------------------------------------

    @property
    def _storage(self) -> SaveStorage:
        return self.looks.storage

    @property
    def _goal(self) -> str:
        return self.target or self.path

    def _ask(self, _: object) -> Ops:
        yield Op(kind=Kind.ASK, what="ask whether it was abandoned", run=self.attempt.ask)

    def _nothing(self, _: object) -> Ops:
        yield from ()

    def _put(self, path: str, blob: Blob, *, may_be_dropped: bool = False) -> Ops:
        effect = partial(self._storage.put, path, blob)
        return sending(
            self.attempt,
            path,
            lambda: [effect],
            what=f"write {path}",
            may_be_dropped=may_be_dropped,
        )

    def _rename(self, source: str, target: str, *, stamp: int | None = None) -> Ops:
        def effect() -> None:
            if stamp is not None and self._storage.identity(source) != stamp:
                message = f"{source} is not what was verified"
                raise CheckpointError(message)
            self._storage.rename(source, target)

        return sending(self.attempt, target, lambda: [effect], what=f"rename {source} to {target}")

    def _remove_file(self, path: str) -> Ops:
        effect = partial(self._storage.remove, path)
        return sending(self.attempt, path, lambda: [effect], what=f"remove {path}", is_removal=True)

    def _remove_all(self, path: str) -> Ops:
        # A request, or a system call, for each file: what is half removed is seen. Nobody promises
        # an order; in this one, what makes it look complete goes last.
        def effects() -> list[Callable[[], object]]:
            names = sorted(self._storage.tree(path), key=_LOOKS_COMPLETE.__contains__)
            paths = [below(path, name) for name in names] or [path]
            return [partial(self._storage.remove, each) for each in paths]

        return sending(self.attempt, path, effects, what=f"remove {path}", is_removal=True)

    def _copy(self, source: str, target: str) -> Ops:
        yield from self._put(target, self._storage.files[source])

    # What steps are made of -----------------------------------------------------------------------

    def _names(self) -> list[str] | None:
        tree = self._storage.tree(self.path)
        if not tree and self.path not in self._storage.links:
            return None
        return [name for name in tree if name]

    def _stage(self, _: object) -> Ops:
        name = f"staged/{next(self.staged)}"

        def stage() -> str:
            if self.renames:
                for part, blob in parts_of(self.looks.form, self.number).items():
                    now = self._storage.effects + 1
                    self._storage.files[below(name, part)] = replace(blob, modified=now)
            return name

        staged: str = yield Op(kind=Kind.NODE, what="stage", run=stage)
        # Whoever was abandoned meanwhile is told by the stage itself.
        self.attempt.ask()
        return staged

    def _discard(self, staged: str) -> Ops:
        for part in parts_of(self.looks.form, self.number):
            self._storage.files.pop(below(staged, part), None)
        yield from ()

    def _unmark(self, _: object) -> Ops:
        yield from self._ask(None)
        yield from self._remove_file(manifest_path(self.path))

    def _publish(self, of: str) -> Ops:
        parts = parts_of(self.looks.form, self.number)
        if self.renames and of not in parts.keys() - {""}:
            yield from self._rename(of or self.given[-1], self.path)
            return
        name = of if of in parts else ""
        may_be_dropped = not self.renames
        yield from self._put(below(self._goal, name), parts[name], may_be_dropped=may_be_dropped)

    def publication(self, sent: Sent) -> Callable[[str], Steps[object]]:
        """Return the steps that publish a staged tree.

        Args:
            sent: What earlier attempts have sent of it.
        """

        def steps(staged: str) -> Steps[object]:
            self.given.append(staged)
            return publication(sent, list(self._contents), renames=self.renames)

        return steps

    @property
    def _contents(self) -> dict[str, tuple[int, str]]:
        return contents_of(self.looks.form, self.number)

    def _publish_metadata(self) -> Ops:
        parts = parts_of(self.looks.form, self.number)
        for name in metadata_of_parts(parts):
            path = below(self._goal, name)
            yield from self._put(path, parts[name], may_be_dropped=True)
            yield Op(
                kind=Kind.QUESTION,
                what="ask for the size",
                run=partial(self._check_size, path, parts[name].size_bytes),
            )

    def _verify(self, of: str) -> None:
        contents = contents_of(self.looks.form, self.number)
        name = of if of in contents else ""
        self._check_size(below(self._goal, name), contents[name][0])

    def _verify_shards(self) -> None:
        contents = contents_of(self.looks.form, self.number)
        for name in set(contents) - set(metadata_of_parts(contents)):
            self._check_size(below(self._goal, name), contents[name][0])

    def _check_size(self, path: str, size_bytes: int) -> None:
        found = self._storage.files.get(path)
        if found is None or found.size_bytes != size_bytes:
            message = f"{path} is not there as it was written"
            raise CheckpointError(message)

    def _mark(self, _: object) -> Ops:
        yield from self._ask(None)
        contents = contents_of(self.looks.form, self.number)
        blob = manifest_blob(self.path, contents, self.number)
        path = manifest_path(self.path)
        yield from self._put(path, blob, may_be_dropped=not self.renames)
        yield Op(
            kind=Kind.QUESTION,
            what="ask for the manifest's size",
            run=partial(self._check_size, path, blob.size_bytes),
        )


def metadata_of_parts(names: Iterable[str]) -> list[str]:
    """Return which files are metadata, in the order in which they may appear."""
    return list(metadata_of(dict.fromkeys(names, 0)))
