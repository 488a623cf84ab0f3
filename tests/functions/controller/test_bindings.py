"""Bound functions: made when a caller asks for one, of the revision that serves, and ended with
it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pilotlight.protocol import BIND_PATH
from pilotlight.spec.bound import MAX_BOUND, is_bound, is_bound_of
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec

PARAMETERS = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "name": {"type": "string", "default": "x"}},
    "required": ["size"],
}
MODEL = {
    "name": "Model",
    "kind": "class",
    "methods": [{"name": "run"}],
    "parameters": PARAMETERS,
    "scaling": {"min_instances": 2},
    "schedules": [{"cron": "0 6 * * *", "method": "run"}],
}


async def deploy(controller: Controller, **changes: Any) -> httpx.Response:
    body = {"functions": [spec(**{**MODEL, **changes}), spec(name="hello")]}
    answer = await controller.http.post("/v1/apps/search/deploy", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def bind(controller: Controller, function: str = "Model", **more: Any) -> httpx.Response:
    body = {
        "tenant": await controller.tenant(),
        "environment": "main",
        "app": "search",
        "function": function,
        "actor": "k-1",
        **more,
    }
    return await controller.internal(BIND_PATH, body)


async def bound(controller: Controller, **more: Any) -> str:
    answer = await bind(controller, **more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["function"])


async def functions(controller: Controller) -> dict[str, Any]:
    found = (await controller.http.get("/v1/apps/search")).json()["functions"]
    return {one["name"]: one["spec"] for one in found}


async def test_each_set_of_arguments_is_one_function(controller: Controller) -> None:
    await deploy(controller)
    first = await bound(controller, arguments={"size": 1})
    assert await bound(controller, arguments={"size": 1, "name": "x"}) == first
    assert await bound(controller, arguments={"size": 2}) != first

    made = (await functions(controller))[first]
    assert made["arguments"] == {"size": 1, "name": "x"}
    assert made["scaling"]["min_instances"] == 0
    assert made["schedules"] == []
    changes: Any = (await controller.feed())["changes"]
    routes = [c["value"] for c in changes if c["kind"] == "function" and c["value"]]
    assert first in {route["function"] for route in routes}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "Model needs an argument for size"),
        ({"size": "1"}, "must be of type integer"),
        ({"size": 1, "colour": "red"}, "Model has no parameter 'colour'"),
    ],
)
async def test_wrong_arguments_are_named(
    controller: Controller, arguments: dict[str, Any], message: str
) -> None:
    await deploy(controller)
    assert message in refused(await bind(controller, arguments=arguments), 400)


async def test_options_are_checked_as_in_a_deploy(controller: Controller) -> None:
    await deploy(controller)
    name = await bound(
        controller,
        function="hello",
        options={"resources": {"cpu": 2.0}, "scaling": {"max_instances": 1}},
    )
    made = (await functions(controller))[name]
    assert (made["resources"]["cpu"], made["scaling"]["max_instances"]) == (2.0, 1)

    async def refusal(options: dict[str, Any]) -> str:
        return refused(await bind(controller, function="hello", options=options), 400)

    assert "cpu" in await refusal({"resources": {"cpu": 1e6}})
    assert "no secret 'other'" in await refusal({"secrets": ["other"]})
    assert "'bundle' cannot be chosen by a caller" in await refusal({"bundle": "f" * 64})
    assert (await bind(controller, function="nothing")).status_code == 404


async def test_options_need_the_approvals_that_a_release_needs(controller: Controller) -> None:
    await deploy(controller)
    answer = await controller.http.put("/v1/apps/search/policy", json={"approvals": 1})
    assert answer.status_code == 200, answer.text

    assert await bound(controller, arguments={"size": 1})
    options = {"env": {"A": "1"}}
    answer = await bind(controller, arguments={"size": 1}, options=options)
    assert "need approvals" in refused(answer, 409)


async def test_bound_functions_end_with_their_revision(controller: Controller) -> None:
    await deploy(controller)
    first = await bound(controller, arguments={"size": 1})
    await deploy(controller)
    assert first in await functions(controller), "nothing changed"

    await deploy(controller, description="another revision")
    assert [name for name in await functions(controller) if is_bound(name)] == []
    assert await bound(controller, arguments={"size": 1}) == first
    assert (await functions(controller))[first]["description"] == "another revision"

    answer = await controller.http.post("/v1/apps/search/functions/Model:rollback", json={})
    assert answer.status_code == 200, answer.text
    assert [name for name in await functions(controller) if is_bound(name)] == []


async def test_a_function_has_a_bounded_number_of_bound_ones(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pilotlight.controller.deployments import bound_functions

    assert MAX_BOUND == 100
    monkeypatch.setattr(bound_functions, "MAX_BOUND", 2)
    await deploy(controller)
    for size in (1, 2):
        assert is_bound_of(await bound(controller, arguments={"size": size}), "Model")
    assert "bound to 2 sets" in refused(await bind(controller, arguments={"size": 3}), 409)
    assert await bound(controller, arguments={"size": 2})
