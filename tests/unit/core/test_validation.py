# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every bad option is refused with its name, its value and what is allowed, before training."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience import config
from lightning_resilience.core import validation
from lightning_resilience.core.admission import AdmissionConfig
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.checkpoints import CheckpointConfig
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.restart_config import RestartConfig
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.core.spool import SpoolConfig
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


SECONDS = {
    RetryPolicy: (
        "base_delay_s",
        "max_delay_s",
        "deadline_s",
        "stall_timeout_s",
        "throttle_base_delay_s",
    ),
    BreakerConfig: (
        "window_s",
        "view_max_age_s",
        "open_for_s",
        "max_open_for_s",
        "probe_timeout_s",
        "probe_lease_s",
    ),
    AdmissionConfig: ("slot_lease_s", "beat_every_s"),
    BudgetConfig: ("budget_window_s",),
    JointConfig: ("joint_timeout_s", "joint_beat_s", "termination_grace_s", "defer_after_s"),
    SpoolConfig: ("max_unpublished_s", "flush_timeout_s"),
    RestartConfig: (
        "restart_window_s",
        "restart_base_delay_s",
        "restart_max_delay_s",
        "gate_deadline_s",
    ),
}
WHOLE = {
    RetryPolicy: ("max_attempts", "unknown_max_attempts"),
    BreakerConfig: (
        "trip_failures",
        "reopen_failures",
        "max_concurrent",
        "ramp_start",
        "site_quorum",
    ),
    BudgetConfig: ("retry_floor",),
    JointConfig: ("max_pending_saves",),
    CheckpointConfig: ("max_consecutive_save_failures",),
    SpoolConfig: ("spool_max_items", "spool_max_bytes"),
}
MOST = {"max_concurrent": 1024, "site_quorum": 8}
OTHERS = {
    RetryPolicy: ("retry_after_max_s",),
    BreakerConfig: ("quorum_fraction",),
    BudgetConfig: ("retry_ratio",),
    JointConfig: ("on_outage", "on_store_loss", "pause_training"),
    CheckpointConfig: ("preflight", "allow_fresh_start"),
    SpoolConfig: ("same_path_interval_s",),
    RestartConfig: (
        "restart_quota",
        "killed_quota",
        "membership_quota",
        "same_failure_limit",
        "settle_s",
        "linger_s",
    ),
}
DERIVED = ("spool_max_bytes", "on_store_loss", "defer_after_s")
NO_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, True, False, "5", b"5", [5], 10**400)


def error_of(make: Callable[..., object], **options: object) -> str:
    """Return the text of the error that these options are refused with."""
    with pytest.raises(ConfigError) as caught:
        make(**options)
    return str(caught.value)


def short(value: object) -> str:
    """Return the beginning of a value's text, as the name of a case."""
    return repr(value)[:12]


def cases(table: Mapping[type, tuple[str, ...]], values: tuple[Any, ...]) -> list[Any]:
    """Return one case for each option of a table and each value."""
    return [
        pytest.param(kind, name, value, id=f"{name}={short(value)}")
        for kind, names in table.items()
        for name in names
        for value in values
    ]


def test_no_option_is_forgotten() -> None:
    """Every option of every config is in one of the tables of this file."""
    for kind in config.CONFIGS:
        names = {field.name for field in dataclasses.fields(kind)}
        tables = [*SECONDS.get(kind, ()), *WHOLE.get(kind, ()), *OTHERS.get(kind, ())]
        assert sorted(tables) == sorted(names)


@pytest.mark.parametrize(
    ("kind", "name", "value"), cases(SECONDS, (*NO_NUMBERS, 0, 0.0, -1.0, -1e-9))
)
def test_durations_are_positive_seconds(kind: type, name: str, value: object) -> None:
    """A duration is a finite number of seconds above 0, nothing else."""
    text = error_of(kind, **{name: value})

    assert text.startswith(f"{name}=")
    assert "a finite number of seconds > 0" in text
    assert "bits" in text if value == 10**400 else repr(value) in text


