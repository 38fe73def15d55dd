# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One node: torch's own agent, with the rendezvous of torch or with the backend ``resilient``.

``elastic_launch`` is what ``torchrun`` calls. Here it forks its workers from a process that has
imported Lightning already, so that a start takes a fraction of a second and not many.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from job import BREAKER, NODE, Diary, leave_with_parent
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from training import train


if TYPE_CHECKING:
    from collections.abc import Mapping

    from job import Job

TORCHS: Mapping[str, object] = {
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    # A busy machine keeps an agent from running for seconds; no node is lost here.
    "keep_alive_max_attempt": 15,
    "join_timeout": 60,
}
OURS: Mapping[str, object] = {
    "restart_base_delay_s": 1,
    "restart_max_delay_s": 2,
    "settle_s": 0.5,
    "linger_s": 5,
    **BREAKER,
}


def options_of(job: Job, node: int) -> dict[str, object]:
    """Return what ``--rdzv-conf`` would say."""
    options = {**TORCHS, "is_host": node == 0}
    if not job.is_guarded:
        return options
    reason = str(job.home / f"reason-{node}.json")
    return {**options, **OURS, "restarts": str(job.home), "termination_log": reason}


def run_node(job: Job, node: int, port: int) -> None:
    """Run an agent to its end; its exit status is that of this process."""
    leave_with_parent()
    output = os.open(job.home / f"node-{node}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ[NODE] = str(node)
    if not job.is_guarded:
        # Torch's workers look for each other in a store of the agents, under a name with the number
        # of restarts, and agents count those differently: until a timeout, nobody is found. Our
        # backend mends that; here torch does without that store, or this would be another story.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    Diary(job, f"agent {node}").listen()
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id=job.name,
        rdzv_backend="resilient" if job.is_guarded else "c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs=options_of(job, node),
        max_restarts=job.max_restarts,
        monitor_interval=0.1,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    elastic_launch(config, run_worker)(job)


def run_worker(job: Job) -> None:
    """Train, with the signal handlers of a fresh process and not those of the agent."""
    leave_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    train(job)
