"""Which paths of an instance's socket are storage, and how often a function may use them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from activator.control_plane.function_storage import (
    MAX_CONNECTIONS,
    FunctionStorage,
    parse_storage_path,
)
from activator.http.request import Request, Scope
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.rules import Rule
from activator.routing.api_keys import FunctionPrincipal
from pilotlight import errors
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.spec.quotas import Quotas
from tests.fakes.fake_worker import FakeWorker


@pytest.mark.parametrize(
    "path, last, is_volume",
    [
        ("/v1/volumes/data:commit", ("data", "commit"), True),
        ("/v1/dicts/seen", ("dicts", "seen"), False),
        ("/v1/queues/jobs", ("queues", "jobs"), False),
    ],
)
def test_storage_is_found_by_its_path(path: str, last: tuple[str, str], is_volume: bool) -> None:
    found = parse_storage_path(path)
    assert found is not None
    assert (found.last, found.is_volume) == (last, is_volume)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/dicts",
        "/v1/dicts/",
        "/v1/dicts/a/b",
        "/v1/dicts/a%2Fb",
        "/v1/queues/a:get",
        "/v1/volumes/data",
        "/internal/collections/t/main/dicts/a",
        "/v1/secrets/a",
    ],
)
def test_other_paths_are_not(path: str) -> None:
    assert parse_storage_path(path) is None


async def test_a_functions_operations_count_in_its_tenants_quota(short_tmp: Path) -> None:
    once = Rule(of="operations", subject="t-1", quotas=Quotas(requests_per_s=1), tenant="t-1")
    check = ProcessQuotas(clock=lambda: 1.0).quota_check((once,))
    controller = await FakeWorker(short_tmp / "controller.sock").start()
    storage = FunctionStorage(
        Endpoint.at(controller.path), token="", mounts_volumes=True, operations=lambda _: check
    )
    statuses: list[int] = []

    async def receive() -> Scope:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Scope) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    def request() -> Request:
        scope = {"type": "http", "path": "/v1/dicts/seen", "method": "POST", "headers": []}
        return Request(scope, receive, send)

    asked = parse_storage_path("/v1/dicts/seen")
    assert asked is not None
    caller = FunctionPrincipal("function:t-1/main/app/name")
    await storage.answer(request(), caller, asked)
    assert statuses == [200]
    with pytest.raises(errors.OverQuota):
        await storage.answer(request(), caller, asked)
    assert repr(storage) == "<FunctionStorage 0 requests>"
    await storage.aclose()
    await controller.aclose()


async def test_tenants_whose_requests_wait_leave_connections_to_others(short_tmp: Path) -> None:
    storage = FunctionStorage(
        Endpoint.at(short_tmp / "nobody.sock"),
        token="",
        mounts_volumes=True,
        operations=lambda _: None,
    )
    asked = parse_storage_path("/v1/queues/jobs")
    assert asked is not None
    refused: Counter[str] = Counter()

    async def receive() -> Scope:
        await asyncio.Event().wait()  # a body that does not come
        return {}

    async def send(message: Scope) -> None:
        raise AssertionError(message)

    async def ask(tenant: str) -> None:
        scope = {"type": "http", "path": "/v1/queues/jobs", "method": "POST", "headers": []}
        caller = FunctionPrincipal(f"function:{tenant}/main/app/name")
        try:
            await storage.answer(Request(scope, receive, send), caller, asked)
        except errors.OverQuota:
            refused[tenant] += 1

    tasks = []
    for tenant in [f"t-{n}" for n in range(6)]:
        tasks += [asyncio.create_task(ask(tenant)) for _ in range(64)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    held = 6 * 64 - refused.total()
    assert refused["t-0"] == 0
    assert held < MAX_CONNECTIONS
    late = asyncio.create_task(ask("t-late"))
    await asyncio.sleep(0)
    assert not late.done()
    for task in (*tasks, late):
        task.cancel()
    for task in (*tasks, late):
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await storage.aclose()
