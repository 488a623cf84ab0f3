"""`POST …:bind`: who may have a function bound, and to what."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.spec.function import PUBLIC
from tests.activator.conftest import KEY, Edge
from tests.fakes.fake_controller import FakeController
from tests.fakes.routes import TENANT, route_of, spec_of

BIND = "shop/hello:bind"
WANTED = {"arguments": {"size": "small"}}


async def test_a_caller_gets_the_name_from_the_controller(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))

    answer = await edge.call(BIND, json=WANTED)

    assert answer.json() == {"function": "hello--0123456789ab"}
    assert controller.bound == [
        {
            "tenant": TENANT,
            "environment": "main",
            "app": "shop",
            "function": "hello",
            "actor": f"k-{KEY}",
            "arguments": {"size": "small"},
            "options": {},
        }
    ]
    assert controller.seen[-1].headers["pilotlight-platform-token"] == "token"


async def test_what_the_controller_refuses_is_answered(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    answer = await edge.call(BIND, json={"arguments": {"size": "huge"}})
    assert (answer.status_code, answer.json()["detail"]) == (400, "size is too large")
    controller.is_down = True
    assert (await edge.call(BIND, json=WANTED)).status_code == 503


async def test_options_need_a_key_that_may_deploy(edge: Edge, controller: FakeController) -> None:
    edge.add(route_of(spec_of()))
    edge.add_key("pl_invoke", scope="invoke")
    options = {"options": {"resources": {"cpu": 2}}}

    assert (await edge.call(BIND, key="pl_invoke", json=WANTED)).status_code == 200
    refused = await edge.call(BIND, key="pl_invoke", json=options)
    assert refused.status_code == 403
    assert "use an API key of scope 'deploy'" in refused.json()["detail"]
    assert (await edge.call(BIND, json=options)).status_code == 200


async def test_other_tenants_and_strangers_have_nothing_bound(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of(access=(PUBLIC,))))
    edge.add_tenant("owner")
    edge.add_tenant("other", tenant="t-00000000000b")
    edge.add_key("pl_other", tenant="t-00000000000b")
    for headers in ({"authorization": "Bearer pl_other"}, {}):
        answer = await edge.client.post(
            f"{edge.url}/t/owner/v1/functions/{BIND}", json=WANTED, headers=headers
        )
        assert answer.status_code == 403
        assert "of the function's own tenant" in answer.json()["detail"]
    assert controller.bound == []


async def test_binding_takes_what_a_call_takes_of_a_quota(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    edge.add_key("pl_slow", quotas={"requests_per_s": 1, "burst": 1})
    statuses = [(await edge.call(BIND, key="pl_slow", json=WANTED)).status_code for _ in range(3)]
    assert statuses[0] == 200
    assert 429 in statuses


async def test_a_key_for_one_function_reaches_its_bound_functions(edge: Edge) -> None:
    edge.add_key("pl_one", app="shop", function="hello", environment="main")
    for name in ("hello", "hello--0123456789ab", "hello--other", "goodbye"):
        edge.add(route_of(spec_of(name=name)))
    reached = [
        (await edge.call(f"shop/{name}:invoke", key="pl_one", json={"x": 1})).status_code
        for name in ("hello", "hello--0123456789ab", "hello--other", "goodbye")
    ]
    assert reached == [200, 200, 403, 403]


@pytest.mark.parametrize("body", [b"[", b"[1]", b'{"arguments": 3}', b"[" * 30_000])
async def test_a_body_that_says_nothing_is_refused(
    edge: Edge, controller: FakeController, body: Any
) -> None:
    edge.add(route_of(spec_of()))
    answer = await edge.call(BIND, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "the body" in answer.json()["detail"]
    assert controller.bound == []
