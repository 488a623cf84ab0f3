"""What one node of a JSON Schema says: its types, bounds, values and references, and how it
is described."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_SHOWN = 60
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SILENT = frozenset(
    {
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "discriminator",
    }
)
"""Annotations: keywords that accept every value."""


def count_nodes(value: Any) -> int:
    """Return the number of values in a value, itself included."""
    count, pending = 0, [value]
    while pending:
        node = pending.pop()
        count += 1
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, list | tuple):
            pending += node
    return count


def width(schema: Any) -> int:
    """Extra steps of a node with hundreds of keywords, which are copied where unions are split."""
    return len(schema) // 100 if isinstance(schema, Mapping) else 0


def followed(root: Mapping[str, Any], schema: Any) -> Any:
    """Follow a chain of references; accepts everything if it is broken or circular, which deploys
    reject."""
    seen = 0
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        seen += 1
        beside = {
            key: value for key, value in schema.items() if key != "$ref" and key not in SILENT
        }
        target = _named(root, schema["$ref"])
        if beside and isinstance(target, Mapping):
            return {"allOf": [target, beside]}
        if beside and target is True:
            return beside
        schema = target
        if seen > MAX_SHOWN:
            return True
    return schema


def _named(root: Mapping[str, Any], reference: str) -> Any:
    at: Any = root
    for word in unquote(reference[1:]).split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and word in at:
            at = at[word]
        elif isinstance(at, list) and word.isdecimal() and int(word) < len(at):
            at = at[int(word)]
        else:
            return True
    return at


def both(rest: Mapping[str, Any], option: Any) -> Any:
    """Return a schema of what both accept, without `allOf` where their keywords differ."""
    if not says_anything(rest):
        return option
    if option is True:
        return rest
    if (
        isinstance(option, Mapping)
        and "$ref" not in option
        and not set(rest) & set(option) - SILENT
    ):
        return {**rest, **option}
    return {"allOf": [rest, option]}


def says_anything(schema: Any) -> bool:
    """Return whether a schema has a keyword that may reject a value."""
    return schema is False or (
        isinstance(schema, Mapping) and any(key not in SILENT for key in schema)
    )


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that a schema may accept, if they can be enumerated; otherwise None."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "null":
        return [None]
    return [False, True] if schema.get("type") == "boolean" else None


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema accepts; "number" includes "integer"."""
    given = schema.get("type", TYPES)
    found = {given} if isinstance(given, str) else set(given)
    return frozenset(found | {"integer"} if "number" in found else found)


def bounds_of(schema: Mapping[str, Any]) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """Return the lower and the upper bound of its numbers: (number, how bounds at this number are
    ordered). Of two lower bounds the greater is narrower, of two upper bounds the lesser."""
    infinite = float("inf")
    low = max(
        (schema.get("minimum", -infinite), False), (schema.get("exclusiveMinimum", -infinite), True)
    )
    high = min(
        (schema.get("maximum", infinite), True), (schema.get("exclusiveMaximum", infinite), False)
    )
    return low, high


def is_within(sub: Mapping[str, Any], sup: Mapping[str, Any], least: str, most: str) -> bool:
    """Return whether the counts that `sub` permits are among those of `sup`."""
    infinite = float("inf")
    return bool(
        sub.get(least, 0) >= sup.get(least, 0)
        and sub.get(most, infinite) <= sup.get(most, infinite)
    )


def is_multiple(sub: Mapping[str, Any], step: float) -> bool:
    """Return whether all numbers of `sub` are multiples of `step`."""
    given = sub.get("multipleOf", 1 if types_of(sub) == {"integer"} else None)
    return given is not None and float(given) % step == 0


def item_at(schema: Mapping[str, Any], number: int) -> Any:
    """Return the schema of the item at this position of an array."""
    prefix = schema.get("prefixItems", [])
    return prefix[number] if number < len(prefix) else schema.get("items", True)


def is_same(one: Any, other: Any) -> bool:
    """Equality as JSON: `1` is not `true`."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def references(value: Any) -> Iterator[str]:
    """Yield every `$ref` in a schema."""
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from references(inner)


def path_inside(where: str, name: str) -> str:
    """Return the path of a property of the object at `where`."""
    return f"{where}.{name}" if where else name


def cut(text: str) -> str:
    """Return at most MAX_SHOWN characters of a text."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def described(schema: Any) -> str:
    """Return what a schema accepts, as short text."""
    if schema is True or not says_anything(schema):
        return "anything"
    if schema is False:
        return "nothing"
    words = {key: value for key, value in schema.items() if key not in SILENT}
    if set(words) == {"type"}:
        kinds = words["type"]
        return kinds if isinstance(kinds, str) else " or ".join(kinds)
    return json.dumps(words)
