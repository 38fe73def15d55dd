# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every bad option is refused before training starts, by name, with its value and what may be."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_resilience import (
    AdmissionConfig,
    BreakerConfig,
    BudgetConfig,
    ConfigError,
    ResilienceCallback,
    RetryPolicy,
)
from lightning_resilience.core.checkpoints import CheckpointConfig
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.spool import SpoolConfig
from tests.lightning_job import Job, make_data, make_model, make_trainer


if TYPE_CHECKING:
    from pathlib import Path


# Most of what follows is against the types.
make: Any = ResilienceCallback
GROUPS = {
    "retry": RetryPolicy,
    "breaker": BreakerConfig,
    "budget": BudgetConfig,
    "admission": AdmissionConfig,
    "joint": JointConfig,
    "checkpoints": CheckpointConfig,
    "spool": SpoolConfig,
}
NO_NUMBERS = ("five", None, True, math.nan, math.inf, [1])


def bad_values(group: str, field: dataclasses.Field[Any]) -> list[Any]:
    """Return values that this option cannot have, whatever the others are."""
    if field.name == "pause_training":
        return ["maybe", "", None, True, 0, -1, 1.5]
    if isinstance(field.default, bool):
        return ["maybe", "", None, 1, 0]
    if isinstance(field.default, str):
        return ["maybe", "", None, 1]
    may_be_none = group == "joint" or field.name == "spool_max_bytes"
    optional = [value for value in NO_NUMBERS if value is not None or not may_be_none]
    may_be_zero = field.name in {"retry_after_max_s", "retry_ratio", "same_path_interval_s"}
    return [*optional, -1, -0.5, *([] if may_be_zero else [0])]


BAD = [
    pytest.param(group, field.name, value, id=f"{field.name}={value!r}")
    for group, kind in GROUPS.items()
    for field in dataclasses.fields(kind)
    for value in bad_values(group, field)
]


@pytest.mark.parametrize(("group", "name", "value"), BAD)
def test_a_value_out_of_range_names_option_value_and_what_is_allowed(
    group: str, name: str, value: Any
) -> None:
    """Of each option, everything that is no such number or word."""
    with pytest.raises(ConfigError) as caught:
        make(**{group: {name: value}})

    text = str(caught.value)
    assert re.search(rf"\b{name}={re.escape(repr(value))}", text) or f"{name}=" in text
    assert "must be" in text


RELATIONS = [
    ({"retry": {"max_attempts": 3}}, "trip_failures=3", "max_attempts=3"),
    ({"retry": {"max_delay_s": 0.5}}, "max_delay_s=0.5", "base_delay_s=1"),
    ({"retry": {"max_delay_s": 3}}, "max_delay_s=3", "throttle_base_delay_s=4"),
    ({"retry": {"unknown_max_attempts": 6}}, "unknown_max_attempts=6", "max_attempts=5"),
    ({"retry": {"stall_timeout_s": 300}}, "stall_timeout_s=300", "window_s=600"),
    ({"breaker": {"view_max_age_s": 10}}, "view_max_age_s=10", "open_for_s=10"),
    ({"breaker": {"max_open_for_s": 9}}, "max_open_for_s=9", "open_for_s=10"),
    ({"breaker": {"probe_timeout_s": 5}}, "probe_timeout_s", "probe_lease_s=8"),
    ({"breaker": {"probe_lease_s": 10}}, "probe_lease_s=10", "open_for_s=10"),
    ({"breaker": {"ramp_start": 17}}, "ramp_start=17", "max_concurrent=16"),
    ({"breaker": {"window_s": 269}}, "window_s=269", "stall_timeout_s=60"),
    ({"admission": {"slot_lease_s": 15}}, "beat_every_s", "slot_lease_s=15"),
    ({"budget": {"retry_floor": 15}}, "retry_floor=15", "trip_failures=3"),
    (
        {"joint": {"joint_timeout_s": 5, "joint_beat_s": 5}},
        "joint_beat_s=5",
        "joint_timeout_s=5",
    ),
]


