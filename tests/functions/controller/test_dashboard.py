"""The dashboard: who gets in, what it shows, what it never loads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.dashboard import assets, formatting, svg
from pilotlight.controller.dashboard.pages import live_events
from pilotlight.controller.identity import sessions, sign_in_codes
from pilotlight.core.dashboard import visitor_cookie
from pilotlight.errors import Forbidden, TooManyRequests
from tests.functions.controller.conftest import Controller, _transport
from tests.functions.controller.parts import instance, spec, usage


async def post_login(controller: Controller, key: str, *, code: str = "") -> httpx.Response:
    """Load the form and send it, as a browser does."""
    form = await controller.client(None).get("/dashboard/login")
    (token,) = re.findall(r'name="form" value="([^"]+)"', form.text)
    cookie = form.headers["set-cookie"].partition(";")[0]
    return await controller.client(None).post(
        "/dashboard/login",
        data={"key": key, "code": code, "form": token},
        headers={"cookie": cookie},
    )


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
    assert "is unknown or was revoked" in wrong.text


async def test_an_invoke_key_does_not_reach_the_dashboard(controller: Controller) -> None:
    answer = await post_login(controller, await controller.new_key(scope="invoke"))
    assert answer.status_code == 403


async def sign_in_code(controller: Controller, key: str) -> str:
    made = await controller.client(key).post("/v1/sign-in-codes")
    assert made.status_code == 201, made.text
    assert made.json()["expires_at"] == controller.clock.now + sign_in_codes.LIFETIME_S
    assert made.json()["dashboard_url"] is None
    return str(made.json()["code"])


async def test_a_sign_in_code_opens_the_dashboard_once(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    made = (await controller.http.post("/v1/keys", json={"scope": "deploy"})).json()
    caplog.set_level("DEBUG")
    code = await sign_in_code(controller, made["secret"])

    answer = await post_login(controller, "", code=code)
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard")
    session = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    assert (await controller.client(None).get("/dashboard", headers=session)).status_code == 200

    again = await post_login(controller, "", code=code)
    assert again.status_code == 401
    assert "run `pilotlight dashboard` again" in again.text
    assert code not in again.text
    assert code not in caplog.text


async def test_a_sign_in_code_ends_after_a_minute_and_with_its_key(controller: Controller) -> None:
    made = (await controller.http.post("/v1/keys", json={"scope": "deploy"})).json()
    late = await sign_in_code(controller, made["secret"])
    controller.clock.now += sign_in_codes.LIFETIME_S
    assert (await post_login(controller, "", code=late)).status_code == 401
    of_revoked = await sign_in_code(controller, made["secret"])
    await controller.http.delete(f"/v1/keys/{made['id']}")
    assert (await post_login(controller, "", code=of_revoked)).status_code == 401


async def test_a_sign_in_code_is_for_keys_that_reach_the_dashboard_only(
    controller: Controller,
) -> None:
    invoke = controller.client(await controller.new_key(scope="invoke"))
    assert (await invoke.post("/v1/sign-in-codes")).status_code == 403
    assert (await controller.client(None).post("/v1/sign-in-codes")).status_code == 401


async def test_a_tenant_has_a_limited_number_of_unused_sign_in_codes(
    controller: Controller,
) -> None:
    for _ in range(sign_in_codes.MAX_OF_TENANT):
        code = (await controller.http.post("/v1/sign-in-codes")).json()["code"]
    refused = await controller.http.post("/v1/sign-in-codes")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
    assert (await post_login(controller, "", code=code)).status_code == 303
    assert (await controller.http.post("/v1/sign-in-codes")).status_code == 201
    controller.clock.now += sign_in_codes.LIFETIME_S
    assert (await controller.http.post("/v1/sign-in-codes")).status_code == 201
    assert repr(controller.context.codes) == "<SignInCodes 1 unused>"


async def test_a_link_of_another_site_does_not_sign_a_browser_in(controller: Controller) -> None:
    for site, takes_codes in (("none", True), ("same-origin", True), ("cross-site", False)):
        page = await controller.client(None).get(
            "/dashboard/login", headers={"sec-fetch-site": site}
        )
        assert ("signin.js" in page.text) is takes_codes, site


async def test_activators_read_of_a_cookie_whose_it_is_and_sign_nobody_in_with_that(
    controller: Controller,
) -> None:
    made = (await controller.http.post("/v1/keys", json={"scope": "deploy"})).json()
    session = (await sign_in(controller, made["secret"]))["cookie"]
    sealer, now = controller.context.key.activator.visitors, controller.clock.now

    assert visitor_cookie.api_key_from_cookies(sealer, session, now=now) == made["id"]
    assert (
        visitor_cookie.api_key_from_cookies(sealer, session, now=now + sessions.SESSION_S) is None
    )
    forged = visitor_cookie.join_cookie("", sealer, key=made["id"], until=now + 60)
    for value in (forged, forged.removeprefix("~")):
        answer = await controller.client(None).get(
            "/dashboard", headers={"cookie": f"{sessions.COOKIE}={value}"}
        )
        assert answer.status_code == 303


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
def test_a_form_from_another_site_is_refused(
    headers: dict[str, str], cookie: str, field: str
) -> None:
    with pytest.raises(Forbidden, match="another site"):
        sessions.require_same_site(headers, cookie=cookie, field=field)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin"},
        {"origin": "http://here.example:8700", "host": "controller"},
    ],
)
def test_a_form_from_here_is_taken(headers: dict[str, str]) -> None:
    sessions.require_same_site(headers, cookie="a", field="a")


async def test_signing_out_forgets_the_session_here(controller: Controller) -> None:
    answer = await controller.client(None).post(
        "/dashboard/logout", data={"form": "x"}, headers={"cookie": "pilotlight_form=x"}
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/login")
    assert 'pilotlight_session=""' in answer.headers["set-cookie"]


async def test_it_shows_what_happened_today_and_loads_nothing_from_elsewhere(
    controller: Controller,
) -> None:
    tenant, now = await controller.tenant(), controller.clock.now
    done = await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    detail = (await controller.http.get("/v1/apps/search")).json()["functions"][0]
    common = {"tenant": tenant, "function_id": detail["id"], "cost": "0.25"}
    records = [
        usage(
            f"req-{n}/1",
            **common,
            exec_ms=10 * n,
            started_at=now - 60,
            start_kind="FORK" if n == 1 else "WARM",
        )
        for n in range(1, 101)
    ]
    records.append(usage("req-old/1", **common, exec_ms=99_999, started_at=now - 90_000))
    await controller.internal(
        "/internal/usage", {"activator": "a", "records": [r.to_json() for r in records]}
    )
    controller.agent.instances = [instance(tenant)]
    session = await sign_in(controller, controller.key)
    usage_page = await controller.client(None).get("/dashboard/usage", headers=session)
    assert ("i-1" in usage_page.text, "minilm dram" in usage_page.text) == (True, True)
    page = await controller.client(None).get("/dashboard", headers=session)
    assert page.status_code == 200
    assert done.json()["functions"][0]["revision"] in page.text
    for said in (
        "search/<b>embed</b>",
        "514 ms",
        "1.00 s",
        "$25.00",
        "FORK: 1<",
    ):
        assert said in page.text, said
    assert all(
        source.startswith("/dashboard/static/")
        for source in re.findall(r'(?:src|href)="(/[^"]*\.(?:js|css|svg))', page.text)
    )
    assert not re.findall(r'(?:src|href|action)="(?!/)(?!#main")', page.text)
    assert "http" not in page.headers["content-security-policy"]
    assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_gpu_time_and_use_are_shown_where_there_are_gpus_and_nothing_where_there_are_none(
    controller: Controller,
) -> None:
    tenant, now = await controller.tenant(), controller.clock.now
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    detail = (await controller.http.get("/v1/apps/search")).json()["functions"][0]
    session = await sign_in(controller, controller.key)
    paths = ("/dashboard/usage", "/dashboard/functions/search/embed")
    for path in paths:
        page = await controller.client(None).get(path, headers=session)
        assert page.status_code == 200
        assert "GPU" not in page.text
    seconds = {"CALL": 60, "START": 30, "FREE_IDLE": 110, "ASLEEP": 100}
    common = {"tenant": tenant, "function_id": detail["id"], "gpu": "A100", "gpu_count": 2}
    records = [
        usage(f"i-1/{kind}/1", **common, kind=kind, billed_ns=s * 10**9, started_at=now - 60)
        for kind, s in seconds.items()
    ]
    await controller.internal(
        "/internal/usage", {"activator": "a", "records": [r.to_json() for r in records]}
    )
    labels = {"tenant": tenant, "environment": "main", "app": "search", "function": "embed"}
    gpu = {
        "uuid": "GPU-0123456789",
        "kind": "A100",
        "memory_bytes": 40 * 1024**3,
        "used_bytes": 10 * 1024**3,
        "sm_utilisation": 0.37,
        "delivered_bytes": 9 * 1024**3,
        "labels": labels,
    }
    stranger = {**gpu, "uuid": "GPU-stranger", "labels": {**labels, "tenant": "t-other"}}
    controller.agent.gpus = [gpu, stranger]
    for path in paths:
        shown = (await controller.client(None).get(path, headers=session)).text
        assert "GPU time" in shown
        assert "20 % busy" in shown, "60 of 300 seconds"
        assert ("GPUs now" in shown, "37 %" in shown, "10 GiB of 40 GiB" in shown) == (True,) * 3
        assert "GPU-stranger" not in shown


async def test_names_are_escaped_and_an_absent_agent_is_named(
    controller: Controller, short_tmp: object
) -> None:
    (controller.context.config.paths.run / "snapshotter.sock").unlink()
    session = await sign_in(controller, controller.key)
    usage_page = await controller.client(None).get("/dashboard/usage", headers=session)
    assert "cannot connect to" in usage_page.text
    page = await controller.client(None).get("/dashboard", headers=session)
    assert "Nothing is deployed" in page.text
    wrong = await post_login(controller, "<script>")
    assert "<script>" not in wrong.text


@pytest.mark.parametrize(
    "amount,shown",
    [
        ("0", "0"),
        ("1234.567", "1,234.57"),
        ("12.346", "12.35"),
        ("0.25", "0.2500"),
        ("0.0000000012", "0.0000000012"),
        ("-3", "\u22123.00"),
    ],
)
def test_money_is_short_and_never_rounded_to_nothing(amount: str, shown: str) -> None:
    assert formatting.money(Decimal(amount)) == shown


def test_an_hour_with_one_call_is_visible_beside_one_with_thousands() -> None:
    heights = [height for _, _, height, _ in svg.bars([0, 1, 10_000])]
    assert heights == [0.0, 1.5, 22.0]


def test_the_parts_of_a_bar_fill_it() -> None:
    parts = svg.shares({"WARM": 3, "COLD": 1}, width=100)
    assert parts == [("WARM", 0.0, 75.0, 3), ("COLD", 75.0, 25.0, 1)]


@pytest.mark.parametrize("proto,secure", [("https", True), ("http", False)])
async def test_cookies_of_an_encrypted_visit_never_travel_in_the_clear(
    controller: Controller, proto: str, secure: bool
) -> None:
    client = controller.client(None)
    client.headers["x-forwarded-proto"] = proto
    form = await client.get("/dashboard/login")
    (token,) = re.findall(r'name="form" value="([^"]+)"', form.text)
    answer = await client.post("/dashboard/login", data={"key": controller.key, "form": token})
    for cookie in [*form.headers.get_list("set-cookie"), *answer.headers.get_list("set-cookie")]:
        flags = cookie.lower()
        assert ("; secure" in flags) is secure
        assert all(
            flag in flags for flag in ("; httponly", "; samesite=strict", "; path=/dashboard")
        )


@pytest.mark.parametrize(
    "hops",
    ["192.0.2.7", "192.0.2.7, 127.0.0.1", "127.0.0.1, 192.0.2.7", "unknown", "::ffff:192.0.2.7"],
)
async def test_a_key_is_not_taken_in_the_clear_from_another_machine(
    controller: Controller, hops: str
) -> None:
    client = controller.client(None)
    client.headers["x-forwarded-for"] = hops
    form = await client.get("/dashboard/login")
    assert form.status_code == 403
    assert "requires https" in form.text
    (token,) = re.findall(r'name="form" value="([^"]+)"', form.text)
    refused = await client.post("/dashboard/login", data={"key": controller.key, "form": token})
    assert (refused.status_code, sessions.COOKIE in refused.headers["set-cookie"]) == (403, False)
    client.headers["x-forwarded-proto"] = "https"
    assert (await client.get("/dashboard/login")).status_code == 200


async def test_where_plain_http_is_allowed_it_is_taken(controller: Controller) -> None:
    settings = replace(controller.context.config.settings, plain_http_sign_in=True)
    context = replace(
        controller.context, config=replace(controller.context.config, settings=settings)
    )
    async with httpx.AsyncClient(
        transport=_transport(context), base_url="http://controller"
    ) as client:
        assert (
            await client.get("/dashboard/login", headers={"x-forwarded-for": "192.0.2.7"})
        ).status_code == 200


@pytest.mark.parametrize("hops", ["", "127.0.0.1", "::1", "127.0.0.1, 127.0.0.53"])
def test_this_machine_needs_no_encryption(hops: str) -> None:
    sessions.require_private_connection({"x-forwarded-for": hops}, "http", allowed=False)


async def test_a_planted_session_is_not_taken_over(controller: Controller) -> None:
    planted = (await sign_in(controller, await controller.new_key(scope="deploy")))["cookie"]
    form = await controller.client(None).get("/dashboard/login", headers={"cookie": planted})
    (token,) = re.findall(r'name="form" value="([^"]+)"', form.text)
    cookies = {"cookie": f"{planted}; {sessions.FORM_COOKIE}={token}"}
    answer = await controller.client(None).post(
        "/dashboard/login", data={"key": controller.key, "form": token}, headers=cookies
    )
    given = dict(
        cookie.partition(";")[0].split("=", 1) for cookie in answer.headers.get_list("set-cookie")
    )
    assert given[sessions.COOKIE] != planted.partition("=")[2]
    assert given[sessions.FORM_COOKIE] != token
    mine = sessions.parse_cookie(controller.context.key, given[sessions.COOKIE])
    theirs = sessions.parse_cookie(controller.context.key, planted.partition("=")[2])
    assert mine[:2] != theirs[:2]


@pytest.mark.parametrize("path", ["/dashboard/login", "/dashboard/logout"])
@pytest.mark.parametrize("cookie,field", [("a", "b"), ("", ""), ("", "a")])
async def test_forms_of_other_sites_change_nothing(
    controller: Controller, path: str, cookie: str, field: str
) -> None:
    headers = {"cookie": f"{sessions.FORM_COOKIE}={cookie}"}
    answer = await controller.client(None).post(
        path, data={"key": controller.key, "form": field}, headers=headers
    )
    assert answer.status_code == 403
    assert not any(c.startswith(sessions.COOKIE) for c in answer.headers.get_list("set-cookie"))


async def test_a_key_of_one_app_is_told_why_it_cannot_look(controller: Controller) -> None:
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    key = await controller.new_key(scope="deploy", environment="main", app="search")
    answer = await post_login(controller, key)
    assert (answer.status_code, "may only access app" in answer.text) == (403, True)


async def test_a_session_that_was_signed_out_of_is_over_though_the_cookie_was_kept(
    controller: Controller,
) -> None:
    session = await sign_in(controller, controller.key)
    async with controller.client(None) as client:
        kept = {"cookie": f"{session['cookie']}; {sessions.FORM_COOKIE}=x"}
        first = await client.get("/dashboard/calls", headers=kept)
        await client.post("/dashboard/logout", data={"form": "x"}, headers=kept)
        second = await client.get("/dashboard/calls", headers=kept)
        events = await client.get("/dashboard/events", headers=kept)
        await client.aclose()
    assert (first.status_code, second.status_code, events.content) == (200, 303, live_events.OVER)


async def test_a_sign_out_outlives_the_controller(controller: Controller) -> None:
    session = await sign_in(controller, controller.key)
    kept = {"cookie": f"{session['cookie']}; {sessions.FORM_COOKIE}=x"}
    assert (
        await controller.client(None).post("/dashboard/logout", data={"form": "x"}, headers=kept)
    ).status_code == 303
    async with httpx.AsyncClient(
        transport=_transport(controller.context), base_url="http://controller"
    ) as after_restart:
        assert (await after_restart.get("/dashboard/calls", headers=kept)).status_code == 303


async def test_sign_outs_are_forgotten_with_their_sessions_time(controller: Controller) -> None:
    with controller.context.store.write() as write:
        sessions.end_session(write, session="old", key="k-1", until=10.0)
        sessions.end_session(write, session="new", key="k-1", until=30.0)
        sessions.purge(write, now=20.0)
        assert sessions.ended_sessions_among(write.sql, ["old", "new"]) == {"new"}


async def test_many_sign_outs_of_one_key_do_not_make_those_of_others_forgotten(
    controller: Controller,
) -> None:
    with controller.context.store.write() as write:
        sessions.end_session(write, session="of-another", key="k-2", until=5.0)
        for n in range(sessions.MAX_ENDED + 5):
            sessions.end_session(write, session=f"s-{n}", key="k-1", until=100.0 + n)
        assert sessions.ended_sessions_among(write.sql, ["of-another", "s-0", "s-4", "s-5"]) == {
            "of-another",
            "s-5",
        }


async def test_over_https_cookies_carry_the_secure_prefix_and_all_flags(
    controller: Controller,
) -> None:
    async with httpx.AsyncClient(
        transport=_transport(controller.context), base_url="http://controller"
    ) as client:
        client.headers["x-forwarded-proto"] = "https"
        form = await client.get("/dashboard/login")
        (token,) = re.findall(r'name="form" value="([^"]+)"', form.text)
        cookie = form.headers["set-cookie"].partition(";")[0]
        answer = await client.post(
            "/dashboard/login",
            data={"key": controller.key, "form": token},
            headers={"cookie": cookie},
        )
        given = answer.headers.get_list("set-cookie")
        assert {one.partition("=")[0] for one in given} == {
            f"__Secure-{sessions.COOKIE}",
            f"__Secure-{sessions.FORM_COOKIE}",
        }
        for one in given:
            flags = {flag.strip().lower() for flag in one.split(";")[1:]}
            assert {"secure", "httponly", "samesite=strict", "path=/dashboard"} <= flags
            assert not any(flag.startswith("domain") for flag in flags)
        (session,) = (one.partition(";")[0] for one in given if sessions.COOKIE in one)
        assert (
            await client.get("/dashboard/calls", headers={"cookie": session})
        ).status_code == 200
        without_prefix = session.removeprefix("__Secure-")
        assert (
            await client.get("/dashboard/calls", headers={"cookie": without_prefix})
        ).status_code == 303, "set without TLS"
        out = await client.post(
            "/dashboard/logout",
            data={"form": "x"},
            headers={"cookie": f"__Secure-{sessions.FORM_COOKIE}=x"},
        )
        (gone,) = out.headers.get_list("set-cookie")
        assert gone.startswith(f'__Secure-{sessions.COOKIE}=""')
        assert "secure" in gone.lower().split("; "), "a browser ignores the removal without it"


@pytest.mark.parametrize("sealed", ["", "made-up", "gAAAAABnonsense"])
async def test_what_we_did_not_seal_is_no_session(controller: Controller, sealed: str) -> None:
    answer = await controller.client(None).get(
        "/dashboard/calls", headers={"cookie": f"{sessions.COOKIE}={sealed}"}
    )
    assert answer.headers["location"] == "/dashboard/login"
    other = controller.context.key.sessions.seal('{"key": "k-1"}')
    answer = await controller.client(None).get(
        "/dashboard/calls", headers={"cookie": f"{sessions.COOKIE}={other}"}
    )
    assert answer.headers["location"] == "/dashboard/login"


async def test_pages_run_and_style_nothing_but_what_carries_their_own_nonce(
    controller: Controller,
) -> None:
    session = await sign_in(controller, controller.key)
    pages = [await controller.client(None).get("/dashboard", headers=session) for _ in range(2)]
    policies = [
        dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        for page in pages
    ]
    assert policies[0]["script-src"] != policies[1]["script-src"]
    for page, policy in zip(pages, policies, strict=True):
        nonce = policy["script-src"].removeprefix("'nonce-").removesuffix("'")
        assert policy["script-src"] == policy["style-src"] == f"'nonce-{nonce}'"
        assert (policy["default-src"], policy["frame-ancestors"], policy["base-uri"]) == (
            "'none'",
            "'none'",
            "'none'",
        )
        assert "unsafe" not in page.headers["content-security-policy"]
        loaded = re.findall(r"<script src[^>]*>|<link rel=\"stylesheet\"[^>]*>", page.text)
        assert len(loaded) == 4
        assert all(f'nonce="{nonce}"' in tag for tag in loaded)
        assert page.headers["cache-control"] == "no-store"


async def test_files_are_named_by_their_content_and_asked_for_once(controller: Controller) -> None:
    client = controller.client(None)
    for name in ("plotly.js", "style.css", "mark.svg"):
        answer = await client.get(assets.url(name), headers={"accept-encoding": "gzip"})
        assert (answer.status_code, answer.headers["content-encoding"]) == (200, "gzip")
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        plain = await client.get(assets.url(name), headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == answer.content == assets.load(name).content
    for path in (
        "/dashboard/static/0000/style.css",
        f"/dashboard/static/{assets.load('style.css').digest}/..%2Fhtml.py",
    ):
        assert (await client.get(path)).status_code == 404


@pytest.fixture
def statements(controller: Controller) -> Iterator[list[str]]:
    """What the database is asked."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(" ".join(statement.split()))

    sa.event.listen(controller.context.store.engine, "before_cursor_execute", note)
    yield seen
    sa.event.remove(controller.context.store.engine, "before_cursor_execute", note)


