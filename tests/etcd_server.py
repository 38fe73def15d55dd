# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A real etcd with version 2 of its API, in a process that a test may kill and freeze."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import uuid
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.store_address import EtcdAddress


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


WITHIN_S = 60.0
"""Against a hang only."""


class EtcdServer:
    """One etcd on loopback; what it holds survives its process.

    Args:
        folder: For its data.
        options: More of its command line.
        certificate: For an encrypted connection; its key is ``key.pem`` in the same folder.
    """

    def __init__(self, folder: Path, *options: str, certificate: Path | None = None) -> None:
        self.folder, self.options, self.certificate = folder, list(options), certificate
        if certificate is not None:
            key = certificate.with_name("key.pem")
            self.options += ["--cert-file", str(certificate), "--key-file", str(key)]
        self.port, peer = free_ports(2)
        self._peer = f"http://127.0.0.1:{peer}"
        self.start()

    def start(self) -> None:
        """Start it, the second time with what it held, at the same port."""
        scheme = "http" if self.certificate is None else "https"
        url = f"{scheme}://127.0.0.1:{self.port}"
        command = ["etcd", "--data-dir", str(self.folder / "data"), *self.options]
        for name, value in {
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": self._peer,
            "initial-advertise-peer-urls": self._peer,
            "initial-cluster": f"default={self._peer}",
        }.items():
            command += [f"--{name}", value]
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._await()

    def _await(self) -> None:
        ends_at_s = time.monotonic() + WITHIN_S
        while not self._is_well():
            text = (self.folder / "etcd.log").read_text(errors="replace")
            assert self.process.poll() is None, text[-2000:]
            assert time.monotonic() < ends_at_s, text[-2000:]
            time.sleep(0.05)

    def _is_well(self) -> bool:
        connection: http.client.HTTPConnection
        if self.certificate is not None:
            context = ssl.create_default_context(cafile=self.certificate)
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=5, context=context
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """End it without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WITHIN_S)

    def freeze(self) -> None:
        """Stop it from answering while its sockets stay open."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def address(self) -> EtcdAddress:
        """Return a directory that nobody else uses."""
        return EtcdAddress(host="127.0.0.1", port=self.port, directory=f"/{uuid.uuid4().hex}")


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens at."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def require_etcd() -> None:
    """Skip where there is no etcd, or none that has version 2 of its API."""
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("there is no etcd (Debian: apt-get install etcd-server)")
    told = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    if "--enable-v2" not in told.stdout + told.stderr:
        pytest.skip("this version of etcd has no version 2 of its API any more")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd for the tests of a module."""
    require_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), "--enable-v2")
    yield server
    if server.process.poll() is None:
        server.kill()
