# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options of a writer and a reader for ``torch.distributed.checkpoint``, checked when given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning_resilience.adapters.lightning.options import Options, check_options
from lightning_resilience.adapters.storage import is_local
from lightning_resilience.config import build, check_relations
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.validation import check_kind
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from typing import Literal


__all__ = ["DcpOptions", "check_dcp_options", "check_directory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOptions(Options):
    """What a user has chosen; nothing is opened yet.

    Args:
        joint: How ranks wait for each other.
        is_joint: Whether they do; a rank that saves or loads by itself waits for nobody.
    """

    joint: JointConfig = field(default_factory=JointConfig)
    is_joint: bool = True


def check_dcp_options(
    *, joint: JointConfig | Mapping[str, Any] | Literal[False] | None, **options: Any
) -> DcpOptions:
    """Return the options, checked; None is an option that was not given.

    Args:
        joint: A config, a mapping of its options, or False.
        options: Those of ``check_options``.

    Raises:
        ConfigError: An option is out of range, of another kind than it takes, or contradicts
            another.
    """
    common = check_options(**options)
    fits = joint is False or isinstance(joint, (JointConfig, Mapping))
    check_kind("joint", joint, fits=fits, allowed="a mapping of options of joint operations, False")
    config = build(JointConfig, joint or None)
    check_relations(common.retry, common.breaker, config, budget=common.budget)
    given = {each.name: getattr(common, each.name) for each in dataclasses.fields(Options)}
    return DcpOptions(**given, joint=config, is_joint=joint is not False)


def check_directory(path: object) -> str:
    """Return the URL or path of a checkpoint's directory, without a slash at its end.

    Raises:
        ConfigError: It is none, or the root of a bucket: the commit mark is beside the directory.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        message = f"path={path!r} is not allowed: it must be a path or a URL of a directory."
        raise ConfigError(message)
    url = str(os.fspath(path)).rstrip("/")
    parts = urlsplit(url)
    if not is_local(url) and parts.scheme != "memory" and not parts.path.strip("/"):
        message = (
            f"path={url!r} is not allowed: a checkpoint is a directory in a bucket, and what says "
            "that it is complete lies beside it. Add a name, such as /step-100."
        )
        raise ConfigError(message)
    return url
