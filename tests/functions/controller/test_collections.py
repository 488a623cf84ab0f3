"""Dicts and queues of the API: who may reach them, their bounds, and requests that wait."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx

from pilotlight.controller.billing import storage_charges
from pilotlight.controller.collections import collections
from pilotlight.controller.collections.collections import CollectionScope
from pilotlight.controller.collections.waiters import QueueWaiters
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.spec.collection import MAX_VALUE_BYTES, CollectionKind
from pilotlight.spec.pricing import PriceSettings
from tests.fakes.databases import owned_sqlite
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused

PLACE = ("t", "main", "q", "")


def encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


async def do(http: httpx.AsyncClient, path: str, op: str, **body: Any) -> httpx.Response:
    return await http.post(f"/v1/{path}", json={"op": op, "create": True, **body})


async def put(http: httpx.AsyncClient, path: str, *values: bytes, **body: Any) -> httpx.Response:
    return await do(http, path, "put", values=[encoded(value) for value in values], **body)


async def test_another_tenant_environment_or_scope_reaches_nothing(controller: Controller) -> None:
    http = controller.http
    entry = {"key": '"k"', "value": encoded(b"secret")}
    assert (await do(http, "dicts/mine", "put", entries=[entry])).json()["count"] == 1
    assert (await put(http, "queues/mine", b"secret")).status_code == 200
    stranger = controller.client(await controller.other_tenant())
    await http.post("/v1/environments", json={"name": "staging"})
    staging = await controller.new_key(scope="deploy", environment="staging")
    async with stranger, controller.client(staging) as elsewhere:
        for client in (stranger, elsewhere):
            assert (await client.get("/v1/dicts")).json() == {"dicts": []}
            assert (await client.get("/v1/queues")).json() == {"queues": []}
            assert (await client.delete("/v1/dicts/mine")).status_code == 404
            body = {"op": "get", "keys": ['"k"']}
            assert (await client.post("/v1/dicts/mine", json=body)).status_code == 404
            taken = await do(client, "queues/mine", "get")
            assert taken.json()["values"] == []
    weak = await controller.new_key(scope="invoke")
    of_app = await controller.new_key(scope="deploy", app="shop")
    async with controller.client(weak) as one, controller.client(of_app) as other:
        for client, reason in ((one, "scope"), (other, "bound to")):
            assert reason in refused(await do(client, "dicts/mine", "count"), 403)
            assert reason in refused(await client.delete("/v1/queues/mine"), 403)
            assert reason in refused(await client.get("/v1/queues"), 403)
    listed = (await http.get("/v1/dicts")).json()["dicts"]
    assert [(row["name"], row["entries"], row["size_bytes"]) for row in listed] == [("mine", 1, 9)]
    taken = await do(http, "queues/mine", "get")
    assert base64.b64decode(taken.json()["values"][0]) == b"secret"


async def test_what_is_too_large_or_unreadable_is_refused(controller: Controller) -> None:
    http = controller.http
    answer = await put(http, "queues/q", b"x" * (MAX_VALUE_BYTES + 1))
    assert f"at most {MAX_VALUE_BYTES}" in refused(answer, 413)
    assert (await put(http, "queues/q", b"x" * MAX_VALUE_BYTES)).status_code == 200
    taken = (await do(http, "queues/q", "get")).json()["values"]
    assert len(base64.b64decode(taken[0])) == MAX_VALUE_BYTES
    assert "larger than" in refused(await put(http, "queues/q", *[b"x" * 10**6] * 3), 413)
    assert "not base64" in refused(await do(http, "queues/q", "put", values=["?"]), 400)
    assert "at most 256" in refused(await do(http, "dicts/d", "pop", key="k" * 257), 400)
    assert "none of them zero" in refused(await do(http, "dicts/d", "pop", key="\0"), 400)
    half = await http.post(
        "/v1/queues/q",
        content=r'{"op": "count", "partition": "\ud800"}',
        headers={"content-type": "application/json"},
    )
    assert "Unicode" in refused(half, 400)
    assert (await do(http, "queues/q", "get", wait_s=31)).status_code == 400
    assert (await do(http, "queues/q", "get", number=501)).status_code == 400
    assert (await do(http, "dicts/d", "explode")).status_code == 400
    keys = [str(number) for number in range(501)]
    assert (await do(http, "dicts/d", "get", keys=keys)).status_code == 400
    assert "name" in refused(await do(http, "dicts/-", "count"), 400)
    listed = (await http.get("/v1/queues")).json()["queues"]
    assert [(row["name"], row["size_bytes"]) for row in listed] == [("q", 0)]


async def test_no_operation_changes_what_activators_keep(controller: Controller) -> None:
    """Which is why the answer to one waits for no activator (`activator.control_plane.proxy`)."""
    http, before = controller.http, await controller.feed()
    for op in ("count", "clear"):
        assert (await do(http, "dicts/d", op)).status_code == 200
    entry = {"key": '"k"', "value": encoded(b"v")}
    assert (await do(http, "dicts/d", "put", entries=[entry])).status_code == 200
    assert (await do(http, "dicts/d", "pop", key='"k"')).status_code == 200
    assert (await put(http, "queues/q", b"1")).status_code == 200
    assert (await do(http, "queues/q", "get")).json()["count"] == 1
    for path in ("dicts/d", "queues/q"):
        assert (await http.delete(f"/v1/{path}")).status_code == 204
    assert await controller.feed() == before


async def test_a_full_disk_takes_values_out_and_none_in(controller: Controller) -> None:
    await put(controller.http, "queues/q", b"1")
    full = DiskFloor(Path("/"), 2**60)
    object.__setattr__(controller.context, "database_floor", full)
    assert "nothing was changed" in refused(await put(controller.http, "queues/q", b"2"), 507)
    assert (await do(controller.http, "queues/q", "get")).json()["count"] == 1


async def test_a_request_waits_for_a_value(controller: Controller) -> None:
    first = asyncio.create_task(do(controller.http, "queues/q", "get", wait_s=20))
    await waiting(controller, 1)
    second = asyncio.create_task(do(controller.http, "queues/q", "get", wait_s=20))
    await waiting(controller, 2)
    elsewhere = await put(controller.http, "queues/q", b"else", partition="p")
    assert elsewhere.status_code == 200
    await put(controller.http, "queues/q", b"1")
    assert (await first).json()["values"] == [encoded(b"1")]  # first come, first served
    assert not second.done()
    await put(controller.http, "queues/q", b"2")
    assert (await second).json()["values"] == [encoded(b"2")]
    in_vain = await do(controller.http, "queues/q", "get", wait_s=0.02)
    assert in_vain.json() == {"values": [], "count": 0}


async def waiting(controller: Controller, number: int) -> None:
    async with asyncio.timeout(30):
        while f"<QueueWaiters {number} in" not in repr(controller.context.waiters):
            await asyncio.sleep(0.005)


async def test_the_end_of_the_process_releases_waiting_requests(controller: Controller) -> None:
    request = asyncio.create_task(do(controller.http, "queues/q", "get", wait_s=20))
    await waiting(controller, 1)
    controller.context.notifier.close()
    assert (await request).json()["values"] == []


async def test_a_caller_that_left_takes_nothing(controller: Controller) -> None:
    """Its request ends, and the value stays for the next one."""
    from pilotlight.controller import http_app

    app = http_app.build_app(controller.context)
    body = b'{"op": "get", "create": true, "wait_s": 20}'
    left = asyncio.Event()
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [
        (b"authorization", f"Bearer {controller.key}".encode()),
        (b"content-type", b"application/json"),
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/queues/q",
        "query_string": b"",
        "headers": headers,
    }
    request = asyncio.ensure_future(app(scope, receive, send))
    await waiting(controller, 1)
    left.set()
    await request
    await put(controller.http, "queues/q", b"1")
    assert (await do(controller.http, "queues/q", "get")).json()["values"] == [encoded(b"1")]


def test_waiters_are_bounded_and_pass_a_wake_on() -> None:
    waiters = QueueWaiters(of_tenant=2, in_all=3)
    with waiters.waiting(PLACE) as first, waiters.waiting(PLACE) as second:
        assert first is not None
        assert second is not None
        with waiters.waiting(PLACE) as third:
            assert third is None  # of this tenant
        other, another = ("u", *PLACE[1:]), ("v", *PLACE[1:])
        with waiters.waiting(other), waiters.waiting(another) as last:
            assert last is None  # of all
        waiters.wake(PLACE, 1)
        assert (first.is_set(), second.is_set()) == (True, False)
        waiters.wake(PLACE, 5)
        second.clear()
    assert repr(waiters) == "<QueueWaiters 0 in 0 partitions>"
    with waiters.waiting(PLACE) as kept:
        with waiters.waiting(PLACE) as leaves:
            assert kept is not None
            assert leaves is not None
            waiters.wake(PLACE, 2)
            kept.clear()
        assert kept.is_set()
    waiters.close()
    with waiters.waiting(PLACE) as late:
        assert late is None


async def test_values_are_on_the_bill_with_volumes(controller: Controller) -> None:
    await put(controller.http, "queues/q", b"x" * 10_000)
    config = controller.context.config
    object.__setattr__(config, "prices", PriceSettings(volumes_gib_month="1000000"))
    with controller.context.store.write() as write:
        assert storage_charges.charge_storage(write, config, snapshots=[]) == 1
        (row,) = write.sql.execute(tables.usage.select()).mappings()
    per_hour = Decimal(10_000) / 2**30 * 1_000_000 / (30 * 24)
    assert (row["kind"], row["method"]) == ("STORAGE", "volumes")
    assert abs(Decimal(row["cost"]) - per_hour) < Decimal("0.000001")
    used = (await controller.http.get("/v1/tenant")).json()["use"]["stored_bytes"]
    assert used >= 10_000


PUSH_UNTIL_KILLED = """
import sys, time
from pilotlight.controller.collections import collections
from pilotlight.controller.collections.collections import CollectionScope
from pilotlight.controller.database.store import Store
from pilotlight.spec.collection import CollectionKind
from pilotlight.spec.quotas import Plan

