"""GPUs of a running agent: each slot has its own, from the start to the end of what runs in it, and
gives them back once, whatever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from pilotlight.core.metrics_server import metrics_socket
from snapshotter.client import AgentClient
from snapshotter.cuda.devices import Suspension
from snapshotter.cuda.errors import CudaRefused
from snapshotter.cuda.gpu_mapping import DeviceRecord, gpu_mapping, record_of
from snapshotter.cuda.gpu_usage import CudaNode, Gpu
from snapshotter.errors import (
    NoCapacity,
    ProofsBusy,
    SnapshotRefused,
    StartFailed,
    StartTimeout,
    Unsupported,
)
from snapshotter.linux.cgroups import Group
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.slots.slot import Slot
from snapshotter.types import GpuGrant, InstanceInfo, StartKind
from tests.fakes.agent_home import AgentHome, begin, instance_id
from tests.fakes.fake_nvml import A100, H100, L4, FakeNvml, gpus, inventory_of, partitioned
from tests.fakes.gpu_nodes import make_nodes_of

T = TypeVar("T")
REPOSITORY = Path(__file__).parents[3]


@asynccontextmanager
async def running(home: AgentHome, *models: str, **more: Any) -> AsyncIterator[AgentClient]:
    async with home.agent(gpus=gpus(*models), **more), home.client() as client:
        yield client


async def free_again(client: AgentClient, home: AgentHome, *, count: int) -> None:
    """All GPUs can be had at once, as soon as what had them is cleared."""

    launch = home.launch("f-all@v1", gpu=("H100",), gpu_count=count)
    found = await eventually(lambda: begin(client, launch), NoCapacity)
    assert found.gpu_count == count
    await client.stop(found.id, grace_s=0)


async def eventually(action: Callable[[], Awaitable[T]], *refused: type[Exception]) -> T:
    """The result of `action`, tried again while it raises `refused` or returns None or False."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(*refused):
                if result := await action():
                    return result
            await asyncio.sleep(0.02)


async def metrics_of(home: AgentHome) -> str:
    """What a scrape reads."""
    reader, writer = await asyncio.open_unix_connection(metrics_socket(home.paths, "snapshotter"))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return text


def uuids(*infos: InstanceInfo) -> list[str]:
    return [uuid for info in infos if info.gpus is not None for uuid in info.gpus.uuids]


# -- one instance, its GPUs ------------------------------------------------------------------------


async def test_two_instances_have_two_gpus_and_a_third_is_refused(home: AgentHome) -> None:
    async with running(home, H100, H100) as client:
        launch = home.launch(gpu=("H100",))
        one, two = [await begin(client, launch) for _ in range(2)]
        assert len(set(uuids(one, two))) == 2
        assert {one.start_kind, two.start_kind} == {StartKind.COLD}
        assert [info.gpus for info in await client.instances()] == [one.gpus, two.gpus]
        with pytest.raises(NoCapacity, match="1 GPUs wanted, 0 of 2 H100 free") as e:
            await begin(client, launch)
        assert e.value.detail["kinds"] == {"H100": {"free": 0, "claimed": 2, "total": 2}}

        await client.stop(one.id, grace_s=1)
        third = await begin(client, launch)
        assert uuids(third) == uuids(one), "its slot was being cleared"


async def test_starts_at_once_share_nothing(home: AgentHome) -> None:
    async with running(home, *(H100,) * 4) as client:
        launch = home.launch(gpu=("H100",), gpu_count=1)
        starts = await asyncio.gather(
            *(begin(client, launch) for _ in range(6)), return_exceptions=True
        )
        infos = [one for one in starts if isinstance(one, InstanceInfo)]
        assert [type(one) for one in starts if not isinstance(one, InstanceInfo)] == [
            NoCapacity
        ] * 2
        assert len(set(uuids(*infos))) == 4


