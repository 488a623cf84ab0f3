"""Revisions that were stored before their schema's `$schema` was refused at deploy: their calls
are, and the activator goes on."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from pilotlight.protocol import CONTENT_PICKLE
from pilotlight.spec.function import MethodSpec
from tests.activator.conftest import Edge
from tests.fakes.routes import SCHEMA, route_of, spec_of
from tests.fakes.schema_server import SchemaServer, serve_schemas


@pytest.fixture(name="server")
def _server() -> Iterator[SchemaServer]:
    with serve_schemas() as running:
        yield running


@pytest.fixture(name="stored")
def _stored(edge: Edge, server: SchemaServer) -> Edge:
    """An activator with such a revision, `shop/old`, and another function, `shop/hello`."""
    method = MethodSpec(schema={**SCHEMA, "$schema": f"{server.url}/x"}, parameters=("x", "y"))
    edge.add(route_of(spec_of("old", methods=(method,))))
    edge.add(route_of(spec_of()))
    return edge


@pytest.mark.parametrize("verb", ["invoke", "submit"])
async def test_a_call_of_it_is_refused_and_names_the_schema_and_the_way_out(
    stored: Edge, server: SchemaServer, verb: str
) -> None:
    for _ in range(3):
        answer = await stored.call(f"shop/old:{verb}", json={"x": 1})

        assert answer.status_code == 400
        said = answer.json()["detail"]
        assert said.startswith(
            "the arguments cannot be checked: schema of shop/old in revision v1-abcdef: $schema "
        )
        assert server.url in said
        assert said.endswith("deploy the function again")
    assert server.requests == []


async def test_other_functions_and_unchecked_arguments_are_served(
    stored: Edge, server: SchemaServer
) -> None:
    await stored.call("shop/old:invoke", json={"x": 1})

    other = await stored.call("shop/hello:invoke", json={"x": 1})
    pickled = await stored.call(
        "shop/old:invoke",
        content=pickle.dumps(((1,), {})),
        headers={"content-type": CONTENT_PICKLE},
    )

    assert (other.status_code, pickled.status_code) == (200, 200)
    assert server.requests == []
