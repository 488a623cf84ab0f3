"""API keys: what each scope and each bound reaches, quotas, rotation, and that a wrong key costs
what a good one does."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import access_control, api_keys
from pilotlight.controller.server import bootstrap
from pilotlight.errors import Unauthenticated
from pilotlight.spec.identifiers import Scope
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import (
    INJECTIONS,
    ManualClock,
    instance,
    refused,
    snapshot,
    spec,
)
from tests.functions.controller.test_weights import upload


async def fed(controller: Controller) -> dict[str, Any]:
    """Keys as activators know them, by id; removed ones are None."""
    changes: Any = (await controller.feed())["changes"]
    return {change["key"]: change["value"] for change in changes if change["kind"] == "key"}


async def made(controller: Controller, **body: Any) -> dict[str, Any]:
    answer = await controller.http.post("/v1/keys", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def deployed(controller: Controller) -> None:
    """Two apps, two functions in the first."""
    for app, names in (("search", ("embed", "rank")), ("other", ("embed",))):
        body = {"functions": [spec(name) for name in names]}
        assert (await controller.http.post(f"/v1/apps/{app}/deploy", json=body)).status_code == 200


# -- scopes ----------------------------------------------------------------------------------------


@pytest.mark.slow  # asks every route
async def test_a_billing_key_reads_money_and_quotas_and_nothing_else(
    controller: Controller,
) -> None:
    await deployed(controller)
    reader = controller.client(await controller.new_key(scope="read-billing"))
    for path in (
        "/v1/whoami",
        "/v1/plans",
        "/v1/tenant",
        "/v1/quotas",
        "/v1/quotas/functions/search/embed",
        "/v1/quotas/customers/ana",
        "/v1/credits",
        "/v1/credits/ana",
    ):
        assert (await reader.get(path)).status_code == 200, path
    document = (await controller.http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        if path.startswith(("/v1/billing", "/v1/budgets", "/v1/invoices", *ACTIVATORS)):
            continue  # money, or the activator's
        if path == "/v1/sign-in-codes" or path.startswith("/v1/device-sign-ins"):
            continue  # signs this key in to the dashboard, or needs no key
        for verb in operations.keys() - {"get"} if path in OPEN_TO_ALL else operations:
            url = path.replace("{", "").replace("}", "")
            assert (await reader.request(verb, url, json={})).status_code in (400, 403), (
                f"{verb} {path}"
            )


ACTIVATORS = (
    "/v1/functions/{app}/{function}:",
    "/v1/calls",
    "/v1/sandboxes",
    "/fn/",
    "/v1/models",
    "/v2",
    "/v1/chat/",
    "/v1/completions",
    "/v1/embeddings",
    "/healthz",
    "/readyz",
)
OPEN_TO_ALL = {
    "/v1/whoami",
    "/v1/plans",
    "/v1/tenant",
    "/v1/quotas",
    "/v1/quotas/functions/{app}/{function}",
    "/v1/quotas/customers/{customer}",
    "/v1/credits",
    "/v1/credits/{customer}",
    "/v1/credits/{customer}/entries",
    "/v1/credits/{customer}/uses",
}


# -- bound to an app or a function -----------------------------------------------------------------


async def test_a_key_of_an_app_deploys_it_and_touches_no_other(controller: Controller) -> None:
    await deployed(controller)
    client = controller.client(await controller.new_key(scope="admin", app="search"))
    assert (
        await client.post(
            "/v1/apps/search/deploy", json={"functions": [spec("embed"), spec("rank")]}
        )
    ).status_code == 200
    assert [a["name"] for a in (await client.get("/v1/apps")).json()["apps"]] == ["search"]
    assert (await client.get("/v1/apps/search/history")).status_code == 200
    for method, path, body in (
        ("POST", "/v1/apps/other/deploy", {"functions": [spec()]}),
        ("GET", "/v1/apps/other", None),
        ("GET", "/v1/apps/other/history", None),
        ("POST", "/v1/apps/other:stop", None),
        ("DELETE", "/v1/apps/other", None),
        ("GET", "/v1/instances?app=other", None),
        ("GET", "/v1/logs?app=other", None),
        ("GET", "/v1/snapshots?app=other", None),
        ("DELETE", "/v1/functions/other/embed/snapshots", None),
        ("PUT", "/v1/functions/other/embed/snapshots", {"enabled": False}),
        ("PUT", "/v1/quotas/functions/other/embed", {"concurrent": 1}),
        ("GET", "/v1/quotas/functions/other/embed", None),
    ):
        assert "is bound to app 'search'" in refused(
            await client.request(method, path, json=body), 403
        ), path
    assert (await client.post("/v1/apps/search:stop")).status_code == 200


async def test_a_key_of_an_app_does_not_change_what_apps_share(controller: Controller) -> None:
    client = controller.client(await controller.new_key(scope="admin", app="search"))
    for method, path, body in (
        ("PUT", "/v1/secrets/token", {"value": "x"}),
        ("DELETE", "/v1/secrets/token", None),
        ("PUT", "/v1/weights/minilm", {"manifest": "ab" * 32}),
        ("DELETE", "/v1/weights/minilm", None),
        ("POST", "/v1/weights/minilm/pin", None),
        ("POST", "/v1/environments", {"name": "staging"}),
        ("DELETE", "/v1/environments/main", None),
        ("GET", "/v1/audit", None),
        ("GET", "/v1/tenants", None),
    ):
        assert "is bound to app 'search'" in refused(
            await client.request(method, path, json=body), 403
        ), path


async def test_a_deploy_with_a_key_of_an_app_leaves_the_weights_of_others_their_meaning(
    controller: Controller, tmp_path: Path
) -> None:
    first, second = [
        await upload(controller.http, tmp_path / name, name.encode())
        for name in ("first", "second")
    ]
    bound = controller.client(await controller.new_key(scope="deploy", app="search"))
    for client, app, manifest in ((controller.http, "other", first), (bound, "search", second)):
        body = {"functions": [spec(weights=[{"name": "minilm", "manifest": manifest}])]}
        assert (await client.post(f"/v1/apps/{app}/deploy", json=body)).status_code == 200
    assert (await controller.http.get("/v1/weights/minilm")).json()["manifest"] == first


async def test_a_key_of_a_function_sees_that_one_and_deploys_nothing(
    controller: Controller,
) -> None:
    await deployed(controller)
    tenant = await controller.tenant()
    controller.agent.instances = [
        instance(tenant),
        instance(tenant, function="rank", name="i-2"),
        instance(tenant, app="other", name="i-3"),
    ]
    controller.agent.snapshots = [snapshot(tenant)]  # of search/hello
    client = controller.client(
        await controller.new_key(scope="deploy", app="search", function="embed")
    )
    assert [f["name"] for f in (await client.get("/v1/apps/search")).json()["functions"]] == [
        "embed"
    ]
    assert [i["id"] for i in (await client.get("/v1/instances")).json()["instances"]] == ["i-1"]
    assert (await client.get("/v1/snapshots")).json() == {"snapshots": []}
    refused(await client.post("/v1/instances/i-2:stop"), 404)
    assert (await client.post("/v1/instances/i-1:stop")).status_code == 204
    for method, path, body in (
        ("POST", "/v1/apps/search/deploy", {"functions": [spec("embed")]}),
        ("POST", "/v1/apps/search:stop", None),
        ("DELETE", "/v1/apps/search", None),
        ("GET", "/v1/instances?function=rank", None),
        ("GET", "/v1/logs?app=search&function=rank", None),
        ("PUT", "/v1/functions/search/rank/snapshots", {"enabled": False}),
    ):
        assert "is bound to function search/embed" in refused(
            await client.request(method, path, json=body), 403
        ), path


async def test_a_bound_key_cannot_make_change_or_see_a_wider_one(controller: Controller) -> None:
    wide = (await controller.http.get("/v1/whoami")).json()["key"]
    bound = controller.client(
        await controller.new_key(scope="admin", app="search", environment="main")
    )
    for body in (
        {},
        {"app": "search"},
        {"environment": "main"},
        {"environment": "main", "app": "other"},
    ):
        assert "only create keys within its own scope" in refused(
            await bound.post("/v1/keys", json=body), 403
        )
    narrower = await bound.post(
        "/v1/keys", json={"environment": "main", "app": "search", "function": "embed"}
    )
    assert narrower.status_code == 201
    for method, path in (
        ("GET", f"/v1/keys/{wide}"),
        ("PATCH", f"/v1/keys/{wide}"),
        ("POST", f"/v1/keys/{wide}:rotate"),
        ("DELETE", f"/v1/keys/{wide}"),
    ):
        refused(await bound.request(method, path, json={}), 404)
    assert wide not in [key["id"] for key in (await bound.get("/v1/keys")).json()["keys"]]


async def test_another_tenants_keys_do_not_exist(controller: Controller) -> None:
    mine = (await controller.http.get("/v1/whoami")).json()["key"]
    stranger = controller.client(await controller.other_tenant())
    for method, path in (
        ("GET", f"/v1/keys/{mine}"),
        ("PATCH", f"/v1/keys/{mine}"),
        ("POST", f"/v1/keys/{mine}:rotate"),
        ("DELETE", f"/v1/keys/{mine}"),
    ):
        refused(await stranger.request(method, path, json={}), 404)
    assert (await controller.http.get("/v1/whoami")).status_code == 200


@pytest.mark.parametrize(
    "body, said",
    [
        ({"function": "embed"}, "function = 'embed': also name its app"),
        ({"name": "x" * 201}, "201 characters; the maximum is 200"),
        ({"expires_in_s": 0}, "expires_in_s = 0: must be above 0"),
        ({"expires_in_s": 1e300}, "expires_in_s = 1e+300: must be above 0, at most"),
        (
            {"quotas": {"requests_per_s": -5}},
            "requests_per_s = -5: must be between 0.001 and 1e+06",
        ),
        ({"quotas": {"burst": 5}}, "burst = 5: requires requests_per_s"),
        ({"quotas": {"concurrent": 1 << 70}}, "concurrent = "),
        ({"quotas": {"wheels": 4}}, "wheels: unknown quota; known: "),
        ({"quotas": {"gpus": 1}}, "gpus = 1: limits a tenant or a function, not a key"),
        *[({"app": name}, "is not valid") for name in INJECTIONS],
    ],
)
async def test_a_key_that_makes_no_sense_is_refused_by_key_value_and_bound(
    controller: Controller, body: dict[str, Any], said: str
) -> None:
    assert said in refused(await controller.http.post("/v1/keys", json=body), 400)
    assert len((await controller.http.get("/v1/keys")).json()["keys"]) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "\\ud800"}',
        '{"quotas": {"\\ud800": 1}}',
        '{"app": "\\ud800"}',
        '{"name": "a\\u0000b", "x": 1}',
        "[]",
        "{",
    ],
)
async def test_half_of_a_surrogate_pair_and_other_bodies_that_are_none_are_refused(
    controller: Controller, text: str
) -> None:
    refused(
        await controller.http.post(
            "/v1/keys", content=text, headers={"content-type": "application/json"}
        ),
        400,
    )


async def test_a_note_on_a_key_may_be_any_text_and_stays_text(controller: Controller) -> None:
    for name in INJECTIONS:
        await made(controller, name=name)
    found = [key["name"] for key in (await controller.http.get("/v1/keys")).json()["keys"]]
    assert sorted(found) == sorted([*INJECTIONS, "first admin key"])


# -- quotas and end --------------------------------------------------------------------------------


async def test_a_key_has_bounds_and_an_end_that_can_be_changed_and_activators_follow(
    controller: Controller,
) -> None:
    key = await made(
        controller, app="search", quotas={"requests_per_s": 2, "burst": None}, expires_in_s=60
    )
    known = (await fed(controller))[key["id"]]
    assert (known["app"], known["function"], known["quotas"]) == (
        "search",
        None,
        {"requests_per_s": 2},
    )
    changed = (
        await controller.http.patch(f"/v1/keys/{key['id']}", json={"quotas": {"concurrent": 3}})
    ).json()
    assert (changed["quotas"], changed["expires_at"]) == (
        {"concurrent": 3},
        controller.clock.now + 60,
    )
    changed = (
        await controller.http.patch(f"/v1/keys/{key['id']}", json={"expires_in_s": None})
    ).json()
    assert (changed["quotas"], changed["expires_at"]) == ({"concurrent": 3}, None)
    known = (await fed(controller))[key["id"]]
    assert (known["quotas"], known["expires_at"]) == ({"concurrent": 3}, None)
    listed = (await controller.http.get("/v1/quotas")).json()["keys"]
    assert listed == [{"key": key["id"], "name": "", "quotas": {"concurrent": 3}}]
    refused(
        await controller.http.patch(f"/v1/keys/{key['id']}", json={"quotas": {"instances": 1}}), 400
    )
    await controller.http.delete(f"/v1/keys/{key['id']}")
    assert "was revoked" in refused(
        await controller.http.patch(f"/v1/keys/{key['id']}", json={"quotas": {}}), 409
    )
    assert (await fed(controller))[key["id"]] is None


# -- rotation --------------------------------------------------------------------------------------


async def test_rotation_gives_a_new_text_with_the_same_reach_and_ends_the_old_one(
    controller: Controller,
) -> None:
    old = await made(
        controller,
        scope="deploy",
        app="search",
        quotas={"concurrent": 3},
        name="ci",
        expires_in_s=600,
    )
    controller.clock.now += 100
    new = (await controller.http.post(f"/v1/keys/{old['id']}:rotate", json={})).json()
    for same in ("scope", "app", "function", "environment", "quotas", "name"):
        assert new[same] == old[same]
    assert (new["replaces"], new["expires_at"]) == (old["id"], controller.clock.now + 600)
    assert new["secret"] != old["secret"]
    assert (await controller.client(new["secret"]).get("/v1/apps")).status_code == 200
    refused(await controller.client(old["secret"]).get("/v1/apps"), 401)
    known = await fed(controller)
    assert known[old["id"]] is None
    assert known[new["id"]]["app"] == "search"


async def test_with_grace_the_old_text_works_until_it_is_over_and_never_longer_than_it_would_have(
    controller: Controller,
) -> None:
    first, second = (
        await made(controller, scope="deploy"),
        await made(controller, scope="deploy", expires_in_s=50),
    )
    for key, lives_s in ((first, 100), (second, 50)):
        began = controller.clock.now
        assert (
            await controller.http.post(f"/v1/keys/{key['id']}:rotate", json={"grace_s": 100})
        ).status_code == 201
        assert (await fed(controller))[key["id"]]["expires_at"] == began + lives_s
        assert (await controller.client(key["secret"]).get("/v1/apps")).status_code == 200
        controller.clock.now = began + lives_s
        assert "has expired" in refused(await controller.client(key["secret"]).get("/v1/apps"), 401)
        controller.clock.now = began


async def test_a_key_rotates_once_and_never_after_its_end(controller: Controller) -> None:
    key = await made(controller, expires_in_s=60)
    successor = (
        await controller.http.post(f"/v1/keys/{key['id']}:rotate", json={"grace_s": 60})
    ).json()
    again = await controller.http.post(f"/v1/keys/{key['id']}:rotate", json={})
    assert f"rotated into {successor['id']}" in refused(again, 409)
    controller.clock.now += 61
    assert "has expired" in refused(
        await controller.http.post(f"/v1/keys/{successor['id']}:rotate", json={}), 409
    )
    await controller.http.delete(f"/v1/keys/{successor['id']}")
    assert "was revoked" in refused(
        await controller.http.post(f"/v1/keys/{successor['id']}:rotate", json={}), 409
    )
    for grace_s in (-1, 1e300):
        other = await made(controller)
        assert "grace_s" in refused(
            await controller.http.post(f"/v1/keys/{other['id']}:rotate", json={"grace_s": grace_s}),
            400,
        )


async def test_of_two_that_rotate_at_once_one_does_and_the_other_is_told(
    controller: Controller,
) -> None:
    key = await made(controller)
    answers = await asyncio.gather(
        *(
            controller.http.post(f"/v1/keys/{key['id']}:rotate", json={"grace_s": 60})
            for _ in range(8)
        )
    )
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 7}
    assert len((await controller.http.get("/v1/keys")).json()["keys"]) == 3


# -- the work of a check ---------------------------------------------------------------------------


@contextmanager
def work(engine: sa.Engine) -> Iterator[list[str]]:
    """The statements that the database was asked meanwhile."""
    asked: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield asked
    event.remove(engine, "before_cursor_execute", note)


def test_a_wrong_key_costs_what_a_good_one_does_and_only_hashes_are_compared(
    store: Store, clock: ManualClock
) -> None:
    good = bootstrap.ensure_admin(store, uid_base=None)
    assert good is not None
    with store.write() as write:
        tenant = write.sql.exec_driver_sql("SELECT tenant FROM api_keys").scalar_one()
        ended, expired = (
            api_keys.create(write, tenant=tenant, scope=Scope.INVOKE, actor="k", expires_in_s=s)
            for s in (None, 1.0)
        )
        api_keys.revoke(write, tenant=tenant, key_id=ended.record.id, actor="k")
    clock.now += 2
    almost = good[:-1] + ("A" if good[-1] != "A" else "B")
    statements: dict[str, list[str]] = {}
    for name, text in {
        "good": good,
        "almost": almost,
        "revoked": ended.secret,
        "expired": expired.secret,
        "odd": "x",
        "long": "y" * 9999,
    }.items():
        with work(store.engine) as asked, store.read() as sql:
            try:
                access_control.authenticate(
                    sql, authorization=f"Bearer {text}", environment=None, now=clock.now
                )
                assert name == "good"
            except Unauthenticated:
                assert name != "good"
        statements[name] = [s for s in asked if "api_keys" in s]
    assert len({tuple(s) for s in statements.values()}) == 1, (
        "the same statements, whatever the key"
    )
    (statement,) = statements["good"]
    assert "api_keys.hash = ?" in statement, (
        "by the hash, by an index; the text itself never reaches the database"
    )
    with store.read() as sql:
        plan = sql.exec_driver_sql(
            "EXPLAIN QUERY PLAN SELECT * FROM api_keys WHERE hash = ?", ("x",)
        ).all()
    assert "USING INDEX" in str(plan)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic eDp5",
        "pl_x",
        "Bearer\tpl_x",
        "bearer  ' OR 1=1 --",
        "Bearer \xff",
    ],
)
def test_what_is_no_key_is_refused_as_one(store: Store, header: str | None) -> None:
    bootstrap.ensure_admin(store, uid_base=None)
    with store.read() as sql, pytest.raises(Unauthenticated):
        access_control.authenticate(sql, authorization=header, environment=None, now=0.0)


@pytest.mark.slow  # ten thousand keys
async def test_ten_thousand_keys_are_listed_bounded_fed_and_found(controller: Controller) -> None:
    first = await made(controller, app="search", quotas={"concurrent": 3})
    table, clock = tables.api_keys, controller.clock
    with controller.context.store.write() as write:
        (row,) = write.sql.execute(sa.select(table).where(table.c.id == first["id"])).mappings()
        copies = [
            {**row, "id": f"k-{n:012x}", "hash": access_control.hash_key(f"pl_{n}")}
            for n in range(10_000)
        ]
        write.sql.execute(sa.insert(table), copies)
    began = time.process_time()
    assert len((await controller.http.get("/v1/keys")).json()["keys"]) == 10_002
    assert len((await controller.http.get("/v1/quotas")).json()["keys"]) == 10_001
    with controller.context.store.read() as sql:
        for n in range(0, 10_000, 10):
            assert (
                access_control.authenticate(
                    sql, authorization=f"Bearer pl_{n}", environment=None, now=clock.now
                ).key
                == f"k-{n:012x}"
            )
        for _ in range(1000):
            with pytest.raises(Unauthenticated):
                access_control.authenticate(
                    sql, authorization="Bearer pl_none", environment=None, now=clock.now
                )
    assert time.process_time() - began < 30, (
        "thousands of looks take a second; a scan of all keys for each would take minutes"
    )


async def own_id(controller: Controller) -> str:
    return str((await controller.http.get("/v1/whoami")).json()["key"])


async def test_the_last_admin_key_of_a_tenant_is_not_revoked_by_mistake(
    controller: Controller,
) -> None:
    await controller.new_key(scope="deploy")
    await controller.new_key(scope="admin", environment="main")  # it cannot do what this one can
    last = await own_id(controller)
    answer = await controller.http.delete(f"/v1/keys/{last}")
    assert answer.status_code == 409
    assert "last admin key" in answer.text
    assert "--force" in answer.text
    assert (await controller.http.get("/v1/whoami")).status_code == 200

    assert (
        await controller.http.delete(f"/v1/keys/{last}", params={"force": "true"})
    ).status_code == 204
    assert (await controller.http.get("/v1/whoami")).status_code == 401


async def test_an_admin_key_goes_without_force_where_another_is_in_force(
    controller: Controller,
) -> None:
    await controller.new_key(scope="admin")
    assert (await controller.http.delete(f"/v1/keys/{await own_id(controller)}")).status_code == 204


@pytest.mark.parametrize("how", ["expired", "revoked", "of another tenant"])
async def test_an_admin_key_that_is_not_in_force_here_does_not_count(
    controller: Controller, how: str
) -> None:
    last = await own_id(controller)
    if how == "of another tenant":
        await controller.other_tenant()
    else:
        made = (
            await controller.http.post("/v1/keys", json={"scope": "admin", "expires_in_s": 60})
        ).json()
        if how == "expired":
            controller.clock.now += 61
        else:
            assert (await controller.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
    assert (await controller.http.delete(f"/v1/keys/{last}")).status_code == 409


async def test_the_last_admin_key_does_not_end_by_a_change_either(controller: Controller) -> None:
    first = await own_id(controller)

    async def end(key: str, in_s: float | None, **params: str) -> int:
        return (
            await controller.http.patch(
                f"/v1/keys/{key}", json={"expires_in_s": in_s}, params=params
            )
        ).status_code

    answer = await controller.http.patch(f"/v1/keys/{first}", json={"expires_in_s": 1})
    assert "last admin key" in refused(answer, 409)
    assert (await controller.http.get(f"/v1/keys/{first}")).json()["expires_at"] is None
    assert (
        await controller.http.patch(f"/v1/keys/{first}", json={"quotas": {"requests_per_s": 5}})
    ).status_code == 200
    second = (await controller.http.post("/v1/keys", json={"scope": "admin"})).json()["id"]
    assert await end(second, 60) == 200, "the first stays"
    assert await end(first, 30) == 409, "the second ends soon"
    assert await end(second, 90) == 200, "later is no end"
    assert await end(first, 30, force="true") == 200
    assert await end(second, 40) == 409, "of those that end it is the last"
    assert await end(first, 20) == 200
    assert await end(second, None) == 200


async def test_the_last_admin_key_is_rotated_without_force(controller: Controller) -> None:
    assert (
        await controller.http.post(f"/v1/keys/{await own_id(controller)}:rotate", json={})
    ).status_code == 201


@pytest.mark.parametrize(
    "name,status",
    [("other/small", 403), ("small", 200), ("search/small", 200)],
)
@pytest.mark.parametrize("kind", ["fallback", "variants"])
async def test_a_key_of_an_app_declares_only_fallbacks_of_that_app(
    controller: Controller, name: str, status: int, kind: str
) -> None:
    bound = controller.client(await controller.new_key(scope="deploy", app="search"))
    rung = {"kind": "function", "function": name} if kind == "fallback" else {"function": name}
    body = {"functions": [{**spec(), kind: [rung]}, spec("small")]}

    answer = await bound.post("/v1/apps/search/deploy", json=body)

    assert answer.status_code == status, answer.text
    assert (await controller.http.post("/v1/apps/search/deploy", json=body)).status_code == 200


# -- customers -------------------------------------------------------------------------------------


async def test_a_key_of_a_customer_says_so_to_activators_and_keeps_it_when_it_is_rotated(
    controller: Controller,
) -> None:
    key = await made(controller, scope="invoke", customer="ana")
    assert key["customer"] == "ana"
    rotated = await controller.http.post(f"/v1/keys/{key['id']}:rotate", json={"grace_s": 60})
    assert rotated.json()["customer"] == "ana"
    known = await fed(controller)
    assert [known[one]["customer"] for one in (key["id"], rotated.json()["id"])] == ["ana", "ana"]
    assert (await made(controller))["customer"] is None


@pytest.mark.parametrize("scope", ["deploy", "admin", "read-billing"])
async def test_a_key_that_reaches_all_customers_is_bound_to_none(
    controller: Controller, scope: str
) -> None:
    body = {"scope": scope, "customer": "ana"}
    assert "use scope 'invoke'" in refused(await controller.http.post("/v1/keys", json=body), 400)


@pytest.mark.parametrize("customer", ["", "a b", "-a", "a/b", "a" * 65, *INJECTIONS])
async def test_a_key_is_bound_to_a_valid_customer_only(
    controller: Controller, customer: str
) -> None:
    refused(await controller.http.post("/v1/keys", json={"customer": customer}), 400)
