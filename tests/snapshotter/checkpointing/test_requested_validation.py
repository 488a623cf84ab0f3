"""Proofs that somebody asks for: few at once, within the node's memory, bounded in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from snapshotter.checkpointing import requested_validation
from snapshotter.checkpointing.requested_validation import RequestedValidations
from snapshotter.errors import NoCapacity, ProofsBusy, SnapshotRefused, SnapshotUnknown
from snapshotter.gpus.grants import GpuGrants
from snapshotter.slots.instances import Instances
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.types import GpuGrant, InstanceState, LaunchSpec, RevisionKey, TenantShare
from tests.fakes.fake_nvml import L4, gpus, inventory_of

MIB = 1024**2
LAUNCH = LaunchSpec(
    revision=RevisionKey("fn-1@r1"),
    trust_domain="t",
    uid=None,
    bundle="b",
    image=None,
    entry={},
    memory_bytes=100 * MIB,
    cpu=1.0,
    startup_timeout_s=604800.0,
    labels={"tenant": "a"},
)


class World:
    """A prover that proves when it is let (`requested_validation.Prover`), on a node of 250 MiB.

    Attributes:
        running, most: proofs under way, and the most of them at once.
        let: set: proofs end.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.launches = {"sn-1": LAUNCH}
        self.asked: Counter[str] = Counter()
        self.running = self.most = 0
        self.let = asyncio.Event()
        self.heard: list[tuple[str, int]] = []
        self.failure: Exception | None = None
        self.gpus: GpuGrant | None = None
        self.instances = Instances()
        self.room = NodeCapacity(memory_bytes=250 * MIB)
        self.proofs = RequestedValidations(
            self, instances=self.instances, room=self.room, clock=lambda: self.now
        )

    def launch_of(self, snapshot_id: str) -> LaunchSpec:
        if snapshot_id not in self.launches:
            raise SnapshotUnknown(snapshot_id)
        return self.launches[snapshot_id]

    async def prove(
        self, snapshot_id: str, charge: Callable[[int], None], *, gpus: GpuGrant | None
    ) -> None:
        self.gpus = gpus
        self.asked[snapshot_id] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.let.wait()
            charge(3_000)
            if self.failure is not None:
                raise self.failure
            charge(4_000)
        finally:
            self.running -= 1

    def add(self, snapshot_id: str, tenant: str, mib: int = 100) -> None:
        self.launches[snapshot_id] = replace(
            LAUNCH, labels={"tenant": tenant}, memory_bytes=mib * MIB
        )

    def begin(self, snapshot_id: str) -> asyncio.Task[None]:
        return asyncio.create_task(self.proofs.prove(snapshot_id, self.hear))

    async def hear(self, proof: str, cpu_ns: int) -> None:
        self.heard.append((proof, cpu_ns))


@pytest.fixture
async def world() -> World:
    return World()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_askers_of_one_snapshot_share_one_proof(world: World) -> None:
    askers = [world.begin("sn-1") for _ in range(50)]
    await settle()
    world.let.set()
    await asyncio.gather(*askers)
    assert world.asked == {"sn-1": 1}


async def test_everybody_who_waited_hears_what_the_proof_cost_by_one_id(world: World) -> None:
    askers = [world.begin("sn-1") for _ in range(3)]
    await settle()
    askers[0].cancel()
    world.let.set()
    await asyncio.wait(askers)
    assert [cpu_ns for _, cpu_ns in world.heard] == [7_000, 7_000], "who left hears nothing"
    assert len({proof for proof, _ in world.heard}) == 1
    world.now += 1e6
    await world.begin("sn-1")
    assert len({proof for proof, _ in world.heard}) == 2, "another proof is charged anew"


async def test_a_proof_that_fails_says_what_it_cost(world: World) -> None:
    world.failure = SnapshotRefused("it does not answer")
    world.let.set()
    with pytest.raises(SnapshotRefused):
        await world.begin("sn-1")
    assert [cpu_ns for _, cpu_ns in world.heard] == [3_000]


