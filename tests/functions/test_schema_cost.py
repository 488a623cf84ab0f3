"""Estimates of what checks against a schema cost: never too low."""

from __future__ import annotations

from typing import Any

import pytest

from activator.llm.openai.request import OpenAIRequest
from pilotlight.controller.release import argument_schemas
from pilotlight.errors import InvalidInput
from pilotlight.validation.schema_cost import (
    MAX_DEPTH,
    MAX_NODES,
    UNBOUNDED,
    estimate_schema_cost,
    pattern_weight,
    pattern_weights,
)

LEAF = {"type": "integer"}
TREE: dict[str, Any] = {
    "$defs": {"N": {"properties": {"c": {"items": {"$ref": "#/$defs/N"}}}}},
    "$ref": "#/$defs/N",
}
TWO_WAYS: dict[str, Any] = {
    "$defs": {
        "N": {
            "allOf": [
                {"items": {"$ref": "#/$defs/N"}},
                {"items": {"$ref": "#/$defs/N"}, "maxItems": 9},
            ]
        }
    },
    "$ref": "#/$defs/N",
}


@pytest.mark.parametrize(
    "pattern,least,most",
    [
        ("abc", 3, 3),
        ("a{1000}", 1000, 1000),
        ("((a{10}){10}){10}", 1000, 1100),
        ("(?:x{1,1000}){1,50}y", 50_000, 51_000),
        (r"\w{1,60}", 60, 6000),
        ("[^]a]{4}", 4, 400),
        (r"\{9\}", 3, 3),
        ("{", 1, 1),
        ("[", 1, 40),
        ("(((", 1, 3),
        ("a{999999999999}", 1, 100),
        (r"\p{L}{100}", 2000, 4000),
        (r"\P{Greek}{100}", 2000, 4000),
        ("[[:alpha:]]{100}", 2000, 4000),
        ("[a[b]]{100}", 2000, 4000),
        ("(?x)a {3}", UNBOUNDED, UNBOUNDED),
        ("(?i-sx:a) {3}", UNBOUNDED, UNBOUNDED),
        (r"\(?ext: [0-9]", 1, 40),
    ],
)
def test_repetitions_count_as_often_as_they_repeat(pattern: str, least: int, most: int) -> None:
    assert least <= pattern_weight(pattern) <= most


def test_many_classes_in_one_pattern_cost_more_than_their_states() -> None:
    """The library compiles a thousand of them in a quarter of a minute."""
    few, many = ({"pattern": r"\s" * count} for count in (10, 300))
    assert pattern_weights(few) < 2_000
    assert pattern_weights(many) > 200_000
    with pytest.raises(InvalidInput, match="patterns"):
        argument_schemas.check_schema(many, "w")


def test_each_use_of_a_definition_counts() -> None:
    one = estimate_schema_cost({"$defs": {"a": LEAF}, "allOf": [{"$ref": "#/$defs/a"}]}).by_depth[0]
    ten = estimate_schema_cost(
        {"$defs": {"a": LEAF}, "allOf": [{"$ref": "#/$defs/a"}] * 10}
    ).by_depth[0]

    assert ten - one >= 9 * 2


def test_definitions_that_name_each_other_twice_double_at_each_step() -> None:
    names = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(16)}

    assert (
        estimate_schema_cost({"$defs": {**names, "a16": LEAF}, "$ref": "#/$defs/a0"}).by_depth[0]
        > 2**16
    )


def test_a_schema_that_refers_to_itself_costs_by_the_depth_of_the_value() -> None:
    tree, two = estimate_schema_cost(TREE), estimate_schema_cost(TWO_WAYS)

    assert tree.is_recursive
    assert len(tree.by_depth) == MAX_DEPTH + 1
    assert tree.by_depth[-1] < 1000
    assert two.by_depth[10] > 2**10
    assert two.by_depth[-1] == UNBOUNDED or two.by_depth[-1] > 2**MAX_DEPTH


def test_patterns_count_for_each_byte_and_as_often_as_they_are_used() -> None:
    one = estimate_schema_cost(
        {"$defs": {"a": {"pattern": "abc"}}, "allOf": [{"$ref": "#/$defs/a"}]}
    )
    ten = estimate_schema_cost(
        {"$defs": {"a": {"pattern": "abc"}}, "allOf": [{"$ref": "#/$defs/a"}] * 10}
    )

    assert (one.per_byte, ten.per_byte, ten.compile_weight) == (3, 30, 3)
    assert (
        estimate_schema_cost(
            {"patternProperties": {"abc": True}, "properties": {"x": {"format": "email"}}}
        ).per_byte
        > 3
    )


def test_nested_evaluation_multiplies() -> None:
    schema: dict[str, Any] = {"properties": {"a": True}}
    for _ in range(12):
        schema = {"allOf": [schema], "unevaluatedProperties": False}

    assert estimate_schema_cost(schema).by_depth[0] > 2**12


def test_a_schema_too_large_to_estimate_is_unbounded() -> None:
    assert estimate_schema_cost({"enum": list(range(MAX_NODES))}).by_depth == (UNBOUNDED,)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, LEAF]},
        {"$ref": "#/$defs/missing"},
        {"$dynamicRef": "#x"},
    ],
)
def test_cycles_that_stay_at_one_value_end(schema: dict[str, Any]) -> None:
    assert estimate_schema_cost(schema).by_depth[0] < 100


def test_a_deploy_with_patterns_too_large_to_compile_is_refused() -> None:
    with pytest.raises(InvalidInput, match="patterns have about"):
        argument_schemas.check_schema(
            {"allOf": [{"pattern": r"(\w{1,90}){1,90}"} for _ in range(20)]}, "w"
        )
    argument_schemas.check_schema({"pattern": "^[a-z0-9-]{1,63}$"}, "w")


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(
            {"properties": {f"p{n}": {"type": "integer"} for n in range(10_000)}}, id="large"
        ),
        pytest.param({"allOf": [{"pattern": r"(\w{1,90}){1,90}"}]}, id="large pattern"),
    ],
)
def test_the_schema_of_a_models_answer_has_bounds_of_its_own(schema: dict[str, Any]) -> None:
    body = {
        "messages": [{"role": "user"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }

    with pytest.raises(InvalidInput, match="too complex"):
        OpenAIRequest("/v1/chat/completions", body)
