"""The data plane against its own description in the OpenAPI document."""

from __future__ import annotations

import re
from typing import Any

import httpx

from pilotlight.controller.server.dataplane_openapi import describe_dataplane
from tests.activator.conftest import KEY, Edge
from tests.fakes.routes import route_of, spec_of

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
NAMES = {"app": "shop", "function": "hello", "call": "req-1", "path": "a/b", "version": "v1-abcdef"}
NAMES |= {"sandbox": "req-2", "process": "7"}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "", "content": {"application/problem+json": {}}}
}


def described() -> dict[str, dict[str, Any]]:
    document: dict[str, Any] = {"paths": {}}
    describe_dataplane(document, PROBLEMS)
    paths: dict[str, dict[str, Any]] = document["paths"]
    return paths


def url_of(edge: Edge, path: str) -> str:
    return edge.url + re.sub(r"{(\w+)}", lambda name: NAMES[name[1]], path)


async def test_methods_that_are_not_described_are_405_and_name_those_that_are(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(edge.gateway),
        headers={"authorization": f"Bearer {KEY}"},
    ) as client:
        redrive: dict[str, dict[str, Any]] = {"/v1/calls/{call}:redrive": {"post": {}}}
        for path, operations in {**described(), **redrive}.items():
            declared = {method.upper() for method in operations}
            for method in set(METHODS) - declared:
                answer = await client.request(method, url_of(edge, path))
                allowed = set(answer.headers.get("allow", "").split(", "))
                assert (answer.status_code, allowed) == (405, declared), f"{method} {path}"
                if method != "HEAD":
                    body = answer.json()  # of the language models' paths in OpenAI's form
                    kind = body["type"] if "type" in body else body["error"]["code"]
                    assert kind.endswith("method-not-allowed")
    assert edge.fleet.started == []


def test_every_response_has_a_status_and_a_description() -> None:
    for path, operations in described().items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                assert re.fullmatch(r"[1-5](\d\d|XX)|default", status), f"{path} {status}"
                assert "description" in response, f"{path} {status}"


async def test_probes_need_no_key_and_are_described(edge: Edge) -> None:
    for path in ("/healthz", "/readyz"):
        operations = described()[path]
        assert [operation["security"] for operation in operations.values()] == [[], []]
        schema = operations["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        answer = await edge.client.get(edge.url + path)
        assert (answer.status_code, set(answer.json())) == (200, set(schema["properties"]))
        head = await edge.client.head(edge.url + path)
        assert (head.status_code, head.content) == (200, b"")


def test_embeddings_are_not_described_as_a_stream() -> None:
    content = described()["/v1/embeddings"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json"}
