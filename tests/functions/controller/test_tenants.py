"""Tenants: plans and overrides, suspended and resumed, and what activators are told of them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.tenant_plan import TenantPlan
from pilotlight.controller.server import bootstrap
from pilotlight.core.settings import SettingsInvalid
from pilotlight.errors import InvalidInput
from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, instance, refused, spec, usage


async def told(controller: Controller, name: str = "acme") -> dict[str, Any]:
    """What activators know of a tenant."""
    page = await controller.feed()
    changes: Any = page["changes"]
    return dict(
        next(c["value"] for c in changes if c["kind"] == "tenant" and c["value"]["name"] == name)
    )


async def change(controller: Controller, **body: Any) -> httpx.Response:
    return await controller.http.patch("/v1/tenants/acme", json=body)


async def test_the_first_tenant_is_not_bounded_before_anybody_said_so(
    controller: Controller,
) -> None:
    own = (await controller.http.get("/v1/tenant")).json()
    assert (own["name"], own["plan"], own["suspended"]) == ("default", "enterprise", False)
    assert (await told(controller, "default"))["plan"]["requests_per_s"] is None


async def test_plans_are_the_platforms_and_one_is_the_default(controller: Controller) -> None:
    body = (await controller.http.get("/v1/plans")).json()
    assert ([p["name"] for p in body["plans"]], body["default"]) == (
        ["free", "standard", "enterprise"],
        "standard",
    )
    assert body["plans"][0]["requests_per_s"] == 5


async def test_a_tenant_has_a_plan_with_overrides_and_activators_are_told_what_that_means(
    controller: Controller,
) -> None:
    made = (
        await controller.http.post(
            "/v1/tenants",
            json={"name": "acme", "plan": "free", "overrides": {"burst": None, "gpus": 2}},
        )
    ).json()
    assert (made["plan"], made["overrides"], made["terms"]["burst"]) == (
        "free",
        {"burst": None, "gpus": 2},
        None,
    )
    known = await told(controller)
    assert known["plan"] == {**BUILT_IN_PLANS["free"].to_json(), "burst": None, "gpus": 2}
    assert known["suspended"] is False
    changed = (
        await change(controller, plan="standard", overrides={"concurrent": 7}, clear=["burst"])
    ).json()
    assert (changed["plan"], changed["overrides"]) == ("standard", {"gpus": 2, "concurrent": 7})
    assert (await told(controller))["plan"]["concurrent"] == 7
    assert (await change(controller, clear="all")).json()["overrides"] == {}


async def test_a_tenant_without_a_plan_of_its_own_gets_the_default_one(
    controller: Controller,
) -> None:
    await controller.other_tenant()
    assert (await controller.http.get("/v1/tenants/acme")).json()["plan"] == "standard"


@pytest.mark.parametrize(
    "overrides, said",
    [
        ({"requests_per_s": -1}, "requests_per_s = -1: must be between 0.001 and 1e+06"),
        ({"concurrent": 10**12}, "concurrent = 1000000000000: must be between 0 and 1e+06"),
        ({"concurrent": 1.5}, "concurrent = 1.5: must be an integer"),
        ({"gpus": "many"}, "gpus = 'many': must be between 0 and 1e+06"),
        ({"instances": True}, "instances = True: must be between 0 and 1e+06"),
        ({"weight": 0}, "weight = 0: must be between 1 and 1000"),
        ({"weight": None}, "weight"),
        ({"priority": "royal"}, "priority = 'royal': must be one of realtime, standard, batch"),
        ({"requests_per_s": None, "burst": 5}, "burst = 5: requires requests_per_s"),
        ({"wheels": 4}, "wheels: unknown key; known: "),
        ({"name": "other"}, "name: unknown key"),
        ({"prices": "2031"}, "prices = '2031': no such price list; available: "),
        ({"prices": 5}, "prices = 5: must be the version"),
    ],
)
async def test_an_override_that_makes_no_sense_is_refused_by_key_value_and_bound(
    controller: Controller, overrides: dict[str, Any], said: str
) -> None:
    await controller.other_tenant()
    assert said in refused(await change(controller, overrides=overrides), 400)
    assert (await controller.http.get("/v1/tenants/acme")).json()["overrides"] == {}
    assert said in refused(
        await controller.http.post("/v1/tenants", json={"name": "b", "overrides": overrides}), 400
    )
    refused(await controller.http.get("/v1/tenants/b"), 404)


async def test_numbers_that_are_none_are_refused(controller: Controller) -> None:
    await controller.other_tenant()
    for text in (
        '{"overrides": {"requests_per_s": NaN}}',
        '{"overrides": {"requests_per_s": Infinity}}',
    ):
        answer = await controller.http.patch(
            "/v1/tenants/acme", content=text, headers={"content-type": "application/json"}
        )
        assert "requests_per_s" in refused(answer, 400)


@pytest.mark.parametrize(
    "body, said",
    [
        ({"plan": "gold"}, "available: free, standard"),
        ({"clear": ["gpus"]}, "not overridden"),
        ({"x": 1}, "x"),
    ],
)
async def test_a_change_that_means_nothing_is_refused(
    controller: Controller, body: dict[str, Any], said: str
) -> None:
    await controller.other_tenant()
    assert said in refused(await change(controller, **body), 400)


async def test_a_suspended_tenant_may_look_and_change_nothing(controller: Controller) -> None:
    own = controller.client(await controller.other_tenant())
    assert (await change(controller, suspended=True)).json()["suspended"] is True
    assert (await told(controller))["suspended"] is True
    assert (await own.get("/v1/apps")).status_code == 200
    assert (await own.get("/v1/whoami")).json()["suspended"] is True
    for answer in (
        await own.post("/v1/keys", json={}),
        await own.delete("/v1/apps/a"),
        await own.put("/v1/secrets/a", json={"value": "x"}),
    ):
        assert "'acme' is suspended" in refused(answer, 403)
    assert (await change(controller, overrides={"gpus": 1})).json()["suspended"] is True, (
        "other changes leave it so"
    )
    assert (await change(controller, suspended=False)).json()["suspended"] is False
    assert (await own.post("/v1/keys", json={})).status_code == 201


async def test_the_tenant_that_runs_the_platform_cannot_be_suspended(
    controller: Controller,
) -> None:
    assert "no other tenant could resume it" in refused(
        await controller.http.patch("/v1/tenants/default", json={"suspended": True}), 409
    )


async def test_another_tenants_terms_are_nobodys_but_the_operators(controller: Controller) -> None:
    own = controller.client(await controller.other_tenant())
    for method, path, body in (
        ("GET", "/v1/tenants", None),
        ("GET", "/v1/tenants/default", None),
        ("GET", "/v1/tenants/none", None),
        ("PATCH", "/v1/tenants/acme", {"plan": "enterprise"}),
        ("PATCH", "/v1/tenants/default", {"suspended": True}),
        ("POST", "/v1/tenants", {"name": "b"}),
        ("GET", "/v1/audit?tenant=default", None),
        ("GET", "/v1/audit?tenant=*", None),
    ):
        refused(await own.request(method, path, json=body), 403)
    refused(await controller.http.get("/v1/tenants/none"), 404)


async def test_the_operator_helps_out_a_tenant_that_lost_its_keys_and_the_tenant_can_see_it(
    controller: Controller,
) -> None:
    lost = controller.client(await controller.other_tenant())
    body = {"scope": "deploy", "app": "search", "quotas": {"concurrent": 1}}
    key = (await controller.http.post("/v1/tenants/acme/keys", json=body)).json()
    found = (await controller.client(key["secret"]).get("/v1/whoami")).json()
    assert (found["tenant"]["name"], found["scope"], found["bound_app"]) == (
        "acme",
        "deploy",
        "search",
    )
    entry = (await lost.get("/v1/audit", params={"limit": 1})).json()["entries"][0]
    assert (entry["subject"], entry["actor"]) == (
        key["id"],
        (await controller.http.get("/v1/whoami")).json()["key"],
    )
    refused(await lost.post("/v1/tenants/default/keys", json={"scope": "admin"}), 403)
    refused(await lost.post("/v1/tenants/acme/keys", json={"scope": "admin"}), 403)
    refused(await controller.http.post("/v1/tenants/nobody/keys", json={}), 404)
    refused(
        await controller.http.post("/v1/tenants/acme/keys", json={"environment": "nowhere"}), 404
    )


async def test_an_operators_key_that_is_bound_does_not_reach_tenants(
    controller: Controller,
) -> None:
    bound = controller.client(await controller.new_key(scope="admin", app="search"))
    deploys = controller.client(await controller.new_key(scope="deploy"))
    for client in (bound, deploys):
        refused(await client.get("/v1/tenants"), 403)
        refused(await client.patch("/v1/tenants/default", json={"plan": "free"}), 403)


async def test_a_gpu_without_a_price_is_refused_where_it_is_asked_for(
    controller: Controller,
) -> None:
    """No call of such a function could be billed: the activators let none through. "any" is priced
    by what is granted."""
    for resources in ({"gpu": ["K80"], "gpu_count": 1}, {"gpu": ["H100", "K80"], "gpu_count": 1}):
        answer = await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [spec(resources=resources)]}
        )
        detail = refused(answer, 400)
        assert "gpu = 'K80' has no price" in detail
        assert "add prices.gpu_s.K80 to platform.yaml" in detail
        assert "H100" in detail
    assert (await controller.http.get("/v1/apps/search")).status_code == 404


async def test_a_tenant_sees_what_it_uses(controller: Controller) -> None:
    tenant = await controller.tenant()
    resources = {"gpu": ["H100"], "gpu_count": 2}
    deployed = (
        await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [spec(resources=resources)]}
        )
    ).json()
    function = (await controller.http.get("/v1/apps/search")).json()["functions"][0]["id"]
    revision = f"{function}@{deployed['functions'][0]['revision']}"
    controller.agent.instances = [
        instance(tenant, revision=revision),
        instance(tenant, name="i-2"),
        instance("t-other", name="i-3"),
    ]
    recent = [
        usage(
            f"req-{n}/1", tenant=tenant, started_at=controller.clock.now - n, tokens_in=7
        ).to_json()
        for n in range(90)
    ]
    await controller.internal("/internal/usage", {"activator": "a", "records": recent})
    assert (await controller.http.get("/v1/tenant")).json()["use"] == {
        "instances": 2,
        "gpus": 2,
        "requests_per_s": 1.0,
        "tokens_per_min": 420,
        "stored_bytes": len(BUNDLE),
        "pinned_bytes": 0,
        "builds_at_once": 0,
        "functions": 1,
        "result_bytes": 0,
    }


@pytest.mark.parametrize(
    "name",
    [
        "x'; DROP TABLE tenants;--",
        "<script>alert(1)</script>",
        "",
        "a" * 64,
        "a/b",
        "ünï",
        "a\0b",
        "-a",
        "a b",
    ],
)
async def test_a_name_is_a_name(controller: Controller, name: str) -> None:
    assert "is not valid" in refused(
        await controller.http.post("/v1/tenants", json={"name": name}), 400
    )
    assert len((await controller.http.get("/v1/tenants")).json()["tenants"]) == 1


async def test_what_a_deploy_shares_must_name_tenants_that_exist(controller: Controller) -> None:
    shared = spec(access=["acme"])
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec("a"), shared]}
    )
    assert refused(answer, 400) == "function 'hello': access: there is no tenant 'acme'"
    await controller.other_tenant()
    for access in (["acme"], ["*"], ["*", "acme", "default"]):
        assert (
            await controller.http.post(
                "/v1/apps/search/deploy", json={"functions": [spec(access=access)]}
            )
        ).status_code == 200


# -- platform.yaml changed -------------------------------------------------------------------------


def _tenant(store: Store, plan: str, plans: dict[str, Plan], **overrides: Any) -> None:
    with store.write() as write:
        tenants.create(
            write,
            name="acme",
            uid_base=None,
            actor="k-1",
            terms=TenantPlan(plan=plan, overrides=overrides, plans=plans),
        )


def test_plans_that_changed_reach_activators_at_the_next_start_and_others_are_not_woken(
    store: Store,
) -> None:
    bootstrap.ensure_admin(store, uid_base=None)
    _tenant(store, "gold", {"gold": Plan(name="gold", concurrent=5)}, gpus=1)

    def head() -> Any:
        with store.read() as sql:
            return sql.exec_driver_sql("SELECT head FROM feed_state").scalar_one()

    before = head()
    for plans, news in (
        ({"gold": Plan(name="gold", concurrent=5)}, 0),
        ({"gold": Plan(name="gold", concurrent=9)}, 1),
    ):
        with store.write() as write:
            tenants.publish_all(write, plans={**BUILT_IN_PLANS, **plans})
        assert head() - before == news
    with store.read() as sql:
        values = [
            json.loads(row.value)
            for row in sql.exec_driver_sql("SELECT value FROM feed WHERE kind = 'tenant'")
        ]
    assert {v["name"]: (v["plan"]["concurrent"], v["plan"]["gpus"]) for v in values} == {
        "acme": (9, 1),
        "default": (None, None),
    }


@pytest.mark.parametrize(
    "plans, said",
    [
        ({}, "plan 'gold' does not exist"),
        ({"gold": Plan(name="gold")}, "burst = 50: requires requests_per_s"),
    ],
)
def test_a_plan_that_is_gone_or_does_not_fit_any_more_stops_the_start_naming_the_tenant(
    store: Store, plans: dict[str, Plan], said: str
) -> None:
    _tenant(store, "gold", {"gold": Plan(name="gold", requests_per_s=5)}, burst=50)
    with (
        store.write() as write,
        pytest.raises(SettingsInvalid, match=f"plans: tenant 'acme': .*{said}"),
    ):
        tenants.publish_all(write, plans={**BUILT_IN_PLANS, **plans})


def test_terms_that_cannot_be_are_not_kept(store: Store) -> None:
    with pytest.raises(InvalidInput, match="burst = 50"):
        _tenant(store, "enterprise", dict(BUILT_IN_PLANS), burst=50)
    with store.read() as sql:
        assert sql.execute(sa.select(tables.tenants)).all() == []
