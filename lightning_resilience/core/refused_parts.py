# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Does a refusal to begin an upload in parts say that there will never be one?

Some endpoints have no such uploads (emulators, zonal buckets), and some roles may write objects but
not these. A file can still be sent whole then. Whether even that is allowed is not asked here:
whoever sends it whole is told. Of other failures the next attempt may know nothing.
"""

from __future__ import annotations

from typing import Final

from lightning_resilience.core.evidence import is_bare_refusal, statuses


__all__ = ["refuses_parts"]

_REFUSALS: Final = frozenset({400, 403, 404, 405, 501})
# What gcsfs makes of a status whose text has the word "invalid" in it.
_BAD_REQUEST: Final = "Bad Request: "


def refuses_parts(error: BaseException) -> bool:
    """Tell whether a file should rather be sent whole, now and later.

    Args:
        error: What the request that begins an upload in parts has raised.
    """
    if isinstance(error, FileNotFoundError) or is_bare_refusal(error):
        return True
    if isinstance(error, ValueError) and str(error).startswith(_BAD_REQUEST):
        return True
    return any(status in _REFUSALS for status in statuses(error))
