"""Which new schemas break callers, and that nothing is called compatible that is not."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.controller.release.comparison_steps import (
    MAX_STEPS,
    ComparisonTooLarge,
    StepBudget,
)
from pilotlight.controller.release.compatibility import MAX_REPORTED, breaking_changes
from pilotlight.controller.release.schema_diff import incompatibilities
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.functions.controller.parts import spec
from tests.hypothesis_profiles import examples

STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def function(schema: Any = None, returns: Any = None, **changes: Any) -> FunctionSpec:
    body = {"name": "", "schema": schema, "returns": returns, **changes}
    return from_json(FunctionSpec, spec(methods=[body]))


def arguments(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
    }


@pytest.mark.parametrize(
    "old,new,told",
    [
        (
            arguments("a", a=NUMBER),
            arguments("a", a=INTEGER),
            "argument 'a': accepted number, now accepts only integer",
        ),
        (
            arguments("a", a=NUMBER),
            arguments("a", "b", a=NUMBER, b=STRING),
            "argument 'b' is now required",
        ),
        (
            arguments("a", a=NUMBER, b=NUMBER),
            arguments("a", a=NUMBER),
            "argument 'b' is no longer accepted",
        ),
        (
            arguments(a={}),
            arguments(a=STRING),
            "argument 'a': accepted anything, now accepts only string",
        ),
        (None, arguments(a=STRING), "its arguments: accepted anything, now accepts only"),
        (
            arguments(a={**NUMBER, "maximum": 9}),
            arguments(a={**NUMBER, "maximum": 5}),
            "argument 'a'",
        ),
        (
            arguments(a={**NUMBER, "minimum": 0}),
            arguments(a={**NUMBER, "exclusiveMinimum": 0}),
            "argument 'a'",
        ),
        (arguments(a={"enum": ["x", "y"]}), arguments(a={"enum": ["x"]}), "argument 'a': accepted"),
        (
            arguments(a={"anyOf": [STRING, {"type": "null"}]}),
            arguments(a=STRING),
            "argument 'a': accepted null, now accepts only string",
        ),
        (
            arguments(a={"type": "array", "items": NUMBER}),
            arguments(a={"type": "array", "items": STRING}),
            "argument 'a[]'",
        ),
        (
            arguments(a={"type": "array"}),
            arguments(a={"type": "array", "minItems": 1}),
            "argument 'a'",
        ),
        (arguments(a=STRING), arguments(a={**STRING, "pattern": "^x"}), "argument 'a'"),
        (
            arguments(a=arguments(b=STRING)),
            arguments(a=arguments("b", b=STRING)),
            "argument 'a.b' is now required",
        ),
        (arguments(a={"type": "boolean"}), arguments(a={"const": True}), "argument 'a'"),
    ],
)
def test_arguments_that_become_narrower_break_callers(old: Any, new: Any, told: str) -> None:
    found = breaking_changes(function(old), function(new))
    assert found[0].startswith(told), found


@pytest.mark.parametrize(
    "old,new",
    [
        (arguments("a", a=INTEGER), arguments(a=NUMBER, b=STRING)),
        (arguments(a=STRING), arguments(a={"anyOf": [STRING, {"type": "null"}], "default": None})),
        (
            arguments(a={"type": ["string", "number"]}),
            arguments(a={"type": ["number", "string", "null"]}),
        ),
        (arguments(a={"enum": ["x"]}), arguments(a=STRING)),
        (arguments(a={**INTEGER, "multipleOf": 4}), arguments(a={**INTEGER, "multipleOf": 2})),
        (
            arguments(
                a={
                    "type": "array",
                    "prefixItems": [NUMBER, NUMBER],
                    "items": False,
                    "minItems": 2,
                    "maxItems": 2,
                }
            ),
            arguments(a={"type": "array", "items": NUMBER}),
        ),
        (arguments(a=STRING), None),
        (arguments(a={"type": "boolean"}), arguments(a={"enum": [True, False, "auto"]})),
    ],
)
def test_arguments_that_become_wider_break_nobody(old: Any, new: Any) -> None:
    assert breaking_changes(function(old), function(new)) == []
    assert breaking_changes(function(new), function(old)) != []


@pytest.mark.parametrize(
    "old,new,told",
    [
        (INTEGER, NUMBER, "the result: was integer, may now be number"),
        (arguments("a", a=STRING), arguments(a=STRING), "the result's 'a' may now be missing"),
        (arguments("a", a=STRING), arguments("b", b=STRING), "the result's 'a' may now be missing"),
        (STRING, {"anyOf": [STRING, {"type": "null"}]}, "the result: was string, may now be null"),
        (STRING, None, "the result: was string, may now be anything"),
    ],
)
def test_answers_that_become_wider_break_callers(old: Any, new: Any, told: str) -> None:
    assert breaking_changes(function(None, old), function(None, new)) == [told]


@pytest.mark.parametrize(
    "old,new",
    [
        (NUMBER, INTEGER),
        (None, STRING),
        (arguments("a", a=STRING), arguments("a", "b", a=STRING, b=NUMBER)),
        ({}, STRING),
    ],
)
def test_answers_that_become_narrower_or_gain_properties_break_nobody(old: Any, new: Any) -> None:
    assert breaking_changes(function(None, old), function(None, new)) == []


def test_methods_kinds_and_positions_are_promises_too() -> None:
    two = from_json(FunctionSpec, spec(kind="class", methods=[{"name": "embed"}, {"name": "rank"}]))
    one = from_json(FunctionSpec, spec(kind="class", methods=[{"name": "embed"}]))
    assert breaking_changes(two, one) == ["method 'rank' was removed"]
    assert breaking_changes(one, two) == []
    assert breaking_changes(function(), from_json(FunctionSpec, spec(kind="asgi"))) == [
        "it was a function, and is now a web application"
    ]
    assert breaking_changes(function(), function(is_generator=True)) == [
        "the result was one value, and is now a stream of items"
    ]
    named = arguments(a=STRING, b=STRING)
    before = function(named, parameters=["a", "b"])
    assert breaking_changes(before, function(named, parameters=["b", "a"])) == [
        "positional arguments were (a, b), and are now (b, a)"
    ]
    assert breaking_changes(before, function(named, parameters=["a"])) == [
        "argument 'b' can no longer be passed by position"
    ]
    assert (
        breaking_changes(
            before, function(arguments(a=STRING, b=STRING, c=STRING), parameters=["a", "b", "c"])
        )
        == []
    )


def recursive(leaf: Any, name: str = "Tree") -> dict[str, Any]:
    tree = {
        "type": "object",
        "properties": {
            "value": leaf,
            "next": {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]},
        },
    }
    return {**arguments(a={"$ref": f"#/$defs/{name}"}), "$defs": {name: tree}}


def test_schemas_that_contain_themselves_are_compared() -> None:
    assert breaking_changes(function(recursive(INTEGER)), function(recursive(NUMBER, "Node"))) == []
    assert (
        "a.value"
        in breaking_changes(function(recursive(NUMBER)), function(recursive(INTEGER, "Node")))[0]
    )


def test_unions_told_apart_by_a_property_are_compared_option_by_option() -> None:
    def union(*sides: str) -> dict[str, Any]:
        options = {side: arguments("kind", kind={"const": side}, size=NUMBER) for side in sides}
        told_by = {
            "oneOf": [{"$ref": f"#/$defs/{side}"} for side in sides],
            "discriminator": {"propertyName": "kind"},
        }
        return {**arguments(a=told_by), "$defs": options}

    assert (
        breaking_changes(
            function(union("square", "disc")), function(union("square", "disc", "line"))
        )
        == []
    )
    assert breaking_changes(function(union("square", "disc")), function(union("square"))) != []


def test_keywords_that_cannot_be_compared_must_be_the_same() -> None:
    old = arguments(a={**STRING, "not": {"const": "x"}})
    assert breaking_changes(function(old), function({**old, "title": "other"})) == []
    assert breaking_changes(function(arguments(a=STRING)), function(old)) != []
    draft = {"$schema": "http://json-schema.org/draft-04/schema#", **arguments(a=STRING)}
    assert breaking_changes(function(draft), function(arguments(a=STRING))) != []


def test_entangled_schemas_are_given_up_and_told() -> None:
    wide = {"anyOf": [arguments(**{f"p{i}": {"enum": [j]} for i in range(20)}) for j in range(40)]}
    other = {
        "anyOf": [arguments(**{f"p{i}": {"enum": [j + 1]} for i in range(20)}) for j in range(40)]
    }
    with pytest.raises(ComparisonTooLarge):
        list(incompatibilities(wide, other))
    assert "too large to compare" in breaking_changes(function(wide), function(other))[-1]


def test_no_more_than_a_screenful_is_told() -> None:
    old = arguments(**{f"p{i}": NUMBER for i in range(100)})
    assert len(breaking_changes(function(old), function(arguments()))) == MAX_REPORTED


leaves = st.sampled_from(
    [
        STRING,
        NUMBER,
        INTEGER,
        {"type": "null"},
        {"type": "boolean"},
        {},
        {"enum": [1, "a"]},
        {"const": 2},
        {**INTEGER, "minimum": 1},
        {**NUMBER, "maximum": 2},
        {**NUMBER, "exclusiveMinimum": 0},
        {**STRING, "minLength": 1},
        {"type": ["integer", "string"]},
        {**INTEGER, "multipleOf": 2},
        {"$ref": "#/$defs/A"},
        {"minimum": 2},
        {"not": INTEGER},
        {**STRING, "pattern": "a"},
        True,
        False,
    ]
)


def _record(properties: dict[str, Any], required: set[str], others: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(required & set(properties)),
        "additionalProperties": others,
    }


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names, unions = st.sampled_from("abc"), st.sampled_from(["anyOf", "oneOf", "allOf"])
    record = st.builds(
        _record,
        st.dictionaries(names, inner, max_size=3),
        st.sets(names),
        st.sampled_from([True, False, INTEGER]),
    )
    several = st.builds(
        lambda word, options: {word: options}, unions, st.lists(inner, min_size=1, max_size=3)
    )
    array = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least},
        inner,
        st.integers(0, 2),
    )
    pair = st.builds(lambda a, b: {"type": "array", "prefixItems": [a], "items": b}, inner, inner)
    beside = st.builds(lambda a: {"$ref": "#/$defs/A", **(a if isinstance(a, dict) else {})}, inner)
    return record | several | array | pair | beside


schemas = st.recursive(leaves, _grown, max_leaves=6)
values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 2, 3, 2.5, -1, "", "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=5,
)


def rooted(schema: Any, named: Any) -> dict[str, Any]:
    """`#/$defs/A` never names itself at once: such a schema is refused at deploy."""
    named = {} if isinstance(named, dict) and "$ref" in str(named) else named
    return {"type": "object", "properties": {"x": schema}, "$defs": {"A": named}}


@settings(max_examples=examples(300), deadline=None)
@given(schemas, leaves, schemas, leaves, st.lists(values, min_size=1, max_size=30))
def test_nothing_is_called_compatible_that_refuses_a_value_which_was_accepted(
    old: Any, old_named: Any, new: Any, new_named: Any, tried: list[Any]
) -> None:
    before, after = rooted(old, old_named), rooted(new, new_named)
    if list(incompatibilities(before, after)):
        return
    accepts, accepts_now = jsonschema_rs.validator_for(before), jsonschema_rs.validator_for(after)
    for value in ({"x": one} for one in tried):
        assert not accepts.is_valid(value) or accepts_now.is_valid(value), value


@settings(max_examples=examples(100), deadline=None)
@given(schemas, leaves)
def test_a_schema_is_compatible_with_itself(schema: Any, named: Any) -> None:
    one = rooted(schema, named)
    assert list(incompatibilities(one, {**rooted(schema, named), "title": "the same"})) == []


WIDE = {"type": "integer", "properties": {f"{n:x}": STRING for n in range(2_400)}}
"""Takes some milliseconds to compile."""


def test_a_schema_that_many_values_are_tried_on_is_compiled_once() -> None:
    steps = StepBudget()
    assert (
        list(
            incompatibilities(
                arguments(a={"enum": list(range(400))}), arguments(a=WIDE), steps=steps
            )
        )
        == []
    )
    with pytest.raises(ComparisonTooLarge):
        steps.take(MAX_STEPS - 2_500)
    assert (
        list(
            incompatibilities(
                arguments(a={"enum": list(range(10))}), arguments(a=WIDE), steps=StepBudget(4_000)
            )
        )
        == []
    )


@pytest.mark.parametrize(
    "sub,sup",
    [
        ({"enum": list(range(12_000))}, WIDE),
        ({"anyOf": [{"const": n} for n in range(5_000)]}, {"allOf": [WIDE]}),
        ({"enum": ["a" * n for n in range(1, 200)]}, {"type": "string", "pattern": "^(?=(a+)+$)"}),
        ({"enum": list(range(5_000))}, {"anyOf": [{"const": n} for n in range(5_000)]}),
        (
            {"anyOf": [{}] * 5_000, "required": [f"{n:x}" for n in range(5_000)]},
            {"required": [f"x{n:x}" for n in range(5_000)]},
        ),
    ],
    ids=["values of a list", "values of a union", "backtracking", "alternatives", "properties"],
)
def test_values_cost_steps_as_nodes_do(sub: Any, sup: Any) -> None:
    with pytest.raises(ComparisonTooLarge):
        list(incompatibilities(sub, sup))


def test_methods_of_one_function_share_the_steps() -> None:
    narrow = arguments(a={"enum": list(range(6_000))})
    old, new = (
        from_json(
            FunctionSpec, spec(methods=[{"name": f"m{n}", "schema": schema} for n in range(20)])
        )
        for schema in (narrow, arguments(a=INTEGER))
    )
    assert any("too large to compare" in text for text in breaking_changes(old, new))
