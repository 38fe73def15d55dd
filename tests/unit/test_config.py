# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""From keyword arguments and environment variables to configs that fit together."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_resilience import config
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.joint import JointConfig
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import ConfigError


@pytest.mark.parametrize("kind", config.CONFIGS)
def test_the_defaults_are_a_valid_config(kind: type) -> None:
    """Every config can be built without a single option."""
    assert config.build(kind) == kind()
    assert config.build(kind, {}) == kind()


def test_the_defaults_fit_together() -> None:
    """The defaults of all configs contradict each other nowhere, also with a process group."""
    configs = (RetryPolicy(), BreakerConfig(), JointConfig())

    config.check_relations(*configs)
    config.check_relations(*configs, process_group_timeout_s=10.0)
    config.check_relations(*configs, process_group_timeout_s=1800.0)


def test_a_mapping_becomes_a_config() -> None:
    """Options of a mapping replace the defaults of the same names, and no others."""
    built = config.build(RetryPolicy, {"max_attempts": 8, "max_delay_s": 60})

    assert built == dataclasses.replace(RetryPolicy(), max_attempts=8, max_delay_s=60)


def test_a_config_passes_unchanged() -> None:
    """An instance is returned as it is."""
    policy = RetryPolicy(max_attempts=8)

    assert config.build(RetryPolicy, policy) is policy


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (
            RetryPolicy,
            {"max_attemps": 8},
            ("RetryPolicy", "'max_attemps'", "8", "Did you mean 'max_attempts'?", "deadline_s"),
        ),
        (RetryPolicy, {"trip_failures": 2}, ("'trip_failures'", "an option of BreakerConfig")),
        (BreakerConfig, {"zzz": None}, ("BreakerConfig", "'zzz'", "Allowed are: ")),
        (JointConfig, {3: 4}, ("JointConfig", "'3'", "4")),
    ],
    ids=["misspelt", "of another config", "far from all", "no text"],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    kind: type, options: dict[str, object], expected: tuple[str, ...]
) -> None:
    """The error names the option, its value, the nearest valid name and what is allowed."""
    with pytest.raises(ConfigError) as raised:
        config.build(kind, options)

    for text in expected:
        assert text in str(raised.value)


@pytest.mark.parametrize("options", [5, "max_attempts=3", [("max_attempts", 3)], BreakerConfig()])
def test_what_is_no_config_and_no_mapping_is_refused(options: object) -> None:
    """The error names the value, its type and what is expected."""
    with pytest.raises(ConfigError, match="mapping") as raised:
        config.build(RetryPolicy, options)

    assert "RetryPolicy" in str(raised.value)
    assert type(options).__name__ in str(raised.value)


def test_a_value_out_of_range_is_refused_by_name() -> None:
    """A mapping's values are checked as those of the class itself."""
    with pytest.raises(ConfigError, match="max_attempts=0"):
        config.build(RetryPolicy, {"max_attempts": 0})


@pytest.mark.parametrize(
    ("retry", "breaker", "joint", "expected"),
    [
        (
            {"max_attempts": 3},
            {"trip_failures": 3},
            {},
            ("trip_failures=3", "max_attempts=3", "less than"),
        ),
        (
            {"stall_timeout_s": 300.0},
            {"window_s": 600.0},
            {},
            ("window_s=600", "stall_timeout_s=300", "max_delay_s=30", "=990", "at least"),
        ),
        (
            {},
            {},
            {"joint_timeout_s": 20.0},
            ("joint_timeout_s=20", "the process group's timeout=10", "less than"),
        ),
        (
            {},
            {},
            {"joint_beat_s": 9.0},
            ("joint_beat_s=9", "joint_timeout_s=8", "less than"),
        ),
    ],
    ids=["trip after the last attempt", "hangs", "watchdog", "beats"],
)
def test_contradictions_name_both_options_and_both_values(
    retry: dict[str, object],
    breaker: dict[str, object],
    joint: dict[str, object],
    expected: tuple[str, ...],
) -> None:
    """Each relation between two configs is refused with both names, both values and the reason."""
    configs = (
        config.build(RetryPolicy, retry),
        config.build(BreakerConfig, breaker),
        config.build(JointConfig, joint),
    )

    with pytest.raises(ConfigError) as raised:
        config.check_relations(*configs, process_group_timeout_s=10.0)

    for text in expected:
        assert text in str(raised.value)


def test_values_on_the_boundary_fit() -> None:
    """A window of exactly three hanging attempts is long enough."""
    retry = RetryPolicy(stall_timeout_s=170.0, max_delay_s=30.0)

    config.check_relations(retry, BreakerConfig(window_s=600.0), JointConfig())


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("on", True),
        ("1", True),
        ("TRUE", True),
        (" yes ", True),
        ("off", False),
        ("0", False),
        ("False", False),
        ("no", False),
        ("", True),
    ],
)
def test_the_switch_has_words_for_on_and_off(text: str, *, enabled: bool) -> None:
    """LIGHTNING_RESILIENCE is read without regard to case; empty is as unset."""
    assert config.read_environment({"LIGHTNING_RESILIENCE": text}).enabled is enabled