@pytest.mark.parametrize(("kind", "name", "value"), cases(SECONDS | WHOLE | OTHERS, (None,)))
def test_none_is_no_value(kind: type[Any], name: str, value: object) -> None:
    """None is refused wherever no option is derived from others."""
    if name.startswith("joint") or name in DERIVED:
        assert getattr(kind(**{name: value}), name) is None
        return

    assert error_of(kind, **{name: value}).startswith(f"{name}=None is not allowed")


@pytest.mark.parametrize(
    ("kind", "name", "value"), cases(WHOLE, (*NO_NUMBERS, 0, -1, 1.0, 2.5, 10**9 + 1))
)
def test_counts_are_whole_numbers(kind: type, name: str, value: object) -> None:
    """A count is a whole number of at least 1; 1.0 and True are none."""
    text = error_of(kind, **{name: value})

    assert text.startswith(f"{name}=")
    assert f"a whole number ≥ 1 and ≤ {MOST.get(name, 10**9)}" in text
    assert "bits" in text if value == 10**400 else repr(value) in text


@pytest.mark.parametrize("value", [*NO_NUMBERS, -0.001], ids=short)
def test_the_longest_retry_after_may_be_zero(value: object) -> None:
    """retry_after_max_s is a finite number of seconds of at least 0."""
    assert RetryPolicy(retry_after_max_s=0).retry_after_max_s == 0

    text = error_of(RetryPolicy, retry_after_max_s=value)

    assert text.startswith("retry_after_max_s=")
    assert "a finite number of seconds ≥ 0" in text


@pytest.mark.parametrize("name", ["restart_quota", "killed_quota", "membership_quota"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, -1, 1.0], ids=short)
def test_a_quota_of_restarts_may_be_zero(name: str, value: object) -> None:
    """Then the first one is denied."""
    assert getattr(RestartConfig(**{name: 0}), name) == 0

    assert "a whole number ≥ 0" in error_of(RestartConfig, **{name: value})


@pytest.mark.parametrize(
    "quotas", [{"restart_quota": 54}, {"membership_quota": 61}, {"restart_quota": 10**9}]
)
def test_a_quota_that_the_record_cannot_count_is_refused(quotas: dict[str, int]) -> None:
    """The oldest restarts would fall out of it, and no number of them would ever be too many."""
    text = error_of(RestartConfig, **quotas)

    assert "restart_quota + membership_quota" in text
    assert "remembered=64" in text
    assert RestartConfig(restart_quota=53).restart_quota == 53


@pytest.mark.parametrize("name", ["settle_s", "linger_s"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, -0.001], ids=short)
def test_the_waits_around_a_restart_may_be_zero(name: str, value: object) -> None:
    """Then nothing is waited for."""
    assert getattr(RestartConfig(**{name: 0}), name) == 0

    assert "a finite number of seconds ≥ 0" in error_of(RestartConfig, **{name: value})


@pytest.mark.parametrize("value", [*NO_NUMBERS, 1, 0], ids=short)
def test_once_is_not_the_same_error_again(value: object) -> None:
    """same_failure_limit is a whole number of at least 2."""
    assert RestartConfig(same_failure_limit=2).same_failure_limit == 2

    assert "a whole number ≥ 2" in error_of(RestartConfig, same_failure_limit=value)


def test_the_first_delay_of_a_restart_is_not_longer_than_the_longest() -> None:
    """The error names both options and both values."""
    text = error_of(RestartConfig, restart_base_delay_s=200.0)

    assert "restart_max_delay_s=120 must be at least restart_base_delay_s=200" in text


