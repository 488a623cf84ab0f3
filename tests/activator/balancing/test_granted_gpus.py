"""Instances are priced by the GPUs that the node granted them, and refused where these have no
price."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path

import pytest

from activator.balancing.throttler import Throttler
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.cli.core.next_step import next_step
from pilotlight.protocol import UsageRecord
from pilotlight.spec.function import FunctionSpec, Resources
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.pricing import Rates, rate_per_s
from snapshotter.errors import Unsupported
from snapshotter.types import GpuDevice, GpuGrant
from tests.activator.billing_world import open_attempt
from tests.activator.scaled_world import ScaledWorld
from tests.fakes.reference_prices import price_usage
from tests.fakes.routes import route_of, spec_of

RATES = Rates(
    version="gpus",
    cpu_core_s=Decimal(0),
    memory_gib_s=Decimal(0),
    gpu_s={"H100": Decimal("0.1"), "A100": Decimal("0.03")},
    start_factor=Decimal(1),
)


def grant(kind: str, count: int = 1) -> GpuGrant:
    return GpuGrant(
        kind=kind,
        devices=tuple(GpuDevice(uuid=f"GPU-{kind}-{n}", kind=kind) for n in range(count)),
    )


def target(*gpu: str, count: int = 1, scaling: Scaling | None = None) -> CallTarget:
    spec: FunctionSpec = spec_of(
        scaling=scaling or Scaling(), resources=Resources(gpu=gpu, gpu_count=count)
    )
    return CallTarget(route_of(spec), "v1-abcdef", RATES)


@pytest.fixture(name="world")
async def _world(short_tmp: Path) -> AsyncIterator[ScaledWorld]:
    async with ScaledWorld.running(short_tmp) as world:
        yield world


async def records_of(world: ScaledWorld) -> list[UsageRecord]:
    await world.books.shipper.flush()
    return sorted(world.ledger.records.values(), key=lambda record: record.started_at)


async def call(throttler: Throttler) -> None:
    """One call of an instance, billed."""
    reservation = await throttler.reserve(5)
    account = reservation.instance.account
    ticket = open_attempt(
        account, call="req-1", start_kind="COLD", now_ns=time.monotonic_ns(), at_ns=time.time_ns()
    )
    await asyncio.sleep(0.001)
    account.close(
        ticket, status=200, outcome="ok", now_ns=time.monotonic_ns(), at_ns=time.time_ns()
    )
    reservation.release()


@pytest.mark.parametrize("granted, rate", [("H100", "0.1"), ("A100", "0.03")])
async def test_the_second_choice_costs_what_it_costs(
    world: ScaledWorld, granted: str, rate: str
) -> None:
    wanted = target("H100", "A100", count=2)
    world.fleet.gpus[wanted.function] = grant(granted, 2)
    await call(world.make_throttler(wanted))
    records = await records_of(world)
    assert {record.kind for record in records} == {"START", "CALL"}
    for record in records:
        assert (record.gpu, record.gpu_count) == (granted, 2)
        assert Decimal(record.rate_per_s) == 2 * Decimal(rate)
    [called] = [record for record in records if record.kind == "CALL"]
    assert Decimal(called.cost) == price_usage(called, RATES) > 0


async def test_an_agent_that_names_no_kind_granted_the_first_one(world: ScaledWorld) -> None:
    await call(world.make_throttler(target("A100", "H100")))
    assert {record.gpu for record in await records_of(world)} == {"A100"}


async def test_gpus_that_the_node_never_has_are_no_reason_to_try_again(world: ScaledWorld) -> None:
    hint = "Set `gpu=` to what this node has (1 L4), or remove `gpu=`."
    refused = Unsupported("1 H100 GPU wanted, but this node has NVIDIA L4", {"hint": hint})
    world.fleet.failures.append(refused)
    with pytest.raises(errors.StartFailed, match="cannot start on this node: 1 H100") as failed:
        await world.make_throttler(target("H100")).reserve(5)
    assert (failed.value.retry_after_s, next_step(failed.value)) == (None, hint)


async def test_any_gpu_costs_what_was_granted(world: ScaledWorld) -> None:
    wanted = target("any")
    rate = rate_per_s(wanted.footprint, wanted.rates)
    assert (wanted.footprint.gpu, rate) == ("H100", Decimal("0.1"))
    world.fleet.gpus[wanted.function] = grant("A100")
    await call(world.make_throttler(wanted))
    assert {record.gpu for record in await records_of(world)} == {"A100"}


async def test_a_granted_kind_without_a_price_is_refused_by_name_and_stopped(
    world: ScaledWorld,
) -> None:
    wanted = target("any")
    world.fleet.gpus[wanted.function] = grant("B200")
    throttler = world.make_throttler(wanted)
    with pytest.raises(
        errors.StartFailed, match=r"no price for GPU kind 'B200'.*prices.gpu_s.B200"
    ):
        await throttler.reserve(5)
    assert [instance_id for instance_id, _ in world.fleet.stopped] == world.fleet.started
    assert not throttler.instances
    assert throttler.is_start_paused, "only calls try it again"
    assert await records_of(world) == []


@pytest.mark.parametrize("gpu", [("B200",), ("H100", "H100-MIG-1g.10gb")])
async def test_a_revision_that_names_a_kind_without_a_price_is_refused_by_name(
    gpu: tuple[str, ...],
) -> None:
    with pytest.raises(errors.Unavailable, match=gpu[-1]):
        target(*gpu)


async def test_the_time_of_a_suspended_and_of_a_stopped_instance_is_on_record(
    world: ScaledWorld,
) -> None:
    wanted = target("A100", scaling=Scaling(keep_asleep_s=600.0))
    world.fleet.gpus[wanted.function] = grant("A100")
    throttler = world.make_throttler(wanted)
    await call(throttler)
    [instance] = throttler.instances.values()
    throttler.suspend_or_stop(instance)
    async with asyncio.timeout(5):
        while not throttler.asleep.instances():
            await asyncio.sleep(0.001)
    throttler.settle_idle()
    kinds = [record.kind for record in await records_of(world)]
    assert kinds.count("ASLEEP") == 1, "each minute, so that a crash loses no more"

    (await throttler.reserve(5)).release()
    records = await records_of(world)
    assert [record.start_kind for record in records if record.kind == "START"] == ["COLD", "WAKE"]
    assert [record.kind for record in records].count("ASLEEP") == 2

    throttler.drain_idle()
    await throttler.aclose()
    for record in await records_of(world):
        assert (record.gpu, record.gpu_count) == ("A100", 1)
        assert Decimal(record.cost) == price_usage(record, RATES)
        assert record.kind not in ("FREE_IDLE", "ASLEEP") or Decimal(record.cost) == 0
