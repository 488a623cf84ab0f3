"""The dashboard at an origin of its own, through a real activator in front of a real controller."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from activator.http.dashboard_host import DashboardHost
from activator.quotas.process_store import ProcessQuotas
from activator.settings import ActivatorSettings
from pilotlight.controller.settings import ControllerSettings
from pilotlight.core.dashboard.dashboard_origin import DashboardOrigin
from pilotlight.spec.function import FunctionKind
from tests.activator.conftest import KEY, PATIENCE_S, Edge, served
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.plain_http import NO_TLS
from tests.fakes.routes import route_of, spec_of
from tests.fakes.served_controller import ServedController

DASHBOARD = "https://dashboard.example"
FUNCTIONS = "api.example"
REDIRECTED = (
    "/dashboard",
    "/dashboard/calls?span=7d&x=a%20b",
    "/%64ashboard",
    "/dashboard/login",
    "/dashboard@evil.example",
    "/dashboard//evil.example",
)
ELSEWHERE = (
    ("POST", "/v1/functions/shop/hello:invoke"),
    ("POST", "/v1/functions/shop/hello:submit"),
    ("POST", "/t/acme/v1/functions/shop/hello:invoke"),
    ("GET", "/fn/shop/page/"),
    ("POST", "/fn/shop/page/"),
    ("GET", "/t/acme/fn/shop/page/"),
    ("GET", "/t/acme/fn/shop/page/dashboard"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v2/models/shop/hello"),
    ("GET", "/v1/whoami"),
    ("GET", "/v1/calls/x"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
)
OTHER_HOSTS = (FUNCTIONS, "", "dashboard.example.evil.example", "xdashboard.example", "[::1]:8700")
OWN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(unauthenticated_per_s=1000.0)


@pytest.fixture(name="dashboard_url")
def _dashboard_url() -> str:
    return DASHBOARD


@pytest.fixture(name="served_controller")
def _served_controller(
    tmp_path: Path, short_tmp: Path, dashboard_url: str
) -> Iterator[ServedController]:
    settings = ControllerSettings(dashboard_url=dashboard_url)
    with ServedController(
        tmp_path, unix_socket=short_tmp / "controller.sock", settings=settings
    ) as running:
        yield running


@pytest.fixture(name="edge")
async def _edge(
    short_tmp: Path, settings: ActivatorSettings, dashboard_url: str
) -> AsyncIterator[Edge]:
    async def answer(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=repr(request.headers).encode())

    dashboard = DashboardHost(DashboardOrigin.parse(dashboard_url))
    async with served(
        Edge(short_tmp, settings, answer, ProcessQuotas(), dashboard=dashboard)
    ) as edge:
        edge.add_tenant("acme")
        edge.add(route_of(spec_of(access=("*",))))
        edge.add(route_of(spec_of("page", kind=FunctionKind.ASGI, access=("*",))))
        yield edge


@asynccontextmanager
async def visitor(edge: Edge, host: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser behind a proxy that ends TLS and passes the `Host` on. It keeps its cookies by
    hand: to httpx the host is an address."""
    headers = {"host": host, "x-forwarded-proto": "https"}
    async with httpx.AsyncClient(
        base_url=edge.url, timeout=PATIENCE_S, verify=NO_TLS, headers=headers
    ) as client:
        yield client


async def sign_in(browser: httpx.AsyncClient, key: str) -> httpx.Response:
    """Load the form and send it; its cookies go with the browser's later requests."""
    form = await browser.get("/dashboard/login")
    assert form.status_code == 200, form.text
    token = str(re.findall(r'name="form" value="([^"]*)"', form.text)[0])
    answer = await browser.post(
        "/dashboard/login", data={"key": key, "form": token}, headers={"cookie": cookies_of(form)}
    )
    browser.headers["cookie"] = cookies_of(answer)
    return answer


def cookies_of(answer: httpx.Response) -> str:
    """What a browser sends back."""
    return "; ".join(line.partition(";")[0] for line in answer.headers.get_list("set-cookie"))


@pytest.mark.parametrize(
    "host",
    ["dashboard.example", "DASHBOARD.example.", "dashboard.example:443", "dashboard.example:8443"],
)
async def test_pages_and_sign_in_are_served_at_the_dashboards_host(
    edge: Edge, served_controller: ServedController, host: str
) -> None:
    async with visitor(edge, host) as browser:
        signed_in = await sign_in(browser, served_controller.key)

        assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/dashboard"), (
            signed_in.text
        )
        assert [
            (await browser.get(path)).status_code
            for path in ("/", "/dashboard", "/dashboard/calls", "/readyz")
        ] == [200] * 4


async def test_cookies_are_bound_to_the_dashboards_host(
    edge: Edge, served_controller: ServedController
) -> None:
    async with visitor(edge, "dashboard.example") as browser:
        signed_in = await sign_in(browser, served_controller.key)

        lines = signed_in.headers.get_list("set-cookie")
        assert sorted(line.partition("=")[0] for line in lines) == [
            "__Host-pilotlight_form",
            "__Host-pilotlight_session",
        ]
        for line in lines:
            words = {word.strip().lower() for word in line.split(";")[1:]}
            assert {"secure", "httponly", "path=/", "samesite=strict"} <= words
            assert not [word for word in words if word.startswith("domain")]


async def test_a_session_cookie_without_the_prefix_is_not_believed(
    edge: Edge, served_controller: ServedController
) -> None:
    async with visitor(edge, "dashboard.example") as browser:
        await sign_in(browser, served_controller.key)
        browser.headers["cookie"] = browser.headers["cookie"].replace("__Host-", "__Secure-")

        assert (await browser.get("/dashboard")).status_code == 303


