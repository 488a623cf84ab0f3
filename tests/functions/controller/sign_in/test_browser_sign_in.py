"""Signing in to the dashboard by an issuer: the whole flow, and what goes wrong on purpose."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import pytest

from pilotlight.controller.identity import sessions
from pilotlight.controller.settings import ControllerSettings
from pilotlight.controller.sign_in import attempts, browser_sign_in
from pilotlight.controller.sign_in.attempts import AttemptLimit
from pilotlight.core.oidc import issuer_client
from pilotlight.core.oidc.settings import CALLBACK_PATH
from pilotlight.errors import TooManyRequests
from tests.fakes.issuer import FakeIssuer, encoded, new_key
from tests.fakes.user_code import Answer
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock
from tests.functions.controller.sign_in.conftest import BEGIN, Browser, error_of, query_of


def person(issuer: FakeIssuer, **claims: Any) -> None:
    issuer.person = {"sub": "u-1", "email": "ada@example.com", "email_verified": True, **claims}


async def test_a_person_signs_in_and_sees_the_dashboard(
    controller: Controller, issuer: FakeIssuer, browser: Browser
) -> None:
    form = await browser.get("/dashboard/login")
    assert f'href="{BEGIN}"' in form.text
    answer = await browser.sign_in()
    assert answer.status_code == 200
    assert 'content="0; url=/dashboard"' in answer.text
    assert browser_sign_in.COOKIE not in browser.cookies
    assert (await browser.get("/dashboard")).status_code == 200
    (made,) = [
        key
        for key in (await controller.http.get("/v1/keys")).json()["keys"]
        if key["created_by"] == "issuer:own:u-alice"
    ]
    assert (made["scope"], made["name"]) == ("deploy", "alice@example.com (dashboard)")
    assert made["expires_at"] == controller.clock.now + 43_200
    entries = (await controller.http.get("/v1/audit")).json()["entries"]
    assert ("issuer:own:u-alice", "key.create", made["id"]) in [
        (entry["actor"], entry["action"], entry["subject"]) for entry in entries
    ]


async def test_cookies_of_a_sign_in_are_for_this_browser_alone(browser: Browser) -> None:
    answer = await browser.get(BEGIN)
    flags = answer.headers["set-cookie"].lower()
    assert all(flag in flags for flag in ("httponly", "samesite=lax", "max-age=600"))
    back = await browser.agree(answer.headers["location"])
    set_cookies = (await browser.get(back)).headers.get_list("set-cookie")
    assert sum("samesite=strict" in line.lower() for line in set_cookies) == 2


class TestWithAnOriginOfItsOwn:
    @pytest.fixture(name="settings")
    def _settings(self) -> ControllerSettings:
        return ControllerSettings(dashboard_url="https://dashboard.example")

    async def test_cookies_have_the_host_prefix(self, browser: Browser) -> None:
        answer = await browser.get(BEGIN)
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"__Host-{browser_sign_in.COOKIE}=")
        assert all(flag in cookie for flag in ("Secure", "Path=/;"))


@pytest.mark.parametrize(
    "claims, tenant, scope",
    [
        ({"groups": ["ops", "acme"]}, "default", "admin"),
        ({"groups": ["acme", "ml"]}, "acme", "deploy"),
        ({"groups": "acme"}, "acme", "deploy"),
        ({"email": "bill@example.com"}, "acme", "read-billing"),
    ],
)
async def test_a_person_gets_the_rights_of_the_first_rule_that_fits(
    *,
    controller: Controller,
    issuer: FakeIssuer,
    browser: Browser,
    claims: dict[str, Any],
    tenant: str,
    scope: str,
) -> None:
    person(issuer, **claims)
    assert (await browser.sign_in()).status_code == 200
    with controller.context.store.read() as sql:
        session = sessions.authenticate_cookie(
            sql,
            controller.context.key,
            browser.cookies[sessions.COOKIE],
            environment=None,
            now=controller.clock.now,
        )
    assert (session.caller.tenant_name, session.caller.scope) == (tenant, scope)
    page = await browser.get("/dashboard/platform")
    assert (page.status_code == 200) == (scope == "admin")


@pytest.mark.parametrize(
    "claims, why",
    [
        ({}, "no rule"),
        ({"groups": ["mlx"]}, "no rule"),
        ({"email": "bill@example.com", "email_verified": False}, "no rule"),
        ({"email": "bill@example.com", "email_verified": "true"}, "no rule"),
        ({"groups": ["lost"]}, "there is no tenant"),
        ({"groups": ["callers"]}, "needs a key of scope"),
        ({"sub": "a\nb", "groups": ["ml"]}, "not printable"),
    ],
)
async def test_a_person_without_a_rule_gets_nothing(
    controller: Controller,
    issuer: FakeIssuer,
    browser: Browser,
    claims: dict[str, Any],
    why: str,
) -> None:
    person(issuer, **claims)
    before = (await controller.http.get("/v1/keys")).json()
    answer = await browser.sign_in()
    assert answer.status_code in (401, 403)
    assert why in error_of(answer)
    assert sessions.COOKIE not in browser.cookies
    assert (await controller.http.get("/v1/keys")).json() == before


async def test_another_browser_does_not_end_a_sign_in(
    controller: Controller, browser: Browser
) -> None:
    back = await browser.agree(await browser.begin())
    other = Browser(controller)
    answer = await other.get(back)
    assert answer.status_code == 401
    assert "has begun no sign-in" in error_of(answer)
    await other.begin()  # its own
    answer = await other.get(back)
    assert answer.status_code == 403
    assert sessions.COOKIE not in other.cookies


async def test_a_code_works_once(browser: Browser, issuer: FakeIssuer) -> None:
    page = await browser.begin()
    cookie = browser.cookies[browser_sign_in.COOKIE]
    back = await browser.agree(page)
    assert (await browser.get(back)).status_code == 200
    assert (await browser.get(back)).status_code == 401  # the cookie has gone
    browser.cookies[browser_sign_in.COOKIE] = cookie
    answer = await browser.get(back)
    assert answer.status_code == 401
    assert "invalid_grant" in error_of(answer)


async def test_a_code_of_another_sign_in_is_worth_nothing(
    controller: Controller, browser: Browser
) -> None:
    """An attacker's code with the victim's state: PKCE."""
    theirs = query_of(await Browser(controller).agree(await Browser(controller).begin()))
    own = query_of(await browser.begin())
    query = {"state": own["state"], "code": theirs["code"], "iss": theirs["iss"]}
    answer = await browser.get(f"{CALLBACK_PATH}?{urlencode(query)}")
    assert answer.status_code == 401
    assert "PKCE" in error_of(answer)


async def test_another_issuers_answer_is_refused(browser: Browser, issuer: FakeIssuer) -> None:
    query = query_of(await browser.agree(await browser.begin()))
    cookie = browser.cookies[browser_sign_in.COOKIE]
    for iss in ("https://evil.example.com", ""):
        browser.cookies[browser_sign_in.COOKIE] = cookie
        answer = await browser.get(f"{CALLBACK_PATH}?{urlencode({**query, 'iss': iss})}")
        assert answer.status_code == 403
    assert issuer.asked("/token") == 0


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"nonce": "another"}, "nonce"),
        ({"nonce": None}, "nonce"),
    ],
)
async def test_a_token_of_another_sign_in_is_refused(
    browser: Browser, issuer: FakeIssuer, changes: dict[str, Any], why: str
) -> None:
    issuer.change = lambda claims: {**claims, **changes}
    answer = await browser.sign_in()
    assert answer.status_code == 401
    assert why in error_of(answer)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"aud": "another"}, "aud"),
        ({"aud": ["pilotlight", "another"]}, "azp"),
        ({"azp": "another"}, "azp"),
        ({"iss": "https://other.example.com"}, "iss"),
        ({"exp": 1}, "expired"),
        ({"nbf": 4_000_000_000}, "nbf"),
    ],
)
async def test_other_id_tokens_are_refused(
    browser: Browser, issuer: FakeIssuer, changes: dict[str, Any], why: str
) -> None:
    issuer.change = lambda claims: {**claims, **changes}
    answer = await browser.sign_in()
    assert answer.status_code == 401
    assert why in error_of(answer)
    assert sessions.COOKIE not in browser.cookies


async def test_a_token_that_the_issuer_did_not_sign_is_refused(
    browser: Browser, issuer: FakeIssuer
) -> None:
    published = issuer.keys[0]
    issuer.keys = [published, new_key("k1")]
    answer = await browser.sign_in()
    assert answer.status_code == 401
    assert "signature" in error_of(answer)


async def test_a_rotated_key_signs_people_in(
    browser: Browser, issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await browser.sign_in()).status_code == 200
    issuer.rotate("k2", "RS256")
    monkeypatch.setattr(issuer_client, "RETRY_S", 0.0)
    assert (await browser.sign_in()).status_code == 200


async def test_a_sign_in_leads_to_the_dashboard_only(browser: Browser) -> None:
    page = await browser.begin()
    assert query_of(page)["redirect_uri"] == f"http://controller{CALLBACK_PATH}"
    for path in (
        f"{BEGIN}?next=https://evil.example.com&redirect_uri=https://evil.example.com",
        f"{BEGIN}?state=x&nonce=y",
    ):
        query = query_of((await browser.get(path)).headers["location"])
        assert query["redirect_uri"] == f"http://controller{CALLBACK_PATH}"
        assert len(query["state"]) == len(query["nonce"]) == 43
    back = await browser.agree((await browser.get(BEGIN)).headers["location"])
    answer = await browser.get(f"{back}&next=https://evil.example.com")
    assert "evil" not in answer.text
    assert re.findall(r"url=([^\"]*)", answer.text) == ["/dashboard"]


async def test_another_site_begins_no_sign_in(browser: Browser, issuer: FakeIssuer) -> None:
    browser.headers = {"sec-fetch-site": "cross-site"}
    assert (await browser.get(BEGIN)).status_code == 403
    assert issuer.requests == []


async def test_a_person_who_does_not_agree_is_told_so(browser: Browser, issuer: FakeIssuer) -> None:
    issuer.person = None
    answer = await browser.sign_in()
    assert answer.status_code == 401
    assert "access_denied" in error_of(answer)


async def test_what_an_issuer_says_is_shown_as_text(browser: Browser, issuer: FakeIssuer) -> None:
    own = query_of(await browser.begin())
    query = {
        "state": own["state"],
        "iss": issuer.url,
        "error": "<script>alert(1)</script>",
        "error_description": "x" * 4000,
    }
    answer = await browser.get(f"{CALLBACK_PATH}?{urlencode(query)}")
    assert answer.status_code == 401
    assert "<script>alert" not in answer.text
    assert len(error_of(answer)) < 500


async def test_a_slow_person_begins_again(browser: Browser, clock: ManualClock) -> None:
    back = await browser.agree(await browser.begin())
    clock.now += browser_sign_in.LASTS_S
    answer = await browser.get(back)
    assert answer.status_code == 401
    assert "took longer than 10 minutes" in error_of(answer)


@pytest.mark.parametrize("cookie", ["", "made-up", "k1.made-up", "x" * 5000])
async def test_a_made_up_cookie_ends_nothing(browser: Browser, cookie: str) -> None:
    back = await browser.agree(await browser.begin())
    browser.cookies[browser_sign_in.COOKIE] = cookie
    assert (await browser.get(back)).status_code == 401


async def test_a_sessions_cookie_is_no_sign_ins_and_the_other_way_round(
    controller: Controller, browser: Browser
) -> None:
    back = await browser.agree(await browser.begin())
    begun = browser.cookies[browser_sign_in.COOKIE]
    assert (await browser.get(back)).status_code == 200
    session = browser.cookies[sessions.COOKIE]
    other = Browser(controller)
    other.cookies = {sessions.COOKIE: begun, browser_sign_in.COOKIE: session.partition("~")[0]}
    assert (await other.get("/dashboard")).headers["location"] == "/dashboard/login"
    other.cookies[browser_sign_in.COOKIE] = session.partition("~")[0]
    assert (await other.get(back)).status_code == 401


async def test_without_the_issuer_the_page_says_why_and_sessions_and_keys_go_on(
    controller: Controller, browser: Browser, issuer: FakeIssuer
) -> None:
    assert (await browser.sign_in()).status_code == 200
    back = await browser.agree(await browser.begin())
    issuer.is_dead = True
    answer = await browser.get(back)
    assert answer.status_code == 503
    assert "sign-in is not possible now" in error_of(answer)
    assert (await browser.get("/dashboard")).status_code == 200
    assert (await controller.http.get("/v1/whoami")).status_code == 200


async def test_an_issuer_that_never_answered_signs_nobody_in(
    browser: Browser, issuer: FakeIssuer
) -> None:
    issuer.is_dead = True
    for _ in range(3):
        answer = await browser.get(BEGIN)
        assert answer.status_code == 503
        assert "cannot be asked" in error_of(answer)
    assert len(issuer.requests) == 1
    assert issuer_client.RETRY_S == 30


async def test_an_unknown_issuer_is_not_found(browser: Browser) -> None:
    assert (await browser.get("/dashboard/login/by/other")).status_code == 404


async def test_an_unsigned_id_token_is_refused(
    browser: Browser, issuer: FakeIssuer, controller: Controller
) -> None:
    page = await browser.begin()
    claims = {**issuer.claims(aud="pilotlight"), "nonce": query_of(page)["nonce"]}
    token = f"{encoded({'alg': 'none', 'kid': 'k1'})}.{encoded(claims)}."
    issuer.answers["/token"] = Answer(body=json.dumps({"id_token": token}).encode())
    answer = await browser.get(await browser.agree(page))
    assert answer.status_code == 401
    assert "algorithm" in error_of(answer)


async def test_a_session_ends_with_its_key_and_by_signing_out(
    controller: Controller, browser: Browser, clock: ManualClock
) -> None:
    async def key_of_session() -> dict[str, Any]:
        keys = (await controller.http.get("/v1/keys")).json()["keys"]
        return dict(next(key for key in keys if key["created_by"].startswith("issuer:")))

    await browser.sign_in()
    key = await key_of_session()
    await controller.http.delete(f"/v1/keys/{key['id']}")
    assert (await browser.get("/dashboard")).status_code == 303

    await browser.sign_in()
    form = browser.cookies[sessions.FORM_COOKIE]
    assert (await browser.post("/dashboard/logout", form=form)).status_code == 303
    assert (await key_of_session())["revoked_at"] is not None

    await browser.sign_in()
    clock.now += 43_200
    assert (await browser.get("/dashboard")).status_code == 303


async def test_a_stranger_makes_the_issuer_refuse_a_few_codes_and_not_those_of_others(
    issuer: FakeIssuer, browser: Browser
) -> None:
    browser.headers["x-forwarded-for"] = "127.0.0.7"
    for number in range(attempts.MAX_REFUSED + 3):
        state = query_of(await browser.begin())["state"]
        query = urlencode({"state": state, "code": number, "iss": issuer.url})
        answer = await browser.get(f"{CALLBACK_PATH}?{query}")
        refused = 401 if number < attempts.MAX_REFUSED else 429
        assert answer.status_code == refused
    assert issuer.asked("/token") == attempts.MAX_REFUSED
    del browser.headers["x-forwarded-for"]
    assert (await browser.sign_in()).status_code == 200


def test_attempts_come_back_and_networks_are_forgotten() -> None:
    limit = AttemptLimit()
    for _ in range(attempts.MAX_REFUSED):
        with suppress(KeyError), limit.attempt("::ffff:192.0.2.7", 100.0):
            raise KeyError
    for address in ("::ffff:192.0.2.8", "2001:db8::1"):
        with limit.attempt(address, 100.0):
            pass
    assert repr(limit) == "<AttemptLimit 1 networks>"
    with pytest.raises(TooManyRequests), limit.attempt("192.0.2.7", 100.0):
        pass
    with limit.attempt("192.0.2.7", 100.0 + attempts.REGAIN_S):
        pass
