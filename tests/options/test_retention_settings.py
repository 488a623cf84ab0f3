"""Proofs of the retentions in section `controller` of platform.yaml."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.billing import billing_jobs
from pilotlight.controller.database import tables
from pilotlight.controller.retention import history, images, revisions
from pilotlight.controller.settings import ControllerSettings
from pilotlight.controller.usage_archive.archiver import UsageArchiver
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec, usage
from tests.options.contract import proves
from tests.options.test_controller_settings import configure

DAY_S = 86_400.0


def count(controller: Controller, table: sa.Table) -> int:
    """Rows of a table."""
    with controller.context.store.read() as sql:
        return int(sql.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


@proves("ControllerSettings.history_days")
async def test_latencies_are_deleted_after_so_many_days(fleet: str, controller: Controller) -> None:
    hour = int((controller.clock.now - 20 * DAY_S) // 3600)
    names = ("tenant", "environment", "function_id", "start_kind", "clock")
    row = {**dict.fromkeys(names, "x"), "hour": hour, "bucket": 1, "calls": 1}
    with controller.context.store.write() as write:
        write.sql.execute(sa.insert(tables.latency_hours).values(**row))
    for days, left in ((None, 1), (21, 1), (19, 0)):
        configure(controller, history_days=days)
        context = controller.context
        await history.delete_history(
            context.store, now=context.clock(), days=context.config.settings.history_days
        )
        assert count(controller, tables.latency_hours) == left


@proves("ControllerSettings.revision_days")
async def test_revisions_are_pruned_after_so_many_days(fleet: str, controller: Controller) -> None:
    for number in range(revisions.KEPT + 2):
        body = {"functions": [spec(description=f"number {number}")]}
        answer = await controller.http.post("/v1/apps/search/deploy", json=body)
        assert answer.status_code == 200, answer.text
    controller.clock.now += 20 * DAY_S
    for days, pruned in ((None, 0), (21, 0), (19, 2)):
        configure(controller, revision_days=days)
        assert await revisions.prune_revisions(controller.context) == pruned


@proves("ControllerSettings.image_days")
async def test_images_are_deleted_after_so_many_days(fleet: str, controller: Controller) -> None:
    row = {"tenant": await controller.tenant(), "digest": "ab" * 32, "spec": '{"steps":[]}'}
    with controller.context.store.write() as write:
        write.sql.execute(sa.insert(tables.images).values(**row, created_at=write.now))
    controller.clock.now += 20 * DAY_S
    for days, deleted in ((None, 0), (21, 0), (19, 1)):
        configure(controller, image_days=days)
        assert await images.delete_images(controller.context) == deleted


@proves("ControllerSettings.usage_days")
async def test_usage_is_archived_after_so_many_days(fleet: str, controller: Controller) -> None:
    tenant = await controller.tenant()
    record = usage(tenant=tenant, started_at=controller.clock.now - 200 * DAY_S)
    answer = await controller.internal("/internal/usage", {"records": [record.to_json()]})
    assert answer.status_code == 200, answer.text
    billing_jobs.issue_due_invoices(controller.context.store, after_days=3)
    for days, left in ((None, 1), (201, 1), (199, 0)):
        configure(controller, usage_days=days)
        context = controller.context
        archiver = UsageArchiver(
            context.store,
            context.files.objects,
            days=context.config.settings.usage_days,
            clock=context.clock,
        )
        while await archiver.archive_next():
            pass
        assert count(controller, tables.usage) == left


@pytest.mark.parametrize(
    "name, low",
    [("history_days", 7), ("revision_days", 7), ("image_days", 7), ("usage_days", 90)],
)
def test_a_retention_has_bounds(name: str, low: int) -> None:
    def settings(value: int | None) -> ControllerSettings:
        values: dict[str, Any] = {name: value}
        return ControllerSettings(**values)

    for value in (low - 1, 36_501):
        with pytest.raises(ValueError, match=f"{name} = {value}: must be between {low} and 36500"):
            settings(value)
    assert getattr(settings(None), name) is None