async def test_pages_read_sums_and_only_as_many_records_as_they_show(
    controller: Controller, statements: list[str]
) -> None:
    tenant = await controller.tenant()
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    identity = (await controller.http.get("/v1/apps/search")).json()["functions"][0]["id"]
    records = [
        usage(
            f"req-{n}/1", tenant=tenant, function_id=identity, started_at=controller.clock.now - 60
        ).to_json()
        for n in range(60)
    ]
    await controller.internal("/internal/usage", {"activator": "a", "records": records})
    session = await sign_in(controller, controller.key)
    statements.clear()
    for path in ("", "/functions/search/embed", "/calls", "/budgets", "/invoices", "/platform"):
        answer = await controller.client(None).get(
            f"/dashboard{path}", params={"span": "90d"}, headers=session
        )
        assert answer.status_code == 200, path
    touching = [s for s in statements if re.search(r"(FROM|JOIN) usage\b", s)]
    assert len(touching) == 3
    assert all("LIMIT" in s for s in touching)


def viewer(name: str = "s-1", key: str = "k-1", until: float = 2e9) -> live_events.Viewer:
    return live_events.Viewer(name, key, until)


async def test_everybody_who_looks_at_a_place_shares_one_question(
    controller: Controller, statements: list[str]
) -> None:
    hub, place = (
        live_events.EventHub(controller.context),
        (await controller.tenant(), "main", "USD"),
    )
    key = (await controller.http.get("/v1/whoami")).json()["key"]
    viewers = [viewer(f"s-{n}", key) for n in range(5)]
    statements.clear()
    for one in viewers:
        hub.join(place, one)
    for one in viewers:
        await one.changed.wait()
    assert {one.latest for one in viewers} != {None}
    assert len({one.latest for one in viewers}) == 1
    assert sum("usage_hours" in s for s in statements) == 1
    assert repr(hub) == "<EventHub 1 places, 5 viewers>"
    for one in viewers:
        hub.remove(place, one)
    assert repr(hub) == "<EventHub 0 places, 0 viewers>"


