# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a launcher says of a process, and what is refused."""

from __future__ import annotations

import re

import pytest

from lightning_resilience.errors import ConfigError
from lightning_resilience.topology import (
    Topology,
    job_end_s,
    job_to_requeue,
    kill_delay_s,
    read_topology,
)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Topology()),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"},
            Topology(rank=5, world_size=8, hosts=2, host=1),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODEID": "1"},
            Topology(rank=3, world_size=4, hosts=2, host=1),
        ),
        ({"RANK": "1", "SLURM_PROCID": "3", "WORLD_SIZE": "2"}, Topology(rank=1, world_size=2)),
        ({"RANK": "", "SLURM_PROCID": "3", "SLURM_NTASKS": " 4 "}, Topology(rank=3, world_size=4)),
        ({"WORLD_SIZE": "  "}, Topology()),
    ],
    ids=["no launcher", "torchrun", "slurm", "torchrun under slurm", "empty is unset", "blanks"],
)
def test_the_launcher_is_believed(environ: dict[str, str], expected: Topology) -> None:
    """Variables of torchrun come first, then SLURM's, then one process on one host."""
    assert read_topology(environ) == expected


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("RANK", 0),
        ("SLURM_PROCID", 0),
        ("WORLD_SIZE", 1),
        ("SLURM_NTASKS", 1),
        ("GROUP_WORLD_SIZE", 1),
        ("SLURM_NNODES", 1),
        ("GROUP_RANK", 0),
        ("SLURM_NODEID", 0),
    ],
)
@pytest.mark.parametrize("value", ["eight", "-1", "1.5", "0x2", "٣", "1" * 10, "2 2"])
def test_what_is_no_number_is_refused(name: str, least: int, value: str) -> None:
    """The error names the variable, its value, and what is allowed."""
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")) as caught:
        read_topology({name: value})

    assert f"≥ {least}" in str(caught.value)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_NTASKS", "GROUP_WORLD_SIZE", "SLURM_NNODES"])
def test_a_job_of_no_processes_or_hosts_is_refused(name: str) -> None:
    """Nothing can be shared out among none."""
    with pytest.raises(ConfigError, match=f"{name}='0'"):
        read_topology({name: "0"})


def test_this_process_is_asked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, the variables are those of the process."""
    monkeypatch.setenv("WORLD_SIZE", "7")

    assert read_topology().world_size == 7


@pytest.mark.parametrize(
    ("variables", "end_s"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "1790000000"}, 1790000000.0),
        ({"SLURM_JOB_END_TIME": "Unknown"}, None),
    ],
)
def test_the_end_of_the_job_is_what_slurm_says(
    variables: dict[str, str], end_s: float | None
) -> None:
    """Where it says nothing that can be read, nobody knows it, and that is no error."""
    assert job_end_s(variables) == end_s


@pytest.mark.parametrize(
    ("text", "delay_s"),
    [("", None), ("90", 90.0), (" 7 ", 7.0), ("0", None), ("-1", None), ("soon", None)],
)
def test_what_the_agent_leaves_before_it_kills_is_taken_where_it_is_a_number(
    text: str, delay_s: float | None
) -> None:
    """Anything else is no reason to end a job, and 0 would leave no time to do anything."""
    assert kill_delay_s({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": text}) == delay_s


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "17"}, "17"),
        ({"SLURM_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, "17"),
        ({"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}, "9_3"),
    ],
)
def test_a_task_of_an_array_is_requeued_by_its_own_name(
    variables: dict[str, str], job: str
) -> None:
    """SLURM knows it by the array's number and its own."""
    assert job_to_requeue(variables) == job
