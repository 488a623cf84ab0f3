"""The agent and weights: leases of the slot's shim, waiting that is a phase of its own, the tier
that each start says."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from snapshotter.client import AgentClient
from snapshotter.errors import SnapshotterError, StartStopped, StartTimeout
from snapshotter.types import StartKind, WeightsMount
from tests.fakes.agent_home import AgentHome, begin, instance_id
from tests.fakes.waiting import until
from weight_cache.errors import OriginUnavailable
from weight_cache.types import Tier

MOUNT = (WeightsMount(name="w", manifest="0" * 64),)


async def test_each_start_says_where_its_weights_were(home: AgentHome, client: AgentClient) -> None:
    cold = await begin(client, home.launch(weights=MOUNT))
    fork = await begin(client, home.launch(weights=MOUNT))
    assert (cold.start_kind, cold.weights) == (StartKind.COLD, {"w": "nvme"})
    assert (fork.start_kind, fork.weights) == (StartKind.FORK, {"w": "dram"})
    assert [i.weights for i in await client.instances()] == [cold.weights, fork.weights]
    assert [p for p in cold.phases_ms if p != "queue"] == [
        "slot",
        "weights",
        "boot",
        "enter",
        "fork",
        "wake",
    ]


async def test_shim_of_the_slot_holds_them(home: AgentHome, client: AgentClient) -> None:
    info = await begin(client, home.launch(weights=MOUNT))
    (pid,) = home.weights.pids.values()
    assert pid is not None
    assert Path(f"/proc/{pid}").exists()
    assert pid != info.pid
    await client.drop_template(info.revision)
    await client.stop(info.id, grace_s=5)
    await until(lambda: home.weights.held == {})
    await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_start_waits_for_what_is_on_its_way(home: AgentHome, client: AgentClient) -> None:
    home.weights.tier = Tier.ORIGIN
    starting = asyncio.create_task(begin(client, home.launch(weights=MOUNT)))
    await until(lambda: home.weights.held)
    other = await begin(client, home.launch("f-2@v1-abc"))
    assert not starting.done()
    home.weights.arrival.set()
    info = await starting
    assert info.weights == {"w": "origin"}
    assert info.phases_ms["weights"] > 0
    assert info.phases_ms["slot"] < info.phases_ms["weights"] + other.phases_ms["slot"] + 1000


@pytest.mark.slow  # a start that ends by its clock
async def test_weights_that_do_not_come_in_time_are_named(
    home: AgentHome, client: AgentClient
) -> None:
    home.weights.tier = Tier.ORIGIN
    with pytest.raises(StartTimeout) as e:
        await begin(client, home.launch(weights=MOUNT, startup_timeout_s=2.0))
    # of its own boot, or of the one it waited for
    assert e.value.detail["phase"] in ("weights", "boot")
    await until(lambda: home.weights.held == {})


async def test_weights_that_cannot_be_had_fail_the_start_and_leave_nothing(
    home: AgentHome, client: AgentClient
) -> None:
    home.weights.failures["open"] = [OriginUnavailable("no such blob: deploy again")]
    with pytest.raises(SnapshotterError, match="deploy again"):
        await begin(client, home.launch(weights=MOUNT))
    await until(lambda: home.weights.held == {})
    assert (await begin(client, home.launch(weights=MOUNT))).weights == {"w": "nvme"}


async def test_caller_that_leaves_gives_them_back(home: AgentHome, client: AgentClient) -> None:
    home.weights.tier = Tier.ORIGIN
    name = instance_id()
    starting = asyncio.create_task(
        begin(client, home.launch(weights=MOUNT, forkable=False), instance_id=name)
    )
    await until(lambda: home.weights.held)
    await client.stop(name, grace_s=0)
    with contextlib.suppress(StartStopped):
        await starting
    await until(lambda: home.weights.held == {})


@pytest.mark.slow  # two dumps and restores
@pytest.mark.root
@pytest.mark.usefixtures("criu", "patient_restores")
async def test_restores_that_wait_for_weights_are_in_nobodys_way(home: AgentHome) -> None:
    async with home.agent(snapshots=True), home.client() as client:
        slow = [
            home.launch(f"f-{n}@v1-abc", boot=["pause:0.2"], weights=MOUNT)
            for n in range(max(2, os.cpu_count() or 1))
        ]
        quick = home.launch("quick@v1-abc", boot=["pause:0.2"])
        for launch in [*slow, quick]:
            await client.checkpoint(launch)
            await client.drop_template(launch.revision)
        home.weights.tier = Tier.ORIGIN
        held = len(home.weights.pids)
        waiting = [asyncio.create_task(begin(client, launch)) for launch in slow]
        await until(lambda: len(home.weights.pids) == held + len(slow))
        assert (await begin(client, quick)).start_kind is StartKind.RESTORE
        assert not any(task.done() for task in waiting)
        home.weights.arrival.set()
        for info in await asyncio.gather(*waiting):
            assert (info.start_kind, info.weights) == (StartKind.RESTORE, {"w": "origin"})
            assert list(info.phases_ms)[:3] == ["slot", "weights", "prefetch"]
