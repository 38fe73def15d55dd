# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The options of the rendezvous backend: ours, and those of the backend that it wraps.

They come as ``--rdzv-conf name=value,…``, in which every value is a text, or as ``rdzv_configs`` of
a ``LaunchConfig``, in which it may be anything. Ours have the names that they have elsewhere, and
are checked by the same code; what belongs to the backend within is passed on as it was given. A
name that neither has is refused, with the nearest: a misspelt time limit is no time limit.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_resilience.adapters.rendezvous_etcd import FILES, require_client
from lightning_resilience.config import build, check_site_store, read_environment, refuse_unknown
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.restart_config import RestartConfig
from lightning_resilience.core.validation import check_choice
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["INNER", "RendezvousOptions"]

INNER: Final = ("c10d", "static", "etcd-v2", "etcd")
"""Backends of torch that can be within: those with a server that can hold our records as well."""

_DYNAMIC: Final = (
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
    # Torch's launcher adds this one to whatever it is given.
    "timeout",
)
_FORWARDED: Final = {
    "c10d": (*_DYNAMIC, "is_host", "store_type"),
    "static": ("timeout", "rank"),
    "etcd-v2": (*_DYNAMIC, "protocol", *FILES["etcd-v2"]),
    "etcd": ("timeout", "last_call_timeout", "etcd_prefix", "protocol", *FILES["etcd"]),
}
_NUMBERS: Final = frozenset(
    {"join_timeout", "read_timeout", "timeout", "keep_alive_interval", "keep_alive_max_attempt"}
)
"""Options of the backend within of which we make use ourselves, before that has looked at them."""
_TEXTS: Final = ("inner", "storage", "restarts", "termination_log", "site_store")
_SWITCHES: Final = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_KEEP_ALIVE_S: Final = 5.0
_KEEP_ALIVE_ATTEMPTS: Final = 3.0
_JOIN_S: Final = 600.0
_READ_S: Final = 60.0
_SLACK_S: Final = 5.0

C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """Checked options of one agent.

    Args:
        inner: Name of the backend within.
        forwarded: Its options, as they were given.
        restart: Quotas, delays and bounds.
        breaker: Of the circuits that a restart waits for, as in the callback.
        storage: URLs that the job cannot start without; several are separated by ``;``.
        restarts: URL of a directory in which the record of restarts is kept as well; None for
            nowhere.
        termination_log: Path of a file for the reason of the end; None for Kubernetes' own where
            that exists.
        site_store: URL of a store of several jobs, as in the callback; the workers are told of it.
    """

    inner: str = "c10d"
    forwarded: Mapping[str, Any] = field(default_factory=dict)
    restart: RestartConfig = field(default_factory=RestartConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    storage: tuple[str, ...] = ()
    restarts: str | None = None
    termination_log: str | None = None
    site_store: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> RendezvousOptions:
        """Return the options, checked.

        Args:
            given: Names and values as torch hands them on.

        Raises:
            ConfigError: A name is unknown (the text names the nearest), or a value is not allowed.
        """
        texts = {name: _text(name, given.get(name)) for name in _TEXTS}
        inner = texts.pop("inner") or "c10d"
        check_choice("inner", inner, choices=INNER)
        require_client(inner)
        own = {
            "restart": tuple(each.name for each in dataclasses.fields(RestartConfig)),
            "breaker": tuple(each.name for each in dataclasses.fields(BreakerConfig)),
        }
        allowed = [*_TEXTS, *own["restart"], *own["breaker"], *_FORWARDED[inner]]
        refuse_unknown("the rendezvous backend 'resilient'", given, allowed=allowed)
        storage = texts.pop("storage") or ""
        site_store = check_site_store(texts.pop("site_store"))
        forwarded = {name: given[name] for name in _FORWARDED[inner] if name in given}
        for name in _NUMBERS & forwarded.keys():
            _check_number(name, forwarded[name])
        return cls(
            inner=inner,
            forwarded=forwarded,
            restart=_built(RestartConfig, given, own["restart"]),
            breaker=_built(BreakerConfig, given, own["breaker"]),
            storage=tuple(url for url in (each.strip() for each in storage.split(";")) if url),
            site_store=site_store or read_environment().site_store,
            **texts,
        )

    @property
    def keep_alive_s(self) -> float:
        """How often the backend within tells that its node is there, in seconds."""
        return float(self.forwarded.get("keep_alive_interval", _KEEP_ALIVE_S))

    @property
    def grace_s(self) -> float:
        """For how long a node may be silent before it counts as gone, in seconds."""
        attempts = float(self.forwarded.get("keep_alive_max_attempt", _KEEP_ALIVE_ATTEMPTS))
        return self.keep_alive_s * attempts

    @property
    def silent_s(self) -> float:
        """For how long torch's own client may be without any answer, in seconds.

        Torch needs twice its timeout to notice that nobody listens, and is to say so itself. The
        older client over etcd shows no progress, and never blocks for long.
        """
        if self.inner == "etcd":
            return math.inf
        name, default = (
            ("timeout", _JOIN_S) if self.inner == "static" else ("read_timeout", _READ_S)
        )
        timeout_s = float(self.forwarded.get(name, default))
        return timeout_s + timeout_s + _SLACK_S

    @property
    def naming_s(self) -> float:
        """For how long the node that names a round waits for the others once it is complete.

        In seconds.

        For longer than it may be silent there is no reason: it is gone, and the round is made anew.
        A static rendezvous waits for nobody, so there it has not even come yet.
        """
        return self.join_s if self.inner == "static" else min(self.grace_s, self.join_s)

    @property
    def named_s(self) -> float:
        """For how long a round's name is waited for: node 0 waits for the other nodes itself."""
        return self.naming_s + self.naming_s

    @property
    def join_s(self) -> float:
        """For how long an agent tries to join, in seconds."""
        name = "timeout" if self.inner == "etcd" else "join_timeout"
        return float(self.forwarded.get(name, _JOIN_S))


def _built(kind: type[C], given: Mapping[str, Any], names: tuple[str, ...]) -> C:
    defaults: Any = kind()
    values = {
        name: _parsed(name, given[name], type(getattr(defaults, name)))
        for name in names
        if name in given
    }
    return build(kind, values)


def _text(name: str, value: Any) -> str | None:
    """Return a text without what surrounds it; None where there is none."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        message = f"{name} is of type {type(value).__name__}; allowed is a text, or None."
        raise ConfigError(message)
    return None if value is None else os.fspath(value).strip() or None


def _check_number(name: str, value: Any) -> None:
    """Refuse what is no number; its range is for the backend within to check."""
    try:
        is_number = math.isfinite(float(value))
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        message = f"{name}={value!r} is not allowed: it must be a number."
        raise ConfigError(message)


def _parsed(name: str, value: Any, kind: type[Any]) -> Any:
    """Make a value of a text; what is no text is left to the config's own checks."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if kind is bool:
        return _SWITCHES.get(text.lower(), text)
    if kind not in {int, float}:
        return text
    try:
        number = float(text)
    except ValueError:
        message = f"{name}={text!r} is not allowed: it must be a number."
        raise ConfigError(message) from None
    return int(number) if kind is int and number.is_integer() else number
