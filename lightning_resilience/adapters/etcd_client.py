# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One connection to etcd's v2 API, with no more of it than a shared store needs.

Nothing here is repeated: whoever calls knows which request may be. Reads ask the whole cluster
(``quorum``), since a member that is behind would answer with what has been. A key is one name in
one directory, with whatever is unusual in it escaped, so any text can be a key and
``etcdctl ls`` still shows it. Values are base64, as the API takes text only, with a sign in front:
an empty text cannot be compared with.
"""

from __future__ import annotations

import base64
import enum
import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlencode

from lightning_resilience.errors import ConfigError, StoreUnavailableError


if TYPE_CHECKING:
    from lightning_resilience.core.store_address import EtcdAddress


__all__ = ["EtcdClient", "EtcdConnectionError", "Node", "Written"]

_KEYS: Final = "/v2/keys"
_MARK: Final = ":"
_FORM: Final = {"Content-Type": "application/x-www-form-urlencoded"}
_MISSING: Final = 100
_DIFFERS: Final = 101
_EXISTS: Final = 105
_EXPECTED: Final = frozenset({_MISSING, _DIFFERS, _EXISTS})
_CLEARED: Final = 401
"""The event index is outdated: etcd keeps the last thousand events of all keys."""
_NOT_FOUND: Final = 404
_FAILED: Final = 400


class EtcdConnectionError(RuntimeError):
    """The connection broke during a request, which may have been carried out."""


class Written(enum.Enum):
    """What has come of a write with a condition."""

    DONE = "done"
    DIFFERS = "differs"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One key as it was read.

    Args:
        value: Its value; None where there is no such key.
        index: When it was written last, in etcd's own count; 0 where there is no such key.
        seen_at: When it was read, in the same count.
    """

    value: bytes | None
    index: int
    seen_at: int