async def test_a_stream_ends_with_its_session_and_the_others_go_on(controller: Controller) -> None:
    hub, place = (
        live_events.EventHub(controller.context),
        (await controller.tenant(), "main", "USD"),
    )
    key = (await controller.http.get("/v1/whoami")).json()["key"]
    with controller.context.store.write() as write:
        sessions.end_session(write, session="out", key=key, until=2e9)
    good, out, late, gone = (
        viewer("good", key),
        viewer("out", key),
        viewer("late", key, controller.clock.now),
        viewer("gone", "k-revoked"),
    )
    for one in (good, out, late, gone):
        hub.join(place, one)
    for one in (good, out, late, gone):
        await one.changed.wait()
    assert [one.is_over for one in (good, out, late, gone)] == [False, True, True, True]
    for one in (good, out, late, gone):
        hub.remove(place, one)


async def test_one_tenants_pages_leave_streams_for_others(controller: Controller) -> None:
    hub = live_events.EventHub(controller.context)
    mine = [viewer(f"s-{n}") for n in range(live_events.MAX_PER_TENANT)]
    for one in mine:
        hub.join(("t-1", "main", "USD"), one)
    with pytest.raises(TooManyRequests):
        hub.join(("t-1", "staging", "USD"), viewer())
    other = viewer("theirs")
    hub.join(("t-2", "main", "USD"), other)
    for one in mine:
        hub.remove(("t-1", "main", "USD"), one)
    hub.remove(("t-2", "main", "USD"), other)


