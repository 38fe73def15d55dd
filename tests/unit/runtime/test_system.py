# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Chance is private: ranks differ, and training's own streams are left alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from lightning_resilience.core.backoff import delay_s
from lightning_resilience.runtime.system import SystemClock, SystemDice


SCHEDULE = """
import json, random, sys
import numpy
random.seed(42)
numpy.random.seed(42)
from lightning_resilience.core.backoff import delay_s
from lightning_resilience.runtime.system import SystemDice
dice = SystemDice(rank=int(sys.argv[1]))
delays = [delay_s(n, base_s=1.0, cap_s=30.0, draw=dice.draw()) for n in range(1, 9)]
print(json.dumps(delays))
"""

FORK = """
import json, os
from lightning_resilience.runtime.system import SystemDice
dice = SystemDice()
dice.draw()
reading, writing = os.pipe()
child = os.fork() == 0
mine = [[dice.draw() for _ in range(4)], [dice.nonce() for _ in range(4)]]
if child:
    os.write(writing, json.dumps(mine).encode())
    os._exit(0)
os.close(writing)
print(json.dumps([mine, json.loads(os.read(reading, 65536))]))
os.wait()
"""


def run_python(program: str, *arguments: str) -> str:
    """Run a program in a process of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    return done.stdout


def test_eight_ranks_seeded_alike_have_eight_schedules() -> None:
    """After ``seed_everything(42)`` on every rank, all delays of all ranks still differ."""
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda rank: run_python(SCHEDULE, str(rank)), range(8)))

    schedules = [json.loads(output) for output in outputs]
    assert len({delay for schedule in schedules for delay in schedule}) == 8 * 8


def test_a_forked_child_has_draws_and_nonces_of_its_own() -> None:
    """A child does not repeat its parent's draws or, worse, its nonces."""
    parent, child = json.loads(run_python(FORK))

    assert set(parent[0]).isdisjoint(child[0])
    assert set(parent[1]).isdisjoint(child[1])


def test_dice_of_one_process_differ() -> None:
    """Two dice of one rank in one process, as two callbacks have, share nothing."""
    first, second = SystemDice(rank=0), SystemDice(rank=0)

    assert [first.draw() for _ in range(4)] != [second.draw() for _ in range(4)]
    assert len({dice.nonce() for dice in (first, second) for _ in range(1000)}) == 2000


def test_training_streams_are_bit_equal_with_and_without_our_draws() -> None:
    """Retries move none of the streams that the training reads: random, numpy, torch."""

    def streams(*, retries: bool) -> list[object]:
        random.seed(42)
        np.random.seed(42)  # noqa: NPY002 - the global stream is what training uses
        torch.manual_seed(42)
        dice = SystemDice(rank=3)
        read: list[object] = []
        for attempt in range(1, 20):
            if retries:
                delay_s(attempt, base_s=1.0, cap_s=30.0, draw=dice.draw())
                dice.nonce()
            read += [
                random.random(),
                np.random.random(),  # noqa: NPY002 - as above
                torch.rand(2).tolist(),
            ]
        return read

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - as above
    try:
        assert streams(retries=True) == streams(retries=False)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - as above
        torch.set_rng_state(states[2])


def test_draws_are_uniform() -> None:
    """Draws lie in [0, 1), and their largest distance from a uniform distribution is small."""
    dice = SystemDice()
    draws = sorted(dice.draw() for _ in range(20_000))

    assert draws[0] >= 0.0
    assert draws[-1] < 1.0
    # Kolmogorov-Smirnov: 2.23 / sqrt(n) is passed by chance once in ten thousand runs.
    farthest = max(abs(draw - (number + 0.5) / 20_000) for number, draw in enumerate(draws))
    assert farthest < 2.23 / 20_000**0.5


def test_the_clock_is_monotonic_and_sleeps() -> None:
    """Time only grows, and a sleep is at least as long as it was asked to be."""
    clock = SystemClock()

    before = clock.now_s()
    clock.sleep(0.01)
    after = clock.now_s()

    assert after - before >= 0.01


def test_nonces_are_text_of_96_bits() -> None:
    """A nonce is 24 hexadecimal digits, so that it fits into a key or a record as it is."""
    nonce = SystemDice(rank=os.getpid()).nonce()

    assert len(nonce) == 24
    assert int(nonce, 16) >= 0
