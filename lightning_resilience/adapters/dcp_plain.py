# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""With ``LIGHTNING_RESILIENCE=off``, torch's own writer and reader do what ours are asked for.

They take over method by method, on the object that a program has made already: so it needs no
change, and nothing is guarded, verified or joint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from lightning_resilience.config import read_environment


if TYPE_CHECKING:
    from lightning_resilience.adapters.dcp_options import DcpOptions


__all__ = ["take_over_reading", "take_over_writing"]

_WRITING: Final = (
    *("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan"),
    *("write_data", "finish", "storage_meta"),
)
_READING: Final = (
    *("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan"),
    *("prepare_global_plan", "read_data"),
)


def take_over_writing(writer: object, url: str, options: DcpOptions, *, thread_count: int) -> None:
    """Let torch's own writer save, where the environment says so.

    Args:
        writer: Ours.
        url: The checkpoint's directory.
        options: What the user has chosen.
        thread_count: How many files are written at once, ≥ 1.
    """
    if not read_environment().enabled:
        plain = FsspecWriter(url, thread_count=thread_count, **options.storage_options)
        _take_over(writer, plain, _WRITING)


def take_over_reading(reader: object, url: str, options: DcpOptions) -> None:
    """Let torch's own reader load, where the environment says so.

    Args:
        reader: Ours.
        url: The checkpoint's directory.
        options: What the user has chosen.
    """
    if not read_environment().enabled:
        _take_over(reader, FsspecReader(url, **options.storage_options), _READING)


def _take_over(ours: object, plain: Any, names: tuple[str, ...]) -> None:
    vars(ours).update({name: getattr(plain, name) for name in names})
