# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""YAML in which every text has one meaning and every value has a line.

What YAML may mean is narrowed to what a scenario needs, because a surprise in a scenario is a run
that tests something else. Words and numbers are those of the core schema of YAML 1.2: ``no`` is a
text, ``1e3`` is a number, ``010`` is ten and ``1:30`` is no number of seconds. A name stands once
in its mapping. There are no aliases, no types by name, and no second document.

What is read are nodes, which know their lines; nothing is constructed from them but the five plain
kinds of scalars.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import yaml
from yaml.composer import ComposerError
from yaml.reader import ReaderError

from lightning_resilience.errors import ScenarioError


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["as_yaml", "compose", "line_of", "scalar"]

# A list in a fault in the list of faults is the deepest that a scenario goes; the rest is a margin.
_DEEPEST: Final = 16
_WIDTH: Final = 100

_NULL: Final = "tag:yaml.org,2002:null"
_BOOL: Final = "tag:yaml.org,2002:bool"
_INT: Final = "tag:yaml.org,2002:int"
_FLOAT: Final = "tag:yaml.org,2002:float"
_STR: Final = "tag:yaml.org,2002:str"

_SPECIAL: Final = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
_CONSTRUCTORS: Final[dict[str, Callable[[str], object]]] = {
    _NULL: lambda _: None,
    _BOOL: lambda text: {"true": True, "false": False}[text.lower()],
    _INT: int,
    _FLOAT: lambda text: float(_SPECIAL.get(text.lower(), text)),
    _STR: str,
}


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            problem = "found an alias, which a scenario may not have: write the value again"
            raise ComposerError(None, None, problem, mark)
        if self._depth == _DEEPEST:
            problem = f"found something in {_DEEPEST} others, which is deeper than a scenario goes"
            raise ComposerError(None, None, problem, mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the base class calls it so
        super().increase_indent(flow, indentless=False)


_SCALARS: Final = (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9]+", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?i:inf))|\.(?i:nan)",
        list("-+.0123456789"),
    ),
)
# None of those that YAML 1.1 has.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    # Also where a scenario is written, so that a text is quoted which would be read as a number.
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


def _sequence(dumper: yaml.SafeDumper, values: list[object]) -> yaml.Node:
    is_flat = not any(isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_flat)


_Dumper.add_representer(list, _sequence)


def compose(text: str, *, source: str) -> yaml.Node | None:
    """Return the nodes of a text, or None where it holds nothing.

    Args:
        text: The text, one YAML document.
        source: Where it is from, for the error.

    Raises:
        ScenarioError: It is not one document of YAML, or has something that a scenario may not
            have. The text names the line.
    """
    try:
        return yaml.compose(text, Loader=_Loader)
    except ReaderError as error:
        found = f"found the character {chr(error.character)!r}, which YAML does not allow"
        line = text.count("\n", 0, error.position) + 1
        raise _refused(found, source=source, line=line) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = None if mark is None else mark.line + 1
        words = " ".join(filter(None, (error.context, error.problem)))
        hint = "; YAML is indented with spaces" if r"'\t'" in words else ""
        raise _refused(words + hint, source=source, line=at) from error


def _refused(words: str, *, source: str, line: int | None) -> ScenarioError:
    place = source if line is None else f"{source}:{line}"
    text = f"{place}: {words}. A scenario is one YAML document: a mapping of its fields."
    return ScenarioError(text, source=source, line=line)


def line_of(node: yaml.Node) -> int:
    """Return the line on which a node begins; the first is 1."""
    return int(node.start_mark.line) + 1


def scalar(node: yaml.ScalarNode) -> object:
    """Return what a scalar stands for: a text, a number, true, false or None.

    Raises:
        ValueError: It names a type of its own, or is not of the type that it names.
    """
    if node.tag not in _CONSTRUCTORS:
        message = f"{node.value!r} names the type {node.tag!r}"
        raise ValueError(message)
    try:
        return _CONSTRUCTORS[node.tag](str(node.value))
    except (KeyError, ValueError):
        message = f"{str(node.value)[:40]!r} is no value of {node.tag.rpartition(':')[2]}"
        raise ValueError(message) from None


def as_yaml(value: dict[str, Any]) -> str:
    """Return a mapping as YAML, in its own order: mappings by lines, flat lists on one line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=_WIDTH,
    )
