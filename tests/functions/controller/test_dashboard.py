"""The dashboard: who gets in, what it shows, what it never loads."""

from __future__ import annotations

import re
from decimal import Decimal

import httpx
import pytest

from pilotlight.controller import sessions
from pilotlight.controller.dashboard import drawing, words
from pilotlight.errors import Forbidden
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import instance, spec, usage


async def post_login(controller: Controller, key: str) -> httpx.Response:
    """Load the form and send it, as a browser does."""
    form = await controller.client(None).get("/dashboard/login")
    (token,) = re.findall(r'name="form" value="([^"]+)"', form.text)
    cookie = form.headers["set-cookie"].partition(";")[0]
    return await controller.client(None).post("/dashboard/login", data={"key": key, "form": token}, headers={"cookie": cookie})


async def sign_in(controller: Controller, key: str) -> dict[str, str]:
    answer = await post_login(controller, key)
    assert (answer.status_code, answer.headers.get("location")) == (303, "/dashboard"), answer.text
    flags = answer.headers["set-cookie"].lower()
    assert "httponly" in flags
    assert "samesite=strict" in flags
    assert key.lower() not in flags
    return {"cookie": answer.headers["set-cookie"].partition(";")[0]}


async def test_a_stranger_is_sent_to_sign_in(controller: Controller) -> None:
    for headers in ({}, {"cookie": f"{sessions.COOKIE}=made-up"}):
        answer = await controller.client(None).get("/dashboard", headers=headers)
        assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/login")
    wrong = await post_login(controller, "pl_wrong")
    assert wrong.status_code == 401
    assert "not known" in wrong.text


async def test_an_invoke_key_does_not_reach_the_dashboard(controller: Controller) -> None:
    answer = await post_login(controller, await controller.new_key(scope="invoke"))
    assert answer.status_code == 403


async def test_a_session_ends_with_its_time_and_with_its_key(controller: Controller) -> None:
    made = (await controller.http.post("/v1/keys", json={"scope": "deploy"})).json()
    session = await sign_in(controller, made["secret"])
    client = controller.client(None)
    assert (await client.get("/dashboard", headers=session)).status_code == 200
    controller.clock.now += sessions.SESSION_S
    assert (await client.get("/dashboard", headers=session)).status_code == 303
    controller.clock.now -= sessions.SESSION_S
    await controller.http.delete(f"/v1/keys/{made['id']}")
    assert (await client.get("/dashboard", headers=session)).status_code == 303


@pytest.mark.parametrize(
    "headers,cookie,field",
    [
        ({"sec-fetch-site": "cross-site"}, "a", "a"),
        ({"sec-fetch-site": "same-site"}, "a", "a"),
        ({}, "", ""),
        ({}, "", "a"),
        ({}, "a", "b"),
    ],
)
def test_a_form_from_another_site_is_refused(headers: dict[str, str], cookie: str, field: str) -> None:
    with pytest.raises(Forbidden, match="another site"):
        sessions.demand_same_site(headers, cookie=cookie, field=field)


@pytest.mark.parametrize("headers", [{}, {"sec-fetch-site": "same-origin"}, {"origin": "http://here.example:8700", "host": "controller"}])
def test_a_form_from_here_is_taken(headers: dict[str, str]) -> None:
    sessions.demand_same_site(headers, cookie="a", field="a")


async def test_signing_out_forgets_the_session_here(controller: Controller) -> None:
    answer = await controller.client(None).post("/dashboard/logout", data={"form": "x"}, headers={"cookie": "pilotlight_form=x"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/login")
    assert 'pilotlight_session=""' in answer.headers["set-cookie"]


async def test_it_shows_what_happened_today_and_loads_nothing_from_elsewhere(controller: Controller) -> None:
    tenant, now = await controller.tenant(), controller.clock.now
    done = await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    detail = (await controller.http.get("/v1/apps/search")).json()["functions"][0]
    common = {"tenant": tenant, "function_id": detail["id"], "cost": "0.25"}
    records = [
        usage(f"req-{n}/1", **common, exec_ms=10 * n, started_at=now - 60, start_kind="FORK" if n == 1 else "WARM") for n in range(1, 101)
    ]
    records.append(usage("req-old/1", **common, exec_ms=99_999, started_at=now - 90_000))
    await controller.internal("/internal/usage", {"activator": "a", "records": [r.to_json() for r in records]})
    controller.agent.instances = [instance(tenant)]
    page = await controller.client(None).get("/dashboard", headers=await sign_in(controller, controller.key))
    assert page.status_code == 200
    assert done.json()["functions"][0]["revision"] in page.text
    for said in ("search/<b>embed</b>", "514 ms", "1.00 s", "$25.00", "FORK: 1<", "i-1", "minilm dram"):
        assert said in page.text, said
    assert all(source.startswith("/dashboard/static/") for source in re.findall(r'(?:src|href)="(/[^"]*\.(?:js|css|svg))', page.text))
    assert not re.findall(r'(?:src|href|action)="(?!/)(?!#main")', page.text)
    assert "http" not in page.headers["content-security-policy"]
    assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_names_are_escaped_and_an_absent_agent_is_named(controller: Controller, short_tmp: object) -> None:
    (controller.context.config.paths.run / "snapshotter.sock").unlink()
    page = await controller.client(None).get("/dashboard", headers=await sign_in(controller, controller.key))
    assert "nobody answers on" in page.text
    assert "Nothing is deployed" in page.text
    wrong = await post_login(controller, "<script>")
    assert "<script>" not in wrong.text


@pytest.mark.parametrize(
    "amount,shown",
    [("0", "0"), ("1234.567", "1,234.57"), ("12.346", "12.35"), ("0.25", "0.2500"), ("0.0000000012", "0.0000000012"), ("-3", "\u22123.00")],
)
def test_money_is_short_and_never_rounded_to_nothing(amount: str, shown: str) -> None:
    assert words.money(Decimal(amount)) == shown


def test_an_hour_with_one_call_is_visible_beside_one_with_thousands() -> None:
    heights = [height for _, _, height, _ in drawing.bars([0, 1, 10_000])]
    assert heights == [0.0, 1.5, 22.0]


def test_the_parts_of_a_bar_fill_it() -> None:
    parts = drawing.shares({"WARM": 3, "COLD": 1}, width=100)
    assert parts == [("WARM", 0.0, 75.0, 3), ("COLD", 75.0, 25.0, 1)]
