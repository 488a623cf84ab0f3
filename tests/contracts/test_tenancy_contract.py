"""Tenants, keys, quotas and the audit log in the database: the same promises on SQLite and on
PostgreSQL."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.identity import access_control, api_keys, quotas, tenants
from pilotlight.controller.identity.api_keys import KeyRestrictions
from pilotlight.controller.identity.tenant_plan import TenantPlan, tenant_plan_of
from pilotlight.controller.registry import launch_spec
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.server import error_responses
from pilotlight.errors import Conflict, NotFound, Unauthenticated
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.quotas import BUILT_IN_PLANS
from pilotlight.spec.record_json import from_json
from tests.functions.controller.parts import INJECTIONS, ManualClock, at_once, refused, spec


@pytest.fixture
def tenant(store: Store) -> str:
    with store.write() as write:
        return tenants.create(write, name="default", uid_base=20_000, actor="platform").id


def fed(store: Store, kind: str) -> dict[str, Any]:
    """What activators know, by key."""
    with store.read() as sql:
        rows = sql.execute(
            sa.select(tables.feed.c.key, tables.feed.c.value).where(tables.feed.c.kind == kind)
        )
        return {row.key: None if row.value is None else json.loads(row.value) for row in rows}


def make(store: Store, tenant: str, **arguments: Any) -> api_keys.NewKey:
    with store.write() as write:
        return api_keys.create(write, tenant=tenant, scope=Scope.DEPLOY, actor="k-1", **arguments)


def test_terms_are_kept_resolved_and_fed(store: Store, tenant: str) -> None:
    with store.write() as write:
        terms = tenant_plan_of(tenants.find(write.sql, name="default"), BUILT_IN_PLANS).changed(
            plan="free", overrides={"gpus": None}, clear=()
        )
        tenants.change(write, name="default", terms=terms, actor="k-1")
    with store.read() as sql:
        assert tenant_plan_of(tenants.get(sql, tenant=tenant), BUILT_IN_PLANS) == TenantPlan(
            plan="free", overrides={"gpus": None}
        )
        assert tenants.unknown_names(sql, {"default", "acme", *INJECTIONS}) == {"acme", *INJECTIONS}
        assert tenants.unknown_names(sql, set()) == set()
    told = fed(store, "tenant")[tenant]
    assert (told["plan"]["gpus"], told["plan"]["concurrent"], told["suspended"]) == (None, 8, False)


def test_a_suspension_keeps_when_it_began_until_it_ends(
    store: Store, clock: ManualClock, tenant: str
) -> None:
    with store.write() as write:
        tenants.create(write, name="acme", uid_base=20_000, actor="k-1")
    began = clock.now
    for suspended, since in ((True, began), (True, began), (None, began), (False, None)):
        with store.write() as write:
            terms = tenant_plan_of(tenants.find(write.sql, name="acme"), BUILT_IN_PLANS)
            tenants.change(write, name="acme", terms=terms, suspended=suspended, actor="k-1")
            assert tenants.find(write.sql, name="acme").suspended_at == since
        clock.now += 1


def test_a_key_is_found_by_its_hash_and_says_what_it_reaches(store: Store, tenant: str) -> None:
    made = make(
        store,
        tenant,
        reach=KeyRestrictions(
            environment="main", app="search", function="embed", quotas={"concurrent": 2}
        ),
    )
    with store.read() as sql:
        found = access_control.authenticate(
            sql, authorization=f"Bearer {made.secret}", environment=None, now=0.0
        )
        assert (found.bound_app, found.bound_function, found.environment) == (
            "search",
            "embed",
            "main",
        )
        assert [k["id"] for k in api_keys.listing(sql, tenant=tenant, bounded=True)] == [
            made.record.id
        ]
        for text in (*INJECTIONS, made.record.id, made.record.hash):
            with pytest.raises(Unauthenticated):
                access_control.authenticate(
                    sql, authorization=f"Bearer {text}", environment=None, now=0.0
                )
            with pytest.raises(NotFound):
                api_keys.find(sql, tenant=text, key_id=made.record.id)
    assert fed(store, "key")[made.record.id]["quotas"] == {"concurrent": 2}


def test_of_many_rotations_at_once_one_happens(
    store: Store, migrated_url: str, clock: ManualClock, tenant: str
) -> None:
    made = make(store, tenant)
    other = Store(migrated_url, clock=clock)  # as another process would

    def rotate(one: Store) -> str:
        try:
            with one.write() as write:
                api_keys.rotate(
                    write, tenant=tenant, key_id=made.record.id, grace_s=60, actor="k-1"
                )
            return "rotated"
        except Conflict:
            return "refused"

    outcomes = at_once(rotate, (store, other) * 3)
    other.close()
    assert Counter(outcomes) == {"rotated": 1, "refused": 5}
    assert fed(store, "key")[made.record.id]["expires_at"] == clock.now + 60


def test_quotas_of_functions_go_with_their_environment(store: Store, tenant: str) -> None:
    with store.write() as write:
        tenants.create_environment(write, tenant=tenant, name="staging", actor="k-1")
    where = quotas.FunctionRef(tenant=tenant, environment="staging", app="search", function="embed")
    for body in ({"requests_per_s": 2.5, "burst": 5}, {"concurrent": 1}):
        with store.write() as write:
            quotas.put(write, where, body, actor="k-1")
        with store.read() as sql:
            assert quotas.get(sql, where) == body
            assert [
                f["quotas"] for f in quotas.listing(sql, tenant=tenant, environment="staging")
            ] == [body]
        assert fed(store, "quota") == {where.key: body}
    with store.write() as write:
        tenants.delete_environment(write, tenant=tenant, name="staging", actor="k-1")
    assert fed(store, "quota") == {where.key: None}


def test_the_log_is_asked_by_everything(store: Store, clock: ManualClock) -> None:
    for n, (actor, action) in enumerate(
        (("k-1", "key.create"), ("k-2", "key.revoke"), ("k-2", "keyring.open"))
    ):
        clock.now += 1
        with audit_trail.with_client_address(f"203.0.113.{n}"), store.write() as write:
            audit_trail.record(
                write, tenant="t-1", actor=actor, action=action, subject="x", after={"n": n}
            )

    def ask(**wanted: Any) -> list[int]:
        with store.read() as sql:
            return [
                entry["after"]["n"]
                for entry in audit_trail.entries(
                    sql, audit_trail.AuditQuery(**{"tenant": None, **wanted}), limit=9
                )
            ]

    assert ask() == ask(tenant="t-1") == [2, 1, 0]
    assert ask(tenant="t-2") == ask(action="key") == ask(action="%") == ask(action="key_*") == []
    assert (ask(action="key.*"), ask(action="key*"), ask(actor="k-2")) == (
        [1, 0],
        [2, 1, 0],
        [2, 1],
    )
    assert (ask(since=clock.now), ask(until=clock.now), ask(address="203.0.113.1")) == (
        [2],
        [1, 0],
        [1],
    )
    with store.read() as sql:
        (last,) = audit_trail.entries(sql, audit_trail.AuditQuery(tenant=None), limit=1)
    assert ask(before_id=last["id"]) == [1, 0]


def test_accelerators_of_what_runs_are_counted_by_revision(store: Store, tenant: str) -> None:
    place = AppRef(tenant=tenant, uid=None, environment="main", app="search", actor="k-1")
    bodies = [
        spec("one", resources={"gpu": ["H100"], "gpu_count": 4}),
        spec("two", resources={"gpu": ["H100"]}),
        spec("none"),
    ]
    with store.write() as write:
        done = app_registry.deploy(
            write, place, specs=[from_json(FunctionSpec, body) for body in bodies]
        )
    names = [
        f"{launch_spec.function_id(tenant=tenant, environment='main', app='search', function=d.function)}@{d.revision}"
        for d in done.functions
    ]
    with store.read() as sql:
        assert [app_registry.gpus_of(sql, names)[name] for name in names] == [4, 1, 0]
        assert app_registry.gpus_of(sql, ["i-7", "f-1@v1"]) == app_registry.gpus_of(sql, []) == {}


async def test_a_text_that_the_database_cannot_keep_is_the_callers_mistake(store: Store) -> None:
    app = FastAPI()
    error_responses.install_error_handlers(app)

    @app.get("/ask")
    def ask(actor: str) -> int:
        with store.read() as sql:
            return len(
                audit_trail.entries(sql, audit_trail.AuditQuery(tenant=None, actor=actor), limit=1)
            )

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://c"
    ) as http:
        answer = await http.get("/ask", params={"actor": "a\0b"})
        assert (answer.status_code, answer.text) == (200, "0") or "NUL" in refused(answer, 400)
        assert (await http.get("/ask", params={"actor": "ab"})).text == "0", (
            "the connection is good for the next question"
        )
