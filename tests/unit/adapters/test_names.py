# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which names are those of the same checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.adapters.names import name_of, real_path_of


if TYPE_CHECKING:
    from pathlib import Path


def test_a_local_path_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative or absolute, with a protocol, our prefix, or a slash at the end."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / "a.ckpt"

    spellings = [
        "run/a.ckpt",
        "./run//a.ckpt/",
        str(path),
        f"file://{path}",
        f"resilient::file://{path}/",
    ]

    assert {name_of(spelling) for spelling in spellings} == {str(path)}


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run/a.ckpt",
        "s3a://bucket/run/a.ckpt",
        "S3://bucket/run/a.ckpt/",
        "s3://key:secret@bucket/run/a.ckpt",
        "resilient::s3://bucket/run/a.ckpt",
    ],
)
def test_a_url_has_one_name(url: str) -> None:
    """Whatever the protocol is called, and whoever asks."""
    assert name_of(url) == "s3://bucket/run/a.ckpt"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://bucket/a.ckpt", "s3://bucket/a.ckpt?version=2"),
        ("s3://bucket/a.ckpt", "gs://bucket/a.ckpt"),
        ("s3://bucket/a.ckpt", "s3://bucket//a.ckpt"),
        ("memory://a.ckpt", "/a.ckpt"),
    ],
)
def test_what_is_not_the_same_has_another_name(one: str, other: str) -> None:
    """In an object's name a question mark, or another slash, is a letter like any other."""
    assert name_of(one) != name_of(other)


def test_a_real_path_has_no_links(tmp_path: Path) -> None:
    """Neither among the directories nor at its end; a URL has none."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "last.ckpt").symlink_to("a.ckpt")

    assert real_path_of(f"{tmp_path}/link/last.ckpt") == f"{tmp_path.resolve()}/real/a.ckpt"
    assert real_path_of("s3://bucket/a.ckpt") == "s3://bucket/a.ckpt"
