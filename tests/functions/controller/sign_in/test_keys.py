"""The keys of people who signed in, beside those that administrators make."""

from __future__ import annotations

from typing import Any

import httpx
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.sign_in import keys
from pilotlight.controller.sign_in.keys import MAX_OF_PERSON
from tests.fakes.issuer import FakeIssuer
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused
from tests.functions.controller.sign_in.test_device_sign_ins import begun, redeem


async def signed_in(controller: Controller, issuer: FakeIssuer, **person: Any) -> dict[str, Any]:
    """The key of a person who signed in from the command line."""
    issuer.person = {"sub": "u-1", "groups": ["ops"], **person}
    shown = await begun(controller)
    issuer.decide(shown["user_code"])
    answer = await redeem(controller, shown["code"])
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["key"])


async def in_force(controller: Controller) -> list[str]:
    keys = (await controller.http.get("/v1/keys")).json()["keys"]
    return [
        key["id"]
        for key in keys
        if key["created_by"].startswith("issuer:") and key["revoked_at"] is None
    ]


async def test_a_sign_ins_key_cannot_be_made_to_last(
    controller: Controller, issuer: FakeIssuer
) -> None:
    key = await signed_in(controller, issuer)
    own = controller.client(key["secret"])
    answers: list[httpx.Response] = [
        await own.patch(f"/v1/keys/{key['id']}", json={"expires_in_s": None}),
        await own.patch(f"/v1/keys/{key['id']}", json={"expires_in_s": 10**6}),
        await own.post(f"/v1/keys/{key['id']}:rotate", json={}),
    ]
    for answer in answers:
        assert "ends with it" in refused(answer, 409)


async def test_a_sign_in_is_no_administrator_of_its_tenant(
    controller: Controller, issuer: FakeIssuer
) -> None:
    key = await signed_in(controller, issuer)
    (lasting,) = [
        one["id"]
        for one in (await controller.http.get("/v1/keys")).json()["keys"]
        if not one["created_by"].startswith("issuer:")
    ]
    own = controller.client(key["secret"])
    assert "last admin key" in refused(await own.delete(f"/v1/keys/{lasting}"), 409)
    assert (await own.delete(f"/v1/keys/{key['id']}")).status_code == 204


async def test_a_persons_oldest_sign_ins_end(controller: Controller, issuer: FakeIssuer) -> None:
    other = await signed_in(controller, issuer, sub="u-2")
    made = []
    for _ in range(MAX_OF_PERSON + 2):
        controller.clock.now += 1
        made.append((await signed_in(controller, issuer))["id"])
    left = set(await in_force(controller))
    assert left == {*made[2:], other["id"]}


async def test_a_suspended_tenants_people_look_and_change_nothing(
    controller: Controller, issuer: FakeIssuer
) -> None:
    await controller.http.patch("/v1/tenants/acme", json={"suspended": True})
    key = await signed_in(controller, issuer, groups=["acme"])
    own = controller.client(key["secret"])
    assert (await own.get("/v1/whoami")).json()["suspended"] is True
    refused(await own.put("/v1/secrets/x", json={"values": {"A": "b"}}), 403)


async def test_signing_out_of_the_dashboard_leaves_the_command_lines_key(
    controller: Controller, issuer: FakeIssuer
) -> None:
    key = await signed_in(controller, issuer)
    with controller.context.store.write() as write:
        keys.end_dashboards(write, key["id"])
    assert await in_force(controller) == [key["id"]]


async def test_a_person_of_a_deleted_tenant_gets_no_key(
    controller: Controller, issuer: FakeIssuer
) -> None:
    assert (await controller.http.delete("/v1/tenants/acme")).status_code == 202
    issuer.person = {"sub": "u-1", "groups": ["acme"]}
    shown = await begun(controller)
    issuer.decide(shown["user_code"])
    assert "is deleted" in refused(await redeem(controller, shown["code"]), 403)
    with controller.context.store.read() as sql:
        made = sa.select(tables.api_keys).where(tables.api_keys.c.created_by.like("issuer:%"))
        assert not sql.execute(made).all()
