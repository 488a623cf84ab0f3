"""Schemas of arguments: what a tenant may make the activator compile and run."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.controller.release import argument_schemas
from pilotlight.errors import InvalidInput
from tests.fakes.schema_server import serve_schemas
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec


def chain(length: int, copies: int) -> dict[str, Any]:
    """Definitions that each name the next one `copies` times."""
    links = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * copies} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def test_a_small_schema_that_takes_forever_to_check_is_refused() -> None:
    with pytest.raises(InvalidInput, match="references followed"):
        argument_schemas.check_schema(chain(45, 2), "w")


def test_a_chain_of_references_is_refused_before_it_overflows_a_stack() -> None:
    with pytest.raises(InvalidInput, match="in a row"):
        argument_schemas.check_schema(chain(900, 1), "w")


def test_references_to_a_key_with_escapes_are_followed() -> None:
    bomb = chain(45, 2)
    bomb["$defs"]["a/b~c d"] = {"$ref": "#/$defs/d0"}
    with pytest.raises(InvalidInput, match="references followed"):
        argument_schemas.check_schema({**bomb, "$ref": "#/$defs/a~1b~0c%20d"}, "w")


@pytest.mark.parametrize(
    "schema",
    [
        chain(8, 2),
        {"$ref": "#"},
        {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"children": {"items": {"$ref": "#/$defs/tree"}}},
                }
            },
            "$ref": "#/$defs/tree",
        },
        {
            "type": "object",
            "properties": {"$ref": {"type": "string"}, "names": {"enum": ["a"] * 1000}},
        },
    ],
)
def test_what_is_small_or_refers_to_itself_is_accepted(schema: dict[str, Any]) -> None:
    argument_schemas.check_schema(schema, "w")


@pytest.mark.parametrize("reference", ["http://127.0.0.1/x", "file:///etc/passwd", "other.json"])
def test_a_reference_to_elsewhere_is_refused(reference: str) -> None:
    with pytest.raises(InvalidInput, match="outside the schema"):
        argument_schemas.check_schema({"properties": {"a": {"$ref": reference}}}, "w")


@pytest.mark.parametrize("part", ["schema", "returns"])
async def test_a_deploy_whose_schema_names_a_draft_elsewhere_is_refused_and_nothing_is_fetched(
    controller: Controller, part: str
) -> None:
    with serve_schemas() as server:
        method = {
            "name": "",
            part: {"type": "object", "properties": {"a": {"$schema": f"{server.url}/x"}}},
        }

        answer = await controller.http.post(
            "/v1/apps/shop/deploy", json={"functions": [spec("hello", methods=[method])]}
        )

        assert server.requests == []
        assert answer.status_code == 400
        assert f"$schema '{server.url}/x' is not supported" in answer.json()["detail"]
