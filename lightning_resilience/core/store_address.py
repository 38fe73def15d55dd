# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Where a job's shared store is: the URLs that users write and that agents hand on to workers.

``tcp://HOST:PORT`` is the server of a ``TCPStore``, and the rest is a directory in an etcd:
``etcd://HOST:PORT/DIRECTORY`` is plain, ``etcds://HOST:PORT/DIRECTORY?ca=FILE&cert=FILE&key=FILE``
is encrypted. The files are named, never quoted: the URL is in the environment, where many can read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

from lightning_resilience.errors import ConfigError


__all__ = ["EtcdAddress", "check_store_url", "is_etcd_url", "parse_etcd_url", "parse_store_url"]

_HOME: Final = "/lightning-resilience"
_LARGEST_PORT: Final = 65535
_FILES: Final = ("ca", "cert", "key")
_TCP_URL: Final = re.compile(
    r"tcp://(?:\[(?P<bracketed>[0-9a-fA-F:.]+)\]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})/?"
)
_ETCD_URL: Final = re.compile(
    r"(?P<scheme>etcds?)://(?:\[(?P<bracketed>[0-9a-fA-F:.]+)\]|(?P<host>[\w.-]+))"
    r":(?P<port>[0-9]{1,5})(?P<directory>(?:/[^/?#]+)*)/?(?:\?(?P<query>[^#]*))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """One etcd, and a directory in it.

    Args:
        host: Name or address, an IPv6 address without brackets.
        port: Its port.
        directory: Path of the directory, with a slash in front and none behind.
        is_secure: Whether it is reached by TLS.
        ca: Path of a file with the authorities that its certificate is checked against; None for
            the system's.
        cert: Path of the client's certificate; None for none.
        key: Path of the certificate's key; None where that is in the same file.
    """

    host: str
    port: int
    directory: str = _HOME
    is_secure: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def place(self) -> str:
        """Host and port, as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole address as text, from which it can be read again."""
        scheme = "etcds" if self.is_secure else "etcd"
        files = {name: value for name in _FILES if (value := getattr(self, name)) is not None}
        query = f"?{urlencode(files)}" if files else ""
        return f"{scheme}://{self.place}{self.directory}{query}"

    def of_run(self, run_id: str) -> EtcdAddress:
        """Return where the records of a run are: in a directory of its own."""
        return self.within(f"{_HOME}/{quote(run_id, safe='')}")

    def within(self, directory: str) -> EtcdAddress:
        """Return another directory of the same etcd."""
        return replace(self, directory=directory)


def check_store_url(url: str, *, option: str = "store") -> None:
    """Refuse a URL that names no store.

    Args:
        url: The URL.
        option: Name of the option it came from, for the error.

    Raises:
        ConfigError: It has another form.
    """
    if is_etcd_url(url):
        parse_etcd_url(url, option=option)
    else:
        parse_store_url(url, option=option)


def parse_store_url(url: str, *, option: str = "store") -> tuple[str, int]:
    """Return host and port of the URL of a ``TCPStore``.

    Args:
        url: ``tcp://host:port``; an IPv6 address stands in brackets.
        option: Name of the option it came from, for the error.

    Returns:
        Host, without brackets, and port.

    Raises:
        ConfigError: The URL has another form.
    """
    found = _TCP_URL.fullmatch(url)
    port = int(found["port"]) if found else 0
    if found is None or not 0 < port <= _LARGEST_PORT:
        # The value may hold a password by mistake, in front of the host or behind the port.
        shown = re.sub(r"(?<=//)[^/]*@|[?#].*", "", url)
        message = (
            f"{option}={shown!r} is not allowed: it must be tcp://HOST:PORT with a port from 1 to "
            f"{_LARGEST_PORT}, for example tcp://host0:29400, or etcd://HOST:PORT/DIRECTORY."
        )
        raise ConfigError(message)
    return found["bracketed"] or found["host"], port


def is_etcd_url(url: str) -> bool:
    """Tell whether a URL is meant to name an etcd."""
    return url.startswith(("etcd:", "etcds:"))


def parse_etcd_url(url: str, *, option: str = "store") -> EtcdAddress:
    """Return what a URL says.

    Args:
        url: ``etcd://HOST:PORT/DIRECTORY`` or ``etcds://…``; an IPv6 address stands in brackets.
        option: Name of the option it came from, for the error.

    Raises:
        ConfigError: The URL has another form.
    """
    found = _ETCD_URL.fullmatch(url)
    files = dict(parse_qsl(found["query"] or "")) if found else {}
    port = int(found["port"]) if found else 0
    if found is None or not 0 < port <= _LARGEST_PORT or set(files) - set(_FILES):
        shown = re.sub(r"(?<=//)[^/]*@|[?#].*", "", url)
        message = (
            f"{option}={shown!r} is not allowed: it must be etcd://HOST:PORT/DIRECTORY, or "
            "etcds://HOST:PORT/DIRECTORY?ca=FILE&cert=FILE&key=FILE, with a port from 1 to "
            f"{_LARGEST_PORT}, for example etcd://etcd0:2379/lightning-resilience/job."
        )
        raise ConfigError(message)
    return EtcdAddress(
        host=found["bracketed"] or found["host"],
        port=port,
        directory=found["directory"] or _HOME,
        is_secure=found["scheme"] == "etcds",
        **files,
    )
