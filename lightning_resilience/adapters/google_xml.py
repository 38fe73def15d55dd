# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Google's XML protocol, which knows uploads in parts, spoken through gcsfs.

gcsfs speaks the other one, in JSON, which has none. Its own request method adds the credentials and
the user's settings, and can be cancelled; it takes whole URLs. Who pays is a parameter in JSON and
a header in XML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from xml.etree import ElementTree as ET

from lightning_resilience.core.evidence import redacted


if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsspec import AbstractFileSystem


__all__ = ["BINARY", "GoogleAnswerError", "ask", "parsed", "text_of"]

BINARY: Final = "application/octet-stream"
"""The type of a checkpoint's content."""


class GoogleAnswerError(OSError):
    """An error that came with the status of a success.

    Args:
        code: The storage's own word for it.
        text: What it says.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.error_code = code


async def ask(
    fs: AbstractFileSystem,
    method: str,
    where: tuple[str, str],
    *,
    flag: str = "",
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    **parameters: Any,
) -> tuple[Mapping[str, str], bytes]:
    """Make one request.

    Args:
        fs: The client, a ``gcsfs.GCSFileSystem``.
        method: ``PUT`` and the like.
        where: Bucket and key; without a key it is about the bucket.
        flag: A parameter without a value.
        headers: What the request says of itself.
        body: What it brings.
        parameters: What comes after the question mark.

    Returns:
        Headers and content of the answer.

    Raises:
        OSError: What gcsfs has made of the answer.
    """
    bucket, key = where
    # Slashes too: what looks like a relative path would be resolved on the way.
    names = "/".join(quote(name, safe="") for name in (bucket, key) if name)
    url = f"{fs._location}/{names}{f'?{flag}' if flag else ''}"  # noqa: SLF001 - gcsfs has no public name for it
    said = {**_payer(fs), **(headers or {})}
    call = fs._call  # noqa: SLF001 - the one that can be cancelled
    answer: tuple[Mapping[str, str], bytes] = await call(
        method, url, headers=said, data=body, **parameters
    )
    return answer


def parsed(content: bytes) -> ET.Element | None:
    """Return what an answer says, None where that is no XML.

    Raises:
        GoogleAnswerError: It says that there was an error, whatever its status.
    """
    try:
        root = ET.fromstring(content)  # noqa: S314 - from the storage that is trusted with checkpoints
    except ET.ParseError:
        return None
    if root.tag.rpartition("}")[2] == "Error":
        raise GoogleAnswerError(text_of(root, "Code"), redacted(text_of(root, "Message")))
    return root


def text_of(element: ET.Element | None, name: str) -> str:
    """Return the text of a child, by its name in any namespace; empty where there is none."""
    found = None if element is None else element.find(f"{{*}}{name}")
    return "" if found is None else (found.text or "")


def _payer(fs: AbstractFileSystem) -> dict[str, str]:
    payer = fs.requester_pays
    if not payer:
        return {}
    return {"x-goog-user-project": payer if isinstance(payer, str) else str(fs.project)}