async def test_of_a_mixed_node_each_gets_what_it_accepts(home: AgentHome) -> None:
    described = [*gpus(H100, L4), partitioned(A100, 2, "3g.20gb")]
    async with home.agent(gpus=described), home.client() as client:
        first = await begin(client, home.launch("f-1@v1", gpu=("H100",)))
        second = await begin(client, home.launch("f-2@v1", gpu=("H100", "L4")))
        third = await begin(client, home.launch("f-3@v1", gpu=("A100-MIG-3g.20gb",)))
        grants = [info.gpus for info in (first, second, third)]
        assert [grant.kind for grant in grants if grant] == ["H100", "L4", "A100-MIG-3g.20gb"]
        assert uuids(third)[0].startswith("MIG-")
        with pytest.raises(NoCapacity, match="0 of 1 H100 free"):
            await begin(client, home.launch("f-4@v1", gpu=("H100",)))
        with pytest.raises(Unsupported, match="2 L4 GPUs wanted, but this node has"):
            await begin(client, home.launch("f-5@v1", gpu=("L4",), gpu_count=2))
        assert (await begin(client, home.launch("f-6@v1"))).gpus is None


# -- given back once -------------------------------------------------------------------------------


async def test_a_start_that_fails_gives_its_gpus_back(home: AgentHome) -> None:
    async with running(home, H100, H100) as client:
        for n, steps in enumerate((["raise:no"], ["exit:3"])):
            launch = home.launch(f"f-{n}@v1", boot=steps, gpu=("H100",), gpu_count=2)
            with pytest.raises(StartFailed):
                await begin(client, launch)
            await free_again(client, home, count=2)
        with pytest.raises(StartFailed):
            await begin(client, home.launch("f-w@v1", wake=["raise:no"], gpu=("H100",)))
        await free_again(client, home, count=2)


async def test_a_start_that_hangs_or_is_given_up_gives_its_gpus_back(home: AgentHome) -> None:
    async with running(home, H100) as client:
        hangs = home.launch("f-h@v1", boot=["hang"], gpu=("H100",), startup_timeout_s=0.5)
        with pytest.raises(StartTimeout):
            await begin(client, hangs)
        await free_again(client, home, count=1)

        name = instance_id()
        launch = home.launch("f-s@v1", boot=["hang"], gpu=("H100",))
        start = asyncio.create_task(begin(client, launch, instance_id=name))
        await eventually(lambda: _is_taken(home))
        await client.stop(name, grace_s=0)
        await asyncio.wait([start])
        assert start.exception() is not None
        await free_again(client, home, count=1)


async def _is_taken(home: AgentHome) -> bool:
    return 'pilotlight_gpus_granted{kind="H100"} 1.0' in await metrics_of(home)


async def test_a_worker_that_is_killed_gives_its_gpus_back_once_it_is_gone(
    home: AgentHome,
) -> None:
    async with running(home, H100) as client:
        for _ in range(3):
            info = await begin(client, home.launch(gpu=("H100",)))
            os.kill(info.pid, signal.SIGKILL)
            await free_again(client, home, count=1)


async def test_what_is_prepared_has_a_gpu_and_hands_it_to_the_instance(home: AgentHome) -> None:
    async with running(home, H100) as client:
        launch, other = (home.launch(f"f-{n}@v1", gpu=("H100",)) for n in (1, 2))
        await client.prepare(launch)
        info = await begin(client, launch)
        assert info.start_kind is StartKind.WAKE
        assert info.gpu_count == 1
        with pytest.raises(NoCapacity, match="0 of 1 H100 free"):
            await client.prepare(launch)
        await client.stop(info.id, grace_s=1)

        await eventually(lambda: client.prepare(launch), NoCapacity)
        assert (await begin(client, other)).gpu_count == 1, "the prepared worker is ended for it"
        assert await client.templates() == []


