"""JSON Schemas of arguments, as users' code declares them: checked once, at deploy, so that nobody downstream meets a bad one.

A schema may point only into itself: a `$ref` to elsewhere would make the activator, which compiles it, fetch or read what a
tenant chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs

from pilotlight.errors import InvalidInput
from pilotlight.spec import canonical_json

MAX_SCHEMA_BYTES = 65_536
MAX_DEPTH = 64
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check(schema: Mapping[str, Any], where: str) -> None:
    """Raise InvalidInput, naming `where`, unless `schema` is small, local and a valid JSON Schema."""
    if (depth := _depth(schema)) > MAX_DEPTH:
        raise InvalidInput(f"{where}: the schema is nested {depth} levels deep: at most {MAX_DEPTH}", parameter=where)
    size = len(canonical_json(schema))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidInput(f"{where}: the schema has {size} bytes: at most {MAX_SCHEMA_BYTES}", parameter=where)
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise InvalidInput(f"{where}: $ref {reference!r} points outside the schema; only '#…' is allowed", parameter=where)
    try:
        jsonschema_rs.validator_for(dict(schema))
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as e:
        raise InvalidInput(f"{where}: not a JSON Schema: {str(e).splitlines()[0]}", parameter=where) from e


def _depth(value: Any) -> int:
    # Level by level, not recursively: the input is a stranger's.
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [child for node in level for child in _children(node)]
    return depth


def _references(schema: Any) -> Iterator[str]:
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            yield from (node[key] for key in _REFERENCES if isinstance(node.get(key), str))
        pending.extend(_children(node))


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return list(node) if isinstance(node, list | tuple) else []
