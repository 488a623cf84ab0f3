"""A tenant's JSON Schema makes no process of the platform open a connection or read a file,
whatever it names."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from activator.llm.openai.request import OpenAIRequest
from activator.llm.request_size import CHAT
from pilotlight.controller.release import argument_schemas
from pilotlight.controller.release.schema_diff import incompatibilities
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import MethodSpec
from pilotlight.validation.json_schema import build_validator
from tests.activator.llm.openai.conftest import chat
from tests.fakes.routes import spec_of, target_of
from tests.fakes.schema_server import (
    DIALECT,
    NAMES,
    SCHEMA,
    SchemaServer,
    schemas_from,
    serve_schemas,
)

ROOT = Path(__file__).parents[1]
ARGUMENTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"a": "text"},
    {"a": 7},
    {"a": [1]},
    {"enum": "text"},
)
METASCHEMAS = (
    DIALECT,
    f"{DIALECT}#",
    "http://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-04/schema#",
)


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[SchemaServer]:
    with serve_schemas() as running:
        yield running


@pytest.fixture(name="schema")
def _schema(request: pytest.FixtureRequest, server: SchemaServer, tmp_path: Path) -> dict[str, Any]:
    """The one that the test is parametrized with."""
    server.requests.clear()
    (tmp_path / "stored.json").write_bytes(SCHEMA)
    return schemas_from(server.url, tmp_path)[request.param]


every_schema = pytest.mark.parametrize("schema", NAMES, indirect=True)


def is_refused(check: Callable[..., object], *arguments: object) -> bool:
    """Whether it raises InvalidInput."""
    try:
        check(*arguments)
    except InvalidInput:
        return True
    return False


@every_schema
def test_a_deploy_refuses_it_without_a_request(
    server: SchemaServer, schema: dict[str, Any]
) -> None:
    assert is_refused(argument_schemas.check_schema, schema, "function 'f'")
    assert server.requests == []


@every_schema
def test_calls_of_a_stored_revision_are_refused_without_a_request(
    server: SchemaServer, schema: dict[str, Any]
) -> None:
    check = target_of(spec_of(methods=(MethodSpec(schema=schema, parameters=("a",)),))).check("")

    assert all(is_refused(check.check, json.dumps(arguments).encode()) for arguments in ARGUMENTS)
    assert server.requests == []


@every_schema
def test_a_comparison_ends_without_a_request(server: SchemaServer, schema: dict[str, Any]) -> None:
    values = {"enum": list(ARGUMENTS)}

    list(incompatibilities(values, schema))
    list(incompatibilities(schema, values))
    list(incompatibilities({"properties": {"a": values}}, {"properties": {"a": schema}}))
    assert server.requests == []


def test_values_of_a_stored_schema_whose_draft_is_unsupported_are_not_called_compatible(
    server: SchemaServer,
) -> None:
    server.requests.clear()
    stored = {
        "properties": {"a": {"$schema": f"{server.url}/x", "enum": [1, 2], "type": "integer"}}
    }

    assert [
        gap.where for gap in incompatibilities({"properties": {"a": {"enum": [1]}}}, stored)
    ] == ["a"]
    assert server.requests == []


@every_schema
def test_the_format_of_a_chat_is_checked_without_a_request(
    server: SchemaServer, schema: dict[str, Any]
) -> None:
    """Only the engine compiles it, and the engine's own word on it is passed back."""
    OpenAIRequest(
        CHAT,
        chat(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        ),
    )

    assert server.requests == []


def test_the_refusal_of_a_draft_names_the_parameter_the_value_and_the_way_out() -> None:
    with pytest.raises(InvalidInput) as refused:
        argument_schemas.check_schema(
            {"properties": {"a": {"$schema": "http://127.0.0.1:9/x"}}},
            "function 'f': schema of 'g'",
        )

    text = str(refused.value)
    assert text.startswith(
        "function 'f': schema of 'g': $schema 'http://127.0.0.1:9/x' is not supported"
    )
    assert f"remove it, or use {DIALECT}" in text
    assert refused.value.detail["parameter"] == "function 'f': schema of 'g'"


def test_a_refusal_is_short_however_long_the_address_is() -> None:
    for schema in (
        {"$schema": f"http://127.0.0.1/{'x' * 9000}"},
        {"$ref": f"http://127.0.0.1/{'x' * 9000}"},
    ):
        with pytest.raises(InvalidInput) as refused:
            build_validator(schema, "w")
        assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": 5},
        {"$schema": ["x"]},
        {"$schema": ""},
        {"$schema": "json-schema.org/draft-07/schema"},
    ],
)
def test_a_draft_that_is_no_address_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        argument_schemas.check_schema(schema, "w")


@pytest.mark.parametrize("metaschema", METASCHEMAS)
def test_supported_drafts_are_accepted_without_a_request(metaschema: str) -> None:
    schema = {
        "$schema": metaschema,
        "type": "object",
        "properties": {"a": {"$schema": metaschema, "type": "integer"}},
    }
    argument_schemas.check_schema(schema, "w")

    validator = build_validator(schema, "w")

    assert (validator.is_valid({"a": 1}), validator.is_valid({"a": "x"})) == (True, False)


@pytest.mark.parametrize(
    "schema,refused",
    [
        ({"prefixItems": [{"type": "string"}]}, [1]),
        ({"$schema": DIALECT, "prefixItems": [{"type": "string"}]}, [1]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]},
            [1],
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "minimum": 1,
                "exclusiveMinimum": True,
            },
            1,
        ),
    ],
)
def test_keywords_mean_what_their_draft_says(schema: dict[str, Any], refused: Any) -> None:
    assert not build_validator(schema, "w").is_valid(refused)


def test_references_within_a_schema_with_an_id_are_followed(server: SchemaServer) -> None:
    server.requests.clear()
    schema = {
        "$id": f"{server.url}/base",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"type": "integer"}},
    }

    argument_schemas.check_schema(schema, "w")

    assert not build_validator(schema, "w").is_valid({"a": "text"})
    assert server.requests == []


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"$schema": {"type": "string"}}},
        {"properties": {"a": {"default": {"$schema": "http://127.0.0.1:9/x"}}}},
        {"properties": {"a": {"enum": [{"$schema": "http://127.0.0.1:9/x"}]}}},
        {"const": {"$schema": "http://127.0.0.1:9/x"}},
    ],
)
def test_a_draft_in_data_and_a_property_of_that_name_are_accepted(schema: dict[str, Any]) -> None:
    argument_schemas.check_schema(schema, "w")


def test_only_one_module_builds_validators() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for package in ("activator", "functions", "weight_cache", "snapshotter")
        for path in (ROOT / package).rglob("*.py")
        if "jsonschema" in (source := path.read_text()) and imports_library(source)
    }

    assert importers == {"functions/pilotlight/validation/json_schema.py"}


def imports_library(source: str) -> bool:
    """Whether the module imports a library of validators, but for its annotations."""
    return any(
        name.partition(".")[0] in ("jsonschema", "jsonschema_rs")
        for name in imported(ast.parse(source))
    )


def imported(node: ast.AST) -> Iterator[str]:
    """Modules that are imported at run time."""
    if (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""
    for child in ast.iter_child_nodes(node):
        yield from imported(child)