async def test_a_controller_that_stops_ends_its_streams(controller: Controller) -> None:
    hub, place = (
        live_events.EventHub(controller.context),
        (await controller.tenant(), "main", "USD"),
    )
    one = viewer(key=(await controller.http.get("/v1/whoami")).json()["key"])
    hub.join(place, one)
    await one.changed.wait()
    one.changed.clear()
    controller.context.notifier.close()
    await one.changed.wait()
    assert one.is_over
    hub.remove(place, one)


def test_who_is_slow_sees_the_newest() -> None:
    one = viewer()
    one.send("first")
    one.send("second")
    assert (one.latest, one.changed.is_set()) == ("second", True)


async def test_the_overview_shows_used_functions_first_and_removed_ones_no_longer(
    controller: Controller,
) -> None:
    tenant = await controller.tenant()
    names = ("aside", "gone", "used")
    body = {"functions": [spec(name) for name in names]}
    await controller.http.post("/v1/apps/search/deploy", json=body)
    known = (await controller.http.get("/v1/apps/search")).json()["functions"]
    records = [
        usage(
            f"req-{one['name']}/1",
            tenant=tenant,
            function=one["name"],
            function_id=one["id"],
            started_at=controller.clock.now - 60,
            cost="0.00002" if one["name"] == "used" else "1.5",
        ).to_json()
        for one in known
        if one["name"] != "aside"
    ]
    await controller.internal("/internal/usage", {"activator": "a", "records": records})
    await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec("aside"), spec("used")]}
    )
    page = await controller.client(None).get(
        "/dashboard", headers=await sign_in(controller, controller.key)
    )
    rows = page.text[page.text.index('id="functions"') :].partition("</table>")[0]
    assert re.findall(r"search/<b>(\w+)</b>", rows) == ["used", "aside"]
    # amounts of a column have as many decimals
    assert re.findall(r'<td class="n">((?:&lt; )?\$[^<]*)</td>', rows) == [
        "$0.0200",
        "&lt; $0.0001",
        "$0.0000",
    ]