@pytest.mark.parametrize("value", [*NO_NUMBERS, 0, 0.0, -0.25, 1.0001, 25], ids=short)
def test_the_quorum_is_a_share(value: object) -> None:
    """quorum_fraction is a number above 0 and at most 1, and no seconds."""
    assert BreakerConfig(quorum_fraction=1).quorum_fraction == 1
    assert BreakerConfig(quorum_fraction=1e-9).quorum_fraction == 1e-9

    text = error_of(BreakerConfig, quorum_fraction=value)

    assert text.startswith("quorum_fraction=")
    assert "a number in (0, 1]" in text
    assert "seconds" not in text


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("on_outage", ("spool", "wait", "skip", "fail")),
        ("on_store_loss", ("wait", "raise", "defer")),
    ],
)
@pytest.mark.parametrize(
    "value", ["", "Wait", "wait ", "defers", 1, True, math.nan, ("wait",)], ids=short
)
def test_choices_are_among_those_that_exist(
    name: str, allowed: tuple[str, ...], value: object
) -> None:
    """A choice is exactly one of the words that exist, and the error lists them."""
    for word in allowed:
        chosen: dict[str, Any] = {name: word}
        assert getattr(JointConfig(**chosen), name) == word

    text = error_of(JointConfig, **{name: value})

    assert text.startswith(f"{name}={value!r} is not allowed")
    assert all(repr(word) in text for word in allowed)


def test_values_at_the_edge_are_allowed() -> None:
    """What is just inside its range is accepted."""
    RetryPolicy(max_attempts=1, unknown_max_attempts=1)
    RetryPolicy(base_delay_s=30, throttle_base_delay_s=30, max_delay_s=30)
    RetryPolicy(max_attempts=10**9)
    BreakerConfig(trip_failures=1, reopen_failures=1, max_concurrent=1, ramp_start=1)
    BreakerConfig(open_for_s=60, max_open_for_s=60)
    BreakerConfig(probe_timeout_s=4, probe_lease_s=7.75)
    BreakerConfig(view_max_age_s=9.999, open_for_s=10)
    JointConfig(joint_timeout_s=1, joint_beat_s=0.999)


@pytest.mark.parametrize("on_outage", ["wait", "skip", "fail"])
def test_what_is_deferred_needs_the_spool(on_outage: str) -> None:
    """Saves are deferred by themselves where they are spooled, and are refused where they are not.

    Whoever has said nothing of the store waits for it then.
    """
    terms = JointConfig(on_outage=on_outage).store_terms(process_group_timeout_s=100.0)
    by_default = JointConfig().store_terms(process_group_timeout_s=100.0)

    text = error_of(JointConfig, on_store_loss="defer", on_outage=on_outage)

    assert (terms.store_patience_s, terms.defer_after_s) == (80.0, None)
    assert (by_default.store_patience_s, by_default.defer_after_s) == (80.0, 20.0)
    assert text.startswith("on_store_loss='defer'")
    assert repr(on_outage) in text


def test_how_long_the_store_must_be_gone_is_bounded_by_default() -> None:
    """A quarter of the time after which a rank is lost, and half a minute at most."""

    def default(timeout_s: float) -> float | None:
        config = JointConfig(joint_timeout_s=timeout_s)
        return config.store_terms(process_group_timeout_s=1.0).defer_after_s

    assert [default(timeout_s) for timeout_s in (40.0, 1440.0)] == [10.0, 30.0]


# Options that contradict each other, and what the error has to name: both options, both values.
RELATIONS: list[tuple[Callable[..., object], dict[str, Any], tuple[str, ...]]] = [
    (RetryPolicy, {"max_delay_s": 2.0, "base_delay_s": 3.0}, ("max_delay_s=2", "base_delay_s=3")),
    (
        RetryPolicy,
        {"max_delay_s": 3.999},
        ("max_delay_s=3.999", "throttle_base_delay_s=4"),
    ),
    (
        RetryPolicy,
        {"max_attempts": 4, "unknown_max_attempts": 5},
        ("max_attempts=4", "unknown_max_attempts=5"),
    ),
    (
        BreakerConfig,
        {"view_max_age_s": 10, "open_for_s": 10},
        ("view_max_age_s=10", "open_for_s=10"),
    ),
    (
        BreakerConfig,
        {"view_max_age_s": 10.0000001},
        ("view_max_age_s=10.0000001", "open_for_s=10"),
    ),
    (
        BreakerConfig,
        {"open_for_s": 61},
        ("max_open_for_s=60", "open_for_s=61"),
    ),
    (
        BreakerConfig,
        {"probe_lease_s": 7.749},
        ("probe_lease_s=7.749", "1.5 · (probe_timeout_s + 0.5) + 1=7.75"),
    ),
    (
        BreakerConfig,
        {"probe_timeout_s": 5},
        ("probe_lease_s=8", "probe_timeout_s", "=9.25"),
    ),
    (
        BreakerConfig,
        {"probe_lease_s": 10},
        ("probe_lease_s=10", "open_for_s=10"),
    ),
    (
        BreakerConfig,
        {"max_concurrent": 4, "ramp_start": 5},
        ("max_concurrent=4", "ramp_start=5"),
    ),
    (
        JointConfig,
        {"joint_timeout_s": 5, "joint_beat_s": 5},
        ("joint_beat_s=5", "joint_timeout_s=5"),
    ),
    (
        JointConfig,
        {"joint_timeout_s": 5, "defer_after_s": 5},
        ("defer_after_s=5", "joint_timeout_s=5"),
    ),
]