@pytest.mark.parametrize(("options", "first", "second"), RELATIONS)
def test_contradictions_name_both_options_and_values(
    options: dict[str, Any], first: str, second: str
) -> None:
    """Two options that do not go together are named, both, with their values."""
    with pytest.raises(ConfigError) as caught:
        make(**options)

    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.mark.parametrize(
    ("options", "name", "hint"),
    [
        ({"retry": {"max_atempts": 3}}, "max_atempts", "max_attempts"),
        ({"breaker": {"open_for": 3}}, "open_for", "open_for_s"),
        ({"joint": {"joint_timeout": 3}}, "joint_timeout", "joint_timeout_s"),
        ({"retry": {"trip_failures": 3}}, "trip_failures", "BreakerConfig"),
    ],
)
def test_an_unknown_name_is_answered_with_the_right_one(
    options: dict[str, Any], name: str, hint: str
) -> None:
    """A misspelt name, or one in the wrong group, is named and answered."""
    with pytest.raises(ConfigError) as caught:
        make(**options)

    assert repr(name) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("name", ["on_outage", "on_store_loss"])
@pytest.mark.parametrize("value", ["defers", "WAIT", "", 1])
def test_a_word_that_is_none_of_the_allowed_is_refused(name: str, value: Any) -> None:
    """The error lists the words that there are."""
    with pytest.raises(ConfigError, match=rf"{name}={re.escape(repr(value))}.*'wait'"):
        make(**{name: value})


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", [5, "fast", [("a", 1)]])
def test_what_is_no_mapping_is_refused(group: str, value: Any) -> None:
    """A group of options is a config or a mapping."""
    with pytest.raises(ConfigError, match="mapping"):
        make(**{group: value})


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"store": "redis://host:1"}, "store"),
        ({"store": "tcp://host"}, "store"),
        ({"store": 29400}, "store"),
        ({"site_store": "redis://host:1"}, "site_store"),
        ({"site_store": 29400}, "site_store"),
        ({"breaker": {"site_quorum": 0}}, "site_quorum=0"),
        ({"breaker": {"site_quorum": 9}}, "site_quorum=9"),
        ({"run_id": 7}, "run_id"),
        ({"run_id": ""}, "run_id"),
        ({"storage_options": "key=value"}, "storage_options"),
        ({"storage_options": [1, 2]}, "storage_options"),
        ({"classify": "transient"}, "classify"),
        ({"spool_dir": 7}, "spool_dir"),
        ({"termination_grace_s": 0}, "termination_grace_s=0"),
        ({"termination_grace_s": "30"}, "termination_grace_s='30"),
        ({"max_pending_saves": 0}, "max_pending_saves=0"),
        ({"max_pending_saves": 1.5}, r"max_pending_saves=1\.5"),
        ({"pause_training": 0}, "pause_training=0"),
        ({"pause_training": "always"}, "pause_training='always"),
        ({"strict": 1}, "strict=1"),
        ({"strict": "yes"}, "strict=… of type str"),
    ],
    ids=repr,
)
def test_other_options_are_checked_when_the_callback_is_made(
    options: dict[str, Any], names: str
) -> None:
    """What is no store, name, mapping, function or folder is refused at once, by name."""
    with pytest.raises(ConfigError, match=rf"\b{names}\b"):
        make(**options)


def test_every_option_of_the_callback_has_its_bad_values() -> None:
    """No option is missing from the tables of this file."""
    marks: list[pytest.Mark] = [
        mark
        for test in (
            test_other_options_are_checked_when_the_callback_is_made,
            test_a_word_that_is_none_of_the_allowed_is_refused,
        )
        for mark in vars(test)["pytestmark"]
    ]
    values = [value for mark in marks for value in mark.args[1]]
    tried = {
        str(name)
        for value in values
        for name in (value[0] if isinstance(value, tuple) else [value])
    }

    assert set(inspect.signature(ResilienceCallback).parameters) - {"unknown"} <= tried | set(
        GROUPS
    )


