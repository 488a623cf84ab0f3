"""Subschema check: `incompatibilities` lists where one JSON Schema accepts values that another
rejects.

Sound, not complete: no finding means that every value is accepted; a finding may be without an
actual value where keywords differ that cannot be compared (`not`, `if`, `pattern`, …). The
semantics of keywords are those of JSON Schema 2020-12 (Core and Validation)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pilotlight.controller.release.argument_schemas import unfold_schema
from pilotlight.errors import InvalidInput
from pilotlight.validation.json_schema import DIALECT, compile_schema
from pilotlight.validation.schema_cost import pattern_weights

if TYPE_CHECKING:
    import jsonschema_rs

MAX_STEPS = 20_000
"""Steps before a comparison is abandoned. A step is a pair of nodes that is compared, or some 10 µs
of other work; all together take tenths of a second."""
COMPILED_PER_STEP = 2
"""Parts of a schema that are compiled per step."""
VISITED_PER_STEP = 500
"""Parts of a schema that one part of a value is checked against, per step."""
MATCHED_PER_STEP = 5_000
"""Product of pattern states and bytes matched, per step."""
SLOW_STEPS = 2_000
"""Cost of a value whose patterns do not match in linear time: the library gives up after some tens
of milliseconds."""
TEXT_PER_STEP = 2_000
"""Characters of schemas compared as text, per step."""
MAX_DEPTH = 100
"""Nesting levels, references included: each takes four of the interpreter's thousand frames."""
MAX_SHOWN = 60
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_SILENT = frozenset(
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
_COMPARED = frozenset(
    {
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "uniqueItems",
        "properties",
        "required",
        "additionalProperties",
    }
)
_COUNTS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
_ONLY = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": (*_COUNTS["string"], "pattern", "format"),
    "array": (*_COUNTS["array"], "items", "prefixItems", "uniqueItems", "contains"),
    "object": (
        *_COUNTS["object"],
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
    ),
}
_KIND_OF = {keyword: kind for kind, keywords in _ONLY.items() for keyword in keywords}
"""Keyword → the only type that it applies to; it accepts all values of other types."""


class ComparisonTooLarge(Exception):
    """Raised when two schemas are too large or too deeply nested to compare."""


