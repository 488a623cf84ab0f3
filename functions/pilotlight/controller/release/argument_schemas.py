"""JSON Schemas of arguments, as users' code declares them: checked once, at deploy, so that nobody
downstream meets a bad one.

A schema may point only into itself and declare only drafts that are supported
(`pilotlight.validation.json_schema`): nothing is fetched or read that a tenant chose. And it must
stay small when its references are followed: forty definitions that each name the next one twice are
a few kilobytes, and a check that never ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.function import canonical_json
from pilotlight.validation.json_schema import build_validator
from pilotlight.validation.schema_cost import pattern_weights, reference_target

MAX_SCHEMA_BYTES = 65_536
MAX_DEPTH = 64
MAX_UNFOLDED = 20_000
"""Nodes of a schema with each `$ref` replaced by what it names (once around a cycle): what one look
at an argument may cost."""
MAX_CHAIN = 300
MAX_PATTERNS = 200_000
"""States of the automata of a schema's patterns, roughly: what compiling them costs, and matching
them for each byte."""
_DEFINITIONS = ("$defs", "definitions")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raise InvalidInput, naming `where`, unless `schema` is small, local and a valid JSON
    Schema."""
    if (depth := _depth(schema)) > MAX_DEPTH:
        raise InvalidInput(
            f"{where}: the schema is nested {depth} levels deep: at most {MAX_DEPTH}",
            parameter=where,
        )
    size = len(canonical_json(schema))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidInput(
            f"{where}: the schema has {size} bytes: at most {MAX_SCHEMA_BYTES}", parameter=where
        )
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise InvalidInput(
                f"{where}: $ref {reference!r} points outside the schema; only '#…' is allowed",
                parameter=where,
            )
    if unfold_schema(schema) > MAX_UNFOLDED:
        what = (
            f"the schema has more than {MAX_UNFOLDED} parts, or {MAX_CHAIN} in a row, once its "
            f"references are followed"
        )
        raise InvalidInput(f"{where}: {what}", parameter=where)
    if (weight := pattern_weights(schema)) > MAX_PATTERNS:
        problem = (
            f"the patterns have about {weight} states with their repetitions counted out: "
            f"at most {MAX_PATTERNS}"
        )
        raise InvalidInput(f"{where}: {problem}", parameter=where)
    build_validator(schema, where)


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


def unfold_schema(schema: Mapping[str, Any]) -> int:
    """How many nodes there are with every local reference replaced by its target; a reference back
    into itself counts once.

    A chain of more than MAX_CHAIN nodes counts as too many: it is walked recursively, here and by
    the compiler."""
    weights: dict[int, int] = {}
    open_nodes: set[int] = set()

    def weigh(node: Any, chain: int) -> int:
        if not isinstance(node, Mapping | list | tuple):
            return 1
        if chain > MAX_CHAIN:
            return MAX_UNFOLDED + 1
        name = id(node)
        if name in weights:
            return weights[name]
        if name in open_nodes:
            return 1
        open_nodes.add(name)
        below = [child for key, child in _items(node) if key not in _DEFINITIONS] + _targets(
            schema, node
        )
        weights[name] = 1 + sum(weigh(child, chain + 1) for child in below)
        open_nodes.discard(name)
        return weights[name]

    return weigh(schema, 0)


def _items(node: Any) -> list[tuple[Any, Any]]:
    return list(node.items()) if isinstance(node, Mapping) else list(enumerate(node))


def _targets(schema: Mapping[str, Any], node: Any) -> list[Any]:
    """What the references of one node name; the root for anchors and for what is not there, which
    the compiler refuses."""
    if not isinstance(node, Mapping):
        return []
    return [
        reference_target(schema, node[key]) for key in _REFERENCES if isinstance(node.get(key), str)
    ]


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return list(node) if isinstance(node, list | tuple) else []
