"""The planner's loop: it fires at the time, hears of new schedules, and outlives a database that is
away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from pilotlight.controller.scheduling import scheduler, schedules
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec

PATIENCE_S = 30.0


@contextlib.asynccontextmanager
async def planning(controller: Controller) -> AsyncIterator[None]:
    task = asyncio.create_task(
        scheduler.run_scheduler(
            store=controller.context.store,
            notifier=controller.context.notifier,
            clock=controller.context.clock,
        )
    )
    try:
        yield
    finally:
        controller.context.notifier.close()
        async with asyncio.timeout(PATIENCE_S):
            await task


async def due(controller: Controller, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (
            len(
                (await controller.http.get("/v1/calls", params={"state": "QUEUED"})).json()["calls"]
            )
            < count
        ):
            controller.context.notifier.ring()
            await asyncio.sleep(0.01)


async def test_what_becomes_due_is_made_a_call_though_it_was_deployed_later(
    controller: Controller,
) -> None:
    async with planning(controller):
        await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [spec(schedules=[{"period_s": 10}])]}
        )
        controller.clock.now += 10
        await due(controller, 1)
        controller.clock.now += 10
        await due(controller, 2)


async def test_a_database_that_is_away_for_a_moment_costs_no_due_time(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(schedules=[{"period_s": 10}])]}
    )
    with controller.context.store.write() as write:
        write.sql.exec_driver_sql("ALTER TABLE due_calls RENAME TO away")
    controller.clock.now += 10
    async with planning(controller):
        async with asyncio.timeout(PATIENCE_S):
            while "schedules_failed" not in caplog.text:
                await asyncio.sleep(0.01)
        with controller.context.store.write() as write:
            write.sql.exec_driver_sql("ALTER TABLE away RENAME TO due_calls")
        await due(controller, 1)


async def test_a_wait_is_bounded_because_the_wall_clock_may_be_set(controller: Controller) -> None:
    await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(schedules=[{"cron": "0 0 1 1 *"}])]}
    )
    assert (
        scheduler._round(controller.context.store, controller.context.clock)
        == scheduler.LONGEST_WAIT_S
        < schedules.GRACE_S
    )
