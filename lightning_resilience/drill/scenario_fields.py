# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which fields a scenario has, and what each may be, in words.

Everything is read off the structs themselves, so that an error, the table in the documents and the
check behind both cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec import NODEFAULT, inspect

from lightning_resilience.drill.scenario import Scenario


__all__ = ["FieldRow", "allowed", "fault_type", "field_rows", "fields_of", "scenario_type"]

Bounded: TypeAlias = inspect.IntType | inspect.FloatType


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One row of the table of fields.

    Args:
        name: Section or kind of fault, and field: ``store.latency_s``, ``outage.for_s``.
        unit: ``s``, ``1/s``, or empty.
        allowed: What it may be.
        default: Its default as a file would say it; ``required`` where there is none.
    """

    name: str
    unit: str
    allowed: str
    default: str


def scenario_type() -> inspect.Type:
    """Return the type of a whole scenario."""
    return inspect.type_info(Scenario)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _unit(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.UnionType):
        return next(filter(None, map(_unit, kind.types)), "")
    extra = kind.extra if isinstance(kind, inspect.Metadata) else None
    return str((extra or {}).get("unit", ""))


def fields_of(kind: inspect.Type) -> dict[str, inspect.Field] | None:
    """Return the fields of a mapping by their names, or None for what is no mapping."""
    bare = _bare(kind)
    if isinstance(bare, inspect.StructType | inspect.DataclassType):
        return {field.name: field for field in bare.fields}
    return None


def _faults_of(kind: inspect.Type) -> dict[str, inspect.StructType]:
    members = kind.types if isinstance(kind, inspect.UnionType) else ()
    structs = [member for member in members if isinstance(member, inspect.StructType)]
    return {str(struct.tag): struct for struct in structs}


def fault_type(kind: inspect.Type) -> dict[str, inspect.StructType]:
    """Return the types of faults by their ``kind``; nothing for what is no fault."""
    return _faults_of(_bare(kind))


def _range(kind: Bounded) -> str:
    bounds = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    return " and ".join(f"{sign} {bound:.12g}" for sign, bound in bounds if bound is not None)


def _allowed_number(kind: Bounded, *, unit: str) -> str:
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a finite number"
    return " ".join(filter(None, (noun, "of seconds" if unit == "s" else "", _range(kind))))


def _allowed_union(kind: inspect.UnionType) -> str:
    if _faults_of(kind):
        return "a mapping of a fault's fields, with its kind"
    return " or ".join(map(allowed, kind.types))


def _allowed_list(kind: inspect.VarTupleType) -> str:
    least = "" if kind.min_length is None else f" with at least {kind.min_length}"
    return f"a list{least}, each {allowed(kind.item_type)}"


def allowed(kind: inspect.Type) -> str:
    """Return in words what a field of this type may be."""
    bare = _bare(kind)
    if isinstance(bare, Bounded):
        return _allowed_number(bare, unit=_unit(kind))
    if isinstance(bare, inspect.UnionType):
        return _allowed_union(bare)
    if isinstance(bare, inspect.VarTupleType):
        return _allowed_list(bare)
    if isinstance(bare, inspect.LiteralType):
        return "one of " + ", ".join(map(repr, bare.values))
    plain = {inspect.BoolType: "true or false", inspect.StrType: "a text"}
    plain |= {inspect.NoneType: "null"}
    return plain.get(type(bare), "a mapping of its fields")


def _default(field: inspect.Field) -> str:
    value: Any = field.default
    if value is NODEFAULT:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _row(name: str, field: inspect.Field) -> FieldRow:
    return FieldRow(
        name=name,
        unit=_unit(field.type),
        allowed=allowed(field.type),
        default=_default(field),
    )


def field_rows() -> tuple[FieldRow, ...]:
    """Return every field of a scenario but those of configs: theirs are in the option table.

    The fields of sections and of the kinds of faults have the section or kind in front.
    """
    rows: list[FieldRow] = []
    kinds: dict[str, inspect.StructType] = {}
    for name, field in (fields_of(scenario_type()) or {}).items():
        if isinstance(field.type, inspect.StructType):
            kinds[name] = field.type
        elif isinstance(field.type, inspect.VarTupleType):
            kinds |= fault_type(field.type.item_type)
        elif not isinstance(field.type, inspect.DataclassType):
            rows.append(_row(name, field))
    rows += [_row(f"{name}.{field.name}", field) for name in kinds for field in kinds[name].fields]
    return tuple(rows)
