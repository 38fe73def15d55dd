# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What belongs to the thread that has called, for the thread in which storage is asked.

An attempt that may be abandoned runs in a thread of its own. There another device is current,
another stream, and no inference mode; and torch's own writer and reader rely on the caller's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from lightning_resilience.adapters.lightning.alone import adopt_device


if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["CallersThread"]


class CallersThread:
    """How the thread that makes it works on tensors."""

    def __init__(self) -> None:
        # Order: what this thread has begun on a stream of its own is done before another looks.
        _settle()
        self._adopt_device = adopt_device()
        self._is_inferring = torch.is_inference_mode_enabled()

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """Work as that thread does; what was begun is done at the end."""
        self._adopt_device()
        with torch.inference_mode(self._is_inferring), torch.set_grad_enabled(False):
            yield
        _settle()


def _settle() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch has no types here
        torch.cuda.synchronize()