@pytest.mark.parametrize("dashboard_url", ["http://dashboard.localhost:8700"])
async def test_cookies_of_a_dashboard_without_tls_hold_for_its_paths_only(
    edge: Edge, served_controller: ServedController
) -> None:
    async with visitor(edge, "dashboard.localhost:8700") as browser:
        del browser.headers["x-forwarded-proto"]
        signed_in = await sign_in(browser, served_controller.key)

        lines = signed_in.headers.get_list("set-cookie")
        assert sorted(line.partition("=")[0] for line in lines) == [
            "pilotlight_form",
            "pilotlight_session",
        ]
        assert all("path=/dashboard;" in line.lower() for line in lines)
        assert (await browser.get("/dashboard")).status_code == 200


async def test_cookies_are_secure_although_the_proxy_does_not_say_that_it_ends_tls(
    edge: Edge, served_controller: ServedController
) -> None:
    async with visitor(edge, "dashboard.example") as browser:
        del browser.headers["x-forwarded-proto"]  # the proxy is on this machine
        signed_in = await sign_in(browser, served_controller.key)

        assert all(
            line.startswith("__Host-") and "Secure" in line
            for line in signed_in.headers.get_list("set-cookie")
        )


async def test_pages_are_redirected_from_the_functions_origin(edge: Edge) -> None:
    hostile = {"cookie": "pilotlight_session=s", "x-forwarded-host": "dashboard.example"}
    locations = {"/": "/dashboard", **{path: path for path in REDIRECTED}}
    async with visitor(edge, FUNCTIONS) as browser:
        for path, location in locations.items():
            for verb in ("GET", "HEAD"):
                answer = await browser.request(verb, path, headers=hostile)

                assert (answer.status_code, answer.headers["location"]) == (
                    308,
                    DASHBOARD + location,
                )
                assert urlsplit(answer.headers["location"]).netloc == "dashboard.example"
                assert answer.headers["cache-control"] == "no-store"
                assert "set-cookie" not in answer.headers


async def test_a_form_is_not_redirected(edge: Edge, served_controller: ServedController) -> None:
    async with visitor(edge, FUNCTIONS) as browser:
        for path in ("/dashboard/login", "/dashboard/logout", "/"):
            answer = await browser.post(
                path,
                data={"key": served_controller.key, "form": "f"},
                headers={"cookie": "pilotlight_form=f"},
            )

            assert (
                answer.status_code,
                "location" in answer.headers,
                "set-cookie" in answer.headers,
            ) == (404, False, False)
            assert DASHBOARD in answer.json()["detail"]


async def test_no_session_is_accepted_at_another_host(
    edge: Edge, served_controller: ServedController
) -> None:
    async with visitor(edge, "dashboard.example") as browser:
        await sign_in(browser, served_controller.key)

        for host in OTHER_HOSTS:
            for path in (
                "/dashboard",
                "/dashboard/calls",
                "/dashboard/events",
                "/dashboard/invoices",
            ):
                assert (await browser.get(path, headers={"host": host})).status_code == 308


async def test_nothing_but_the_dashboard_is_served_at_its_host(edge: Edge) -> None:
    async with visitor(edge, "dashboard.example") as browser:
        for verb, path in ELSEWHERE:
            for headers in (OWN, {**OWN, "idempotency-key": "k"}, {}):
                answer = await browser.request(
                    verb, path, headers=headers, json={"x": 1} if verb == "POST" else None
                )

                assert (answer.status_code, answer.json()["detail"].partition(" is ")[0]) == (
                    404,
                    path,
                )


async def test_a_call_without_a_task_is_not_served_at_the_dashboards_host(edge: Edge) -> None:
    async with visitor(edge, FUNCTIONS) as caller:
        path = "/v1/functions/shop/hello:invoke"
        for _ in range(3):  # from the second on the route is known, and no task is made
            assert (await caller.post(path, headers=OWN, json={"x": 1})).status_code == 200

        assert (
            await caller.post(path, headers={**OWN, "host": "dashboard.example"}, json={"x": 1})
        ).status_code == 404


async def test_a_websocket_is_not_accepted_at_the_dashboards_host(edge: Edge) -> None:
    port = urlsplit(edge.url).port

    with pytest.raises(InvalidStatus) as refused:
        async with connect(
            "ws://dashboard.example/t/acme/fn/shop/page/socket",
            host="127.0.0.1",
            port=port,
            proxy=None,
            additional_headers=OWN,
        ):
            pass

    assert refused.value.response.status_code == 404


async def test_functions_and_the_api_are_served_at_every_other_host(
    edge: Edge, served_controller: ServedController
) -> None:
    async with visitor(edge, FUNCTIONS) as caller:
        assert (
            await caller.post("/v1/functions/shop/hello:invoke", headers=OWN, json={"x": 1})
        ).status_code == 200
        assert (await caller.get("/t/acme/fn/shop/page/")).status_code == 200
        assert (
            await caller.get(
                "/v1/whoami", headers={"authorization": f"Bearer {served_controller.key}"}
            )
        ).status_code == 200

        form = await caller.get("/dashboard/login", headers={"host": "dashboard.example"})
        style = re.findall(r'href="(/dashboard/static/[^"]*\.css)"', form.text)[0]
        assert (await caller.get(style)).status_code == 200, "the API's reference loads it, too"


async def test_a_function_gets_no_cookie_of_the_dashboard(
    edge: Edge, served_controller: ServedController
) -> None:
    async with visitor(edge, "dashboard.example:8443") as browser:
        await sign_in(browser, served_controller.key)

        # a browser sends its cookies to every port of the host
        answer = await browser.get("/t/acme/fn/shop/page/")

        assert answer.status_code == 404
        assert "pilotlight_session" not in answer.text
