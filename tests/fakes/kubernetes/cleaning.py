"""What the API server does to a body before anything else sees it: unknown fields go (and are
named), wrong types are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.kubernetes.schema import Schema

Json = dict[str, Any]
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@dataclass(kw_only=True)
class Findings:
    """`unknown`: paths of fields that the schema does not have; `wrong`: (path, what); `missing`:
    paths of required fields."""

    unknown: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def cleaned(value: Any, schema: Schema, findings: Findings, path: str = "") -> Any:
    """A deep copy of `value` without unknown fields and nulls; what was found on the way is added
    to `findings`."""
    form = schema.form
    if form == "any":
        return copied(value)
    if form == "list":
        if not isinstance(value, list):
            return _wrong(value, "array", findings, path)
        items = schema.items
        return [cleaned(item, items, findings, f"{path}[{i}]") for i, item in enumerate(value)]
    if form == "scalar":
        return _scalar(value, schema, findings, path)
    if not isinstance(value, dict):
        return _wrong(value, "object", findings, path)
    return _fields(value, schema, findings, path)


def _fields(value: Json, schema: Schema, findings: Findings, path: str) -> Json:
    result = {}
    for key, below in value.items():
        if below is None:
            continue
        inner = schema.field(key)
        where = f"{path}.{key}" if path else key
        if inner is None:
            findings.unknown.append(where)
        else:
            result[key] = cleaned(below, inner, findings, where)
    for key in schema.required:
        if key not in result:
            findings.missing.append(f"{path}.{key}" if path else key)
    return result


def _scalar(value: Any, schema: Schema, findings: Findings, path: str) -> Any:
    for name in schema.types:
        if isinstance(value, _TYPES[name]) and not (isinstance(value, bool) and name != "boolean"):
            break
    else:
        return _wrong(value, "/".join(sorted(schema.types)), findings, path)
    if schema.enum and value not in schema.enum:
        findings.wrong.append(
            (
                path,
                f'Unsupported value: "{value}": supported values: '
                + ", ".join(f'"{v}"' for v in schema.enum),
            )
        )
    if schema.pattern and isinstance(value, str) and not re.search(schema.pattern, value):
        findings.wrong.append(
            (path, f"Invalid value: \"{value}\": {path} in body should match '{schema.pattern}'")
        )
    return value


def _wrong(value: Any, expected: str, findings: Findings, path: str) -> Any:
    kind = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }.get(type(value), "null")
    findings.wrong.append(
        (path, f'Invalid value: "{kind}": {path} in body must be of type {expected}: "{kind}"')
    )
    return copied(value)


def copied(value: Any) -> Any:
    """A deep copy of a JSON value."""
    if isinstance(value, dict):
        return {key: copied(below) for key, below in value.items()}
    if isinstance(value, list):
        return [copied(below) for below in value]
    return value
