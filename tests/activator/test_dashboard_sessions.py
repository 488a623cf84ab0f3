"""Dashboard sessions through a real activator in front of a real controller: each browser sees its
own tenant, and no other."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from activator.settings import ActivatorSettings
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from tests.activator.conftest import PATIENCE_S, Edge
from tests.fakes.plain_http import NO_TLS
from tests.fakes.served_controller import ServedController
from tests.functions.controller.parts import usage

PAGES = (
    "/",
    "/dashboard",
    "/dashboard/calls",
    "/dashboard/traces",
    "/dashboard/releases",
    "/dashboard/experiments",
    "/dashboard/objectives",
    "/dashboard/models",
    "/dashboard/budgets",
    "/dashboard/invoices",
    "/dashboard/invoices/2027-01.json",
    "/dashboard/invoices/2027-01.csv",
    "/dashboard/platform",
)
"""January 2027 is the month of the controller's clock."""
SESSION_IS_OVER = "event: over"


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    # signing in counts as a request without a key
    return ActivatorSettings(unauthenticated_per_s=1000.0)


@pytest.fixture(name="served_controller")
def _served_controller(tmp_path: Path, short_tmp: Path) -> Iterator[ServedController]:
    with ServedController(tmp_path, unix_socket=short_tmp / "controller.sock") as running:
        yield running


@asynccontextmanager
async def visitor(edge: Edge) -> AsyncIterator[httpx.AsyncClient]:
    """A browser: it keeps the cookies that it is given, and has none at first."""
    async with httpx.AsyncClient(base_url=edge.url, timeout=PATIENCE_S, verify=NO_TLS) as client:
        yield client


async def sign_in(browser: httpx.AsyncClient, key: str) -> None:
    """Load the form and send it."""
    answer = await browser.post(
        "/dashboard/login",
        data={"key": key, "form": form_of(await browser.get("/dashboard/login"))},
    )
    assert (answer.status_code, answer.headers.get("location")) == (303, "/dashboard"), answer.text


def form_of(page: httpx.Response) -> str:
    """The token of the page's form."""
    return str(re.findall(r'name="form" value="([^"]*)"', page.text)[0])


class Tenants:
    """Two tenants, each with a call of an app that is named after it."""

    def __init__(self, controller: ServedController) -> None:
        self.keys = {"default": controller.key}
        with httpx.Client(
            base_url=controller.url,
            verify=NO_TLS,
            headers={"authorization": f"Bearer {controller.key}"},
        ) as operator:
            ids = {"default": operator.get("/v1/whoami").json()["tenant"]["id"]}
            made = operator.post("/v1/tenants", json={"name": "acme"}).json()
            self.keys["acme"], ids["acme"] = made["key"]["secret"], made["id"]
            records = [
                usage(
                    f"req-{name}/1",
                    tenant=tenant,
                    app=f"app-of-{name}",
                    started_at=controller.now - 60,
                    cost=cost,
                )
                for (name, tenant), cost in zip(ids.items(), ("11.25", "22.75"), strict=True)
            ]
            answer = operator.post(
                "/internal/usage",
                json={
                    "activator": "a-0",
                    "records": [replace(record, key="k").to_json() for record in records],
                },
                headers={HEADER_PLATFORM_TOKEN: controller.token},
            )
            assert answer.status_code == 200, answer.text


@pytest.fixture(name="tenants")
def _tenants(served_controller: ServedController) -> Tenants:
    return Tenants(served_controller)


async def test_each_browser_sees_only_its_own_tenant(edge: Edge, tenants: Tenants) -> None:
    async with visitor(edge) as first, visitor(edge) as second:
        await sign_in(first, tenants.keys["default"])
        await sign_in(second, tenants.keys["acme"])

        for browser, own, other, total in (
            (first, "default", "acme", "11.25"),
            (second, "acme", "default", "22.75"),
        ):
            calls = (await browser.get("/dashboard/calls")).text
            assert (f"app-of-{own}" in calls, f"app-of-{other}" in calls) == (True, False)
            assert f"<b>{own}</b>" in (await browser.get("/dashboard")).text
            assert (
                (await browser.get("/dashboard/invoices/2027-01.json"))
                .json()["total"]
                .startswith(total)
            )


async def test_someone_without_a_session_sees_no_page_after_others_signed_in(
    edge: Edge, tenants: Tenants
) -> None:
    async with visitor(edge) as first, visitor(edge) as second:
        await sign_in(first, tenants.keys["default"])
        await sign_in(second, tenants.keys["acme"])

        for path in PAGES:
            async with visitor(edge) as stranger:
                answer = await stranger.get(path)
            assert (path, answer.status_code, answer.headers.get("location")) == (
                path,
                303,
                "/dashboard/login",
            )


async def test_someone_without_a_session_gets_no_live_figures(edge: Edge, tenants: Tenants) -> None:
    async with visitor(edge) as browser, visitor(edge) as stranger:
        await sign_in(browser, tenants.keys["acme"])

        async with (
            stranger.stream("GET", "/dashboard/events") as refused,
            browser.stream("GET", "/dashboard/events") as live,
        ):
            assert await first_event(refused) == SESSION_IS_OVER
            assert await first_event(live) == "event: figures"


async def first_event(answer: httpx.Response) -> str:
    """The first line of an answer that begins an event."""
    return await anext(line async for line in answer.aiter_lines() if line.startswith("event:"))


async def test_someone_without_a_session_ends_no_session_by_signing_out(
    edge: Edge, tenants: Tenants
) -> None:
    async with visitor(edge) as first, visitor(edge) as second, visitor(edge) as stranger:
        await sign_in(first, tenants.keys["default"])
        await sign_in(second, tenants.keys["acme"])
        form = form_of(await stranger.get("/dashboard", follow_redirects=True))
        stranger.cookies.clear()

        refused = await stranger.post("/dashboard/logout", data={"form": form})

        assert refused.status_code == 403
        assert [(await browser.get("/dashboard")).status_code for browser in (first, second)] == [
            200,
            200,
        ]


async def test_signing_out_ends_the_session_of_that_browser_only(
    edge: Edge, tenants: Tenants
) -> None:
    async with visitor(edge) as first, visitor(edge) as second:
        await sign_in(first, tenants.keys["default"])
        await sign_in(second, tenants.keys["acme"])
        session = dict(first.cookies)

        await first.post("/dashboard/logout", data={"form": form_of(await first.get("/dashboard"))})

        assert (await second.get("/dashboard")).status_code == 200
        first.cookies.update(session)
        assert (await first.get("/dashboard")).status_code == 303
