"""The real process, killed after it posted an alert and before it could note that."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from tests.fakes.hooks import OK, Receiver
from tests.functions.controller.parts import ManualClock, usage
from tests.functions.controller.test_faults import Process

PATIENCE_S = 60.0


@pytest.fixture(name="process")
def _process(short_tmp: Path) -> Iterator[Process]:
    started = Process(short_tmp, ", webhooks: any")
    yield started
    started.close()


@pytest.mark.timeout(180)  # two starts of a process, on a machine that may be busy
@pytest.mark.slow  # starts a controller twice
async def test_an_alert_is_delivered_again_under_the_same_id(process: Process) -> None:
    async with Receiver(reply=lambda n: None if n == 1 else OK).serve() as receiver:
        await asyncio.to_thread(process.start)
        secret = await asyncio.to_thread(_spend, process, receiver.url)
        async with asyncio.timeout(PATIENCE_S):
            await receiver.arrived.wait()
        await asyncio.to_thread(process.end, signal.SIGKILL)
        _let_the_claim_run_out(process.home)
        receiver.arrived.clear()
        await asyncio.to_thread(process.start)
        async with asyncio.timeout(PATIENCE_S):
            await receiver.arrived.wait()
    first, second = receiver.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    assert first.is_signed_with(secret)
    assert second.is_signed_with(secret)


def _spend(process: Process, url: str) -> str:
    made = process.http.put(
        "/v1/budgets", json={"amount": "1", "alerts": [50], "webhook": url}
    ).json()
    now, tenant = made["created_at"], process.http.get("/v1/whoami").json()["tenant"]["id"]
    headers = {HEADER_PLATFORM_TOKEN: PlatformKey.load(process.home / "platform.key").token}
    records = [usage(tenant=tenant, cost="0.500000000000", started_at=now).to_json()]
    assert (
        process.http.post(
            "/internal/usage", json={"activator": "a", "records": records}, headers=headers
        ).status_code
        == 200
    )
    return str(made["webhook_secret"])


def _let_the_claim_run_out(home: Path) -> None:
    store = Store(f"sqlite:///{home / 'controller/controller.db'}", clock=ManualClock())
    with store.write() as write:
        row = write.sql.execute(sa.select(tables.budget_alerts)).one()
        assert (row.delivered_at, row.attempts) == (None, 1)
        write.sql.execute(sa.update(tables.budget_alerts).values(next_attempt_at=0.0))
    store.close()
