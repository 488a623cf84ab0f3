"""Guards at the controller: what a deploy refuses, and refusals in the audit log."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.controller.deployments.dependency_checks import parse_specs
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.errors import InvalidInput
from pilotlight.protocol import REFUSALS_PATH
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec

SERVER = {"port": 8000, "openai": {}}


def guarded(**guard: Any) -> dict[str, Any]:
    return spec("chat", kind="asgi", web_server=SERVER, guard=guard)


def test_an_expression_that_needs_backtracking_is_refused_at_deploy() -> None:
    parse_specs("search", [guarded(expressions={"own": "a+b"})])
    with pytest.raises(InvalidInput, match="guard"):
        parse_specs("search", [guarded(expressions={"own": "(?<=a)b"})])
    with pytest.raises(InvalidInput, match="its own guard"):
        parse_specs("search", [guarded(function="chat")])


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "tenant": "",
        "function": "main/search/chat",
        "revision": "v1-abcdef",
        "key": "k-1",
        "stage": "input",
        "rule": "email",
        "call": "req-1",
        "calls": 3,
        "first_at": 1.0,
        "last_at": 2.0,
        **changes,
    }


async def test_refusals_are_in_the_log_of_the_functions_tenant(controller: Controller) -> None:
    tenant = await controller.tenant()
    headers = {HEADER_PLATFORM_TOKEN: controller.context.key.token}
    body = {"refusals": [entry(tenant=tenant)]}
    answer = await controller.http.post(REFUSALS_PATH, json=body, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"accepted": 1}), answer.text
    found = (await controller.http.get("/v1/audit", params={"action": "guard.*"})).json()["entries"]
    assert [(one["actor"], one["subject"], one["request"]) for one in found] == [
        ("k-1", "main/search/chat", "req-1")
    ]
    assert found[0]["after"] == {
        "revision": "v1-abcdef",
        "stage": "input",
        "rule": "email",
        "calls": 3,
        "first_at": 1.0,
        "last_at": 2.0,
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"refusals": [{}]},
        {"refusals": [entry(calls=0)]},
        {"refusals": [entry(text="what was said")]},
        {"refusals": [entry(rule="x" * 600)]},
    ],
)
async def test_a_wrong_report_is_refused(controller: Controller, body: dict[str, Any]) -> None:
    headers = {HEADER_PLATFORM_TOKEN: controller.context.key.token}
    answer = await controller.http.post(REFUSALS_PATH, json=body, headers=headers)
    assert answer.status_code in (400, 422)


async def test_only_activators_report(controller: Controller) -> None:
    refused(await controller.http.post(REFUSALS_PATH, json={"refusals": []}), 403)
