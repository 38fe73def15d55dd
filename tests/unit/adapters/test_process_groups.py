# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Only gloo's connections are shut down, and only where it is certain that they are gloo's."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from lightning_resilience.adapters.process_groups import (
    abort_nccl,
    cut,
    gloo_addresses,
    is_world_ended,
    parse_address,
)


if TYPE_CHECKING:
    from collections.abc import Iterator


def published(family: int, address: bytes, *, host: bytes = b"node-1") -> bytes:
    """Make what gloo publishes: a host name, and a padded address, each after its length."""
    raw = struct.pack("=H", family) + address
    raw += b"\xaa" * (136 - len(raw))
    return struct.pack("=Q", len(host)) + host + struct.pack("=Q", len(raw)) + raw + b"\x01" * 16


IPV4 = published(socket.AF_INET, struct.pack("!H4B", 4711, 10, 0, 0, 7))
IPV6 = published(
    socket.AF_INET6, struct.pack("!HI", 4711, 0) + socket.inet_pton(socket.AF_INET6, "fe80::7")
)
MAPPED = published(
    socket.AF_INET6,
    struct.pack("!HI", 4711, 0) + socket.inet_pton(socket.AF_INET6, "::ffff:10.0.0.7"),
)


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (IPV4, ("10.0.0.7", 4711)),
        (IPV6, ("fe80::7", 4711)),
        (MAPPED, ("10.0.0.7", 4711)),
        (published(socket.AF_UNIX, b"/tmp/socket"), None),
        (IPV4[:20], None),
        (b"", None),
        (b"\xff" * 40, None),
        (b"something else altogether, and longer", None),
    ],
)
def test_an_address_is_read_or_it_is_none(value: bytes, address: tuple[str, int] | None) -> None:
    """What does not look like an address of gloo's is not taken for one."""
    assert parse_address(value) == address


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, tuple[str, int]]]:
    """Connect two sockets of this process; yield both ends, and the address that is listened at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            yield one, other, server.getsockname()


def test_both_ends_of_a_connection_at_that_address_are_shut_down() -> None:
    """Whoever reads from either end is told that it is over, and the descriptors stay valid."""
    with connected() as (one, other, address), connected() as (bystander, peer, _):
        number = cut(frozenset([address]))

        assert number == 2
        assert one.recv(1) == other.recv(1) == b""
        bystander.sendall(b"x")
        assert peer.recv(1) == b"x"
        assert os.fstat(one.fileno())


def test_nothing_is_shut_down_where_no_address_is_known() -> None:
    """Where gloo cannot be told apart, all connections are left alone."""
    with connected() as (one, other, _):
        assert cut(frozenset()) == 0
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_files_and_other_kinds_of_sockets_are_passed_over() -> None:
    """Descriptors that are no connections over IP are neither touched nor a reason to stop."""
    left, right = socket.socketpair()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with left, right, datagrams, connected() as (_, _, address):
        assert cut(frozenset([address])) == 2
        left.sendall(b"x")
        assert right.recv(1) == b"x"


def test_without_a_process_group_there_is_nothing_to_end() -> None:
    """A process that is in no group has no addresses, no NCCL, and nothing that was ended."""
    assert gloo_addresses() == frozenset()
    assert abort_nccl() is False
    assert is_world_ended() is False


@pytest.fixture
def group() -> Iterator[None]:
    """A gloo group of one rank."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    del os.environ["GLOO_SOCKET_IFNAME"]
    if before is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = before


@pytest.mark.usefixtures("group")
def test_a_group_says_where_it_listens_and_is_ended_once() -> None:
    """The address of each rank is found in the group's store; ending is remembered per group."""
    addresses = gloo_addresses()

    assert [host for host, _port in addresses] == ["127.0.0.1"]
    assert not is_world_ended()
    cut(addresses)
    assert is_world_ended()


@pytest.mark.usefixtures("group")
def test_a_new_group_has_not_been_ended() -> None:
    """What was ended before is not remembered of another group."""
    assert not is_world_ended()
