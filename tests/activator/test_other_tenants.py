"""Who may call what: keys that reach only so far, functions of other tenants, public ones, and
tenants that are suspended."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from activator.quotas.process_store import ProcessQuotas
from activator.quotas.store_protocol import QuotaStore
from activator.routing.api_keys import ANONYMOUS
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import problem_of, until
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, route_of, spec_of

OTHER, THIRD = "t-000000000002", "t-000000000003"
THEIRS = "/t/acme/v1/functions/shop/hello:invoke"


async def tell(request: WorkerRequest) -> WorkerAnswer:
    """A page that says where it is and what it was sent."""
    lines = [
        f"{request.method} {request.path}",
        *(f"{name}: {value}" for name, value in request.headers.items()),
    ]
    cookies = (
        "Set-Cookie: basket=1; Path=/",
        "set-cookie: pilotlight_session=mine; Path=/dashboard",
        "set-cookie: =pilotlight_form=x",
    )
    headers = (*cookies, "Clear-Site-Data: *", "strict-transport-security: max-age=9", "x-mine: 1")
    return WorkerAnswer(body="\n".join(lines).encode(), content_type="text/html", headers=headers)


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(unauthenticated_per_s=3.0)


@pytest.fixture(name="quota_store")
def _quota_store() -> QuotaStore:
    return ProcessQuotas(clock=lambda: 1.0)


@pytest.fixture(name="street")
async def _street(edge: Edge) -> Edge:
    """Three tenants: acme, which has functions; beta and gamma, which have keys. No time passes for
    what is counted in seconds."""
    edge.stop_the_clock_of_strangers()
    edge.add_tenant("acme")
    edge.add_tenant("beta", tenant=OTHER)
    edge.add_tenant("gamma", tenant=THIRD)
    edge.add_key("pl_beta", tenant=OTHER, scope="invoke")
    edge.add_key("pl_gamma", tenant=THIRD, scope="invoke")
    return edge


def deploy(edge: Edge, *access: str, name: str = "hello", **more: Any) -> None:
    edge.add(route_of(spec_of(name, access=access, **more)))


async def post(
    edge: Edge, path: str = THEIRS, *, key: str | None = None, **more: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    return await edge.client.post(
        f"{edge.url}{path}", json={"x": 1}, headers={**headers, **more.pop("headers", {})}, **more
    )


# -- functions of other tenants --------------------------------------------------------------------
async def test_another_tenants_private_function_does_not_exist(street: Edge) -> None:
    deploy(street)
    deploy(street, "gamma", name="shared")
    private = await post(street, key="pl_beta")
    shared = await post(street, "/t/acme/v1/functions/shop/shared:invoke", key="pl_beta")
    missing = await post(street, "/t/acme/v1/functions/shop/nothing:invoke", key="pl_beta")
    nobodys = await post(street, "/t/nobody/v1/functions/shop/hello:invoke", key="pl_beta")

    assert [a.status_code for a in (private, shared, missing, nobodys)] == [404] * 4
    assert (
        problem_of(private)["detail"]
        == problem_of(nobodys)["detail"]
        == problem_of(missing)["detail"].replace("nothing", "hello")  # type: ignore[attr-defined]
    )
    assert not street.fleet.started


async def test_a_shared_function_is_called_by_those_it_is_shared_with_and_its_owner_pays(
    street: Edge,
) -> None:
    deploy(street, "beta")
    answers = [await post(street, key="pl_beta") for _ in range(2)]  # the second one warm
    assert [a.status_code for a in answers] == [200, 200]
    assert answers[1].headers["pilotlight-start"] == "WARM"
    assert (await post(street, key="pl_gamma")).status_code == 404
    assert (await post(street, key=KEY)).status_code == 200

    records = [r for r in (await street.settle()).values() if r.kind == "CALL"]
    assert {r.tenant for r in records} == {TENANT}
    assert sorted(r.caller for r in records) == ["", OTHER, OTHER]


async def test_sharing_ends_at_once(street: Edge) -> None:
    deploy(street, "beta")
    assert (await post(street, key="pl_beta")).status_code == 200
    deploy(street)
    assert (await post(street, key="pl_beta")).status_code == 404


async def test_a_stopped_function_is_told_only_to_those_who_may_call_it(street: Edge) -> None:
    route = route_of(spec_of(access=("beta",)))
    object.__setattr__(route, "stopped", True)
    street.add(route)
    assert (await post(street, key="pl_beta")).status_code == 503
    assert (await post(street, key="pl_gamma")).status_code == 404


async def test_a_foreign_caller_falls_under_the_owners_quotas_and_its_own_and_sees_only_its_own(
    street: Edge,
) -> None:
    deploy(street, "beta", "gamma")
    street.add_tenant("acme", requests_per_s=0.001, burst=3)
    street.add_tenant("beta", tenant=OTHER, requests_per_s=0.001, burst=2)
    answers = [await post(street, key="pl_beta") for _ in range(3)]

    assert [a.status_code for a in answers] == [200, 200, 429]
    assert answers[0].headers["ratelimit-policy"] == '"tenant";q=2;w=2000'
    assert problem_of(answers[2])["of"] == "tenant"

    assert (await post(street, key="pl_gamma")).status_code == 200
    owners = await post(street, key="pl_gamma")
    assert owners.status_code == 429
    assert {k: v for k, v in problem_of(owners).items() if k in ("of", "limit")} == {"of": "owner"}
    assert "ratelimit-policy" not in owners.headers
    assert (await post(street, key=KEY)).status_code == 429  # the owner is used up too


async def test_warming_up_is_the_owners(street: Edge) -> None:
    deploy(street, "beta")
    street.add_key("pl_beta_deploy", tenant=OTHER, scope="deploy")
    assert (
        await post(street, THEIRS.replace("invoke", "warmup"), key="pl_beta_deploy")
    ).status_code == 403


async def test_only_functions_are_under_a_tenants_name(street: Edge) -> None:
    for path in (
        "/t/acme/v1/calls/x",
        "/t/acme/dashboard",
        "/t/acme",
        "/t//v1/functions/shop/hello:invoke",
    ):
        assert (await post(street, path, key=KEY)).status_code == 404, path


async def test_a_submitted_call_of_a_foreign_function_is_its_callers(
    street: Edge, controller: FakeController, shipping: object
) -> None:
    deploy(street, "beta")
    accepted = await post(street, THEIRS.replace("invoke", "submit"), key="pl_beta")
    assert accepted.status_code == 202
    put = await street.client.put(
        f"{street.url}/v1/calls/mine?function=t/acme/shop/hello",
        json={"x": 1},
        headers={"authorization": "Bearer pl_beta"},
    )
    assert put.status_code == 202, put.text
    for call in (accepted.json()["id"], "mine"):
        url = f"{street.url}/v1/calls/{call}?wait_s=20"
        assert (
            await street.client.get(url, headers={"authorization": "Bearer pl_beta"}, timeout=30)
        ).json()["state"] == "SUCCEEDED"
    assert {r.caller for r in (await street.settle()).values() if r.kind == "CALL"} == {OTHER}


async def test_an_app_may_be_called_like_the_prefix_of_tenants(
    street: Edge, controller: FakeController
) -> None:
    street.add(route_of(spec_of(), app="t"))
    url = f"{street.url}/v1/calls/mine?function=t/hello"
    put = await street.client.put(url, json={"x": 1}, headers={"authorization": f"Bearer {KEY}"})
    assert put.status_code == 202, put.text
    assert (await post(street, "/v1/functions/t/hello:invoke", key=KEY)).status_code == 200
    assert (await post(street, "/t/acme/v1/functions/t/hello:invoke", key=KEY)).status_code == 200


# -- public functions ------------------------------------------------------------------------------
async def test_a_public_function_needs_no_key_and_its_callers_are_bounded_by_their_address(
    street: Edge,
) -> None:
    deploy(street, "*")
    answers = [await post(street) for _ in range(7)]
    assert [a.status_code for a in answers] == [200] * 6 + [429]
    assert answers[0].headers["ratelimit-policy"] == '"address";q=6;w=2'
    assert problem_of(answers[6])["of"] == "address"
    assert (await post(street, key="pl_gamma")).status_code == 200  # a key has no such bound

    records = [r for r in (await street.settle()).values() if r.kind == "CALL"]
    assert sorted((r.key, r.caller) for r in records) == [("", "")] * 6 + [("k-pl_gamma", THIRD)]


async def test_a_wrong_key_is_refused_also_where_none_is_needed(street: Edge) -> None:
    deploy(street, "*")
    assert (await post(street, key="pl_wrong")).status_code == 401


async def test_without_a_key_what_is_private_and_what_does_not_exist_are_told_apart_by_nothing(
    street: Edge,
) -> None:
    deploy(street)
    answers = [await post(street), await post(street, THEIRS.replace("hello", "nothing"))]
    assert [a.status_code for a in answers] == [401, 401]
    assert problem_of(answers[0])["detail"] == problem_of(answers[1])["detail"]
    assert "www-authenticate" in answers[0].headers
    # and guessing is slowed down
    assert [(await post(street)).status_code for _ in range(6)][-1] == 429


async def test_without_a_tenants_name_a_key_is_needed(street: Edge) -> None:
    deploy(street, "*")
    assert (await post(street, "/v1/functions/shop/hello:invoke")).status_code == 401


async def test_who_has_no_key_cannot_submit_because_nobody_could_ask_for_the_result(
    street: Edge,
) -> None:
    deploy(street, "*")
    for verb, status in (("submit", 401), ("warmup", 403)):
        assert (await post(street, THEIRS.replace("invoke", verb))).status_code == status


class TestPages:
    """Public pages share an origin with the dashboard."""

    @pytest.fixture(name="behaviour")
    def _behaviour(self) -> object:
        return tell

    @pytest.fixture(name="site")
    async def _site(self, street: Edge) -> Edge:
        deploy(street, "*", name="site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))
        deploy(street, name="inner", kind=FunctionKind.ASGI, methods=(MethodSpec(),))
        return street

    async def test_a_public_page_knows_its_prefix_and_runs_in_a_sandbox(self, site: Edge) -> None:
        answer = await site.client.get(f"{site.url}/t/acme/fn/shop/site/a/b%20c?q=1")
        assert answer.status_code == 200
        assert answer.text.splitlines()[0] == "GET /asgi/a/b%20c?q=1"
        assert "pilotlight-root-path: /t/acme/fn/shop/site" in answer.text
        assert answer.headers["content-security-policy"].startswith("sandbox ")

        own = await site.client.get(
            f"{site.url}/fn/shop/site/", headers={"authorization": f"Bearer {KEY}"}
        )
        assert own.headers["content-security-policy"].startswith("sandbox ")
        assert "pilotlight-root-path: /fn/shop/site" in own.text

    async def test_a_public_page_signs_nobody_in_or_out_of_the_dashboard(self, site: Edge) -> None:
        answer = await site.client.get(f"{site.url}/t/acme/fn/shop/site/")
        assert answer.headers.get_list("set-cookie") == ["basket=1; Path=/t/acme/fn/shop/site"]
        assert not {"clear-site-data", "strict-transport-security"} & set(answer.headers)
        assert answer.headers["x-mine"] == "1"

    async def test_a_private_page_needs_a_key_of_its_tenant(self, site: Edge) -> None:
        url = f"{site.url}/t/acme/fn/shop/inner/"
        assert (await site.client.get(url)).status_code == 401
        assert (
            await site.client.get(url, headers={"authorization": "Bearer pl_beta"})
        ).status_code == 404
        assert (
            await site.client.get(url, headers={"authorization": f"Bearer {KEY}"})
        ).status_code == 200

    async def test_a_websocket_without_a_key_is_refused_where_one_is_needed(
        self, site: Edge
    ) -> None:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(site.url.replace("http", "ws") + "/t/acme/fn/shop/inner/chat"):
                raise AssertionError("accepted")
        assert refused.value.response.status_code == 401


# -- keys ------------------------------------------------------------------------------------------
async def test_a_key_of_one_app_or_function_is_refused_elsewhere_and_told_what_it_is_for(
    street: Edge,
) -> None:
    deploy(street)
    deploy(street, name="other")
    street.add_key("pl_app", app="shop")
    street.add_key("pl_one", app="shop", function="hello")
    street.add_key("pl_elsewhere", app="warehouse")

    assert (await street.call(json={"x": 1}, key="pl_app")).status_code == 200
    assert (await street.call(json={"x": 1}, key="pl_one")).status_code == 200
    other = await street.call("shop/other:invoke", json={"x": 1}, key="pl_one")
    assert (other.status_code, "shop/hello" in str(problem_of(other)["detail"])) == (403, True)
    elsewhere = await street.call(json={"x": 1}, key="pl_elsewhere")
    assert (elsewhere.status_code, "'warehouse'" in str(problem_of(elsewhere)["detail"])) == (
        403,
        True,
    )
    missing = await street.call("shop/missing:invoke", json={"x": 1}, key="pl_elsewhere")
    assert missing.status_code == 403  # whether it exists is not said


async def test_a_key_of_one_function_sees_no_call_of_another(
    street: Edge, controller: FakeController, shipping: object
) -> None:
    deploy(street)
    deploy(street, name="other")
    street.add_key("pl_one", app="shop", function="other")
    street.fleet.gate.clear()
    call_id = (await street.call("shop/hello:submit", json={"x": 1})).json()["id"]
    headers = {"authorization": "Bearer pl_one"}
    asked = [
        await street.client.get(f"{street.url}/v1/calls/{call_id}", headers=headers),
        await street.client.post(f"{street.url}/v1/calls/{call_id}:cancel", headers=headers),
    ]
    assert [(a.status_code, "shop/other" in a.text) for a in asked] == [(403, True)] * 2
    street.fleet.gate.set()
    await until(
        lambda: (
            controller.calls.get(call_id, {}).get("state") == "SUCCEEDED"
            and not street.calls.pending
        )
    )
    assert (
        await street.client.get(f"{street.url}/v1/calls/{call_id}", headers=headers)
    ).status_code == 403


@pytest.mark.parametrize("verb", ["invoke", "submit", "warmup"])
async def test_a_key_that_reads_bills_calls_nothing(street: Edge, verb: str) -> None:
    deploy(street)
    street.add_key("pl_books", scope="read-billing")
    answer = await street.call(f"shop/hello:{verb}", json={"x": 1}, key="pl_books")
    assert (answer.status_code, "invoke" in answer.text or "deploy" in answer.text) == (403, True)
    poll = await street.client.get(
        f"{street.url}/v1/calls/req-1", headers={"authorization": "Bearer pl_books"}
    )
    assert poll.status_code == 403


async def test_a_revoked_key_is_refused_with_the_next_request(street: Edge) -> None:
    deploy(street)
    street.add_key("pl_short")
    for _ in range(2):
        assert (await street.call(json={"x": 1}, key="pl_short")).status_code == 200
    street.tell("key", "k-pl_short", None)
    assert (await street.call(json={"x": 1}, key="pl_short")).status_code == 401


# -- suspended tenants -----------------------------------------------------------------------------
async def test_a_suspended_tenants_calls_are_refused_until_it_is_resumed(street: Edge) -> None:
    deploy(street, "beta", "*")
    assert (await street.call(json={"x": 1})).status_code == 200
    street.add_tenant("acme", suspended=True)
    refused = await street.call(json={"x": 1})
    assert (refused.status_code, "'acme'" in str(problem_of(refused)["detail"])) == (403, True)
    assert (
        await street.client.get(
            f"{street.url}/v1/calls/x", headers={"authorization": f"Bearer {KEY}"}
        )
    ).status_code == 403
    assert (await post(street, key="pl_beta")).status_code == 403  # nobody calls its functions
    assert (await post(street)).status_code == 403

    street.add_tenant("acme")
    assert (await street.call(json={"x": 1})).status_code == 200


async def test_a_suspended_caller_is_refused_at_functions_that_are_shared_with_it(
    street: Edge,
) -> None:
    deploy(street, "beta")
    street.add_tenant("beta", tenant=OTHER, suspended=True)
    assert (await post(street, key="pl_beta")).status_code == 403


async def test_a_call_that_was_submitted_before_does_not_run_while_its_tenant_is_suspended(
    street: Edge, script: Script, controller: FakeController, shipping: object
) -> None:
    deploy(street, scaling=Scaling(max_instances=1))
    may_end = asyncio.Event()

    async def waits(request: WorkerRequest) -> WorkerAnswer:
        await may_end.wait()
        return WorkerAnswer(body=request.body)

    script.now = waits
    for _ in range(2):  # the first one occupies the function
        call_id = (await street.call("shop/hello:submit", json={"x": 1})).json()["id"]
    await until(lambda: any(worker.requests for worker in street.fleet.workers.values()))
    street.add_tenant("acme", suspended=True)
    may_end.set()
    await until(lambda: controller.calls.get(call_id, {}).get("state") == "FAILED")
    assert controller.calls[call_id]["status"] == 403
    assert [len(worker.requests) for worker in street.fleet.workers.values()] == [1]


def test_a_caller_shows_who_it_is_and_never_a_key(street: Edge) -> None:
    street.add_key("pl_one", app="shop", function="hello")
    caller = street.table.authenticate(b"Bearer pl_one", 0.0)
    assert repr(caller) == "<Principal k-pl_one deploy>"
    assert (caller.tenant_name, caller.app, caller.function) == ("acme", "shop", "hello")
    assert repr(ANONYMOUS) == "<Principal anonymous invoke>"
    with pytest.raises(errors.Forbidden):
        caller.check_reach(environment="main", app="shop", function="other")