async def test_the_agents_metrics_count_gpus_by_kind(home: AgentHome) -> None:
    async with running(home, H100, H100, L4) as client:
        await begin(client, home.launch(gpu=("H100",)))
        text = await metrics_of(home)
        assert 'pilotlight_gpus{kind="H100"} 2.0' in text
        assert 'pilotlight_gpus_granted{kind="H100"} 1.0' in text
        assert 'pilotlight_gpus_granted{kind="L4"} 0.0' in text
        assert 'pilotlight_gpu_fragmentation{kind="H100"} 1.0' in text


# -- across a restart ------------------------------------------------------------------------------


@contextmanager
def described(home: AgentHome, *models: str) -> Iterator[str]:
    """Agents that are started meanwhile have the library and the tool of a node with these GPUs.
    Yields the directory of its device nodes, which only root can make."""
    root = home.paths.home.parent
    if os.geteuid() == 0:
        make_nodes_of(root / "gpus", inventory_of(*gpus(*models)).devices)
    FakeNvml(gpus(*models)).save(root / "node.json")
    tool = root / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_NVML", str(root / "node.json"))
        patch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        home.python_path = (REPOSITORY / "tests/fakes/nvml",)
        yield str(root / "gpus")


@pytest.mark.e2e
async def test_a_restarted_agent_knows_who_has_which_gpu(home: AgentHome) -> None:
    with described(home, H100, H100, H100) as devices:
        with home.agent_process("--devices", devices) as agent:
            async with home.client() as client:
                kept = await begin(client, home.launch("f-1@v1", gpu=("H100",)))
                await client.prepare(home.launch("f-2@v1", gpu=("H100",)))
                ended = await begin(client, home.launch("f-3@v1", gpu=("H100",)))
                assert len(set(uuids(kept, ended))) == 2
                agent.kill()
                agent.wait()
        os.kill(ended.pid, signal.SIGKILL)

        with home.agent_process("--devices", devices):
            async with home.client() as client:
                [adopted] = [i for i in await client.adopt(lessee="act-1") if i.id == kept.id]
                assert adopted == kept
                one = await begin(client, home.launch("f-4@v1", gpu=("H100",)))
                assert uuids(one) == uuids(ended), "that of the dead is free, and no other"
                with pytest.raises(NoCapacity, match="2 GPUs wanted, 0 of 3 H100 free"):
                    await begin(client, home.launch("f-5@v1", gpu=("H100",), gpu_count=2))
                assert len(await client.templates()) == 1, "its GPU would not be enough"
                last = await begin(client, home.launch("f-6@v1", gpu=("H100",)))
                assert len(set(uuids(kept, one, last))) == 3
                for info in (kept, one, last):
                    await client.stop(info.id, grace_s=1)
                await free_again(client, home, count=3)


# -- snapshots -------------------------------------------------------------------------------------


class OneProcess:
    """Devices of trees with CUDA state in one process, over a node of GPUs: what a dump records,
    and what a restore maps, is decided as on a GPU.

    Attributes:
        mapped: the mapping of each restore.
    """

    def __init__(self, *models: str) -> None:
        self.node = CudaNode(
            release=580,
            version="580.65.06",
            mps=False,
            gpus=tuple(Gpu(uuid=g.uuid, name=g.name, minor=g.minor) for g in gpus(*models)),
        )
        self.mapped: list[Mapping[str, str]] = []

    async def before_dump(self, pids: Sequence[int], *, granted: Sequence[str] = ()) -> Suspension:
        """See Devices."""
        return Suspension(record=record_of(self.node, granted, 1, granted=granted))

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        """See Devices."""
        suspension.end()

    def check_restore(self, record: DeviceRecord, *, target: Sequence[str] = ()) -> None:
        """See Devices."""
        gpu_mapping(record, self.node, target=target)

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: Sequence[str] = ()
    ) -> Mapping[str, float]:
        """See Devices."""
        self.mapped.append(gpu_mapping(record, self.node, target=target))
        return {}


