# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""C44: one store client used by a waiting thread and by a heartbeat stalls the heartbeat.

A client of torch is locked for as long as one of its operations waits, so that a heartbeat on the
same client comes when the wait is over, and the rank is taken for dead. Reported for pytorch as
#69520 and #64990.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from lightning_resilience.adapters.torch_store import TorchStore


HANG_S = 20.0


def test_heartbeats_go_on_while_a_thread_waits() -> None:
    """Ten beats are in the store before the wait of the other thread has ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TorchStore.connect("127.0.0.1", server.port, timeout_s=HANG_S)
    watcher = store.watcher()

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(watcher.wait_for, "bell", HANG_S * 3)
        beating = threads.submit(lambda: [store.add("beat", 1) for _ in range(10)])
        beats = beating.result(HANG_S)
        was_waiting = not waiting.done()
        store.set("bell", b"")

        assert waiting.result(HANG_S) is True

    assert beats == list(range(1, 11))
    assert was_waiting
    watcher.close()
    store.close()


def test_the_process_groups_own_client_is_left_alone() -> None:
    """What waits on our store locks neither the group's client nor its keys."""
    group_client = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watcher = TorchStore.wrap(group_client, timeout_s=HANG_S)

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(watcher.wait_for, "bell", HANG_S * 3)
        beating = threads.submit(lambda: [group_client.add("beat", 1) for _ in range(10)])
        beats = beating.result(HANG_S)
        was_waiting = not waiting.done()
        group_client.set("bell", "")

        assert waiting.result(HANG_S) is True

    assert beats == list(range(1, 11))
    assert was_waiting
    watcher.close()