class EtcdClient:
    """A connection. One thread at a time, but for ``cut``.

    Args:
        address: Where, and which directory.
        timeout_s: Longest time for each answer, in seconds.

    Raises:
        OSError: Nobody listens, or no connection could be made in time.
        ConfigError: A file with a certificate cannot be read.
    """

    def __init__(self, address: EtcdAddress, *, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._connection = _connection(address, timeout_s)
        self._socket = self._opened()

    def __del__(self) -> None:
        # Whoever drops a client has dropped its connection; there is none where a file was missing.
        if hasattr(self, "_connection"):
            self.close()

    def read(self, key: str) -> Node:
        """Return a key's value, and when it was written."""
        answer = self._asked("GET", self._path(key), query={"quorum": "true"})
        if answer.error is not None:
            return Node(value=None, index=0, seen_at=answer.index)
        node = answer.body["node"]
        return Node(
            value=_decoded(node["value"]), index=node["modifiedIndex"], seen_at=answer.index
        )

    def read_all(self) -> dict[str, bytes]:
        """Return all keys of the directory with their values."""
        answer = self._asked("GET", self._path(), query={"quorum": "true"})
        nodes = [] if answer.error is not None else answer.body["node"].get("nodes", [])
        return {
            unquote(each["key"].rpartition("/")[2][1:]): _decoded(each["value"])
            for each in nodes
            if "value" in each
        }

    def write(self, key: str, value: bytes) -> None:
        """Write a key, whatever it was."""
        self._put(key, {"value": _encoded(value)})

    def create(self, key: str, value: bytes) -> Written:
        """Write a key that does not exist; ``DIFFERS`` where it does."""
        return self._put(key, {"value": _encoded(value), "prevExist": "false"})

    def replace(self, key: str, value: bytes, *, expected: bytes) -> Written:
        """Write a key whose value is ``expected``."""
        return self._put(key, {"value": _encoded(value), "prevValue": _encoded(expected)})

    def replace_at(self, key: str, value: bytes, *, index: int) -> Written:
        """Write a key that was written last at ``index``."""
        return self._put(key, {"value": _encoded(value), "prevIndex": str(index)})

    def delete(self, key: str) -> bool:
        """Delete a key; True if it existed."""
        return self._asked("DELETE", self._path(key)).error is None

    def wait(self, key: str, *, after: int, timeout_s: float) -> bool:
        """Block until something happens to a key.

        Args:
            key: The key.
            after: Count of etcd after which that may have been.
            timeout_s: Longest time, in seconds.

        Returns:
            Whether something has happened, or may have.
        """
        query = {"wait": "true", "waitIndex": str(after + 1)}
        try:
            self._asked("GET", self._path(key), query=query, timeout_s=timeout_s)
        except TimeoutError:
            return False
        return True

    def lease(self, keep_s: float) -> None:
        """Let the directory, with all that is in it, live for so long from now on.

        Args:
            keep_s: In whole seconds.
        """
        form = {"dir": "true", "ttl": f"{keep_s:.0f}"}
        path = self._path()
        renewed = self._asked("PUT", path, form={**form, "prevExist": "true", "refresh": "true"})
        if renewed.error is not None:
            # Whoever comes second here finds that the first one has done it.
            self._asked("PUT", path, form={**form, "prevExist": "false"})

    def cut(self) -> None:
        """End the request that is under way; it raises. Any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Already broken: then the request is failing by itself.
            return

    def close(self) -> None:
        """Let the connection go. Idempotent."""
        self._connection.close()

    def _opened(self) -> socket.socket:
        self._connection.connect()
        # Known to ``cut`` whatever becomes of the connection.
        opened: socket.socket = self._connection.sock
        return opened

    def _put(self, key: str, form: dict[str, str]) -> Written:
        error = self._asked("PUT", self._path(key), form=form).error
        if error is None:
            return Written.DONE
        return Written.MISSING if error == _MISSING else Written.DIFFERS

    def _path(self, key: str | None = None) -> str:
        directory = f"{_KEYS}{quote(self._address.directory)}"
        # A mark in front: etcd hides names with an underscore, and cleans away dots.
        return directory if key is None else f"{directory}/@{quote(quote(key, safe=''), safe='')}"

    def _asked(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        form: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> _Answer:
        target = f"{path}?{urlencode(query)}" if query else path
        body = None if form is None else urlencode(form)
        try:
            if self._connection.sock is None:
                self._socket = self._opened()
            self._socket.settimeout(self._timeout_s if timeout_s is None else timeout_s)
            self._connection.request(method, target, body=body, headers=_FORM if form else {})
            response = self._connection.getresponse()
            raw = response.read()
        except TimeoutError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            text = f"{type(error).__name__}: {error}"
            raise EtcdConnectionError(text) from error
        return _answer_of(response, raw, self._address)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What etcd has answered.

    Args:
        body: The answer.
        error: Its code, where a condition was not met or a key is missing; None where all is well.
        index: Count of etcd when it answered.
    """

    body: Any
    error: int | None
    index: int


def _answer_of(response: http.client.HTTPResponse, raw: bytes, address: EtcdAddress) -> _Answer:
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _no_api(response.status, raw, address)
    index = int(response.headers.get("X-Etcd-Index") or 0)
    if response.status < _FAILED:
        return _Answer(body=body, error=None, index=index)
    code = body.get("errorCode")
    if code == _CLEARED or code in _EXPECTED:
        return _Answer(body=body, error=code, index=index)
    text = (
        f"etcd at {address.place} answered {response.status}: {body.get('message')} "
        f"({body.get('cause')})"
    )
    raise StoreUnavailableError(text)


def _no_api(status: int, raw: bytes, address: EtcdAddress) -> Exception:
    shown = raw[:80].decode("utf-8", "replace").strip()
    text = f"what listens at {address.place} answered {status} {shown!r}, not as etcd's v2 API"
    if status == _NOT_FOUND:
        return ConfigError(
            f"{text}: start etcd with --enable-v2, which versions up to 3.5 have. Or use inner=c10d"
        )
    return StoreUnavailableError(text)


def _connection(address: EtcdAddress, timeout_s: float) -> http.client.HTTPConnection:
    if not address.is_secure:
        return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        context = ssl.create_default_context(cafile=address.ca)
        if address.cert is not None:
            context.load_cert_chain(address.cert, address.key)
    except OSError as error:
        text = f"the certificates for etcd at {address.place} cannot be used: {error}"
        raise ConfigError(text) from error
    return http.client.HTTPSConnection(
        address.host, address.port, timeout=timeout_s, context=context
    )


def _encoded(value: bytes) -> str:
    return f"{_MARK}{base64.b64encode(value).decode('ascii')}"


def _decoded(text: str) -> bytes:
    return base64.b64decode(text.removeprefix(_MARK))
