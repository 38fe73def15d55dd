# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""From what a user writes to configs that fit together, and back to the option table.

The config dataclasses live in the ``core`` file that uses them, with the reason of each default
beside it, and check themselves. This file adds what no single one of them can know:

* :func:`build` turns keyword arguments into a config, and answers a misspelt name with the nearest;
* :func:`check_relations` refuses options of *different* configs that contradict each other;
* :func:`read_environment` is the only reader of environment variables;
* :func:`option_table` lists every option from the dataclasses themselves, so that the command line,
  the README and the code cannot disagree.

Everything here raises ``ConfigError`` before training starts; nothing here has a side effect.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.checkpoints import CheckpointConfig
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.restart_config import RestartConfig
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.core.spool import SpoolConfig
from lightning_resilience.core.store_address import check_store_url, parse_store_url
from lightning_resilience.core.validation import check_at_least, check_less
from lightning_resilience.errors import ConfigError


__all__ = [
    "CONFIGS",
    "SITE_STORE",
    "Environment",
    "Option",
    "build",
    "check_relations",
    "check_store",
    "option_table",
    "options_markdown",
    "parse_store_url",
    "read_environment",
    "refuse_unknown",
    "refuse_unknown_arguments",
]

CONFIGS: Final[tuple[type[Any], ...]] = (
    RetryPolicy,
    BudgetConfig,
    BreakerConfig,
    AdmissionConfig,
    JointConfig,
    CheckpointConfig,
    SpoolConfig,
    RestartConfig,
)
"""Every config dataclass, in the order of the option table."""

SITE_STORE: Final = "LIGHTNING_RESILIENCE_SITE_STORE"
"""Environment variable with the URL of the store that several jobs share."""

_ON: Final = ("on", "1", "true", "yes")
_OFF: Final = ("off", "0", "false", "no")
# A window must outlast this many attempts that hang until they are abandoned, with the waits
# between them; in a shorter one the first is forgotten before the last, and hangs never trip.
_HANGS_IN_WINDOW: Final = 3
# As many hosts as a quorum ever needs; each takes so many failures before it votes.
_LARGEST_QUORUM: Final = 8

