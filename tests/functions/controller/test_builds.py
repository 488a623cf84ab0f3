"""Builds of images are on the bill, however they end, once for all who listen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from decimal import Decimal

import anyio.to_thread
import httpx
import pytest

from pilotlight.controller.billing import ledger, price_lists
from pilotlight.controller.billing.build_charges import CHARGE_NS, REMEMBERED, BuildUsage
from pilotlight.controller.database import tables
from pilotlight.protocol import UsageRecord
from snapshotter.errors import ImageBuildFailed, SnapshotRefused
from tests.fakes.reference_prices import price_usage
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import snapshot

IMAGE = {"python": "3.11", "steps": [{"op": "pip", "packages": ["six"], "options": []}]}
SECOND = 10**9


async def build(http: httpx.AsyncClient) -> str:
    return (await http.post("/v1/images", json=IMAGE)).text


async def charged(controller: Controller) -> Sequence[UsageRecord]:
    """BUILD records in the ledger."""

    def read() -> Sequence[UsageRecord]:
        with controller.context.store.read() as sql:
            return ledger.find(sql, tables.usage.c.kind == "BUILD")

    return await anyio.to_thread.run_sync(read)


async def test_a_build_costs_the_cpu_time_that_it_used(controller: Controller) -> None:
    controller.agent.build_cpu_ns = (SECOND, 7 * SECOND)
    answer = await build(controller.http)
    assert '"image"' in answer
    assert "cpu_ns" not in answer
    [record] = await charged(controller)
    assert (record.id, record.billed_ns, record.method) == (
        "b-1/BUILD/7000000000",
        7 * SECOND,
        record.method,
    )
    assert record.key.startswith("k-")
    with controller.context.store.read() as sql:
        rates = price_lists.of_tenants(sql, controller.context.config)[record.tenant]
    assert Decimal(record.cost) == price_usage(record, rates) == 7 * rates.cpu_core_s
    [image] = (await controller.http.get("/v1/images")).json()["images"]
    assert image["build_cpu_s"] == 7.0


@pytest.mark.parametrize("failure", [None, SnapshotRefused("it took too long", {"reasons": []})])
async def test_a_proof_that_a_key_asks_for_costs_its_cpu_time_once(
    controller: Controller, failure: SnapshotRefused | None
) -> None:
    controller.agent.snapshots = [snapshot(await controller.tenant())]
    controller.agent.prove_ns, controller.agent.prove_failure = 3 * SECOND, failure
    for _ in range(2):  # the second one hears of the same proof
        answer = await controller.http.post("/v1/snapshots/sn-1:prove")
        assert answer.status_code == (200 if failure is None else 409), answer.text
    [record] = await charged(controller)
    assert (record.method, record.billed_ns, record.instance) == (
        "sn-1",
        3 * SECOND,
        "proof-sn-1-0",
    )


async def test_an_image_that_is_there_already_costs_nothing(controller: Controller) -> None:
    controller.agent.build_cpu_ns = (SECOND,)
    await build(controller.http)
    controller.agent.build_cpu_ns = ()
    await build(controller.http)
    assert len(await charged(controller)) == 1
    [image] = (await controller.http.get("/v1/images")).json()["images"]
    assert image["build_cpu_s"] == 1.0


async def test_a_build_that_fails_costs_the_same(controller: Controller) -> None:
    controller.agent.build_cpu_ns = (3 * SECOND,)
    controller.agent.build_failure = ImageBuildFailed("no such package", {})
    assert "no such package" in await build(controller.http)
    [record] = await charged(controller)
    assert record.billed_ns == 3 * SECOND


async def test_a_long_build_is_charged_while_it_goes_on(controller: Controller) -> None:
    controller.agent.build_cpu_ns = (CHARGE_NS - 1, CHARGE_NS, CHARGE_NS + SECOND)
    await build(controller.http)
    assert sorted(record.billed_ns for record in await charged(controller)) == [SECOND, CHARGE_NS]


async def test_callers_that_share_a_build_pay_for_it_once(controller: Controller) -> None:
    controller.agent.build_cpu_ns = (5 * SECOND,)
    controller.agent.build_may_end = asyncio.Event()
    both = [asyncio.create_task(build(controller.http)) for _ in range(2)]
    async with asyncio.timeout(30):
        while [verb for verb, _ in controller.agent.asked].count("build_image") < 2:
            await asyncio.sleep(0.005)
    controller.agent.build_may_end.set()
    await asyncio.gather(*both)
    assert [record.billed_ns for record in await charged(controller)] == [5 * SECOND]


async def test_a_caller_who_leaves_owes_what_was_used_so_far(controller: Controller) -> None:
    controller.agent.build_cpu_ns = (4 * SECOND,)
    controller.agent.build_may_end = asyncio.Event()
    caller = asyncio.create_task(build(controller.http))
    async with asyncio.timeout(30):
        while repr(controller.context.builds) != "<BuildUsage 1 remembered>":
            await asyncio.sleep(0.005)
    caller.cancel()
    await asyncio.wait([caller])
    async with asyncio.timeout(30):
        while not (found := await charged(controller)):
            await asyncio.sleep(0.005)
    assert [record.billed_ns for record in found] == [4 * SECOND]


@pytest.mark.parametrize("reason", ["'acme' is suspended", "was revoked"])
async def test_a_build_ends_when_its_caller_may_no_longer_make_it(
    controller: Controller, reason: str
) -> None:
    admin = await controller.other_tenant()
    own = controller.client(admin)
    key = (await own.post("/v1/keys", json={"scope": "deploy"})).json()
    controller.agent.build_cpu_ns = (SECOND,)
    controller.agent.build_may_end = asyncio.Event()
    building = asyncio.create_task(build(controller.client(key["secret"])))
    async with asyncio.timeout(30):
        await controller.agent.building.wait()
    if reason == "was revoked":
        assert (await own.delete(f"/v1/keys/{key['id']}")).status_code == 204
    else:
        suspended = {"suspended": True}
        assert (await controller.http.patch("/v1/tenants/acme", json=suspended)).is_success
    controller.agent.build_may_end.set()

    assert reason in (answer := await building)
    assert '"image"' not in answer
    assert (await own.get("/v1/images")).json()["images"] == []
    assert [record.billed_ns for record in await charged(controller)] == [SECOND]


def test_the_memory_of_builds_is_bounded_and_forgets_the_oldest() -> None:
    builds = BuildUsage()
    for n in range(REMEMBERED + 10):
        builds.record_usage(f"b-{n}", SECOND)
    assert repr(builds) == f"<BuildUsage {REMEMBERED} remembered>"
    assert builds.charge(f"b-{REMEMBERED}") == (SECOND, SECOND)
    assert builds.charge(f"b-{REMEMBERED}") == (0, SECOND)