def test_another_word_is_no_switch() -> None:
    """A switch that is neither on nor off is refused, with both lists of words."""
    with pytest.raises(ConfigError) as raised:
        config.read_environment({"LIGHTNING_RESILIENCE": "disabled"})

    for text in ("LIGHTNING_RESILIENCE='disabled'", "on", "off", "true", "false"):
        assert text in str(raised.value)


def test_an_empty_environment_leaves_everything_to_the_defaults() -> None:
    """Without variables everything is on and nothing is set."""
    assert config.read_environment({}) == config.Environment(
        enabled=True, store=None, run_id=None, spool_dir=None
    )


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the variables of this process are read."""
    monkeypatch.setenv("LIGHTNING_RESILIENCE", "off")

    assert config.read_environment().enabled is False


@pytest.mark.parametrize(
    ("variables", "run_id"),
    [
        (
            {
                "LIGHTNING_RESILIENCE_RUN_ID": "mine",
                "TORCHELASTIC_RUN_ID": "elastic",
                "SLURM_JOB_ID": "7",
            },
            "mine",
        ),
        ({"TORCHELASTIC_RUN_ID": "elastic", "SLURM_JOB_ID": "7"}, "elastic"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "7"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, None),
    ],
    ids=["ours", "elastic", "elastic without a name", "nothing", "restart count"],
)
def test_the_run_id_comes_from_the_first_that_names_the_run(
    variables: dict[str, str], run_id: str | None
) -> None:
    """Ours wins, then torchrun's unless it is "none", then SLURM's; a restart count is none."""
    assert config.read_environment(variables).run_id == run_id


def test_the_spool_folder_falls_back_to_the_temporary_one() -> None:
    """LIGHTNING_RESILIENCE_SPOOL_DIR wins over TMPDIR."""
    both = {"LIGHTNING_RESILIENCE_SPOOL_DIR": "/spool", "TMPDIR": "/scratch"}

    assert config.read_environment(both).spool_dir == "/spool"
    assert config.read_environment({"TMPDIR": "/scratch"}).spool_dir == "/scratch"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://host0:29400", ("host0", 29400)),
        ("tcp://10.0.0.1:1/", ("10.0.0.1", 1)),
        ("tcp://[::1]:29400", ("::1", 29400)),
    ],
)
def test_a_store_url_is_host_and_port(url: str, address: tuple[str, int]) -> None:
    """Names, IPv4 and bracketed IPv6 addresses are understood."""
    assert config.parse_store_url(url) == address
    assert config.read_environment({"LIGHTNING_RESILIENCE_STORE": url}).store == url
    assert config.read_environment({config.SITE_STORE: url}).site_store == url


@pytest.mark.parametrize(
    "url",
    [
        "host0:29400",
        "host0",
        "tcp://host0",
        "tcp://:29400",
        "tcp://host0:0",
        "tcp://host0:65536",
        "tcp://host0:port",
        "tcp://host0:29400/path",
        "tcp://[::1:29400",
        "redis://host0:6379",
        "tcp://user@host0:29400",
    ],
)
def test_another_store_url_is_refused(url: str) -> None:
    """The error names the variable, the value and the form that is allowed."""
    with pytest.raises(ConfigError, match="LIGHTNING_RESILIENCE_STORE") as raised:
        config.read_environment({"LIGHTNING_RESILIENCE_STORE": url})

    assert "tcp://HOST:PORT" in str(raised.value)


def test_a_password_in_a_store_url_is_not_repeated() -> None:
    """An error text ends in logs, so that a secret in the value is left out of it."""
    with pytest.raises(ConfigError) as raised:
        config.parse_store_url("tcp://user:secret@host0:29400?token=secret")

    assert "secret" not in str(raised.value)
    assert "host0:29400" in str(raised.value)


def test_the_table_has_every_option_once_with_its_reason() -> None:
    """The option table is the fields of the configs in their order; no name is used twice."""
    rows = config.option_table()

    fields = [
        (field.name, kind.__name__) for kind in config.CONFIGS for field in dataclasses.fields(kind)
    ]
    assert [(row.name, row.owner) for row in rows] == fields
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.why and row.default for row in rows)


def test_the_table_shows_numbers_as_people_write_them() -> None:
    """A whole number of seconds has no decimal point, and a default that depends says so."""
    shown = {row.name: row.default for row in config.option_table()}

    assert shown["max_delay_s"] == "30"
    assert shown["max_attempts"] == "5"
    assert shown["joint_timeout_s"] == "derived"


def test_the_markdown_is_one_row_for_each_option() -> None:
    """The Markdown table has a head, a rule and a row of four cells for every option."""
    lines = config.options_markdown().splitlines()

    assert len(lines) == 2 + len(config.option_table())
    assert all(line.count("|") == 5 for line in lines)
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)


def test_a_start_of_the_workers_and_its_run_are_as_the_agents_call_them() -> None:
    """Those look under ``TORCHELASTIC_RUN_ID`` whatever it is, torchrun's own default as well."""
    variables = {"LIGHTNING_RESILIENCE_INCARNATION": "3-n", "TORCHELASTIC_RUN_ID": "none"}
    named = config.read_environment({**variables, "LIGHTNING_RESILIENCE_RUN_ID": "mine"})

    assert (named.incarnation, named.agents_run_id, named.run_id) == ("3-n", "none", "mine")
    assert config.read_environment({}).incarnation is None