store = Store(sys.argv[1], clock=time.time)
scope = CollectionScope(
    tenant=sys.argv[2], environment="main", kind=CollectionKind.QUEUE, name="q"
)
for number in range(1_000_000):
    with store.write() as write:
        made = collections.create(write, scope)
        collections.push(write, made, Plan(), "", [b"%d" % number])
    print(number, flush=True)
"""


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    url, _ = owned_sqlite(tmp_path / "controller.db", now=1.0)
    store = Store(url, clock=lambda: 1.0)
    with store.read() as sql:
        tenant = str(sql.execute(tables.tenants.select()).mappings().one()["id"])
    store.close()
    argv = [sys.executable, "-c", PUSH_UNTIL_KILLED, url, tenant]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as pushing:
        assert pushing.stdout is not None
        acknowledged = [pushing.stdout.readline() for _ in range(20)]
        os.kill(pushing.pid, signal.SIGKILL)
        acknowledged += pushing.stdout.readlines()
    scope = CollectionScope(tenant=tenant, environment="main", kind=CollectionKind.QUEUE, name="q")
    store = Store(url, clock=lambda: 1.0)
    with store.write() as write:
        kept = collections.take(write, collections.find(write.sql, scope), "", 10_000)
        assert collections.find(write.sql, scope).entries == 0
    store.close()
    assert len(kept) in (len(acknowledged), len(acknowledged) + 1)
    assert kept == [b"%d" % number for number in range(len(kept))]
