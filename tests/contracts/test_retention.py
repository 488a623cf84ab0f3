"""What has no end of its own is deleted when it is old: history, revisions without traffic, images
without revisions."""

from __future__ import annotations

import hashlib
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.retention import history, images, revisions
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock, spec

DAY_S = 86_400.0


async def deploy(controller: Controller, count: int, **changes: Any) -> None:
    for number in range(count):
        body = {"functions": [spec(description=f"number {number}", **changes)]}
        answer = await controller.http.post("/v1/apps/search/deploy", json=body)
        assert answer.status_code == 200, answer.text


def revisions_of(controller: Controller) -> list[tuple[int, bool]]:
    """Ordinals, and whether they are pruned."""
    table = tables.revisions
    with controller.context.store.read() as sql:
        rows = sql.execute(sa.select(table.c.ordinal, table.c.pruned_at).order_by(table.c.ordinal))
        return [(row.ordinal, row.pruned_at is not None) for row in rows]


async def test_old_revisions_without_traffic_are_pruned_and_then_deleted(
    controller: Controller,
) -> None:
    await deploy(controller, 13)
    url = "/v1/apps/search/functions/hello/aliases/good"
    assert (await controller.http.put(url, json={"revision": "v2"})).status_code == 200
    assert await revisions.prune_revisions(controller.context) == 0
    controller.clock.now += 181 * DAY_S
    assert await revisions.prune_revisions(controller.context) == 2
    assert [number for number, is_pruned in revisions_of(controller) if is_pruned] == [1, 3]
    asked = [args["revision"] for what, args in controller.agent.asked if args.get("revision")]
    assert len(asked) == 2
    controller.clock.now += 181 * DAY_S
    await revisions.prune_revisions(controller.context)
    assert [number for number, _ in revisions_of(controller)] == [2, *range(4, 14)]
    body = (await controller.http.get("/v1/apps/search")).json()
    assert body["functions"][0]["traffic"][0]["weight"] == 100


async def test_images_that_no_revision_uses_are_deleted(controller: Controller) -> None:
    used, unused = (hashlib.sha256(name).hexdigest() for name in (b"used", b"unused"))
    tenant = await controller.tenant()
    row = {"tenant": tenant, "spec": '{"python":"3.11","steps":[]}', "created_at": 1.8e9}
    with controller.context.store.write() as write:
        for digest in (used, unused):
            write.sql.execute(sa.insert(tables.images).values(**row, digest=digest, size_bytes=5))
    await deploy(controller, 1, image=used)
    assert await images.delete_images(controller.context) == 0
    controller.clock.now += 91 * DAY_S
    assert await images.delete_images(controller.context) == 1
    found = (await controller.http.get("/v1/images")).json()["images"]
    assert [one["digest"] for one in found] == [used]
    asked = [args["digest"] for what, args in controller.agent.asked if what == "delete_image"]
    assert asked == [unused]


def _row(table: sa.Table, **values: Any) -> sa.Insert:
    """An insert with 1, "" or no value in the other columns."""
    row = {
        column.name: None
        if column.nullable
        else 1
        if isinstance(column.type, sa.BigInteger | sa.Double)
        else "{}"
        for column in table.columns
    }
    return sa.insert(table).values(**{**row, **values})


async def test_history_goes_when_it_is_old_and_what_runs_stays(
    store: Store, clock: ManualClock
) -> None:
    old, young = clock.now - 401 * DAY_S, clock.now - 399 * DAY_S
    with store.write() as write:
        write.sql.execute(_row(tables.tenants, id="t-1", name="acme", uid=None))
        write.sql.execute(_row(tables.environments, tenant="t-1", name="main"))
        app = {"tenant": "t-1", "environment": "main"}
        write.sql.execute(_row(tables.apps, **app, name="a", stopped=False))
        write.sql.execute(
            _row(tables.functions, **app, app="a", id="f-1", name="f", snapshots=True)
        )
        for name, at in (("old", old), ("young", young), ("open", None)):
            of_it = {"id": name, "tenant": "t-1", "function": "f-1"}
            write.sql.execute(_row(tables.rollouts, **of_it, finished_at=at))
            write.sql.execute(_row(tables.rollout_decisions, rollout=name))
            write.sql.execute(_row(tables.slo_alerts, **of_it, ended_at=at))
            write.sql.execute(_row(tables.experiments, **of_it, name=name, ended_at=at))
            write.sql.execute(_row(tables.exposures, experiment=name))
            write.sql.execute(_row(tables.exposure_latency, experiment=name))
            write.sql.execute(
                _row(
                    tables.feedback, tenant="t-1", call=name, function_id="f-1", at=at or clock.now
                )
            )
            hour = int((at or clock.now) // 3600)
            write.sql.execute(_row(tables.latency_hours, tenant="t-1", hour=hour))
    await history.delete_history(store, now=clock.now, days=None)
    await history.delete_history(store, now=clock.now, days=400)
    left = {}
    with store.read() as sql:
        for table in (
            tables.rollouts,
            tables.rollout_decisions,
            tables.slo_alerts,
            tables.experiments,
            tables.exposures,
            tables.exposure_latency,
            tables.feedback,
            tables.latency_hours,
        ):
            left[table.name] = sql.execute(
                sa.select(sa.func.count()).select_from(table)
            ).scalar_one()
    assert left == {**dict.fromkeys(left, 2), "experiments": 3}
