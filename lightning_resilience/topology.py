# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How many processes and hosts the job has, and which ones these are: what the launcher says.

A share of a limit and the quorum of votes rest on these numbers. They are declared by the launcher
and never measured. And when the job ends, where the scheduler says that.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["Topology", "host_name", "job_end_s", "job_to_requeue", "kill_delay_s", "read_topology"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where this process is among those of its job, as the launcher says.

    Args:
        rank: Its number, from 0.
        world_size: Processes of the job, ≥ 1.
        hosts: Hosts of the job, ≥ 1.
        host: Number of this host, from 0.
    """

    rank: int = 0
    world_size: int = 1
    hosts: int = 1
    host: int = 0


def read_topology(environ: Mapping[str, str] | None = None) -> Topology:
    """Return what the launcher's environment variables say of this process.

    Args:
        environ: The variables; those of this process by default.

    Returns:
        One process on one host where there is no launcher.

    Raises:
        ConfigError: A variable is no whole number. The text names it.
    """
    variables = os.environ if environ is None else environ

    def number(*names: str, least: int) -> int:
        for name in names:
            text = variables.get(name, "").strip()
            if text:
                return _parse_number(name, text, least=least)
        return least

    return Topology(
        rank=number("RANK", "SLURM_PROCID", least=0),
        world_size=number("WORLD_SIZE", "SLURM_NTASKS", least=1),
        hosts=number("GROUP_WORLD_SIZE", "SLURM_NNODES", least=1),
        host=number("GROUP_RANK", "SLURM_NODEID", "NODE_RANK", least=0),
    )


def job_end_s(environ: Mapping[str, str] | None = None) -> float | None:
    """Return when the scheduler ends this job, in seconds since 1970; None where it does not say.

    Args:
        environ: The variables; those of this process by default.
    """
    variables = os.environ if environ is None else environ
    text = variables.get("SLURM_JOB_END_TIME", "").strip()
    return float(text) if re.fullmatch("[0-9]{1,12}", text) else None


def job_to_requeue(environ: Mapping[str, str] | None = None) -> str:
    """Return by which name SLURM requeues this job: a task of an array has one of its own.

    Args:
        environ: The variables; those of this process by default.

    Returns:
        The name; empty where this is no job of SLURM's.
    """
    variables = os.environ if environ is None else environ
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID", "")


def kill_delay_s(environ: Mapping[str, str] | None = None) -> float | None:
    """Return how long torch's agent leaves between SIGTERM and SIGKILL, in seconds.

    Args:
        environ: The variables; those of this process by default.

    Returns:
        None where it does not say; it may have been told on its command line, which nobody sees.
    """
    variables = os.environ if environ is None else environ
    text = variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "").strip()
    return float(text) if re.fullmatch("0*[1-9][0-9]{0,8}", text) else None


def host_name(node: str, topology: Topology) -> str:
    """Return the name under which all processes of this host vote.

    Args:
        node: The machine's name. Containers of one machine may share it.
        topology: Where this process is.
    """
    return f"{node}#{topology.host}"


def _parse_number(name: str, text: str, *, least: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        message = (
            f"The environment variable {name}={text!r} is not allowed: it must be a whole number "
            f"≥ {least}, as a launcher sets it."
        )
        raise ConfigError(message)
    return int(text)
