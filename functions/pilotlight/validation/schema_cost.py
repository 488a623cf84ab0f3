"""Estimates of the cost of validating arguments against a JSON Schema of a tenant, made without
compiling the schema.

A validator visits each part of a schema, following references, at most once per value that it
applies to; a regular expression costs its size per byte of text. Both estimates are upper bounds,
so a low estimate is reliable. What cannot be estimated (recursion deeper than MAX_DEPTH, very large
schemas) counts as UNBOUNDED."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

UNBOUNDED: Final = 10**9
MAX_NODES: Final = 4_000
"""Maximum size of a schema to estimate: for larger ones the estimate itself would take long."""
MAX_DEPTH: Final = 32
"""Values nested deeper count as UNBOUNDED for a recursive schema."""
FORMAT_WEIGHT: Final = 20
"""Cost of `format`, in the unit of patterns: the checks of the library are linear."""
UNIQUE_WEIGHT: Final = 10
UNEVALUATED_FACTOR: Final = 3
"""`unevaluated…` evaluates its sibling keywords again; nested levels multiply."""
_BELOW: Final = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "items",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keywords whose schemas apply to parts of a value; those of other keywords apply to the value
itself."""
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_IS_VERBOSE: Final = re.compile(r"(?<!\\)(?:\\\\)*\(\?[imsuRU-]*x[imsuRU-]*[:)]")
_NAMED: Final = re.compile(r"[pPuUx]\{[^}]*\}")
_PERL_CLASS: Final = re.compile(r"\\[dDwWsSc]")
_WRITTEN_CHARS: Final = 64
"""Characters of `\\s` as a class."""
_CLASS_WEIGHT: Final = 20
"""Cost of a character class such as `\\w`: its automaton over UTF-8 has many states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaCost:
    """The cost of validating against one schema.

    Attributes:
        by_depth: entry n is the number of visits per value for values nested at most n deep (the
            last entry also for deeper ones).
        is_recursive: the last entry of `by_depth` applies to values of that depth only.
        per_byte: cost of patterns and formats per byte of text.
        compile_weight: cost of compiling the patterns."""

    by_depth: tuple[int, ...]
    is_recursive: bool
    per_byte: int
    compile_weight: int


def estimate_schema_cost(schema: Mapping[str, Any]) -> SchemaCost:
    """Estimate the cost of one schema."""
    nodes, compile_weight = _count(schema)
    if nodes > MAX_NODES:
        return SchemaCost(
            by_depth=(UNBOUNDED,),
            is_recursive=False,
            per_byte=UNBOUNDED,
            compile_weight=compile_weight,
        )
    visits, text = _CostSum(schema, _visit_weight), _CostSum(schema, _text_weight)
    by_depth: list[int] = []
    for depth in range(MAX_DEPTH + 1):
        by_depth.append(visits.of_value(depth))
        if by_depth[-1] >= UNBOUNDED or not visits.is_cut:
            break
    return SchemaCost(
        by_depth=tuple(by_depth),
        is_recursive=visits.is_cut,
        per_byte=text.of_value(len(by_depth) - 1),
        compile_weight=compile_weight,
    )


def pattern_weights(schema: Mapping[str, Any]) -> int:
    """Estimate the cost of compiling the patterns of a schema, in states of their automata."""
    return _count(schema)[1]


def pattern_weight(pattern: str) -> int:
    """Estimate the number of states of the automaton of a regular expression. Counted repetitions
    multiply what they repeat; with white space that does not count (flag `x`), that is not
    known."""
    if _IS_VERBOSE.search(pattern):
        return UNBOUNDED
    return max(_pattern_weight(pattern, _class_end), _pattern_weight(pattern, _outer_class_end))


def _pattern_weight(pattern: str, class_end: Callable[[str, int], int]) -> int:
    groups, last, at, size = [0], 0, 0, len(pattern)
    while at < size:
        char = pattern[at]
        at += 1
        if char == "(":
            groups.append(0)
            last = 0
            continue
        if char == ")" and len(groups) > 1:
            last = groups.pop()
        elif char == "[":
            at, last = class_end(pattern, at), _CLASS_WEIGHT
        elif char == "\\":
            last = _CLASS_WEIGHT if pattern[at : at + 1] in "wWdDsSpPuU" else 1
            named = _NAMED.match(pattern, at)
            at = named.end() if named is not None else at + 1
        elif char == "{":
            end = pattern.find("}", at)
            words = pattern[at:end].split(",") if end > 0 else []
            most = max(
                (int(word) for word in words if word.isdecimal() and len(word) < 10), default=-1
            )
            if most >= 0:
                groups[-1] += last * max(0, most - 1)
                last *= max(1, most)
                at = end + 1
            continue
        else:
            last = _CLASS_WEIGHT if char == "." else 1
        groups[-1] += last
    return max(1, min(UNBOUNDED, sum(groups)))


def _class_end(pattern: str, at: int) -> int:
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":
        at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _outer_class_end(pattern: str, at: int) -> int:
    """The end of a class that may contain others, such as `[[:alpha:]]` and `[a[b]]`."""
    ends = 1
    while at < len(pattern) and ends:
        ends += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 2 if pattern[at] == "\\" else 1
    return at


def _count(schema: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of nodes of a schema as written, and the cost of compiling its patterns."""
    nodes = compiled = 0
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        nodes += 1
        if isinstance(node, Mapping):
            compiled += sum(map(_compile_weight, _patterns(node)))
            pending += node.values()
        elif isinstance(node, list | tuple):
            pending += node
    return nodes, min(UNBOUNDED, compiled)


