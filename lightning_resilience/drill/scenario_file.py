# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Scenario files: read with errors that name file, line and field, and written to be read again.

A file says only what differs from the defaults. Reading goes down the nodes of the YAML beside the
types of the scenario, and refuses on the way what has no place there: a name that is unknown, given
twice or missing, a number that is none. ``msgspec`` then checks types and ranges, and the configs
and the scenario their own relations; whatever they refuse is looked up in the lines that were read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml
from msgspec import inspect

from lightning_resilience.config import refuse_unknown
from lightning_resilience.drill.scenario import Scenario
from lightning_resilience.drill.scenario_fields import (
    allowed,
    fault_type,
    fields_of,
    scenario_type,
)
from lightning_resilience.drill.scenario_yaml import as_yaml, compose, line_of, scalar
from lightning_resilience.errors import ConfigError, ScenarioError


if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


__all__ = ["parse_scenario", "read_scenario", "scenario_text"]

_TAG: Final = "kind"
_ROOT: Final = "a scenario"
# How msgspec says where: its path begins with a dollar sign, which stands for the whole.
_WHERE: Final = re.compile(r" - at `\$\.?([^`]*)`\Z")
_LONGEST_SHOWN: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    line: int
    value: object
    kind: inspect.Type


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    source: str
    places: dict[str, _Place] = field(default_factory=dict)

    def error(self, text: str, *, path: str, line: int) -> ScenarioError:
        return ScenarioError(
            f"{self.source}:{line}: {text}", field=path, source=self.source, line=line
        )

    def refused(self, path: str, place: _Place, *, hint: str = "") -> ScenarioError:
        shown = _shown(place.value)
        given = f"{path}={shown} is not allowed" if path else f"{shown} is no scenario"
        text = f"{given}: it must be {allowed(place.kind)}.{hint}"
        return self.error(text, path=path, line=place.line)

    def value(self, node: yaml.Node, kind: inspect.Type, *, path: str, line: int) -> object:
        if isinstance(node, yaml.MappingNode) and (fields_of(kind) or fault_type(kind)):
            value: object = self._mapping(node, kind, path=path, line=line)
        elif isinstance(node, yaml.SequenceNode) and isinstance(kind, inspect.VarTupleType):
            value = [
                self.value(child, kind.item_type, path=f"{path}[{index}]", line=line_of(child))
                for index, child in enumerate(node.value)
            ]
        elif isinstance(node, yaml.ScalarNode):
            value = self._scalar(node, kind, path=path, line=line)
        else:
            raise self.refused(path, _Place(line=line, value=_glance(node), kind=kind))
        self.places[path] = _Place(line=line, value=value, kind=kind)
        return value

    def _scalar(self, node: yaml.ScalarNode, kind: inspect.Type, *, path: str, line: int) -> object:
        try:
            value = scalar(node)
        except ValueError as error:
            text = f"{path or _ROOT}: {error}; it must be {allowed(kind)}."
            raise self.error(text, path=path, line=line) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refused(path, _Place(line=line, value=value, kind=kind))
        return value

    def _mapping(
        self, node: yaml.MappingNode, kind: inspect.Type, *, path: str, line: int
    ) -> dict[str, object]:
        pairs = dict(self._pairs(node, path=path))
        faults = fault_type(kind)
        fault = self._fault(pairs, faults, path=path, line=line) if faults else None
        fields = fields_of(fault or kind) or {}
        types = {name: of.type for name, of in fields.items()}
        if fault is not None:
            types = {_TAG: inspect.StrType(), **types}
        unknown = next((name for name in pairs if name not in types), None)
        if unknown is not None:
            raise self._unknown(unknown, pairs[unknown], names=list(types), path=path)
        for name, of in fields.items():
            if of.required and name not in pairs:
                text = f"{path} lacks {name}, which must be {allowed(of.type)}."
                raise self.error(text, path=_joined(path, name), line=line)
        return {
            name: self.value(child, types[name], path=_joined(path, name), line=line_of(key))
            for name, (key, child) in pairs.items()
        }

    def _unknown(
        self, name: str, pair: tuple[yaml.Node, yaml.Node], *, names: list[str], path: str
    ) -> ScenarioError:
        key, node = pair
        text = ""
        try:
            refuse_unknown(path or _ROOT, {name: _glance(node)}, allowed=names)
        except ConfigError as error:
            text = str(error)
        return self.error(text, path=_joined(path, name), line=line_of(key))

    def _pairs(
        self, node: yaml.MappingNode, *, path: str
    ) -> Iterator[tuple[str, tuple[yaml.Node, yaml.Node]]]:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = line_of(key)
            if not isinstance(key, yaml.ScalarNode):
                text = f"{path or _ROOT} has a field whose name is a list or a mapping: name it."
                raise self.error(text, path=path, line=line)
            name = str(key.value)
            if name in first:
                text = (
                    f"{_joined(path, name)} is given twice, here and in line {first[name]}: "
                    "remove one of them."
                )
                raise self.error(text, path=_joined(path, name), line=line)
            first[name] = line
            yield name, (key, value)

    def _fault(
        self,
        pairs: dict[str, tuple[yaml.Node, yaml.Node]],
        faults: dict[str, inspect.StructType],
        *,
        path: str,
        line: int,
    ) -> inspect.StructType:
        kinds = inspect.LiteralType(values=tuple(faults))
        if _TAG not in pairs:
            text = f"{path} lacks {_TAG}, which must be {allowed(kinds)}."
            raise self.error(text, path=_joined(path, _TAG), line=line)
        key, node = pairs[_TAG]
        name = str(node.value) if isinstance(node, yaml.ScalarNode) else ""
        if name not in faults:
            place = _Place(line=line_of(key), value=_glance(node), kind=kinds)
            raise self.refused(_joined(path, _TAG), place, hint=_nearest(name, list(faults)))
        return faults[name]

    def located(self, error: msgspec.ValidationError) -> ScenarioError:
        """Return what msgspec refused as an error that names the line and the field."""
        found = _WHERE.search(str(error))
        path = found[1] if found else ""
        cause = error.__cause__
        if not isinstance(cause, ConfigError):
            return self.refused(path, self.places[path])
        # Of the options that contradict each other, the file may have only the second.
        names = [_joined(path, word) for word in re.findall(r"[\w.\[\]]+", str(cause))]
        at = next((name for name in names if name in self.places), path)
        text = f"{path}: {cause}" if path else str(cause)
        return self.error(text, path=at, line=self.places[at].line)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _glance(node: yaml.Node) -> object:
    if isinstance(node, yaml.ScalarNode):
        try:
            return scalar(node)
        except ValueError:
            return str(node.value)
    return {} if isinstance(node, yaml.MappingNode) else node.value


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_SHOWN:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _nearest(name: str, names: list[str]) -> str:
    import difflib  # noqa: PLC0415 - for a mistake only

    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def read_scenario(path: str | os.PathLike[str]) -> Scenario:
    """Return the scenario of a file.

    Args:
        path: The file, UTF-8.

    Raises:
        ScenarioError: The file cannot be read, or is no scenario. The text names file, line and
            field, what is wrong with the value, and what is allowed.
    """
    source = str(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        message = f"{source}: it cannot be read: {error.strerror or error}. Name a file."
        raise ScenarioError(message, source=source) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = (
            f"{source}:{line}: byte {error.start} of the file is no UTF-8. Save it as UTF-8 text."
        )
        raise ScenarioError(message, source=source, line=line) from error
    return parse_scenario(text, source=source)


def parse_scenario(text: str, *, source: str = "scenario") -> Scenario:
    """Return the scenario that a YAML text describes.

    Args:
        text: One YAML document, a mapping of the fields that differ from the defaults.
        source: Where it is from, for the errors.

    Raises:
        ScenarioError: It is no scenario. The text names source, line and field, what is wrong with
            the value, and what is allowed.

    Example:
        >>> parse_scenario("faults: [{kind: outage, at_s: 10, for_s: 60}]").faults[0].at_s
        10.0
    """
    reading = _Reading(source=source)
    node = compose(text, source=source)
    if node is None:
        message = "the text holds nothing. Name at least one field, or write {} for the defaults."
        raise reading.error(message, path="", line=1)
    line = line_of(node)
    value = reading.value(node, scenario_type(), path="", line=line)
    try:
        return msgspec.convert(value, Scenario)
    except msgspec.ValidationError as error:
        raise reading.located(error) from error


def scenario_text(scenario: Scenario) -> str:
    """Return the YAML of a scenario: what differs from the defaults, in the order of the fields.

    Reading it gives an equal scenario.
    """
    return as_yaml(_differing(scenario))


def _differing(value: object) -> dict[str, object]:
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        defaults = {of.name: of.default for of in msgspec.structs.fields(value)}
    else:
        tag = None
        defaults = {of.name: of.default for of in dataclasses.fields(value)}  # type: ignore[arg-type]  # what is no struct in a scenario is a config
    given = {name: getattr(value, name) for name in defaults}
    named: dict[str, object] = {} if tag is None else {_TAG: tag}
    changed = {name: _plain(given[name]) for name in given if given[name] != defaults[name]}
    return named | changed


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        return _differing(value)
    return value
