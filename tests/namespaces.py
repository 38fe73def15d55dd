# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a cable between them that a test may cut; by ``iproute2``."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from collections.abc import Iterator


VARIABLE = "TEST_NAMESPACE"
_NETWORK = 0x40000000


def enter(name: str | None = None) -> None:
    """Let the calling thread, and what it starts, be in a namespace; the environment names it."""
    path = Path("/run/netns", name or os.environ[VARIABLE])
    with path.open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"{path} could not be entered")


class Cable:
    """What connects two namespaces.

    Args:
        names: Of the namespaces.
        addresses: Of the two ends.
    """

    def __init__(self, names: tuple[str, str], addresses: tuple[str, str]) -> None:
        self.names = names
        self.addresses = addresses

    def lay(self) -> None:
        """Make the namespaces and connect them."""
        one, other = self.names
        for name in self.names:
            ip("netns", "add", name)
        ends = (f"{one}-end", f"{other}-end")
        ip("link", "add", ends[0], "netns", one, "type", "veth", "peer", ends[1], "netns", other)
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Let nothing through."""
        ip("-n", self.names[0], "link", "set", f"{self.names[0]}-end", "down")

    def mend(self) -> None:
        """Let everything through again."""
        ip("-n", self.names[0], "link", "set", f"{self.names[0]}-end", "up")

    def remove(self) -> None:
        """Remove the namespaces, and the cable with them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    """Call iproute2's program."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Two connected namespaces; the test is skipped where none can be made."""
    number = os.getpid()
    made = Cable((f"a{number}", f"b{number}"), ("10.199.7.1", "10.199.7.2"))
    try:
        made.lay()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        said = getattr(error, "stderr", "") or error
        pytest.skip(f"no network namespaces here (iproute2, and the right to make them): {said}")
    yield made
    made.remove()