C = TypeVar("C")
S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the option table.

    Args:
        name: Name of the option; durations end in ``_s`` and are seconds.
        default: The default as the table shows it; "derived" where it depends on other values.
        why: The reason of the default.
        owner: Name of the config class that has the option.
    """

    name: str
    default: str
    why: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment variables of this process say; None where one is unset or empty.

    Args:
        enabled: Whether anything is guarded: ``LIGHTNING_RESILIENCE``, on by default.
        store: URL of the shared store: ``LIGHTNING_RESILIENCE_STORE``.
        site_store: URL of the store of several jobs: ``LIGHTNING_RESILIENCE_SITE_STORE``.
        run_id: Name of this run, equal on all ranks: ``LIGHTNING_RESILIENCE_RUN_ID``, else what the
            launcher says (``TORCHELASTIC_RUN_ID`` unless it is "none", then ``SLURM_JOB_ID``).
        spool_dir: Parent of the staging folder: ``LIGHTNING_RESILIENCE_SPOOL_DIR``, else
            ``TMPDIR``.
        incarnation: Name of this start of the workers, of agents that want to be told how it goes:
            ``LIGHTNING_RESILIENCE_INCARNATION``.
        agents_run_id: What those call the run: ``TORCHELASTIC_RUN_ID``, whatever it is.
    """

    enabled: bool = True
    store: str | None = None
    site_store: str | None = None
    run_id: str | None = None
    spool_dir: str | None = None
    incarnation: str | None = None
    agents_run_id: str | None = None


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Return what the environment variables say, checked.

    Args:
        environ: The variables; those of this process by default.

    Returns:
        The values, with the launcher's fallbacks applied.

    Raises:
        ConfigError: A variable has a value that is not allowed. The text names it.
    """
    variables = os.environ if environ is None else environ

    def first(*names: str) -> str | None:
        values = (variables.get(name, "").strip() for name in names)
        return next((value for value in values if value), None)

    store, site_store = first("LIGHTNING_RESILIENCE_STORE"), first(SITE_STORE)
    if store is not None:
        check_store_url(store, option="LIGHTNING_RESILIENCE_STORE")
    check_site_store(site_store, option=SITE_STORE)
    # torchrun's own default for a run without --rdzv-id is the word "none", equal for every job.
    launched = first("TORCHELASTIC_RUN_ID")
    run_id = first("LIGHTNING_RESILIENCE_RUN_ID") or (launched if launched != "none" else None)
    return Environment(
        enabled=_parse_switch("LIGHTNING_RESILIENCE", first("LIGHTNING_RESILIENCE") or "on"),
        store=store,
        site_store=site_store,
        run_id=run_id or first("SLURM_JOB_ID"),
        spool_dir=first("LIGHTNING_RESILIENCE_SPOOL_DIR", "TMPDIR"),
        incarnation=first("LIGHTNING_RESILIENCE_INCARNATION"),
        agents_run_id=launched,
    )


def _parse_switch(name: str, text: str) -> bool:
    word = text.lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    message = (
        f"The environment variable {name}={text!r} is not allowed: it must be one of "
        f"{', '.join((*_ON, *_OFF))}. Unset it to leave everything on."
    )
    raise ConfigError(message)


def check_site_store(url: str | None, *, option: str = "site_store") -> str | None:
    """Refuse a URL of another form than ``tcp://host:port``; pass the rest through.

    Args:
        url: URL of the store of several jobs; None where there is none.
        option: Name of the option it came from, for the error.

    Raises:
        ConfigError: The URL has another form.
    """
    if url is not None:
        parse_store_url(url, option=option)
    return url


def check_store(store: S) -> S:
    """Refuse a store URL of a form that no store has; pass the rest through.

    Raises:
        ConfigError: ``store`` is a text of another form.
    """
    if isinstance(store, str):
        check_store_url(store)
    return store


def build(kind: type[C], options: C | Mapping[str, object] | None = None) -> C:
    """Return a checked config.

    Args:
        kind: The config class.
        options: A config of that class, which is returned as it is; a mapping of option names to
            values; or None for the defaults.

    Returns:
        The config.

    Raises:
        ConfigError: A name is unknown (the text names the nearest valid one), a value is out of
            range, or ``options`` is something else.

    Example:
        >>> from lightning_resilience import RetryPolicy
        >>> build(RetryPolicy, {"max_attempts": 8}).max_attempts
        8
    """
    if options is None:
        return kind()
    if isinstance(options, kind):
        return options
    if not isinstance(options, Mapping):
        message = (
            f"{options!r} of type {type(options).__name__} is not allowed where a {kind.__name__} "
            f"is expected: pass a {kind.__name__} or a mapping of its options."
        )
        raise ConfigError(message)
    _refuse_unknown_names(kind, options)
    return kind(**options)


def _refuse_unknown_names(kind: type[Any], options: Mapping[str, object]) -> None:
    refuse_unknown(
        kind.__name__, options, allowed=[field.name for field in dataclasses.fields(kind)]
    )


def refuse_unknown(owner: str, options: Mapping[str, object], *, allowed: Sequence[str]) -> None:
    """Refuse options that ``owner`` does not have, and answer the first with the nearest.

    Args:
        owner: Name of what takes the options.
        options: Names and values as they were given.
        allowed: Names of the options that there are.

    Raises:
        ConfigError: A name is not among ``allowed``.
    """
    unknown = [name for name in options if name not in allowed]
    if not unknown:
        return
    import difflib  # noqa: PLC0415 - for a mistake only

    name = str(unknown[0])
    nearest = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    home = next((row.owner for row in option_table() if row.name == name), None)
    if home is not None:
        hint = f" It is an option of {home}."
    message = (
        f"{owner} has no option {name!r} (given as {_shown(options[unknown[0]])}).{hint} "
        f"Allowed are: {', '.join(allowed)}."
    )
    raise ConfigError(message)


def refuse_unknown_arguments(kind: type[Any], unknown: Mapping[str, object]) -> None:
    """Refuse keywords that the signature of ``kind`` does not name: it is the list of its options.

    Args:
        kind: The class that is made.
        unknown: Names and values of what else it was given.

    Raises:
        ConfigError: There is one.
    """
    if unknown:
        parameters = inspect.signature(kind).parameters.values()
        named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        refuse_unknown(kind.__name__, unknown, allowed=named)


def _shown(value: object) -> str:
    # A misspelt storage_options holds passwords.
    if isinstance(value, (str, int, float)) or value is None:
        return repr(value)
    return f"a {type(value).__name__}"


def check_relations(
    retry: RetryPolicy,
    breaker: BreakerConfig,
    joint: JointConfig,
    *,
    budget: BudgetConfig | None = None,
    process_group_timeout_s: float | None = None,
) -> None:
    """Refuse options of different configs that contradict each other.

    Relations inside one config are checked by that config.

    Args:
        retry: The retry policy.
        breaker: The breaker's config.
        joint: The joint operations' config.
        budget: The retry budget's config; None for one that is not used.
        process_group_timeout_s: Timeout of the process group in seconds, if there is one.

    Raises:
        ConfigError: Two options contradict each other. The text names both and both values.
    """
    check_less(
        ("trip_failures", breaker.trip_failures),
        ("max_attempts", retry.max_attempts),
        why="an operation would give up before its failures could open the circuit",
    )
    hang = f"stall_timeout_s={retry.stall_timeout_s:g} + max_delay_s={retry.max_delay_s:g}"
    check_at_least(
        ("window_s", breaker.window_s),
        (
            f"{_HANGS_IN_WINDOW} × ({hang})",
            _HANGS_IN_WINDOW * (retry.stall_timeout_s + retry.max_delay_s),
        ),
        why="calls that hang until they are abandoned would never open the circuit",
    )
    if budget is not None:
        needed = _LARGEST_QUORUM * (breaker.trip_failures - 1)
        check_at_least(
            ("retry_floor", budget.retry_floor),
            (
                f"{_LARGEST_QUORUM} · (trip_failures={breaker.trip_failures} − 1)",
                needed,
            ),
            why="the budget would deny the retries whose failures open the circuit",
        )
    if process_group_timeout_s is not None:
        _check_process_group(joint, process_group_timeout_s)


def _check_process_group(joint: JointConfig, process_group_timeout_s: float) -> None:
    timeout_s = joint.timeout_s(process_group_timeout_s=process_group_timeout_s)
    check_less(
        ("joint_timeout_s", timeout_s),
        ("the process group's timeout", process_group_timeout_s),
        why="the watchdog would end the ranks before they could tell who is missing",
    )
    check_less(
        ("joint_beat_s", joint.beat_s(process_group_timeout_s=process_group_timeout_s)),
        ("joint_timeout_s", timeout_s),
        why="a rank that works would be taken for lost between two beats",
    )


def option_table() -> tuple[Option, ...]:
    """Return every option that exists, in the order of the config classes and their fields."""
    return tuple(
        Option(
            name=field.name,
            default=_default_text(field.default),
            why=field.metadata["why"],
            owner=kind.__name__,
        )
        for kind in CONFIGS
        for field in dataclasses.fields(kind)
    )


def _default_text(default: object) -> str:
    if default is None:
        return "derived"
    if isinstance(default, enum.Enum):
        return str(default.value)
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def options_markdown() -> str:
    """Return the option table as a Markdown table, without a line end after the last row."""
    rows = [("option", "default", "of", "why"), ("---", "---", "---", "---")]
    rows += [(f"`{row.name}`", row.default, f"`{row.owner}`", row.why) for row in option_table()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