@pytest.mark.parametrize(("kind", "options", "named"), RELATIONS)
def test_options_that_contradict_each_other_are_refused(
    kind: Callable[..., object], options: dict[str, Any], named: tuple[str, ...]
) -> None:
    """The error of a broken relation names both options with both values, and what to change."""
    text = error_of(kind, **options)

    assert all(part in text for part in named), text
    assert "Lower the " in text or "Raise the " in text


@pytest.mark.parametrize(
    ("retry", "breaker", "named"),
    [
        ({"max_attempts": 3}, {}, ("trip_failures=3", "max_attempts=3")),
        ({}, {"trip_failures": 7}, ("trip_failures=7", "max_attempts=5")),
        ({}, {"window_s": 269.9}, ("window_s=269.9", "stall_timeout_s=60", "max_delay_s=30")),
        ({"stall_timeout_s": 171}, {}, ("window_s=600", "stall_timeout_s=171", "max_delay_s=30")),
    ],
)
def test_options_of_two_configs_that_contradict_each_other_are_refused(
    retry: dict[str, Any], breaker: dict[str, Any], named: tuple[str, ...]
) -> None:
    """A relation between two configs is checked like one within a config."""

    def check(retry: dict[str, Any], breaker: dict[str, Any]) -> None:
        config.check_relations(RetryPolicy(**retry), BreakerConfig(**breaker), JointConfig())

    text = error_of(check, retry=retry, breaker=breaker)

    assert all(part in text for part in named), text


def test_a_joint_timeout_is_shorter_than_the_process_groups() -> None:
    """Who waits for others must leave before the watchdog of the process group does."""

    def check(timeout_s: float) -> None:
        config.check_relations(
            RetryPolicy(),
            BreakerConfig(),
            JointConfig(joint_timeout_s=timeout_s),
            process_group_timeout_s=10.0,
        )

    check(9.99)
    text = error_of(check, timeout_s=10)

    assert "joint_timeout_s=10" in text
    assert "process group" in text


def test_relations_that_just_hold_are_allowed() -> None:
    """The edge of every relation between configs is on the allowed side."""
    config.check_relations(RetryPolicy(max_attempts=4), BreakerConfig(window_s=270), JointConfig())


@pytest.mark.parametrize("kind", config.CONFIGS)
def test_every_option_has_a_reason(kind: type) -> None:
    """Every default stands beside the reason for it."""
    for field in dataclasses.fields(kind):
        assert field.metadata["why"], field.name


def test_a_config_error_is_a_value_error() -> None:
    """Who catches ValueError catches a bad option."""
    with pytest.raises(ValueError, match="max_attempts"):
        validation.check_whole("max_attempts", "five", minimum=1)


def test_an_exclusive_bound_is_named() -> None:
    """Where a duration has another lower bound, the error says which."""
    validation.check_seconds("pause_s", 2.1, above=2.0)

    assert "> 2" in error_of(
        lambda value: validation.check_seconds("pause_s", value, above=2.0), value=2.0
    )


@pytest.mark.parametrize("kind", config.CONFIGS)
def test_a_config_cannot_be_changed(kind: type) -> None:
    """A config that was checked stays as it was checked."""
    checked = kind()

    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(checked, field.name, None)