class StepBudget:
    """The shared budget of several comparisons. Owner: the caller that compares."""

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._left = most

    def __repr__(self) -> str:
        return f"<StepBudget: {self._left} left>"

    def take(self, count: int = 1) -> None:
        """Charge steps before they are made. Raises ComparisonTooLarge."""
        self._left -= count
        if self._left < 0:
            raise ComparisonTooLarge(
                "the schemas are too large to compare: their compatibility is not known"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incompatibility:
    """Values that `sub` accepts and `sup` may reject.

    Attributes:
        where: path inside the value, such as `items[].price`; "" for the value itself.
        kind: `values`; `required`: `sup` requires a property that `sub` does not; `unknown`: `sup`
            does not accept a property of `sub`.
        sub, sup: short description of what each accepts there.
    """

    where: str
    kind: str
    sub: str
    sup: str


def incompatibilities(
    sub: Mapping[str, Any] | None,
    sup: Mapping[str, Any] | None,
    *,
    is_answer: bool = False,
    steps: StepBudget | None = None,
) -> Iterator[Incompatibility]:
    """Find where `sub` accepts values that `sup` rejects; None accepts everything. `is_answer`:
    objects may have properties that `sup` does not define.

    `steps`: a budget shared with other comparisons. Raises ComparisonTooLarge.
    """
    ours, theirs = sub or {}, sup or {}
    if _is_same(ours, theirs):
        return
    if any(schema.get("$schema", DIALECT) != DIALECT for schema in (ours, theirs)):
        # another dialect gives the same keywords another meaning
        yield Incompatibility(
            where="", kind="values", sub=_cut(_words(ours)), sup=_cut(_words(theirs))
        )
        return
    yield from _Comparison(ours, theirs, is_answer=is_answer, steps=steps or StepBudget()).of(
        ours, theirs, ""
    )


class _Comparison:
    """Comparison of two schemas. Owner: one call of `incompatibilities`. `_assumed`: pairs of nodes
    that an enclosing call is comparing."""

    def __init__(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], *, is_answer: bool, steps: StepBudget
    ) -> None:
        self._sub, self._sup, self._is_answer = sub, sup, is_answer
        self._assumed: set[tuple[int, int]] = set()
        self._steps = steps
        self._tests: dict[int, _Test] = {}
        self._has_same_names = all(
            _is_same(sub.get(word), sup.get(word)) for word in ("$defs", "definitions")
        )

    def of(self, sub: Any, sup: Any, where: str) -> Iterator[Incompatibility]:
        self._steps.take(1 + _width(sub) + _width(sup))
        if len(self._assumed) > MAX_DEPTH:
            raise ComparisonTooLarge(
                "the schemas are nested too deeply to compare: their compatibility is not known"
            )
        if self._has_same_names and sub == sup and self._is_same(sub, sup):
            return
        sub, sup = _followed(self._sub, sub), _followed(self._sup, sup)
        pair = (id(sub), id(sup))
        if sup is True or sub is False or not _said(sup) or pair in self._assumed:
            return
        if sup is False:
            yield self._gap(where, "unknown", sub, sup)
            return
        self._assumed.add(pair)
        try:
            yield from self._by_parts({} if sub is True else sub, sup, where)
        finally:  # also if the generator is closed early: the ids may be reused by other nodes
            self._assumed.discard(pair)

    def _by_parts(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], where: str
    ) -> Iterator[Incompatibility]:
        """Split unions and intersections; those of `sub` first, where every alternative must
        fit."""
        for word in ("anyOf", "oneOf"):
            if options := sub.get(word):
                rest = {key: value for key, value in sub.items() if key != word}
                for option in options:
                    yield from self.of(_both(rest, option), sup, where)
                return
        kinds = sub.get("type")
        if isinstance(kinds, list) and "enum" not in sub and "const" not in sub:
            for kind in kinds:
                yield from self.of({**sub, "type": kind}, sup, where)
            return
        if parts := sup.get("allOf"):
            for part in ({key: value for key, value in sup.items() if key != "allOf"}, *parts):
                yield from self.of(sub, part, where)
            return
        # distinguished by a property: at most one fits
        word = "oneOf" if "discriminator" in sup and "oneOf" in sup else "anyOf"
        if word in sup:
            rest = {key: value for key, value in sup.items() if key != word}
            yield from self._fits_one(
                sub, [_both(rest, option) for option in sup[word]], sup, where
            )
            return
        if parts := sub.get("allOf"):
            rest = {key: value for key, value in sub.items() if key != "allOf"}
            yield from self._one_is_enough([rest, *parts], sub, sup, where)
            return
        yield from self._plain(sub, sup, where)

    def _fits_one(
        self, sub: Any, options: list[Any], sup: Any, where: str
    ) -> Iterator[Incompatibility]:
        if values := _values(sub):
            if not self._accepts_all(sup, values):
                yield self._gap(where, "values", sub, sup)
            return
        found = [list(self.of(sub, option, where)) for option in options]
        if all(found):
            yield found[0][0] if len(found) == 1 else self._gap(where, "values", sub, sup)

    def _one_is_enough(
        self, parts: list[Any], sub: Any, sup: Any, where: str
    ) -> Iterator[Incompatibility]:
        if all(next(self.of(part, sup, where), None) is not None for part in parts):
            yield self._gap(where, "values", sub, sup)

    def _accepts_all(self, schema: Mapping[str, Any], values: list[Any]) -> bool:
        test = self._tests.get(id(schema))
        if test is None:
            named = {key: self._sup[key] for key in ("$defs", "definitions") if key in self._sup}
            test = self._tests[id(schema)] = _test_of(schema, named, self._steps)
        return all(test.accepts(value, self._steps) for value in values)

    def _gap(self, where: str, kind: str, sub: Any, sup: Any) -> Incompatibility:
        words = _words(sub), _words(sup)
        self._steps.take(sum(map(len, words)) // TEXT_PER_STEP)
        return Incompatibility(where=where, kind=kind, sub=_cut(words[0]), sup=_cut(words[1]))

    def _is_same(self, one: Any, other: Any) -> bool:
        text = json.dumps(one, sort_keys=True)
        self._steps.take(len(text) // TEXT_PER_STEP)
        return text == json.dumps(other, sort_keys=True)

    def _plain(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], where: str
    ) -> Iterator[Incompatibility]:
        values = _values(sub)
        if values is not None:
            if not self._accepts_all(sup, values):
                yield self._gap(where, "values", sub, sup)
            return
        ours, theirs = _types(sub), _types(sup)
        if (
            "enum" in sup
            or "const" in sup
            or not ours <= theirs
            or any(self._differs(word, sub, sup, ours) for word in sup)
        ):
            yield self._gap(where, "values", sub, sup)
            return
        if not all(_is_within(sub, sup, *pair) for kind, pair in _COUNTS.items() if kind in ours):
            yield self._gap(where, "values", sub, sup)
        if "number" in ours or "integer" in ours:
            yield from self._numbers(sub, sup, where)
        if "array" in ours:
            yield from self._arrays(sub, sup, where)
        if "object" in ours:
            yield from self._objects(sub, sup, where)

    def _differs(
        self, word: str, sub: Mapping[str, Any], sup: Mapping[str, Any], ours: frozenset[str]
    ) -> bool:
        """Whether `sup` has a keyword that is only compared for equality, applies to these types,
        and is different in `sub`."""
        if (word in _COMPARED and word != "oneOf") or word in _SILENT:
            return False
        kind = _KIND_OF.get(word)
        if kind is not None and kind not in ours and not (kind == "number" and "integer" in ours):
            return False
        if word == "multipleOf":
            return not _is_multiple(sub, float(sup[word]))
        if word not in sub or not _is_same(sub[word], sup[word]):
            return True
        return not self._has_same_names and next(_references(sup[word]), None) is not None

    def _numbers(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], where: str
    ) -> Iterator[Incompatibility]:
        # A bound is (number, whether it is excluded): of two lower bounds the greater is narrower,
        # of two upper bounds the lesser.
        low, high = _bounds(sub)
        least, most = _bounds(sup)
        if least > low or most < high:
            yield self._gap(where, "values", sub, sup)

    def _arrays(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], where: str
    ) -> Iterator[Incompatibility]:
        if sup.get("uniqueItems") and not sub.get("uniqueItems"):
            yield self._gap(where, "values", sub, sup)
        ours, theirs = sub.get("prefixItems", []), sup.get("prefixItems", [])
        most, named = sub.get("maxItems"), max(len(ours), len(theirs))
        for n in range(named if most is None else min(named, most)):
            yield from self.of(_item(sub, n), _item(sup, n), f"{where}[{n}]")
        if most is None or most > named:
            yield from self.of(sub.get("items", True), sup.get("items", True), f"{where}[]")

    def _objects(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], where: str
    ) -> Iterator[Incompatibility]:
        ours, theirs = sub.get("properties", {}), sup.get("properties", {})
        others, closed = (
            sub.get("additionalProperties", True),
            sup.get("additionalProperties", True),
        )
        if self._is_answer and closed is False:
            closed = True
        always = set(sub.get("required", ()))
        self._steps.take(
            (len(ours) + len(theirs) + len(always) + len(sup.get("required", ()))) // 100
        )
        for name in sup.get("required", ()):
            if name not in always:
                yield self._gap(_inside(where, name), "required", sub, sup)
        if sub.get("patternProperties") and not _is_same(
            sub["patternProperties"], sup.get("patternProperties")
        ):
            # property names of a form that `sup` does not define
            yield self._gap(where, "values", sub, sup)
        for name in {**ours, **theirs}:
            yield from self.of(
                ours.get(name, others), theirs.get(name, closed), _inside(where, name)
            )
        yield from self.of(others, closed, _inside(where, "*"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """Compiled schema that tests single values.

    Attributes:
        of: the schema, referenced so that its id is not reused.
        validator: None: every value counts as rejected.
        parts: number of parts of the schema, with references followed.
        states: number of states of its patterns.
        is_linear: its patterns match in linear time.
    """

    of: Mapping[str, Any]
    validator: jsonschema_rs.Validator | None
    parts: int
    states: int
    is_linear: bool

    def accepts(self, value: Any, steps: StepBudget) -> bool:
        """Whether the schema accepts the value. Raises ComparisonTooLarge without testing it, if
        that would cost too much."""
        text = json.dumps(value)
        visits, matched = (
            _nodes(value) * self.parts // VISITED_PER_STEP,
            len(text) * self.states // MATCHED_PER_STEP,
        )
        steps.take(
            1
            + len(text) // TEXT_PER_STEP
            + visits
            + matched
            + (0 if self.is_linear else SLOW_STEPS)
        )
        return self.validator is not None and self.validator.is_valid(value)


def _test_of(schema: Mapping[str, Any], named: Mapping[str, Any], steps: StepBudget) -> _Test:
    """Compile a schema. `named`: definitions that it may refer to."""
    whole = {**named, **schema}
    steps.take(_nodes(whole) // COMPILED_PER_STEP)
    none = _Test(of=schema, validator=None, parts=0, states=0, is_linear=True)
    if any(
        not reference.startswith(("#/$defs/", "#/definitions/"))
        for reference in _references(schema)
    ):
        return none
    states = pattern_weights(whole)
    steps.take(states // COMPILED_PER_STEP)
    try:
        validator, is_linear = compile_schema(whole, "the schema")
    except InvalidInput:
        # a revision from before such schemas were rejected: no value counts as accepted
        return none
    return _Test(
        of=schema,
        validator=validator,
        parts=unfold_schema(whole),
        states=states,
        is_linear=is_linear,
    )


def _nodes(value: Any) -> int:
    count, pending = 0, [value]
    while pending:
        node = pending.pop()
        count += 1
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, list | tuple):
            pending += node
    return count


def _width(schema: Any) -> int:
    """Extra steps of a node with hundreds of keywords, which are copied where unions are split."""
    return len(schema) // 100 if isinstance(schema, Mapping) else 0


def _followed(root: Mapping[str, Any], schema: Any) -> Any:
    """Follow a chain of references; accepts everything if it is broken or circular, which deploys
    reject."""
    seen = 0
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        seen += 1
        beside = {
            key: value for key, value in schema.items() if key != "$ref" and key not in _SILENT
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


def _both(rest: Mapping[str, Any], option: Any) -> Any:
    if not _said(rest):
        return option
    if option is True:
        return rest
    if (
        isinstance(option, Mapping)
        and "$ref" not in option
        and not set(rest) & set(option) - _SILENT
    ):
        return {**rest, **option}
    return {"allOf": [rest, option]}


def _said(schema: Any) -> bool:
    return schema is False or (
        isinstance(schema, Mapping) and any(key not in _SILENT for key in schema)
    )


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that a schema may accept, if they can be enumerated; otherwise None."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "null":
        return [None]
    return [False, True] if schema.get("type") == "boolean" else None


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type", TYPES)
    found = {given} if isinstance(given, str) else set(given)
    return frozenset(found | {"integer"} if "number" in found else found)


def _bounds(schema: Mapping[str, Any]) -> tuple[tuple[float, bool], tuple[float, bool]]:
    infinite = float("inf")
    low = max(
        (schema.get("minimum", -infinite), False), (schema.get("exclusiveMinimum", -infinite), True)
    )
    high = min(
        (schema.get("maximum", infinite), True), (schema.get("exclusiveMaximum", infinite), False)
    )
    return low, high


def _is_within(sub: Mapping[str, Any], sup: Mapping[str, Any], least: str, most: str) -> bool:
    infinite = float("inf")
    return bool(
        sub.get(least, 0) >= sup.get(least, 0)
        and sub.get(most, infinite) <= sup.get(most, infinite)
    )


def _is_multiple(sub: Mapping[str, Any], step: float) -> bool:
    given = sub.get("multipleOf", 1 if _types(sub) == {"integer"} else None)
    return given is not None and float(given) % step == 0


def _item(schema: Mapping[str, Any], number: int) -> Any:
    prefix = schema.get("prefixItems", [])
    return prefix[number] if number < len(prefix) else schema.get("items", True)


def _is_same(one: Any, other: Any) -> bool:
    """Equality as JSON: `1` is not `true`."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _references(inner)


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _words(schema: Any) -> str:
    if schema is True or not _said(schema):
        return "anything"
    if schema is False:
        return "nothing"
    words = {key: value for key, value in schema.items() if key not in _SILENT}
    if set(words) == {"type"}:
        kinds = words["type"]
        return kinds if isinstance(kinds, str) else " or ".join(kinds)
    return json.dumps(words)