@pytest.mark.root
@pytest.mark.usefixtures("patient_restores")
async def test_a_restore_goes_to_the_gpus_that_are_granted(home: AgentHome) -> None:
    devices = OneProcess(*(H100,) * 4)
    async with running(home, *(H100,) * 4, snapshots=True, devices=devices) as client:
        launch = home.launch(gpu=("H100",), gpu_count=2)
        await client.checkpoint(launch)
        assert devices.mapped == [{}] * len(devices.mapped), "proofs run on the GPUs of the dump"
        proofs = len(devices.mapped)

        one, two = [await begin(client, launch) for _ in range(2)]
        assert {one.start_kind, two.start_kind} == {StartKind.RESTORE}
        assert len(set(uuids(one, two))) == 4
        moved = devices.mapped[proofs + 1]
        assert [moved[uuid] for uuid in uuids(one)] == uuids(two), "in their order"
        with pytest.raises(NoCapacity):
            await begin(client, launch)


@pytest.mark.root
@pytest.mark.usefixtures("patient_restores")
async def test_a_snapshot_of_another_model_is_passed_over_and_not_broken(home: AgentHome) -> None:
    devices = OneProcess(H100, L4)
    async with running(home, H100, L4, snapshots=True, devices=devices) as client:
        launch = home.launch(gpu=("H100", "L4"))
        made = await client.checkpoint(launch)
        one, two = [await begin(client, launch) for _ in range(2)]
        assert (one.start_kind, two.start_kind) == (StartKind.RESTORE, StartKind.COLD)
        assert two.gpus is not None
        assert two.gpus.kind == "L4"
        await client.stop(two.id, grace_s=1)
        [snapshot] = [s for s in await client.snapshots() if s.id == made.id]
        assert snapshot.state == "READY"


class Unfit(OneProcess):
    """As on a driver that cannot move a process to another GPU."""

    def check_restore(self, record: DeviceRecord, *, target: Sequence[str] = ()) -> None:
        """See Devices."""
        if tuple(target) != record.used:
            raise CudaRefused([])


@pytest.mark.root
@pytest.mark.usefixtures("patient_restores")
async def test_a_snapshot_that_does_not_fit_the_granted_gpu_is_not_quarantined(
    home: AgentHome,
) -> None:
    devices = Unfit(H100, H100)
    async with running(home, H100, H100, snapshots=True, devices=devices) as client:
        launch = home.launch(gpu=("H100",))
        made = await client.checkpoint(launch)
        first = await begin(client, launch)
        assert first.start_kind is StartKind.RESTORE
        for _ in range(4):
            second = await begin(client, launch)
            assert second.start_kind is StartKind.COLD
            await client.stop(second.id, grace_s=1)
        with pytest.raises(SnapshotRefused, match="its proof needs other GPUs"):
            await eventually(lambda: client.prove_snapshot(made.id), NoCapacity, ProofsBusy)
        [snapshot] = await client.snapshots()
        assert (snapshot.id, snapshot.state) == (made.id, "READY")


def test_a_slot_of_a_release_that_did_not_record_its_gpus_is_not_taken_over(
    home: AgentHome, tmp_path: Path
) -> None:
    slot = cast(Slot, SimpleNamespace(id="s-1", directory=tmp_path))
    grant = GpuGrant(kind="H100", devices=inventory_of(*gpus(H100)).devices)
    occupied = OccupiedSlot(
        slot=slot,
        launch=home.launch(gpu=("H100",)),
        group=Group(directories={}, version=2),
        gpus=grant,
    )
    record = occupied.record()
    (tmp_path / "housing.json").write_text(json.dumps(record))
    found = OccupiedSlot.of(slot)
    assert found is not None
    assert found.gpus == grant

    (tmp_path / "housing.json").write_text(json.dumps({**record, "gpus": None}))
    with pytest.raises(ValueError, match="an earlier version did not record its GPUs"):
        OccupiedSlot.of(slot)
    without = {**record, "launch": home.launch().to_json(), "gpus": None}
    (tmp_path / "housing.json").write_text(json.dumps(without))
    assert OccupiedSlot.of(slot) is not None
