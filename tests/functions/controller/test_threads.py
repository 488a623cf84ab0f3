"""Threads of the controller: one tenant's slow requests leave some to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.server.tenant_threads import OF_TENANT, TenantThreads
from tests.functions.controller.conftest import Controller


class SlowQueries:
    """Queries that name a table wait in their threads until `go` is set. `begun` counts them;
    `enough` is set at OF_TENANT."""

    def __init__(self, table: str) -> None:
        self.go = threading.Event()
        self.begun = 0
        self.enough = asyncio.Event()
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()

    def __call__(self, _sql: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if f"FROM {self._table} " not in statement.replace("\n", " "):
            return
        with self._lock:
            self.begun += 1
            if self.begun == OF_TENANT:
                self._loop.call_soon_threadsafe(self.enough.set)
        self.go.wait(50)


@contextmanager
def slow(controller: Controller, table: str) -> Iterator[SlowQueries]:
    queries = SlowQueries(table)
    sa.event.listen(controller.context.store.engine, "before_cursor_execute", queries)
    try:
        yield queries
    finally:
        queries.go.set()


@pytest.mark.parametrize(
    "path, table",
    [
        pytest.param("/v1/calls?limit=1000", "calls", id="a route in a thread"),
        pytest.param("/v1/weights", "weights", id="a route on the loop"),
    ],
)
async def test_one_tenants_slow_requests_leave_threads_to_others(
    controller: Controller, path: str, table: str
) -> None:
    async with controller.client(await controller.other_tenant()) as acme:
        with slow(controller, table) as queries:
            asked = [asyncio.create_task(acme.get(path)) for _ in range(60)]
            async with asyncio.timeout(30):
                await queries.enough.wait()
                assert (await controller.http.get("/v1/whoami")).status_code == 200
            assert queries.begun == OF_TENANT
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}


async def test_a_share_is_given_back_whatever_becomes_of_the_work() -> None:
    threads = TenantThreads(of_tenant=1)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.run("t-1", fail)
    async with threads.share("t-1"):
        waiting = asyncio.create_task(threads.run("t-1", lambda: 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        assert await threads.run("t-2", lambda: 2) == 2
    assert await threads.run("t-1", lambda: 3) == 3
    await asyncio.gather(waiting, return_exceptions=True)