def _compile_weight(pattern: str) -> int:
    """The states, and what the library takes to write `\\d` and the like as classes: it parses the
    pattern again for each, as long as it is by then (measured: 13 microseconds times the square of
    their number)."""
    classes = len(_PERL_CLASS.findall(pattern))
    return pattern_weight(pattern) + classes * (len(pattern) + _WRITTEN_CHARS * classes) // 6


def _patterns(node: Mapping[str, Any]) -> list[str]:
    patterns = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    named = node.get("patternProperties")
    return patterns + [str(name) for name in named] if isinstance(named, Mapping) else patterns


def _visit_weight(node: Any) -> int:
    return 1 + UNIQUE_WEIGHT if isinstance(node, Mapping) and node.get("uniqueItems") is True else 1


def _text_weight(node: Any) -> int:
    if not isinstance(node, Mapping):
        return 0
    return sum(map(pattern_weight, _patterns(node))) + (
        FORMAT_WEIGHT if isinstance(node.get("format"), str) else 0
    )


class _CostSum:
    """Adds up the weights of the nodes that apply to one value. `is_cut`: nodes were omitted,
    because the value is not nested deep enough."""

    def __init__(self, schema: Mapping[str, Any], own: Callable[[Any], int]) -> None:
        """`own` returns the weight of one node."""
        self._schema = schema
        self._own = own
        self._known: dict[tuple[int, int], int] = {}
        self._open: set[tuple[int, int]] = set()
        self._recursive = _recursive_nodes(schema)
        self.is_cut = False

    def of_value(self, depth: int) -> int:
        """Return the weight of the schema for a value nested `depth` deep, at most UNBOUNDED."""
        try:
            return self._weight(self._schema, depth)
        except RecursionError:
            return UNBOUNDED

    def _weight(self, node: Any, depth: int) -> int:
        if not isinstance(node, Mapping | list | tuple):
            return self._own(node)
        if id(node) not in self._recursive:
            depth = 0  # irrelevant for nodes without recursion
        elif depth < 0:
            self.is_cut = True
            return self._own(node)
        name = (id(node), depth)
        if (known := self._known.get(name)) is not None:
            return known
        if name in self._open:  # a cycle at the same value, which the library breaks
            return self._own(node)
        self._open.add(name)
        total = self._sum(node, depth)
        self._open.discard(name)
        self._known[name] = total
        return total

    def _sum(self, node: Any, depth: int) -> int:
        if not isinstance(node, Mapping):
            return min(
                UNBOUNDED, self._own(node) + sum(self._weight(child, depth) for child in node)
            )
        total = self._own(node)
        for key, child in node.items():
            if key not in _DEFINITIONS:
                total += self._weight(child, depth - 1 if key in _BELOW else depth)
        for reference in (node[key] for key in _REFERENCES if isinstance(node.get(key), str)):
            total += self._weight(reference_target(self._schema, reference), depth)
        if "unevaluatedProperties" in node or "unevaluatedItems" in node:
            total *= UNEVALUATED_FACTOR
        return min(UNBOUNDED, total)


def _recursive_nodes(schema: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids of nodes from which a cycle of references can be reached."""
    edges: dict[int, list[int]] = {}
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if id(node) in edges or not isinstance(node, Mapping | list | tuple):
            continue
        if isinstance(node, Mapping):
            below = [child for key, child in node.items() if key not in _DEFINITIONS]
            below += [
                reference_target(schema, node[key])
                for key in _REFERENCES
                if isinstance(node.get(key), str)
            ]
        else:
            below = list(node)
        below = [child for child in below if isinstance(child, Mapping | list | tuple)]
        edges[id(node)] = [id(child) for child in below]
        pending += below
    # Kahn's algorithm from the leaves: the remaining nodes reach a cycle.
    parents: dict[int, list[int]] = {name: [] for name in edges}
    left = {name: len(below) for name, below in edges.items()}
    for name, below in edges.items():
        for child in below:
            parents[child].append(name)
    ready = [name for name, count in left.items() if not count]
    while ready:
        name = ready.pop()
        del left[name]
        for parent in parents[name]:
            left[parent] -= 1
            if not left[parent]:
                ready.append(parent)
    return frozenset(left)


def reference_target(schema: Mapping[str, Any], reference: str) -> Any:
    """Return the target of a local reference; the root for anchors, and for missing targets, which
    the compiler rejects."""
    at: Any = schema
    for word in unquote(reference[1:]).split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and word in at:
            at = at[word]
        elif isinstance(at, list | tuple) and word.isdecimal() and int(word) < len(at):
            at = at[int(word)]
        else:
            return schema
    return at
