"""Validation at deploy of the JSON Schemas of arguments that users declare, so that later code can
rely on them.

A schema may refer only to itself and declare only supported drafts
(`pilotlight.validation.json_schema`), so nothing that a tenant chose is fetched or read. It must
also stay small when its references are followed: forty definitions that each refer to the next one
twice are a few kilobytes, but their validation would never end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.record_json import canonical_json
from pilotlight.validation.json_schema import build_validator
from pilotlight.validation.schema_cost import pattern_weights, reference_target

MAX_SCHEMA_BYTES = 65_536
MAX_DEPTH = 64
MAX_UNFOLDED = 20_000
"""Maximum number of nodes with each `$ref` replaced by its target (once around a cycle), which
bounds the cost of validating an argument."""
MAX_CHAIN = 300
MAX_PATTERNS = 200_000
"""Approximate maximum number of automaton states of a schema's patterns, which bounds the cost of
compiling them and of matching each byte."""
_DEFINITIONS = ("$defs", "definitions")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raise InvalidInput, naming `where`, unless `schema` is small, local and a valid JSON
    Schema."""
    if (depth := _depth(schema)) > MAX_DEPTH:
        raise InvalidInput(
            f"{where}: the schema is nested {depth} levels deep: the maximum is {MAX_DEPTH}",
            parameter=where,
        )
    size = len(canonical_json(schema))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidInput(
            f"{where}: the schema has {size} bytes: the maximum is {MAX_SCHEMA_BYTES}",
            parameter=where,
        )
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise InvalidInput(
                f"{where}: $ref {reference!r} points outside the schema: only '#…' is allowed",
                parameter=where,
            )
    if unfold_schema(schema) > MAX_UNFOLDED:
        what = (
            f"the schema has more than {MAX_UNFOLDED} parts, or {MAX_CHAIN} in a row, with its "
            f"references followed"
        )
        raise InvalidInput(f"{where}: {what}", parameter=where)
    if (weight := pattern_weights(schema)) > MAX_PATTERNS:
        problem = (
            f"the patterns have about {weight} states with their repetitions expanded: "
            f"the maximum is {MAX_PATTERNS}"
        )
        raise InvalidInput(f"{where}: {problem}", parameter=where)
    build_validator(schema, where)


def _depth(value: Any) -> int:
    # Level by level, not recursively: the input is untrusted.
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
    """Count the nodes with every local reference replaced by its target; a reference back into
    itself counts once.

    A chain of more than MAX_CHAIN nodes counts as too many, because this function and the compiler
    follow it recursively."""
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
    """Targets of the references of one node; the root for anchors and for missing targets, which
    the compiler rejects."""
    if not isinstance(node, Mapping):
        return []
    return [
        reference_target(schema, node[key]) for key in _REFERENCES if isinstance(node.get(key), str)
    ]


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return list(node) if isinstance(node, list | tuple) else []
