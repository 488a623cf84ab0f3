"""Subschema check: `incompatibilities` lists where one JSON Schema accepts values that another
rejects.

Sound, not complete: no finding means that every value is accepted; a finding may be without an
actual value where keywords differ that cannot be compared (`not`, `if`, `pattern`, …). The
semantics of keywords are those of JSON Schema 2020-12 (Core and Validation)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.release.comparison_steps import (
    TEXT_PER_STEP,
    ComparisonTooLarge,
    StepBudget,
)
from pilotlight.controller.release.schema_nodes import (
    SILENT,
    both,
    bounds_of,
    cut,
    described,
    followed,
    is_multiple,
    is_same,
    is_within,
    item_at,
    path_inside,
    references,
    says_anything,
    types_of,
    values_of,
    width,
)
from pilotlight.controller.release.value_tests import ValueTest, compile_test
from pilotlight.validation.json_schema import DIALECT

MAX_DEPTH = 100
"""Nesting levels, references included: each takes four of the interpreter's thousand frames."""
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
    if is_same(ours, theirs):
        return
    if any(schema.get("$schema", DIALECT) != DIALECT for schema in (ours, theirs)):
        # another dialect gives the same keywords another meaning
        yield Incompatibility(
            where="", kind="values", sub=cut(described(ours)), sup=cut(described(theirs))
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
        self._tests: dict[int, ValueTest] = {}
        self._has_same_names = all(
            is_same(sub.get(word), sup.get(word)) for word in ("$defs", "definitions")
        )

    def of(self, sub: Any, sup: Any, where: str) -> Iterator[Incompatibility]:
        self._steps.take(1 + width(sub) + width(sup))
        if len(self._assumed) > MAX_DEPTH:
            raise ComparisonTooLarge(
                "the schemas are nested too deeply to compare: their compatibility is not known"
            )
        if self._has_same_names and sub == sup and self._is_same(sub, sup):
            return
        sub, sup = followed(self._sub, sub), followed(self._sup, sup)
        pair = (id(sub), id(sup))
        if sup is True or sub is False or not says_anything(sup) or pair in self._assumed:
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
                    yield from self.of(both(rest, option), sup, where)
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
            yield from self._fits_one(sub, [both(rest, option) for option in sup[word]], sup, where)
            return
        if parts := sub.get("allOf"):
            rest = {key: value for key, value in sub.items() if key != "allOf"}
            yield from self._one_is_enough([rest, *parts], sub, sup, where)
            return
        yield from self._plain(sub, sup, where)

    def _fits_one(
        self, sub: Any, options: list[Any], sup: Any, where: str
    ) -> Iterator[Incompatibility]:
        if values := values_of(sub):
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
            test = self._tests[id(schema)] = compile_test(schema, named, self._steps)
        return all(test.accepts(value, self._steps) for value in values)

    def _gap(self, where: str, kind: str, sub: Any, sup: Any) -> Incompatibility:
        words = described(sub), described(sup)
        self._steps.take(sum(map(len, words)) // TEXT_PER_STEP)
        return Incompatibility(where=where, kind=kind, sub=cut(words[0]), sup=cut(words[1]))

    def _is_same(self, one: Any, other: Any) -> bool:
        text = json.dumps(one, sort_keys=True)
        self._steps.take(len(text) // TEXT_PER_STEP)
        return text == json.dumps(other, sort_keys=True)

    def _plain(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], where: str
    ) -> Iterator[Incompatibility]:
        values = values_of(sub)
        if values is not None:
            if not self._accepts_all(sup, values):
                yield self._gap(where, "values", sub, sup)
            return
        ours, theirs = types_of(sub), types_of(sup)
        if (
            "enum" in sup
            or "const" in sup
            or not ours <= theirs
            or any(self._differs(word, sub, sup, ours) for word in sup)
        ):
            yield self._gap(where, "values", sub, sup)
            return
        if not all(is_within(sub, sup, *pair) for kind, pair in _COUNTS.items() if kind in ours):
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
        if (word in _COMPARED and word != "oneOf") or word in SILENT:
            return False
        kind = _KIND_OF.get(word)
        if kind is not None and kind not in ours and not (kind == "number" and "integer" in ours):
            return False
        if word == "multipleOf":
            return not is_multiple(sub, float(sup[word]))
        if word not in sub or not is_same(sub[word], sup[word]):
            return True
        return not self._has_same_names and next(references(sup[word]), None) is not None

    def _numbers(
        self, sub: Mapping[str, Any], sup: Mapping[str, Any], where: str
    ) -> Iterator[Incompatibility]:
        low, high = bounds_of(sub)
        least, most = bounds_of(sup)
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
            yield from self.of(item_at(sub, n), item_at(sup, n), f"{where}[{n}]")
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
                yield self._gap(path_inside(where, name), "required", sub, sup)
        if sub.get("patternProperties") and not is_same(
            sub["patternProperties"], sup.get("patternProperties")
        ):
            # property names of a form that `sup` does not define
            yield self._gap(where, "values", sub, sup)
        for name in {**ours, **theirs}:
            yield from self.of(
                ours.get(name, others), theirs.get(name, closed), path_inside(where, name)
            )
        yield from self.of(others, closed, path_inside(where, "*"))
