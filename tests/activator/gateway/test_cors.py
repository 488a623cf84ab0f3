"""Pages of other sites at public functions: preflights, and what their scripts may read (CORS)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from activator.settings import ActivatorSettings
from pilotlight.spec.function import FunctionKind, MethodSpec
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import problem_of
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of, split_route

SITE = "https://app.example"
PUBLIC = "/t/acme/v1/functions/shop/hello:invoke"
RAW = "/t/acme/fn/shop/site/items"


async def page(request: WorkerRequest) -> WorkerAnswer:
    """A web application that speaks about origins itself."""
    own = (f"x-method: {request.method}", "Access-Control-Allow-Origin: https://own.example")
    return WorkerAnswer(body=b"page", content_type="text/html", headers=own)


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(unauthenticated_per_s=3.0)


@pytest.fixture(name="street")
async def _street(edge: Edge) -> Edge:
    edge.stop_the_clock_of_strangers()
    edge.add_tenant("acme")
    return edge


def deploy(edge: Edge, *cors: str, name: str = "hello", **more: Any) -> None:
    edge.add(route_of(spec_of(name, access=("*",), cors=cors, **more)))


async def ask(
    edge: Edge, path: str = PUBLIC, *, verb: str = "POST", origin: str = SITE, **headers: str
) -> httpx.Response:
    sent = {"origin": origin, **{k.replace("_", "-"): v for k, v in headers.items()}}
    body = {"json": {"x": 1}} if verb == "POST" else {}
    return await edge.client.request(verb, f"{edge.url}{path}", headers=sent, **body)  # type: ignore[arg-type]


async def preflight(edge: Edge, path: str = PUBLIC, **headers: str) -> httpx.Response:
    return await ask(
        edge, path, verb="OPTIONS", **{"access_control_request_method": "POST", **headers}
    )


def allowed(answer: httpx.Response) -> str | None:
    found = answer.headers.get("access-control-allow-origin")
    return None if found is None else str(found)


async def test_a_preflight_is_answered_before_anything_starts(street: Edge) -> None:
    deploy(street, SITE)
    street.add_tenant("acme", requests_per_s=0.001, burst=1)  # a preflight uses nothing of it
    for _ in range(3):
        answer = await preflight(
            street, access_control_request_headers="authorization, Content-Type"
        )
        assert (answer.status_code, allowed(answer)) == (204, SITE)
        assert answer.headers["access-control-allow-methods"] == "POST"
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert answer.headers["access-control-max-age"] == "600"
        assert "origin" in answer.headers["vary"].lower()
        assert "access-control-allow-credentials" not in answer.headers
        assert answer.content == b""
    assert not street.fleet.started
    assert not await street.settle()

    assert (await ask(street)).status_code == 200


async def test_an_origin_that_is_not_named_is_refused(street: Edge) -> None:
    deploy(street, SITE)
    for origin in (
        "https://evil.example",
        "http://app.example",
        "https://app.example.evil",
        "null",
    ):
        answer = await preflight(street, origin=origin)
        assert (answer.status_code, allowed(answer)) == (403, None)
        assert "cors" in str(problem_of(answer)["detail"])
        called = await ask(street, origin=origin)
        assert (called.status_code, allowed(called)) == (200, None)
        assert called.headers["vary"] == "Origin"
    broken = await preflight(street, access_control_request_headers="x y, \x7f")
    assert "access-control-allow-headers" not in broken.headers


async def test_scripts_may_read_answers_and_errors(street: Edge) -> None:
    deploy(street, SITE)
    street.add_tenant("acme", requests_per_s=0.001, burst=2)
    answers = [await ask(street) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    answers.append(await ask(street, authorization="Bearer pl_wrong"))
    stopped = route_of(spec_of(access=("*",), cors=(SITE,)))
    object.__setattr__(stopped, "stopped", True)
    street.add(stopped)
    answers.append(await ask(street))
    assert [a.status_code for a in answers[3:]] == [401, 503]
    for answer in answers:
        assert (allowed(answer), answer.headers["vary"]) == (SITE, "Origin")
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "pilotlight-cost", "retry-after", "ratelimit"} <= set(exposed)


async def test_warm_calls_with_a_key_and_repeats_are_readable_too(street: Edge) -> None:
    deploy(street, SITE)
    bearer = f"Bearer {KEY}"
    warm = [await ask(street, authorization=bearer) for _ in range(3)][-1]
    assert (warm.headers["pilotlight-start"], allowed(warm)) == ("WARM", SITE)
    once = [await ask(street, authorization=bearer, idempotency_key="k") for _ in range(2)]
    assert [allowed(a) for a in once] == [SITE, SITE]
    elsewhere = await ask(street, authorization=bearer, idempotency_key="k", origin="https://b.c")
    assert (elsewhere.status_code, allowed(elsewhere)) == (200, None)  # kept answers name no origin
    own = await street.call(json={"x": 1}, headers={"origin": SITE})
    assert (own.status_code, allowed(own)) == (200, None)  # not under the tenant's name


async def test_any_origin_is_answered_by_a_star(street: Edge) -> None:
    deploy(street, "*")
    assert allowed(await preflight(street)) == "*"
    assert allowed(await ask(street, origin="null")) == "*"


async def test_what_names_no_origin_is_as_before(street: Edge) -> None:
    deploy(street)
    assert (await preflight(street)).status_code == 405
    answer = await ask(street)
    assert (answer.status_code, allowed(answer), answer.headers.get("vary")) == (200, None, None)
    assert (await preflight(street, "/t/nobody/v1/functions/shop/hello:invoke")).status_code == 405
    assert (await preflight(street, "/t/acme/v1/functions/shop:invoke")).status_code == 405


@pytest.mark.parametrize("behaviour", [page])
async def test_a_web_applications_own_headers_count_only_without_cors(street: Edge) -> None:
    web = {"kind": FunctionKind.ASGI, "methods": (MethodSpec(),)}
    deploy(street, SITE, name="site", **web)
    asked = {"access_control_request_method": "DELETE"}
    assert (await preflight(street, RAW, **asked)).headers[
        "access-control-allow-methods"
    ] == "DELETE"
    assert not street.fleet.started
    answer = await ask(street, RAW, verb="GET")
    assert (answer.text, answer.headers.get_list("access-control-allow-origin")) == ("page", [SITE])
    plain = await street.client.get(f"{street.url}{RAW}")
    assert (plain.headers["vary"], allowed(plain)) == ("Origin", "https://own.example")
    options = await ask(street, RAW, verb="OPTIONS")  # not a preflight
    assert (options.headers["x-method"], allowed(options)) == ("OPTIONS", SITE)

    deploy(street, name="site", **web)
    itself = await preflight(street, RAW)
    assert (itself.headers["x-method"], allowed(itself)) == ("OPTIONS", "https://own.example")


async def test_an_origin_counts_once_every_answering_revision_names_it(street: Edge) -> None:
    old, new = (
        route_of(spec_of(access=("*",), cors=cors), revision=name).revisions[name]
        for name, cors in (("v1", (SITE,)), ("v2", (SITE, "https://new.example")))
    )
    split = split_route(spec_of(access=("*",)), {"v1": 50, "v2": 50})
    street.add(replace(split, revisions={"v1": old, "v2": new}))
    assert allowed(await preflight(street)) == SITE
    assert (await preflight(street, origin="https://new.example")).status_code == 403