async def test_what_other_tenants_have_reserved_is_not_for_proofs(world: World) -> None:
    world.room.check(
        replace(LAUNCH, memory_bytes=0), [], TenantShare(tenant="b", reserved={"b": 200 * MIB})
    )
    world.let.set()
    with pytest.raises(NoCapacity):
        await world.proofs.prove("sn-1")
    world.add("sn-2", "b")
    await world.proofs.prove("sn-2")


async def test_a_tenant_has_one_proof_at_a_time_and_is_told_when_to_ask_again(world: World) -> None:
    world.add("sn-2", "a")
    first = world.begin("sn-1")
    await settle()
    second = world.begin("sn-2")
    await settle()
    world.let.set()
    with pytest.raises(ProofsBusy) as busy:
        await second
    assert busy.value.detail["retry_after_s"] > 0
    await first


async def test_the_next_proof_of_a_tenant_begins_after_a_rest_and_another_tenants_at_once(
    world: World,
) -> None:
    world.add("sn-2", "b")
    first = world.begin("sn-1")
    await settle()
    world.now = 2.0
    world.let.set()
    await first
    with pytest.raises(ProofsBusy) as busy:
        await world.proofs.prove("sn-1")
    assert busy.value.detail == {"retry_after_s": 18.0}, "nine times as long as it took"
    await world.proofs.prove("sn-2")
    world.now += 18.0
    await world.proofs.prove("sn-1")
    assert world.asked == {"sn-1": 2, "sn-2": 1}


async def test_few_proofs_run_at_once_however_many_tenants_ask(world: World) -> None:
    for n in range(8):
        world.add(f"sn-{n}", f"tenant-{n}", mib=1)
    askers = [world.begin(f"sn-{n}") for n in range(8)]
    await settle()
    assert world.running == 2
    world.let.set()
    await asyncio.gather(*askers)
    assert (world.most, world.asked.total()) == (2, 8)


async def test_a_proof_claims_the_memory_of_an_instance_while_it_runs(world: World) -> None:
    first = world.begin("sn-1")
    await settle()
    assert [(i.info.memory_bytes, i.info.state) for i in world.instances] == [
        (100 * MIB, InstanceState.STARTING)
    ]
    world.let.set()
    await first
    assert world.instances.claimed_bytes() == 0


async def test_a_proof_for_which_there_is_no_memory_is_refused(world: World) -> None:
    world.add("sn-2", "b", mib=200)
    first = world.begin("sn-1")
    await settle()
    second = world.begin("sn-2")
    await settle()
    world.let.set()
    with pytest.raises(NoCapacity):
        await second
    await first
    assert world.asked == {"sn-1": 1}


async def test_a_proof_has_gpus_as_an_instance_has(world: World) -> None:
    inventory = inventory_of(*gpus(L4))
    world.room.gpus = GpuGrants(
        inventory, lambda: (instance.info.gpus for instance in world.instances)
    )
    world.launches["sn-1"] = replace(LAUNCH, gpu=("L4",))
    first = world.begin("sn-1")
    await settle()
    assert world.gpus == GpuGrant(kind="L4", devices=inventory.devices)
    with pytest.raises(NoCapacity, match="0 of 1 L4 free"):
        world.room.check(world.launches["sn-1"], [], None)
    world.let.set()
    await first
    assert world.room.gpus.granted() == frozenset()


async def test_a_proof_has_a_deadline_of_its_own_whatever_the_startup_timeout(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requested_validation.MOST_S == 600
    monkeypatch.setattr(requested_validation, "MOST_S", 0.01)
    with pytest.raises(SnapshotRefused, match="did not finish"):
        await world.proofs.prove("sn-1")
    assert (world.running, world.instances.claimed_bytes()) == (0, 0)


async def test_an_asker_that_leaves_does_not_end_the_proof(world: World) -> None:
    first, second = world.begin("sn-1"), world.begin("sn-1")
    await settle()
    first.cancel()
    await settle()
    assert world.running == 1
    world.let.set()
    await second


async def test_closing_ends_what_is_under_way(world: World) -> None:
    first = world.begin("sn-1")
    await settle()
    await world.proofs.aclose()
    assert (world.running, world.instances.claimed_bytes()) == (0, 0)
    with pytest.raises(asyncio.CancelledError):
        await first
