"""GPUs of instances, from the agent's grant to the device node that opens in the slot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from snapshotter.client import AgentClient
from snapshotter.errors import NoCapacity
from snapshotter.linux.cgroups import Cgroups
from snapshotter.types import InstanceInfo, LaunchSpec, SnapshotState, StartKind
from tests.conftest import RequireOrSkip
from tests.fakes.agent_home import AgentHome, ask, begin
from tests.fakes.fake_nvml import H100, gpus

pytestmark = pytest.mark.root


@pytest.fixture
def home(short_tmp: Path, require_or_skip: RequireOrSkip) -> AgentHome:
    """Where devices are controlled."""
    home = AgentHome(short_tmp)
    cgroups = Cgroups.find(home.paths.run)
    if not cgroups.controls_devices:
        require_or_skip(str(cgroups.why_no_devices))
    cgroups.remove_empty()
    return home


def function(home: AgentHome, name: str, *, gpu: bool = True, **changes: object) -> LaunchSpec:
    """One that requests a GPU."""
    kinds = ("H100",) if gpu else ()
    return home.launch(f"{name}@v1-abc", gpu=kinds, gpu_count=int(gpu), **changes)


async def opened(info: InstanceInfo) -> list[str]:
    """Names of the GPUs whose nodes open in its slot, but for the missing driver."""
    answers = [await ask(info, f"/open/dev/nvidia{minor}") for minor in range(3)]
    assert set(answers) <= {"ENXIO", "ENOENT"}
    return [f"nvidia{minor}" for minor, answer in enumerate(answers) if answer == "ENXIO"]


async def begin_when_free(client: AgentClient, launch: LaunchSpec) -> InstanceInfo:
    """Start it once the slot that has its GPU is cleared, which a stop does not wait for."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await begin(client, launch)
            except NoCapacity:
                await asyncio.sleep(0.02)


async def test_each_instance_opens_the_gpu_that_it_was_granted(home: AgentHome) -> None:
    async with home.agent(gpus=gpus(H100, H100)), home.client() as client:
        first = await begin(client, function(home, "f-1"))
        second = await begin(client, function(home, "f-2"))
        without = await begin(client, function(home, "f-3", gpu=False))
        assert first.gpus is not None
        assert second.gpus is not None
        for info, grant in ((first, first.gpus), (second, second.gpus)):
            assert await opened(info) == [f"nvidia{grant.devices[0].minor}"]
            assert await ask(info, "/env/CUDA_VISIBLE_DEVICES") == grant.uuids[0]
        assert first.gpus.uuids != second.gpus.uuids
        assert await opened(without) == []
        assert await ask(without, "/env/CUDA_VISIBLE_DEVICES") == ""

        with pytest.raises(NoCapacity):
            await begin(client, function(home, "f-4"))
        await client.stop(first.id, grace_s=0)
        fourth = await begin_when_free(client, function(home, "f-4"))
        assert await opened(fourth) == _minors(first)


async def test_instances_of_one_function_have_a_slot_and_a_gpu_each(home: AgentHome) -> None:
    """A worker with a GPU is not forked, though it has no threads."""
    launch = function(home, "f-1")
    async with home.agent(gpus=gpus(H100, H100)), home.client() as client:
        infos = [await begin(client, launch) for _ in range(2)]
        assert {info.start_kind for info in infos} == {StartKind.COLD}
        assert sorted([*await opened(infos[0]), *await opened(infos[1])]) == ["nvidia0", "nvidia1"]


async def test_what_a_function_declares_does_not_choose_its_gpu(home: AgentHome) -> None:
    """In a revision of an earlier release, or in a secret of one."""
    launch = function(home, "f-1", env={"CUDA_VISIBLE_DEVICES": "1"})
    async with home.agent(gpus=gpus(H100, H100)), home.client() as client:
        info = await begin(client, launch, secret_env={"CUDA_VISIBLE_DEVICES": "0,1"})
        assert info.gpus is not None
        assert await ask(info, "/env/CUDA_VISIBLE_DEVICES") == info.gpus.uuids[0]


@pytest.mark.usefixtures("criu", "patient_restores")
async def test_a_restored_instance_has_the_gpu_that_it_is_granted_now(home: AgentHome) -> None:
    launch = function(home, "f-1", boot=["pause:0.2"])
    async with home.agent(snapshots=True, gpus=gpus(H100, H100)), home.client() as client:
        made = await client.checkpoint(launch)
        assert made.state is SnapshotState.READY
        await client.drop_template(launch.revision)
        first = await begin(client, launch)
        second = await begin(client, launch)
        assert [first.start_kind, second.start_kind] == [StartKind.RESTORE] * 2
        for info in (first, second):
            assert info.gpus is not None
            assert await ask(info, "/restored") is True
            assert await opened(info) == _minors(info)
            assert await ask(info, "/env/CUDA_VISIBLE_DEVICES") == info.gpus.uuids[0]
        assert await opened(first) != await opened(second)


def _minors(info: InstanceInfo) -> list[str]:
    assert info.gpus is not None
    return [f"nvidia{device.minor}" for device in info.gpus.devices]
