# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""End this process's part in its process groups, so that no thread of it waits in one for ever.

A thread in a collective cannot be interrupted: Python's signal handlers do not run there, and other
ranks that leave are noticed late, or at the group's timeout only. What ends it, from another thread
of the same process (seen with torch 2.13):

* **NCCL**: aborting the communicators, which torch offers for this.
* **gloo**: aborting does nothing, but a collective fails at once when the sockets under it are shut
  down. Which of a process's sockets are gloo's is known for certain: each rank of a group has
  published the address at which its gloo listens, in the group's store, and one end of each of
  gloo's connections is such an address. Sockets of storage, loggers and stores are left alone.

A backend of another kind is left alone as well, and so is gloo where its addresses cannot be read
(its store is away, or it writes them in another way), or where the system does not list a process's
descriptors. Then the caller is told that nothing was ended.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from lightning_resilience.adapters.torch_store import TorchStore
from lightning_resilience.errors import ResilienceError


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup


__all__ = ["Address", "abort_nccl", "cut", "gloo_addresses", "is_world_ended", "parse_address"]

Address = tuple[str, int]
"""An IP address in its shortest form, and a port."""

_DESCRIPTORS: Final = Path("/dev/fd")
_LENGTH: Final = struct.Struct("=Q")
_PORT: Final = struct.Struct("!H")
_IPV4_AT: Final = 4
_IPV6_AT: Final = 8
_STORE_TIMEOUT_S: Final = 1.0
# gloo has one context for each network interface that it is told to use.
_MOST_CONTEXTS: Final = 16

_ended: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def gloo_addresses() -> frozenset[Address]:
    """Return the addresses at which the gloo of every rank of every group listens.

    Empty where this process is in no gloo group, or cannot read them.

    Note:
        Any thread, bounded: about a second where the groups' store is away.
    """
    found: set[Address] = set()
    if not (dist.is_available() and dist.is_initialized()):
        return frozenset()
    for group, (_backend, store) in list(dist.distributed_c10d._world.pg_map.items()):  # noqa: SLF001 - torch has no public name
        with suppress(ResilienceError):
            found.update(_published(group, store))
    return frozenset(found)


def _published(group: ProcessGroup, store: dist.Store) -> Iterator[Address]:
    # A connection of our own: the group's may be the one that a thread is waiting on.
    reader = TorchStore.wrap(store, timeout_s=_STORE_TIMEOUT_S)
    try:
        for device in _gloo_devices(group):
            for context in range(_MOST_CONTEXTS):
                keys = [f"{device}//{context}/{rank}" for rank in range(group.size())]
                if reader.get(keys[0]) is None:
                    break
                values = (value for value in reader.multi_get(keys) if value is not None)
                addresses = (parse_address(value) for value in values)
                yield from (address for address in addresses if address is not None)
    finally:
        reader.close()


def _gloo_devices(group: ProcessGroup) -> Iterator[str]:
    # Torch has no public names for these.
    for device in group._device_types:  # noqa: SLF001
        with suppress(RuntimeError):
            if type(group._get_backend(device)).__name__ == "ProcessGroupGloo":  # noqa: SLF001
                yield device.type


def parse_address(value: bytes) -> Address | None:
    """Return the address that gloo has published in a store, None where this is none.

    The value begins with the length and the text of a host name, then the length and the bytes of
    an address, which begin with a ``sockaddr``.
    """
    try:
        (name_length,) = _LENGTH.unpack_from(value)
        start = 2 * _LENGTH.size + name_length
        (length,) = _LENGTH.unpack_from(value, start - _LENGTH.size)
        raw = value[start : start + length]
        (family,) = struct.unpack_from("=H", raw)
        (port,) = _PORT.unpack_from(raw, struct.calcsize("=H"))
        if family == socket.AF_INET:
            ip = ipaddress.ip_address(raw[_IPV4_AT : _IPV4_AT + 4])
        elif family == socket.AF_INET6:
            ip = ipaddress.ip_address(raw[_IPV6_AT : _IPV6_AT + 16])
        else:
            return None
    except (struct.error, ValueError, OverflowError):
        return None
    return _shortest(ip), port


def _shortest(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip)


def cut(addresses: frozenset[Address]) -> int:
    """Shut down every connection of this process that has one end at one of ``addresses``.

    Whoever waits on one of them, in any thread, gets an error at once.

    Args:
        addresses: Where gloo listens.

    Returns:
        How many were shut down.

    Note:
        Any thread. The descriptors stay with their owner, which closes them.
    """
    number = 0
    for path in list(_DESCRIPTORS.iterdir()) if addresses and _DESCRIPTORS.is_dir() else ():
        # Order: duplicated first and looked at then, because the descriptor may be closed, and its
        # number given to somebody else, at any time.
        with suppress(OSError):
            descriptor = os.dup(int(path.name))
            try:
                number += _cut_one(descriptor, addresses)
            finally:
                os.close(descriptor)
    world = dist.group.WORLD
    if addresses and world is not None and _is_all_gloo():
        _ended.add(world)
    return number


def _is_all_gloo() -> bool:
    groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - torch has no public name
    return all(len(list(_gloo_devices(group))) == len(group._device_types) for group in groups)  # noqa: SLF001


def _cut_one(descriptor: int, addresses: frozenset[Address]) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    connection = socket.socket(fileno=descriptor)
    try:
        if connection.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        ends = {_end(connection.getsockname()), _end(connection.getpeername())}
        if ends.isdisjoint(addresses):
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True
    finally:
        connection.detach()


def _end(name: Any) -> Address:
    host, port = name[:2]
    return _shortest(ipaddress.ip_address(host.partition("%")[0])), port


def abort_nccl() -> bool:
    """Abort this process's NCCL communicators, of all groups.

    Returns:
        Whether there were any.

    Note:
        Any thread; made for one that is not in a collective.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.is_nccl_available()):
        return False
    names = [name for name, _store in dist.distributed_c10d._world.pg_map.values()]  # noqa: SLF001 - torch has no public name
    if not any("nccl" in str(name) for name in names):
        return False
    dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch has no public name
    return True


def is_world_ended() -> bool:
    """Tell whether every collective of this process fails at once, because ``cut`` was called.

    False where it is in a group of another backend than gloo, or knows no address of gloo's.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.group.WORLD in _ended
