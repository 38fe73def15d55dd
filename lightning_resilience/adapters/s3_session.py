# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An HTTP session for aiobotocore that sends each request once.

Below botocore's retries is one more: aiohttp sends an idempotent request again when its connection
breaks, once, also on a connection that was not reused. During an outage of resets that doubles what
reaches the storage. Imported only where an ``s3://`` filesystem is made.
"""

from __future__ import annotations

import inspect
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession


__all__ = ["OneRequestSession", "session_options"]


class OneRequestSession(AIOHTTPSession):  # type: ignore[misc] # aiobotocore has no types
    """aiobotocore's session, without aiohttp's second try."""

    async def _get_session(self, proxy_url: str) -> Any:
        session = await super()._get_session(proxy_url)
        # aiohttp has no public name for it; an unknown attribute would do no harm.
        session._retry_connection = False  # noqa: SLF001 - see above
        return session


def session_options() -> dict[str, Any]:
    """Return the ``config_kwargs`` that select the session; none where aiobotocore is too old."""
    if "http_session_cls" not in inspect.signature(AioConfig.__init__).parameters:
        return {}
    return {"http_session_cls": OneRequestSession}
