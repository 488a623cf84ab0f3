"""A tenant is deleted with all that it has, and another one loses nothing: on SQLite and on
PostgreSQL, also when the controller is killed at every transaction."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.tenant_deletion import progress
from pilotlight.controller.tenant_deletion.deleter import IDLE_S, SETTLE_S, TenantDeleter
from pilotlight.controller.tenant_deletion.tenant_tables import DELETED, KEPT, OF_PLATFORM
from pilotlight.core.object_store import DirectoryStore, ObjectStore, blob_key
from pilotlight.core.object_store.errors import ObjectStoreUnavailable
from pilotlight.protocol import CallRecord
from snapshotter.errors import AgentUnavailable
from tests.fakes.killed_commits import Killed, killed_after
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import instance, refused, spec, usage

Row = tuple[Any, ...]
SHARED = hashlib.sha256(b"of both").hexdigest()
_MADE_BY_API = {"tenants", "audit", "prices", "tenant_deletions"}
_WITH_PARENTS = ("ended_sessions", "batch_lines")
_SHARED = ("blobs", "usage_archives")
"""Tables of the platform that rows of tenants refer to."""
_FUNCTIONS = {"function_id": "functions", "batch": "batches", "key": "api_keys"}
"""Columns that refer to another table without a foreign key."""


ON_SQLITE = pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
"""For what does not depend on the database."""


@pytest.fixture
def blobs(tmp_path: Path) -> ObjectStore:
    return AwayStore(tmp_path / "blobs")


def value_of(column: sa.Column[Any], tenant: str) -> Any:
    """A value for a row of a tenant: the same for the same column, and other tenants have others."""
    table = column.table.name
    for key in column.foreign_keys:
        return tenant if key.column.table.name == "tenants" else value_of(key.column, tenant)
    if column.name == "tenant":
        return tenant
    if column.name in _FUNCTIONS and table in (*_WITH_PARENTS, *_BY_FUNCTION):
        return value_of(tables.metadata.tables[_FUNCTIONS[column.name]].c.id, tenant)
    if column.name in ("digest", "manifest"):
        return hashlib.sha256(f"{tenant} {table}".encode()).hexdigest()
    if isinstance(column.type, sa.Boolean):
        return False
    if isinstance(column.type, sa.LargeBinary):
        return b"value"
    if isinstance(column.type, sa.Double):
        return 1_900_000_000.0 if column.name == "expires_at" else 1_800_000_000.0
    if isinstance(column.type, sa.BigInteger):
        return 1
    return f"{tenant}-{table}-{column.name}"


_BY_FUNCTION = tuple(
    name for name, table in tables.metadata.tables.items() if "function_id" in table.c
)


def fill(store: Store, tenant: str) -> None:
    """Give a tenant a row in every table."""
    with store.write() as write:
        for table in tables.metadata.sorted_tables:
            if table.name in {*OF_PLATFORM, *_MADE_BY_API} - {*_SHARED}:
                continue
            values = {column.name: value_of(column, tenant) for column in table.columns}
            write.sql.execute(write.insert(table).values(values).on_conflict_do_nothing())
        write.sql.execute(
            write.insert(tables.blobs)
            .values(digest=SHARED, size_bytes=7, created_at=1.0)
            .on_conflict_do_nothing()
        )
        write.sql.execute(
            sa.insert(tables.blob_owners).values(tenant=tenant, digest=SHARED, created_at=1.0)
        )


def rows_of(
    store: Store, tenant: str, names: Mapping[str, sa.ColumnElement[bool]]
) -> dict[str, list[Row]]:
    with store.read() as sql:
        return {
            name: sorted(
                tuple(row)
                for row in sql.execute(sa.select(tables.metadata.tables[name]).where(where))
            )
            for name, where in names.items()
        }


def deleted_of(store: Store, tenant: str) -> dict[str, list[Row]]:
    return rows_of(store, tenant, {rows.name: rows.where(tenant) for rows in DELETED})


def kept_of(store: Store, tenant: str) -> dict[str, list[Row]]:
    accounts = tables.credit_accounts.c
    of_tenant = sa.select(accounts.id).where(accounts.tenant == tenant)
    columns = {name: tables.metadata.tables[name].c for name in KEPT.keys() - _MADE_BY_API}
    return rows_of(
        store,
        tenant,
        {
            name: c.tenant == tenant if "tenant" in c else c.account.in_(of_tenant)
            for name, c in columns.items()
        },
    )


async def two_tenants(controller: Controller) -> tuple[str, str, str, str]:
    """Ids and keys of two tenants that have rows in every table."""
    found: list[str] = []
    for name in ("acme", "beta"):
        key = await controller.other_tenant(name)
        tenant = (await controller.client(key).get("/v1/whoami")).json()["tenant"]["id"]
        await asyncio.to_thread(fill, controller.context.store, tenant)
        await controller.context.files.objects.put(
            blob_key(value_of(tables.blobs.c.digest, tenant)), b"one"
        )
        found += [tenant, key]
    await controller.context.files.objects.put(blob_key(SHARED), b"of both")
    tenant, key, other, others_key = found
    return tenant, key, other, others_key


async def delete(controller: Controller, name: str = "acme") -> dict[str, Any]:
    answer = await controller.http.delete(f"/v1/tenants/{name}")
    assert answer.status_code == 202, answer.text
    return dict(answer.json()["deletion"])


async def shown(controller: Controller, name: str = "acme") -> dict[str, Any]:
    return dict((await controller.http.get(f"/v1/tenants/{name}")).json()["deletion"])


async def finish(controller: Controller) -> None:
    controller.clock.now += SETTLE_S
    assert await TenantDeleter(controller.context).round() == IDLE_S


def test_every_table_is_on_one_list() -> None:
    found = {rows.name for rows in DELETED}
    lists = [found, set(KEPT), set(OF_PLATFORM)]
    assert set().union(*lists) == {*tables.metadata.tables, "alembic_version"}
    assert sum(map(len, lists)) == len(set().union(*lists))
    with_tenants = {name for name, table in tables.metadata.tables.items() if "tenant" in table.c}
    assert with_tenants <= found | KEPT.keys()
    assert {
        table.name
        for table in tables.metadata.tables.values()
        for key in table.foreign_keys
        if key.column.table.name in found
    } <= found
    assert all((*KEPT.values(), *OF_PLATFORM.values()))


def test_every_table_of_the_database_is_known(store: Store) -> None:
    known = {rows.name for rows in DELETED} | KEPT.keys() | OF_PLATFORM.keys()
    assert set(sa.inspect(store.engine).get_table_names()) == known


async def test_a_tenant_is_deleted_and_another_loses_nothing(controller: Controller) -> None:
    tenant, key, other, others_key = await two_tenants(controller)
    store, objects = controller.context.store, controller.context.files.objects
    before, kept = deleted_of(store, other), kept_of(store, other) | kept_of(store, tenant)
    assert all(before.values()), [name for name, rows in before.items() if not rows]

    assert (await delete(controller))["state"] == "access"
    assert refused(await controller.client(key).get("/v1/whoami"), 401)
    await finish(controller)

    done = await shown(controller)
    assert (done["state"], done["waiting_for"]) == ("deleted", "")
    assert {name for name, count in done["counts"].items() if count} >= {
        rows.name for rows in DELETED if not rows.by_collector
    }
    assert not any(deleted_of(store, tenant).values())
    assert deleted_of(store, other) == before
    assert kept_of(store, other) | kept_of(store, tenant) == kept
    assert await objects.info(blob_key(value_of(tables.blobs.c.digest, tenant))) is None
    assert await objects.info(blob_key(value_of(tables.blobs.c.digest, other))) is not None
    assert await objects.info(blob_key(SHARED)) is not None
    assert (await controller.client(others_key).get("/v1/whoami")).status_code == 200
    asked = {
        (what, args.get("volume") or args.get("digest")) for what, args in controller.agent.asked
    }
    assert ("drop_volume", value_of(tables.volumes.c.id, tenant)) in asked
    assert ("delete_image", value_of(tables.images.c.digest, tenant)) in asked
    assert ("drop_volume", value_of(tables.volumes.c.id, other)) not in asked


@pytest.mark.slow  # some hundred rounds
async def test_a_controller_that_is_killed_at_every_transaction_deletes_all(
    controller: Controller,
) -> None:
    tenant, _, other, _ = await two_tenants(controller)
    store = controller.context.store
    others, kept = deleted_of(store, other), kept_of(store, tenant)
    await delete(controller)
    controller.clock.now += SETTLE_S
    kills, commits, state = 0, 1, await shown(controller)
    while state["state"] != "deleted":
        kills += 1
        assert kills < 300
        with killed_after(store, commits), contextlib.suppress(Killed):
            await TenantDeleter(controller.context).round()
        before, state = state, await shown(controller)
        # what is safe to repeat takes a transaction again
        commits = commits + 1 if state == before else 1
    assert kills > len(DELETED)
    assert not any(deleted_of(store, tenant).values())
    assert (deleted_of(store, other), kept_of(store, tenant)) == (others, kept)


@ON_SQLITE
async def test_its_name_is_not_given_again_and_it_cannot_be_changed(controller: Controller) -> None:
    key = await controller.other_tenant()
    await delete(controller)
    await finish(controller)
    assert "was deleted" in refused(
        await controller.http.post("/v1/tenants", json={"name": "acme"}), 409
    )
    for answer in (
        await controller.http.patch("/v1/tenants/acme", json={"suspended": False}),
        await controller.http.post("/v1/tenants/acme/keys", json={"scope": "admin"}),
    ):
        assert "is deleted" in refused(answer, 409)
    again = await delete(controller)
    assert again["state"] == "deleted"
    refused(await controller.client(key).get("/v1/apps"), 401)


@ON_SQLITE
async def test_only_the_platforms_administrators_delete_and_not_their_own_tenant(
    controller: Controller,
) -> None:
    own = controller.client(await controller.other_tenant())
    refused(await own.delete("/v1/tenants/acme"), 403)
    refused(await own.delete("/v1/tenants/default"), 403)
    assert "cannot be deleted" in refused(await controller.http.delete("/v1/tenants/default"), 409)
    refused(await controller.http.delete("/v1/tenants/nobody"), 404)


async def test_calls_that_end_later_are_billed_and_invoiced_and_nothing_else_of_them_stays(
    controller: Controller,
) -> None:
    key = await controller.other_tenant()
    tenant = (await controller.client(key).get("/v1/whoami")).json()["tenant"]["id"]
    await delete(controller)
    await finish(controller)
    record = usage(tenant=tenant, started_at=controller.clock.now - 40 * 86_400.0, cost="0.5")
    body = {"activator": "a", "records": [record.to_json()]}
    assert (await controller.internal("/internal/usage", body)).status_code == 200
    call = CallRecord(
        id="req-1",
        tenant=tenant,
        environment="main",
        app="search",
        function="embed",
        method="",
        state="FAILED",
        sequence=2,
        submitted_at=controller.clock.now,
        expires_at=controller.clock.now + 60,
    )
    assert (
        await controller.internal("/internal/calls", {"calls": [call.to_json()]})
    ).status_code == 200
    assert not deleted_of(controller.context.store, tenant)["calls"]

    made = await controller.http.post("/v1/billing/invoices", json={"month": "2026-12"})
    assert made.status_code == 200, made.text
    found = (await controller.http.get("/v1/billing/invoices", params={"tenant": "acme"})).json()
    assert [one["total"] for one in found["invoices"]] == ["0.500000000000"]


async def test_rows_that_come_later_are_deleted_too(controller: Controller) -> None:
    tenant, *_ = await two_tenants(controller)
    await delete(controller)
    await finish(controller)
    with controller.context.store.write() as write:
        table = tables.traces
        values = {column.name: value_of(column, tenant) for column in table.columns}
        write.sql.execute(sa.insert(table).values(values))
    deleter = TenantDeleter(controller.context)
    await deleter.restart_late()
    await deleter.round()
    assert not any(deleted_of(controller.context.store, tenant).values())
    assert (await shown(controller))["state"] == "deleted"


@ON_SQLITE
async def test_images_and_volumes_wait_for_the_instances_and_the_node(
    controller: Controller,
) -> None:
    tenant, *_ = await two_tenants(controller)
    controller.agent.instances = [instance(tenant)]
    await delete(controller)
    deleter = TenantDeleter(controller.context)
    controller.clock.now += SETTLE_S
    await deleter.round()
    waiting = await shown(controller)
    assert (waiting["state"], waiting["waiting_for"]) == ("instances", "1 instances are ending")
    left = deleted_of(controller.context.store, tenant)
    names = ("volumes", "images", "api_keys", "calls")
    assert [bool(left[name]) for name in names] == [True, True, False, False]
    controller.agent.instances = []
    assert await deleter.round() == IDLE_S
    assert (await shown(controller))["state"] == "deleted"


class AwayStore(DirectoryStore):
    """A blob store that deletes nothing while it is away."""

    is_away = False

    async def delete(self, key: str) -> None:
        if self.is_away:
            raise ObjectStoreUnavailable("the blob store does not answer")
        await super().delete(key)


@ON_SQLITE
async def test_it_waits_for_a_node_and_a_blob_store_that_are_away_and_says_so(
    controller: Controller,
) -> None:
    tenant, *_ = await two_tenants(controller)
    objects = controller.context.files.objects
    assert isinstance(objects, AwayStore)
    controller.agent.volume_failure = AgentUnavailable("the node agent does not answer")
    objects.is_away = True
    await delete(controller)
    controller.clock.now += SETTLE_S
    deleter = TenantDeleter(controller.context)

    async def waits() -> tuple[str, str]:
        assert await deleter.round() < IDLE_S
        found = await shown(controller)
        return found["state"], found["waiting_for"]

    assert await waits() == ("storage", "the node agent does not answer")
    assert deleted_of(controller.context.store, tenant)["volumes"]
    controller.agent.volume_failure = None
    state, reason = await waits()
    assert (state, "the blob store does not answer" in reason) == ("objects", True)
    objects.is_away = False
    assert await deleter.round() == IDLE_S
    assert not any(deleted_of(controller.context.store, tenant).values())


@ON_SQLITE
async def test_activators_are_told_at_once_and_routes_secrets_and_keys_leave_the_feed(
    controller: Controller,
) -> None:
    own = controller.client(await controller.other_tenant())
    tenant = (await own.get("/v1/whoami")).json()["tenant"]["id"]
    bundle = b"the source archive of an app"
    digest = hashlib.sha256(bundle).hexdigest()
    assert (await own.put(f"/v1/blobs/{digest}", content=bundle)).status_code == 200
    assert (
        await own.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    ).status_code == 200
    await own.put("/v1/secrets/token", json={"value": "hush"})
    await own.put("/v1/quotas/customers/ana", json={"concurrent": 3})
    await own.put("/v1/budgets", json={"amount": "5"})

    def known(page: dict[str, Any]) -> dict[tuple[str, str], Any]:
        return {
            (change["kind"], change["key"]): change["value"]
            for change in page["changes"]
            if change["value"] is not None
        }

    before = known(await controller.feed())
    assert len([key for key in before if tenant in key[1]]) == 4
    await delete(controller)
    told = known(await controller.feed())["tenant", tenant]
    assert (told["suspended"], told["deleted"]) == (True, True)
    await finish(controller)
    after = known(await controller.feed())
    of_platform = {key for key, value in before.items() if _is_of(value, tenant)}
    assert after.keys() == before.keys() - of_platform - {
        key for key in before if key[1].startswith(f"{tenant}/")
    } | {("tenant", tenant)}
    with controller.context.store.read() as sql:
        found = progress.find(sql, tenant=tenant)
    assert found is not None
    assert found.state == progress.DONE


def _is_of(value: Any, tenant: str) -> bool:
    return isinstance(value, dict) and value.get("tenant") == tenant
