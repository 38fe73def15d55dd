# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is different where torch's rendezvous is in an etcd: ``inner=etcd-v2``, ``inner=etcd``.

With ``c10d`` the store of the rendezvous holds our records as well, and serves the workers. Torch's
store over etcd can do neither: it compares nothing, and a worker has no address for it. So our
records are in a directory of the same etcd, of which the workers get the URL; torch's process
groups have the store that torch makes for them, on node 0.

Torch's client for etcd is the package ``python-etcd``, and what that raises is no error of torch's.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from lightning_resilience.adapters.etcd_store import KEEP_S, EtcdStore
from lightning_resilience.adapters.torch_store import innermost_store
from lightning_resilience.core.exit_codes import ExitCode
from lightning_resilience.core.store_address import EtcdAddress
from lightning_resilience.errors import ConfigError, StoreError


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo


__all__ = [
    "FILES",
    "ROUNDS_KEEP_S",
    "address_in",
    "opened",
    "place_of_names",
    "require_client",
    "rounds_of",
    "understood",
]

FILES: Final = {
    "etcd-v2": ("ca_cert", "ssl_cert", "ssl_cert_key"),
    "etcd": ("cacert", "cert", "key"),
}
"""Torch's names for the files of an encrypted connection: authorities, certificate, key."""

ROUNDS_KEEP_S: Final = 5400.0
"""How long the store of torch's agents is kept after a round has begun, in seconds. For less than
the two hours after which torch's rendezvous itself is gone: that would count rounds from the first
again, and find in the store what is of another run."""

_PORT: Final = 2379
_TIMEOUT_S: Final = 5.0
_log = logging.getLogger(__name__)


def require_client(inner: str) -> None:
    """Refuse a backend whose client is not installed.

    Args:
        inner: Name of torch's backend.

    Raises:
        ConfigError: It needs ``python-etcd``, which is not there, or cannot work with the version
            of ``urllib3`` that is.
    """
    if inner not in FILES:
        return
    remedy = "Install what it needs with: pip install 'lightning-resilience[etcd]'."
    try:
        importlib.import_module("etcd")
        response = importlib.import_module("urllib3.response").HTTPResponse
    except ImportError as error:
        message = (
            f"inner={inner!r} is not allowed here: torch needs the package python-etcd for it "
            f"({error}). {remedy}"
        )
        raise ConfigError(message) from error
    if not hasattr(response, "getheader"):
        message = (
            f"inner={inner!r} is not allowed here: the package python-etcd, which torch needs for "
            f"it, does not work with this version of urllib3, as with 2.6.0. {remedy}"
        )
        raise ConfigError(message)


def address_in(
    endpoint: str, *, run_id: str, inner: str, options: Mapping[str, Any]
) -> EtcdAddress | None:
    """Return where a run's records are in the etcd of its rendezvous; None where it has none.

    Args:
        endpoint: As the launcher was given it.
        run_id: Name of the run.
        inner: Name of torch's backend.
        options: Its options.
    """
    if inner not in FILES:
        return None
    host, port = parse_rendezvous_endpoint(endpoint, _PORT)
    ca, cert, key = (options.get(name) for name in FILES[inner])
    is_secure = str(options.get("protocol", "http")).strip().lower() == "https"
    address = EtcdAddress(
        host=host, port=port, is_secure=is_secure, ca=ca, cert=cert, key=key if cert else None
    )
    return address.of_run(run_id)


def opened(address: EtcdAddress, *, prefix: str = "", keep_s: float = KEEP_S) -> EtcdStore:
    """Return a store in a directory of an etcd, which is kept from now on.

    Args:
        address: Where, and which directory.
        prefix: Put before every key.
        keep_s: How long the directory is kept after its last use, in seconds; a day by default.

    Raises:
        StoreUnavailableError: Etcd does not answer.
        SystemExit: 64, where what answers has no version 2 of the API, and never had.
    """
    store = EtcdStore(address, timeout_s=_TIMEOUT_S, prefix=prefix, keep_s=keep_s)
    try:
        store.lease()
    except ConfigError as error:
        _log.error("%s", error)
        store.close()
        raise SystemExit(int(ExitCode.USAGE)) from error
    except StoreError:
        store.close()
        raise
    return store


def rounds_of(address: EtcdAddress) -> EtcdAddress:
    """Return where the agents of a run have the store of their rounds."""
    return address.within(f"{address.directory}/rounds")


def place_of_names(
    handler: RendezvousHandler, info: RendezvousInfo, address: EtcdAddress
) -> tuple[EtcdAddress, str]:
    """Return where the agents of a round may leave something for each other.

    A round has a store of its own, or its number in the one of all rounds.

    Args:
        handler: Torch's handler, which has joined the round.
        info: What it has returned.
        address: Of the run's records.
    """
    store: Any = innermost_store(info.store)
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    number = getattr(state, "round", 0)
    return address.within(f"{store.prefix.rstrip('/')}/names"), f"{number}/"


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Let what torch's client for etcd raises be what torch raises for any other store.

    Raises:
        RendezvousConnectionError: Etcd has not answered, or not as it should.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, _foreign()):
            raise
        message = f"etcd has not answered torch's client: {type(error).__name__}: {error}"
        raise RendezvousConnectionError(message) from error


def _foreign() -> tuple[type[BaseException], ...]:
    try:
        client = importlib.import_module("etcd")
        http = importlib.import_module("urllib3.exceptions")
    except ImportError:
        return ()
    # LookupError: a key of another agent has not come in time.
    return client.EtcdException, http.HTTPError, LookupError
