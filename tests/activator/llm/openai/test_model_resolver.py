"""Names of models, and the functions that they stand for."""

from __future__ import annotations

import pytest

from activator.llm.openai.model_resolver import MAX_COMPARED, ModelName, near_names, parse
from activator.routing.model_catalog import Engines
from activator.routing.route_table import FunctionRouter
from pilotlight.spec.pricing import Rates
from tests.activator.llm.openai.conftest import llm
from tests.fakes.routes import TENANT, change, empty_table, route_of, spec_of, split_route


@pytest.mark.parametrize(
    "text,name",
    [
        ("shop/assistant", ModelName(place="shop/assistant")),
        ("shop/assistant@beta", ModelName(place="shop/assistant", asked="beta")),
        ("shop/assistant:pirate", ModelName(place="shop/assistant", adapter="pirate")),
        (
            "shop/assistant@beta:pirate",
            ModelName(place="shop/assistant", asked="beta", adapter="pirate"),
        ),
        ("assistant", ModelName(place="assistant")),
        ("", ModelName(place="")),
        ("@:", ModelName(place="")),
    ],
)
def test_a_name_has_its_parts(text: str, name: ModelName) -> None:
    assert parse(text) == name


def test_names_that_are_alike_are_found_and_else_the_first_ones() -> None:
    there = ["shop/assistant", "shop/assistant:pirate", "shop/small"]

    assert near_names("shop/asistant", there)[0] == "shop/assistant"
    assert near_names("gpt-4o", there) == ["shop/assistant", "shop/assistant:pirate", "shop/small"]
    assert near_names("x", []) == []


def test_a_wrong_name_is_compared_with_few_however_many_there_are() -> None:
    names = [f"app-{n:05d}/a-function-with-a-long-name" for n in range(10_000)]
    left = iter(names)
    assert near_names("app-00001/a-function-with-a-long-nam", left)[0] == names[1]
    assert next(left) == names[MAX_COMPARED]
    assert near_names(names[7] * 100, names) == names[:5]


def test_engines_come_and_go_with_their_functions() -> None:
    table = empty_table()
    table.apply(change(1, route_of(llm(lora=("pirate",)))))
    table.apply(change(2, route_of(spec_of("plain"))))

    (engine,) = table.engines.of(TENANT, "main")
    assert list(engine.models()) == ["shop/assistant", "shop/assistant:pirate"]
    assert table.engines.of(TENANT, "staging") == table.engines.of("t-2", "main") == []

    table.apply(change(3, route_of(spec_of("assistant"))))
    assert len(table.engines) == 0
    table.apply(change(4, route_of(llm())))
    table.clear()
    assert len(table.engines) == 0


def test_a_stopped_engine_is_not_offered() -> None:
    table = empty_table()
    route = route_of(llm())
    table.apply(change(1, route))
    table.apply(
        change(2, type(route)(**{**route.to_json(), "traffic": route.traffic, "stopped": True}))
    )

    assert repr(table.engines) == "<Engines 0>"


def test_what_has_most_of_the_traffic_says_what_it_is() -> None:
    engines = Engines()
    route = split_route(
        llm(lora=("pirate",)), {"v1-aaa": 40, "v2-bbb": 60}, tags={"beta": "v1-aaa"}
    )
    engines.apply("t/main/shop/assistant", FunctionRouter(route, Rates(version="test")))

    (engine,) = engines.of("t", "main")
    assert list(engine.models()) == [
        "shop/assistant",
        "shop/assistant:pirate",
        "shop/assistant@beta",
    ]
    assert engine.is_open_to(TENANT, "")
    assert not engine.is_open_to("t-2", "globex")
