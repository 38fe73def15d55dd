# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Attributes are replaced on one object, and put back as they were."""

from __future__ import annotations

from typing import Any

from lightning_resilience.adapters.lightning.patches import Patches


class Owner:
    """Has a method to replace."""

    def greet(self) -> str:
        """Say who speaks."""
        return "class"


def test_a_method_of_the_class_is_the_classes_again() -> None:
    """What was not on the instance is not on it afterwards."""
    owner, patches = Owner(), Patches()
    patches.replace(owner, "greet", lambda: "ours")
    during = owner.greet()

    patches.undo()

    assert (during, owner.greet(), vars(owner)) == ("ours", "class", {})


def test_what_was_on_the_instance_is_on_it_again() -> None:
    """A method that somebody had set on the instance comes back, the very same object."""
    owner, patches = Owner(), Patches()
    theirs = lambda: "theirs"  # noqa: E731 - compared by identity
    vars(owner)["greet"] = theirs
    patches.replace(owner, "greet", lambda: "ours")

    patches.undo()

    assert vars(owner)["greet"] is theirs


class Asked(Owner):
    """Fails where somebody looks at the dictionary of an instance."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override] # what is looked for
        """Fail."""
        message = "looked at"
        raise AssertionError(message)


def test_a_method_is_replaced_without_a_look_at_the_instances_dictionary() -> None:
    """CPython up to 3.12 makes it for that look, and all that the instance does is slower then."""
    owner, patches = Asked(), Patches()

    patches.replace(owner, "greet", lambda: "first")
    patches.replace(owner, "greet", lambda: "ours")
    during = owner.greet()
    patches.undo()

    assert (during, owner.greet()) == ("ours", "class")


def test_other_instances_see_nothing() -> None:
    """Only the instance is touched, never its class."""
    owner, other, patches = Owner(), Owner(), Patches()

    patches.replace(owner, "greet", lambda: "ours")

    assert other.greet() == "class"


def test_a_name_replaced_twice_is_what_it_was_at_first() -> None:
    """They are put back in the reverse order."""
    owner, patches = Owner(), Patches()
    patches.replace(owner, "greet", lambda: "first")
    patches.replace(owner, "greet", lambda: "second")

    patches.undo()

    assert vars(owner) == {}


def test_undoing_twice_changes_nothing() -> None:
    """What somebody sets after the first time stays."""
    owner, patches = Owner(), Patches()
    patches.replace(owner, "greet", lambda: "ours")
    patches.undo()
    vars(owner)["greet"] = lambda: "later"

    patches.undo()

    assert owner.greet() == "later"


def test_an_attribute_that_was_removed_meanwhile_is_no_error() -> None:
    """Somebody else's clean-up may have come first."""
    owner, patches = Owner(), Patches()
    patches.replace(owner, "greet", lambda: "ours")
    del vars(owner)["greet"]

    patches.undo()

    assert owner.greet() == "class"
