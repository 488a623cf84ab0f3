"""Signing in from the command line: the device flow through the controller."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pilotlight.controller.sign_in import device_sign_ins
from tests.fakes.issuer import FakeIssuer
from tests.fakes.user_code import Answer
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock, refused

PATH = "/v1/device-sign-ins"


async def begin(controller: Controller, address: str = "192.0.2.1", **body: Any) -> httpx.Response:
    headers = {"x-forwarded-for": address}
    return await controller.client(None).post(PATH, json=body, headers=headers)


async def begun(controller: Controller, address: str = "192.0.2.1") -> dict[str, Any]:
    answer = await begin(controller, address)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def redeem(controller: Controller, code: str) -> httpx.Response:
    return await controller.client(None).post(f"{PATH}:redeem", json={"code": code})


async def test_the_command_line_gets_a_key_and_no_token(
    controller: Controller, issuer: FakeIssuer
) -> None:
    shown = await begun(controller)
    assert shown["verification_uri"] == f"{issuer.url}/activate"
    (device,) = issuer.devices.values()
    assert shown["user_code"] == device.user_code
    assert device.code not in str(shown)
    waiting = await redeem(controller, shown["code"])
    assert waiting.json()["status"] == "pending"
    issuer.decide(shown["user_code"])
    answer = await redeem(controller, shown["code"])
    found = answer.json()
    assert (answer.status_code, found["status"], found["tenant"]) == (200, "signed_in", "default")
    assert "eyJ" not in answer.text
    key = found["key"]
    assert (key["name"], key["scope"]) == ("alice@example.com (command line)", "deploy")
    who = (await controller.client(key["secret"]).get("/v1/whoami")).json()
    assert (who["issuer"], who["expires_at"]) == ("own", controller.clock.now + 43_200)
    entries = (await controller.http.get("/v1/audit")).json()["entries"]
    (entry,) = [one for one in entries if one["subject"] == key["id"]]
    assert (entry["actor"], entry["action"]) == ("issuer:own:u-alice", "key.create")
    assert key["secret"] not in str(entry)
    refused(await redeem(controller, shown["code"]), 401)  # it works once


async def test_a_key_says_when_its_sign_in_has_ended(
    controller: Controller, issuer: FakeIssuer, clock: ManualClock
) -> None:
    shown = await begun(controller)
    issuer.decide(shown["user_code"])
    key = (await redeem(controller, shown["code"])).json()["key"]
    clock.now += 43_200
    why = refused(await controller.client(key["secret"]).get("/v1/whoami"), 401)
    assert "pilotlight login --oidc" in why


@pytest.mark.parametrize("state", ["access_denied", "expired_token", "invalid_grant"])
async def test_a_refused_sign_in_is_over(
    controller: Controller, issuer: FakeIssuer, state: str
) -> None:
    shown = await begun(controller)
    issuer.decide(shown["user_code"], state)
    assert state in refused(await redeem(controller, shown["code"]), 401)
    assert "used, refused, or has expired" in refused(await redeem(controller, shown["code"]), 401)


async def test_a_made_up_code_is_refused_without_asking_the_issuer(
    controller: Controller, issuer: FakeIssuer
) -> None:
    refused(await redeem(controller, "made-up"), 401)
    refused(await redeem(controller, "x" * 101), 400)
    assert issuer.requests == []


async def test_a_person_without_a_rule_gets_no_key(
    controller: Controller, issuer: FakeIssuer
) -> None:
    shown = await begun(controller)
    issuer.person = {"sub": "u-9"}
    issuer.decide(shown["user_code"])
    assert "no rule" in refused(await redeem(controller, shown["code"]), 403)


async def test_another_tenants_user_gets_that_tenants_key(
    controller: Controller, issuer: FakeIssuer
) -> None:
    shown = await begun(controller)
    issuer.person = {"sub": "u-2", "groups": ["acme"]}
    issuer.decide(shown["user_code"])
    key = (await redeem(controller, shown["code"])).json()["key"]
    client = controller.client(key["secret"])
    who = (await client.get("/v1/whoami")).json()
    assert (who["tenant"]["name"], who["bound_environment"]) == ("acme", "main")
    refused(await client.get("/v1/tenants"), 403)


@pytest.mark.parametrize(
    "changes", [{"aud": "another"}, {"exp": 1}, {"iss": "https://other.example.com"}]
)
async def test_other_id_tokens_are_refused(
    controller: Controller, issuer: FakeIssuer, changes: dict[str, Any]
) -> None:
    issuer.change = lambda claims: {**claims, **changes}
    shown = await begun(controller)
    issuer.decide(shown["user_code"])
    refused(await redeem(controller, shown["code"]), 401)


async def test_pending_sign_ins_of_an_address_are_bounded(
    controller: Controller, issuer: FakeIssuer, clock: ManualClock
) -> None:
    for number in range(device_sign_ins.MAX_OF_ADDRESS):
        await begun(controller, f"2001:db8::{number}")  # one network
    assert (await begin(controller, "2001:db8::ff")).status_code == 429
    assert issuer.asked("/device") == device_sign_ins.MAX_OF_ADDRESS
    await begun(controller, "2001:db8:1::1")
    clock.now += device_sign_ins.MAX_LASTS_S
    await begun(controller, "2001:db8::ff")
    assert repr(controller.context.devices) == "<DeviceSignIns 1 pending>"


async def test_all_pending_sign_ins_are_bounded(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sign_ins, "MAX_PENDING", 2)
    for number in range(2):
        await begun(controller, f"192.0.2.{number}")
    answer = await begin(controller, "192.0.2.9")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")


async def test_the_issuer_is_asked_at_its_own_pace(
    controller: Controller, issuer: FakeIssuer, clock: ManualClock
) -> None:
    issuer.interval_s = 7
    shown = await begun(controller)
    assert shown["interval_s"] == 7
    for _ in range(5):
        assert (await redeem(controller, shown["code"])).json()["status"] == "pending"
    assert issuer.asked("/token") == 1
    issuer.decide(shown["user_code"], "slow_down")
    clock.now += 7
    assert (await redeem(controller, shown["code"])).json()["interval_s"] == 12
    issuer.decide(shown["user_code"])
    clock.now += 7
    assert (await redeem(controller, shown["code"])).json()["status"] == "pending"
    clock.now += 5
    assert (await redeem(controller, shown["code"])).json()["status"] == "signed_in"


async def test_a_sign_in_outlives_an_issuer_that_is_away_for_a_moment(
    controller: Controller, issuer: FakeIssuer
) -> None:
    shown = await begun(controller)
    issuer.is_dead = True
    refused(await redeem(controller, shown["code"]), 503)
    issuer.is_dead = False
    issuer.decide(shown["user_code"])
    assert (await redeem(controller, shown["code"])).json()["status"] == "signed_in"


async def test_a_dead_issuer_leaves_nothing_pending(
    controller: Controller, issuer: FakeIssuer
) -> None:
    issuer.is_dead = True
    for _ in range(2 * device_sign_ins.MAX_OF_ADDRESS):
        assert (await begin(controller)).status_code == 503
    assert len(issuer.requests) == 1
    assert repr(controller.context.devices) == "<DeviceSignIns 0 pending>"


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"device_code": "d", "user_code": "\x1b[31mX", "verification_uri": "https://a"},
        {"device_code": "d", "user_code": "X" * 65, "verification_uri": "https://a"},
        {"device_code": "d", "user_code": "X", "verification_uri": "javascript:alert(1)"},
        {"device_code": "d", "user_code": "X", "verification_uri": "http://example.com"},
        {"device_code": 5, "user_code": "X", "verification_uri": "https://a"},
    ],
)
async def test_what_must_not_be_shown_is_refused(
    controller: Controller, issuer: FakeIssuer, answer: dict[str, Any]
) -> None:
    issuer.answers["/device"] = Answer(body=json.dumps(answer).encode())
    assert "RFC 8628" in (why := refused(await begin(controller), 503)) or "https" in why


async def test_an_issuer_without_a_device_flow_says_so(
    controller: Controller, issuer: FakeIssuer
) -> None:
    issuer.document = {"device_authorization_endpoint": None}
    assert "no device flow" in refused(await begin(controller), 401)


async def test_an_unknown_issuer_is_not_found(controller: Controller) -> None:
    assert "known: own" in refused(await begin(controller, issuer="other"), 404)
