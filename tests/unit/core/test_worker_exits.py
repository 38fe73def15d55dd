# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What an agent makes of a worker that has ended."""

from __future__ import annotations

import signal

import pytest

from lightning_resilience.core.incident import IncidentRecord, fingerprint_of
from lightning_resilience.core.records import decode, encode
from lightning_resilience.core.worker_exits import incident_of_exit


def told(status: int, message: str = "") -> IncidentRecord:
    """What an agent offers."""
    return incident_of_exit(rank=2, status=status, message=message, writer="w")


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (1, "ValueError: bad", "error"),
        (1, "botocore.exceptions.ClientError: AccessDenied", "error"),
        (-signal.SIGTERM, "ValueError: bad", "error"),
        (1, "lightning.pytorch.utilities.exceptions.SIGTERMException: ", "signal"),
        (1, "torch.distributed.DistBackendError: NCCL", "echo"),
        (1, "PeerFailedError: rank 0 has left", "echo"),
        (1, "RuntimeError: [/third_party/gloo/pair.cc:547] Connection closed by peer", "echo"),
        (1, "RuntimeError: shapes do not match", "error"),
        (143, "", "signal"),
        (-signal.SIGTERM, "", "signal"),
        (-signal.SIGINT, "", "signal"),
        (-signal.SIGHUP, "", "signal"),
        (-signal.SIGKILL, "", "killed"),
        (-signal.SIGABRT, "", "echo"),
        (-signal.SIGSEGV, "", "error"),
        (3, "", "exit"),
        (137, "", "exit"),
    ],
)
def test_a_worker_is_known_by_its_file_else_by_its_status(
    status: int, message: str, kind: str
) -> None:
    """Its own word counts for more than how its process has ended."""
    assert told(status, message).kind == kind


@pytest.mark.parametrize(
    ("status", "said"), [(3, "exit status 3"), (-9, "signal SIGKILL"), (-11, "signal 11")]
)
def test_what_has_no_word_of_its_own_is_described(status: int, said: str) -> None:
    """For a person who looks at the record."""
    assert told(status).error == said


@pytest.mark.parametrize(
    ("message", "failure"),
    [
        ("lightning_resilience.errors.ConfigError: no", "permanent"),
        ("ImportError: no module", "permanent"),
        ("CircuitOpenError: s3", "transient"),
        ("ValueError: bad", ""),
        ("", ""),
    ],
)
def test_the_class_of_a_failure_is_known_by_its_name(message: str, failure: str) -> None:
    """Where the name says it; the exception itself is gone."""
    assert told(1, message).failure == failure


def test_the_same_error_with_other_numbers_has_the_same_fingerprint() -> None:
    """Addresses, steps and counts change from start to start."""
    one = told(1, "RuntimeError: at 0x7f00 in batch 12")
    other = told(1, "RuntimeError: at 0xdead in batch 9")
    third = told(1, "RuntimeError: at 0xdead in sample 9")

    assert one.fingerprint == other.fingerprint == fingerprint_of(one.error) != third.fingerprint
    assert told(3).fingerprint == ""


def test_no_secret_gets_into_the_record() -> None:
    """A URL in an error may hold a password; and a text may be of any length."""
    record = told(1, "OSError: https://user:secret@host/key " + 5000 * "x")

    assert "secret" not in record.error
    assert len(record.error) <= 500
    assert decode(IncidentRecord, encode(record), key="k") == record