async def test_quotas_of_functions_and_keys_stand_beside_the_plans(controller: Controller) -> None:
    await controller.http.put("/v1/quotas/functions/search/embed", json={"concurrent": 7})
    await controller.new_key(
        scope="invoke", name="<b>shop</b>", quotas={"requests_per_s": 3.5, "body_bytes": 2048}
    )
    page = await controller.client(None).get(
        "/dashboard/budgets", headers=await sign_in(controller, controller.key)
    )
    for said in ("search/embed", "key &lt;b&gt;shop&lt;/b&gt;", "3.5", "2.0 KiB"):
        assert said in page.text, said


async def test_budgets_say_of_whose_customer_they_are(controller: Controller) -> None:
    for customer, amount in (("*", "5"), ("ana", "9"), ("", "20")):
        body = {"customer": customer, "amount": amount}
        assert (await controller.http.put("/v1/budgets", json=body)).status_code == 201
    listed = (await controller.http.get("/v1/budgets", params={"customer": "ana"})).json()
    assert [(one["customer"], one["parent"]) for one in listed["budgets"]] == [("ana", None)]
    page = await controller.client(None).get(
        "/dashboard/budgets", headers=await sign_in(controller, controller.key)
    )
    assert re.findall(r'class="line"><b>([^<]*)</b>', page.text) == [
        "Whole tenant",
        "each customer",
        "customer ana",
    ]


