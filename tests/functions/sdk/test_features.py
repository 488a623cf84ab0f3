"""`FeatureSchema` in training code, `features=`, and what they refuse."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.sdk.options import resolve_options
from pilotlight.spec.features.schema import FeatureType
from pilotlight.spec.features.sources import FeaturesSpec, RedisFeatures
from pilotlight.spec.function import FunctionKind, FunctionNetwork, FunctionSpec, MethodSpec
from pilotlight.spec.record_json import from_json, to_json
from tests.fakes.routes import spec_of

Feature, FeatureSchema = pilotlight.Feature, pilotlight.FeatureSchema
AGE = FeatureSchema({"age": int, "income": Feature(float, default=0, low=0, high=1e9)})
ONLINE = FeatureSchema({"trips": Feature(int, default=0)})


def test_a_schema_is_the_same_after_json() -> None:
    schema = FeatureSchema(
        {
            "a": int,
            "b": Feature(float, default=1, low=-1, high=1.5),
            "c": Feature(bool, default=False),
            "d": Feature(str, nullable=True),
            "e": Feature(list, default=[1, 2], size=2),
        },
        version="v7",
    )
    document = json.loads(json.dumps(schema.to_json()))
    assert FeatureSchema.from_json(document) == schema
    assert FeatureSchema.from_json(document).hash == schema.hash
    assert schema.names == ("a", "b", "c", "d", "e")


def test_the_hash_is_known_and_does_not_depend_on_the_process() -> None:
    """A change of it refuses the models of everyone who has written it down."""
    assert AGE.hash == "7f4b4eeeb3ab471d519696bf3299ad2d30b5d1d6ec4590910b48281a585bf06d"


@pytest.mark.parametrize(
    "other",
    [
        {"income": Feature(float, low=0, high=1e9), "age": int},
        {"age": int},
        {"age": float, "income": Feature(float, low=0, high=1e9)},
        {"age": int, "income": Feature(float, low=1, high=1e9)},
        {"age": int, "income": Feature(float, low=0)},
        {"age": Feature(int, nullable=True), "income": Feature(float, low=0, high=1e9)},
        {"ages": int, "income": Feature(float, low=0, high=1e9)},
    ],
)
def test_what_training_depends_on_changes_the_hash(other: dict[str, Any]) -> None:
    assert FeatureSchema(other).hash != AGE.hash


def test_defaults_do_not_change_the_hash_and_the_version_does() -> None:
    same = {"age": Feature(int, default=40), "income": Feature(float, low=0, high=1e9)}
    assert FeatureSchema(same).hash == AGE.hash
    assert FeatureSchema(same, version="2").hash != AGE.hash


def test_a_row_is_converted_in_order_and_its_other_values_are_left_out() -> None:
    row = {"label": 1, "income": np.float32(2.5), "age": np.int64(40)}
    found = AGE.validate(row)
    assert (list(found.items()), type(found["age"])) == ([("age", 40), ("income", 2.5)], int)
    vector = FeatureSchema({"v": Feature(list, size=3), "w": Feature(bool, nullable=True)})
    given = {"v": np.ones(3, dtype=np.float32), "w": np.True_}
    assert vector.validate(given) == {"v": [1.0, 1.0, 1.0], "w": True}
    assert vector.validate({"v": (1, 2, 3)}) == {"v": [1.0, 2.0, 3.0], "w": None}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"age": 4}, "income: is missing"),
        ({"age": 4.0, "income": 1.0}, "age: a value of type float is no int"),
        ({"age": True, "income": 1.0}, "age: a value of type bool is no int"),
        ({"age": "4", "income": 1.0}, "age: a value of type str is no int"),
        ({"age": 4, "income": -1}, "income: a value is out of range"),
        ({"age": 4, "income": float("nan")}, "income: a value of type float"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_without_its_values(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        AGE.validate(row)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FeatureSchema({}), "give 1 to 256"),
        (lambda: FeatureSchema({f"f{n}": int for n in range(257)}), "give 1 to 256"),
        (lambda: FeatureSchema({"a b": int}), "names have 1 to 64"),
        (lambda: FeatureSchema({"a": dict}), "must be one of int, float"),
        (lambda: FeatureSchema({"a": int}, version="v" * 257), "at most 256"),
        (lambda: Feature(str, low=1), "must be a number, of int"),
        (lambda: Feature(int, low="1"), "must be a number, of int"),  # type: ignore[arg-type]
        (lambda: Feature(int, low=2, high=1), "is empty"),
        (lambda: Feature(int, size=2), "of a list"),
        (lambda: Feature(list, size=0), "of a list"),
        (lambda: Feature(int, default="x"), "no int"),
        (lambda: Feature(int, default=5, high=4), "out of range"),
        (lambda: Feature(list, default=[1], size=2), "must be 2"),
        (lambda: Feature(list, default=["a"]), "no list of numbers"),
        (lambda: pilotlight.Redis("user:{id}", AGE), "age needs a default"),
        (lambda: pilotlight.Redis("user:{id}", {"a": int}), "expected pilotlight.FeatureSchema"),  # type: ignore[arg-type]
        (lambda: pilotlight.Redis("user", ONLINE), "must have a parameter"),
        (lambda: pilotlight.Redis("{a}{b}", ONLINE), "between two of them a separator"),
        (lambda: pilotlight.Redis("{a}x-{b}", ONLINE), "between two of them a separator"),
        (lambda: pilotlight.Redis("user:{id", ONLINE), "in braces"),
        (lambda: pilotlight.Redis("u:{id}", ONLINE, url="redis://cache"), "environment variable"),
        (lambda: pilotlight.Redis("u:{id}", ONLINE, deadline_ms=0), "deadline_ms = 0"),
        (lambda: pilotlight.Redis("u:{id}", ONLINE, max_age=0), "max_age = 0"),
        (lambda: FeatureSchema.merge(AGE, AGE), "each name once"),
        (lambda: options(AGE, pilotlight.Redis("u:{id}", ONLINE), ONLINE), "each name once"),
        (lambda: options("user:{id}"), "expected pilotlight.FeatureSchema"),
        (lambda: pilotlight.ModelCard(features="abc"), "must be the hash"),
        (FeaturesSpec, "neither arguments nor online"),
    ],
)
def test_what_is_no_declaration_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def options(*features: Any) -> FeaturesSpec:
    found = resolve_options({"features": list(features)}, concurrent=None).policies["features"]
    assert isinstance(found, FeaturesSpec)
    return found


def test_features_are_a_schema_or_sources_or_both() -> None:
    source = pilotlight.Redis("user:{user_id}", ONLINE, max_age=60, deadline_ms=5, timestamp="at")
    assert source == RedisFeatures(
        key="user:{user_id}", schema=ONLINE, max_age_s=60, deadline_ms=5, timestamp="at"
    )
    assert options(AGE) == FeaturesSpec(arguments=AGE)
    both = options(AGE, source)
    assert both == FeaturesSpec(arguments=AGE, online=(source,))
    assert both.schema.hash == FeatureSchema.merge(AGE, ONLINE).hash
    assert options(AGE).schema.hash == AGE.hash
    spec = spec_of("hello", features=FeaturesSpec(arguments=AGE))
    assert from_json(FunctionSpec, json.loads(json.dumps(to_json(spec)))) == spec
    assert resolve_options({}, concurrent=None).policies["features"] is None


def test_keys_are_written_as_they_are_read() -> None:
    source = pilotlight.Redis("shop:{shop}/user:{user_id}", ONLINE)
    assert source.key_of(shop="a", user_id="b:c/d%") == "shop:a/user:b%3Ac%2Fd%25"
    assert source.key_of(shop=7, user_id="ä") == "shop:7/user:%C3%A4"
    identity = uuid.UUID(int=7)
    assert source.key_of(shop=7, user_id=identity) == f"shop:7/user:{identity}"
    with pytest.raises(InvalidInput, match="user_id: must be text"):
        source.key_of(shop="a")


def test_no_two_entities_have_one_key() -> None:
    source = pilotlight.Redis("{a}:{b}", ONLINE)
    parts = ["", "a", ":", "%", "%3A", "a:", ":a", "b", "::", "{b}", "\n", "\u00e9", "é"]
    keys = {source.key_of(a=f"x{one}", b=f"x{other}") for one in parts for other in parts}
    assert len(keys) == len(set(parts)) ** 2


def rank(user_id: str, limit: int = 3, features: Any = None) -> float:
    return 0.0


def rank_by_name(user_id: str, *, features: Any, limit: int = 3) -> float:
    return 0.0


def rank_in_the_middle(user_id: str, features: Any, limit: int = 3) -> float:
    return 0.0


def rank_several(user_id: str, *features: Any) -> float:
    return 0.0


def rank_given(features: list[float], limit: int) -> float:
    return 0.0


def declared(function: Any, **more: Any) -> MethodSpec:
    app = pilotlight.App("shop")
    app.function(**more)(function)
    (declaration,) = app.declarations.values()
    return declaration.methods()[0]


USER = pilotlight.Redis("user:{user_id}", ONLINE)


@pytest.mark.parametrize("function", [rank, rank_by_name])
def test_the_parameter_is_no_argument_of_callers(function: Any) -> None:
    found = declared(function, features=USER)
    assert found.takes_features
    assert list((found.schema or {})["properties"]) == ["user_id", "limit"]
    assert (found.schema or {})["required"] == ["user_id"]
    assert "features" not in found.parameters


def test_a_parameter_of_that_name_is_an_argument_of_other_functions() -> None:
    for features in (None, AGE):
        found = declared(rank_given, features=features)
        assert (found.takes_features, found.parameters) == (False, ("features", "limit"))


@pytest.mark.parametrize("function", [rank_in_the_middle, rank_several])
def test_arguments_behind_it_are_refused(function: Any) -> None:
    with pytest.raises(InvalidInput, match="declare the parameter 'features' last"):
        declared(function, features=USER)


TAKES = MethodSpec(schema={"properties": {"user_id": {}}}, takes_features=True)
USERS = FeaturesSpec(online=(RedisFeatures(key="user:{user_id}", schema=ONLINE),))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"methods": (MethodSpec(),)}, "does not take them: add a parameter 'features'"),
        ({"methods": (replace(TAKES, schema={}),)}, "hello has no parameter 'user_id'"),
        ({"network": FunctionNetwork.NONE}, "reaches no Redis"),
        ({"kind": FunctionKind.ASGI}, "features: .* only functions and classes"),
        ({"card": pilotlight.ModelCard(features="0" * 64)}, "its model was trained with 0000"),
    ],
)
def test_combinations_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    assert spec_of("hello", features=USERS, methods=(TAKES,)).features == USERS
    with pytest.raises(InvalidInput, match=message):
        spec_of("hello", features=USERS, **{"methods": (TAKES,), **fields})


def test_a_card_is_saved_for_the_deploy(tmp_path: Path) -> None:
    card = pilotlight.ModelCard(task="ranking", features=AGE.hash)
    card.save(tmp_path / "model_card.json")
    found = from_json(pilotlight.ModelCard, json.loads((tmp_path / "model_card.json").read_text()))
    assert found == card
    assert spec_of("hello", features=FeaturesSpec(arguments=AGE), card=card).card == card


def test_a_monitor_watches_the_features_of_a_schema() -> None:
    schema = FeatureSchema({"age": Feature(int, low=0, high=120), "city": str, "v": list})
    found = pilotlight.Monitor(features=schema).features
    assert [(one.path, one.low, one.high) for one in found] == [
        ("$.age", 0.0, 120.0),
        ("$.city", None, None),
    ]
    assert schema.features[2].type is FeatureType.LIST
