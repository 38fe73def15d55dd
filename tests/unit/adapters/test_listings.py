# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever a filesystem calls the time of the last change, it is one number."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from lightning_resilience.adapters.listings import modified_s


UTC = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("item", "expected_s"),
    [
        ({"mtime": 5.5, "created": 4.0}, 5.5),
        ({"mtime": None, "created": 4}, 4.0),
        ({"LastModified": UTC}, UTC.timestamp()),
        ({"LastModified": UTC.astimezone(timezone(timedelta(hours=5)))}, UTC.timestamp()),
        ({"created": UTC.replace(tzinfo=None)}, UTC.timestamp()),
        ({"updated": "2026-01-02T03:04:05Z"}, UTC.timestamp()),
        ({"updated": "some day"}, None),
        ({"size": 7}, None),
    ],
)
def test_the_time_of_the_last_change_is_found(
    item: dict[str, Any], expected_s: float | None
) -> None:
    """In seconds since 1970, or None where it is not said."""
    assert modified_s(item) == expected_s