async def test_a_key_of_one_environment_sees_that_one_and_nothing_of_the_whole_tenant(
    controller: Controller,
) -> None:
    await controller.http.post("/v1/environments", json={"name": "staging"})
    session = await sign_in(
        controller, await controller.new_key(scope="deploy", environment="staging")
    )
    client = controller.client(None)
    page = await client.get("/dashboard", headers=session)
    assert "<option selected>staging</option>" in page.text
    assert "<option>main" not in page.text
    assert ">Invoices<" not in page.text
    for path, status in (
        ("/dashboard?environment=main", 403),
        ("/dashboard/invoices", 403),
        ("/dashboard/invoices/2027-01.csv", 403),
    ):
        assert (await client.get(path, headers=session)).status_code == status, path
    whole = await sign_in(controller, controller.key)
    assert (await client.get("/dashboard?environment=nowhere", headers=whole)).status_code == 404
    unknown = await client.get("/dashboard/nowhere", headers=whole)
    assert (unknown.status_code, unknown.headers["content-type"]) == (
        404,
        "text/html; charset=utf-8",
    )
    assert "no page /dashboard/nowhere" in unknown.text


@pytest.mark.slow  # waits until a stream looks again
async def test_a_ledger_that_fails_for_a_moment_does_not_end_the_streams(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    hub, place = (
        live_events.EventHub(controller.context),
        (await controller.tenant(), "main", "USD"),
    )
    one = viewer(key=(await controller.http.get("/v1/whoami")).json()["key"])
    with controller.context.store.write() as write:
        write.sql.exec_driver_sql("ALTER TABLE usage_hours RENAME TO away")
    hub.join(place, one)
    while "event=live_failed" not in caplog.text:
        await asyncio.sleep(0.01)
    with controller.context.store.write() as write:
        write.sql.exec_driver_sql("ALTER TABLE away RENAME TO usage_hours")
    await one.changed.wait()
    assert not one.is_over
    hub.remove(place, one)