def test_an_unknown_option_of_the_callback_is_refused_by_name() -> None:
    """A misspelt keyword is an error with its name, its value and the nearest that there is."""
    with pytest.raises(ConfigError, match=r"'on_outrage' .*'wait'.*'on_outage'"):
        make(on_outrage="wait")


def test_an_option_of_a_group_is_sent_there() -> None:
    """Options of the groups are no keywords of the callback, and the error says whose they are."""
    with pytest.raises(ConfigError, match=r"'max_attempts'.*RetryPolicy"):
        make(max_attempts=3)


@pytest.mark.parametrize("name", ["on_outage", "on_store_loss"])
def test_a_word_that_is_given_twice_is_refused(name: str) -> None:
    """Which of two contradicting words counts is not for us to guess."""
    with pytest.raises(ConfigError, match=f"{name} is given twice"):
        make(**{name: "wait", "joint": {name: "wait"}})


def test_a_secret_under_a_misspelt_name_is_not_shown() -> None:
    """What was meant as options of the storage may hold a password."""
    with pytest.raises(
        ConfigError, match=r"'storage_option' .*a dict.*'storage_options'"
    ) as caught:
        make(storage_option={"password": "hunter2"})

    assert "hunter2" not in str(caught.value)


def test_a_secret_of_the_wrong_kind_is_not_shown() -> None:
    """What was passed as options of the storage may hold a password."""
    with pytest.raises(ConfigError) as caught:
        make(storage_options="password=hunter2")

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("joint", "expected"),
    [
        ({"joint_timeout_s": 20.0}, r"joint_timeout_s=20 must be less than the process group's"),
        ({"joint_beat_s": 16.0}, r"joint_beat_s=16 must be less than joint_timeout_s=16"),
    ],
)
def test_what_contradicts_the_trainer_is_refused_before_training(
    joint: dict[str, Any], expected: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process group's timeout is known in ``setup`` only, and that is before the first step."""
    callback = make(joint=joint)
    trainer: Any = object.__new__(Trainer)
    monkeypatch.setattr(Trainer, "world_size", 2)
    strategy = DDPStrategy(timeout=timedelta(seconds=20))
    trainer._accelerator_connector = SimpleNamespace(strategy=strategy)
    trainer.callbacks = [callback]

    with pytest.raises(ConfigError, match=expected):
        callback.setup(trainer, None, "fit")

    assert list(spool.iterdir()) == []


def test_a_bad_number_of_hosts_is_refused_in_setup(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first joint operation, where the other ranks would wait for this one."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "two")
    callback = make()
    trainer: Any = object.__new__(Trainer)
    monkeypatch.setattr(Trainer, "world_size", 2)
    trainer._accelerator_connector = SimpleNamespace(strategy=DDPStrategy())
    trainer.callbacks = [callback]

    with pytest.raises(ConfigError, match="GROUP_WORLD_SIZE='two'"):
        callback.setup(trainer, None, "fit")

    assert list(spool.iterdir()) == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LIGHTNING_RESILIENCE", "perhaps"),
        ("LIGHTNING_RESILIENCE_STORE", "http://host:1"),
        ("LIGHTNING_RESILIENCE_STORE", "tcp://host:99999"),
        ("LIGHTNING_RESILIENCE_SITE_STORE", "http://host:1"),
        ("GROUP_WORLD_SIZE", "two"),
        ("SLURM_NNODES", "0"),
    ],
)
def test_a_bad_variable_is_refused_before_training(
    variable: str, value: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the variable and its value, and no step is taken."""
    monkeypatch.setenv(variable, value)
    trainer = make_trainer(Job(folder=str(spool / "files"), ranks=1))

    with pytest.raises(ConfigError, match=rf"{variable}={re.escape(repr(value))}"):
        trainer.fit(make_model(), make_data())

    assert trainer.global_step == 0
    assert not (spool / "files").exists()
