# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How many bytes a call had moved, for who reads that it was given up.

Counted is what whoever moved them has marked, in one attempt and wherever it was: a file that is
fetched and then read through for its digest counts twice. So it tells how far an attempt had come,
and is compared with nothing. A part of an upload counts once storage has taken it. An object that
goes in one request does not count: nobody knows how much of it had gone.
"""

from __future__ import annotations

from dataclasses import dataclass


__all__ = ["Moved"]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one attempt has moved so far; 0 also where nobody counts them.

    Args:
        written: To files on this node, or in a directory that it sees as one.
        sent: To a storage that has taken them.
        read: From files and from storage.
    """

    written: int = 0
    sent: int = 0
    read: int = 0

    def plus(self, *, written: int, sent: int, read: int) -> Moved:
        """Return it with more of each."""
        return Moved(self.written + written, self.sent + sent, self.read + read)

    def told(self) -> str:
        """Return it in words, without the kinds of which there are none; empty for nothing."""
        kinds = {"written": self.written, "sent": self.sent, "read": self.read}
        return ", ".join(f"{count} bytes {kind}" for kind, count in kinds.items() if count)
