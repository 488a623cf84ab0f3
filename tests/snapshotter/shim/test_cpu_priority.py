"""Boots and background work give way on the CPU until they are ready, and nothing depends on it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from snapshotter.client import AgentClient
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.shim import cpu_priority
from snapshotter.types import InstanceInfo, LaunchSpec, StartKind
from tests.fakes.agent_home import AgentHome, instance_id

ROOT = Path(__file__).parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="weights of the CPU need root")


@pytest.fixture
async def client(home: AgentHome) -> AsyncIterator[AgentClient]:
    async with home.agent(namespaces=False), home.client() as client:
        yield client


@pytest.fixture
def real(short_tmp: Path) -> Iterator[Group]:
    """A group of the machine's own, with half a CPU's share."""
    cgroups = Cgroups.find(short_tmp)
    if "cpu" not in cgroups.bases or not Path(f"{cgroups.bases['cpu']}/cpu.idle").exists():
        pytest.skip("no cpu controller here, or a kernel before 5.15")
    group = cgroups.make("s-1", memory_bytes=1 << 26, cpu=0.5)
    yield group
    for directory in set(group.directories.values()):
        directory.rmdir()
    cgroups.remove_empty()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boot gives way for so long that even a busy machine has reached the gate by then."""
    monkeypatch.setattr(cpu_priority, "BOOT", ((30.0, cpu_priority.BOOT[0][1]),))


class Gate:
    """A fifo that a boot reads: it waits there until it is let go."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "gate"
        os.mkfifo(self.path, 0o666)
        self.path.chmod(0o666)

    async def reached(self) -> int:
        """Until the boot is there; a descriptor, to be closed to let it go."""
        return await asyncio.to_thread(os.open, self.path, os.O_WRONLY)


async def begin(client: AgentClient, launch: LaunchSpec) -> InstanceInfo:
    return await client.start(launch, instance_id=instance_id(), lessee="act-1", secret_env={})


def group_of(pid: int) -> Path | None:
    """Where the kernel has its cpu group; None in the root group, whose processes it groups by
    session."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    path = next((path for _, names, path in lines if "cpu" in names.split(",")), "/")
    return None if path == "/" else Path("/sys/fs/cgroup/cpu") / path.lstrip("/")


def part(pid: int) -> float:
    """Which part of one CPU's share its group has; 0 where the kernel gives it only what no other
    group of ours wants."""
    group = group_of(pid)
    if group is None:
        pytest.skip("no cpu group here")
    if (group / "cpu.idle").read_text() == "1\n":
        return 0
    return int((group / "cpu.shares").read_text()) / 1024


def workers(home: AgentHome) -> list[int]:
    """Pids of workers that run in slots of this home."""
    found = []
    for group in (
        Cgroups.find(home.paths.run).group(name) for name in Cgroups.find(home.paths.run).names()
    ):
        found += [int(pid) for file in group.procs for pid in Path(file).read_text().split()]
    return sorted(set(found))


def test_a_group_gives_way_wholly_partly_and_not_at_all(real: Group) -> None:
    cpu = real.directories["cpu"]
    file, half = cpu / cpu_priority.FILE[real.version], cpu_priority.weight(real.version, 0.5)
    assert file.read_text().strip() == half
    real.weigh(0)
    real.weigh(0)
    assert (cpu / "cpu.idle").read_text() == "1\n"
    real.weigh(0.125)
    assert ((cpu / "cpu.idle").read_text(), file.read_text().strip()) == (
        "0\n",
        cpu_priority.weight(real.version, 0.0625),
    )
    real.weigh(1)
    assert file.read_text().strip() == half


@pytest.mark.parametrize("version, least", [(1, "2"), (2, "1")])
def test_a_kernel_that_has_no_idle_groups_gives_it_the_least_weight(
    tmp_path: Path, version: int, least: str
) -> None:
    file = tmp_path / cpu_priority.FILE[version]
    file.touch()
    group = Group(directories={"cpu": tmp_path}, version=version, cpu=2.0)
    group.weigh(0)
    assert file.read_text() == least
    group.weigh(1)
    assert int(file.read_text()) > 100
    assert not (tmp_path / "cpu.idle").exists()


def test_a_group_that_is_gone_or_has_nothing_for_the_cpu_is_let_be(tmp_path: Path) -> None:
    Group(directories={"cpu": tmp_path / "gone"}, version=1).weigh(0)
    Group(directories={}, version=0).weigh(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@needs_root
@pytest.mark.usefixtures("patient")
async def test_a_boot_gives_way_until_its_template_stands(
    home: AgentHome, client: AgentClient, short_tmp: Path
) -> None:
    gate = Gate(short_tmp)
    launch = home.launch(boot=[f"read:{gate.path}"], uid=None)
    start = asyncio.create_task(begin(client, launch))
    writer = await gate.reached()
    assert [part(pid) for pid in workers(home)] == [1 / 8]
    os.close(writer)
    cold = await start
    [template] = await client.templates()
    assert cold.start_kind is StartKind.COLD
    assert [part(pid) for pid in (cold.pid, template.pid)] == [1, 1]
    fork = await begin(client, launch)
    assert part(fork.pid) == 1


@pytest.mark.root
@needs_root
@pytest.mark.usefixtures("patient")
async def test_a_worker_that_serves_in_place_gives_way_until_it_is_ready(
    home: AgentHome, client: AgentClient, short_tmp: Path
) -> None:
    gate = Gate(short_tmp)
    launch = home.launch(wake=[f"read:{gate.path}"], forkable=False, uid=None)
    start = asyncio.create_task(begin(client, launch))
    writer = await gate.reached()
    assert [part(pid) for pid in workers(home)] == [1 / 8]
    os.close(writer)
    assert part((await start).pid) == 1


@pytest.mark.root
@needs_root
async def test_a_boot_that_takes_long_gets_on_all_the_same(
    home: AgentHome, client: AgentClient, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_priority, "BOOT", ((0.01, 0.0), (0.01, 0.125)))
    gate = Gate(short_tmp)
    launch = home.launch(boot=[f"read:{gate.path}"], uid=None)
    start = asyncio.create_task(begin(client, launch))
    writer = await gate.reached()
    [pid] = workers(home)
    group = group_of(pid)
    whole = cpu_priority.weight(1, launch.cpu)
    while group is not None and (group / "cpu.shares").read_text().strip() != whole:
        await asyncio.sleep(0.005)
    os.close(writer)
    await start


@pytest.mark.root
@pytest.mark.e2e
@needs_root
async def test_what_a_killed_agent_left_behind_has_its_share_once_it_is_ready(
    home: AgentHome, short_tmp: Path
) -> None:
    gate = Gate(short_tmp)
    launch = home.launch(boot=[f"read:{gate.path}"], uid=None)
    with home.agent_process("--plain") as agent:
        async with home.client() as client:
            start = asyncio.create_task(begin(client, launch))
            writer = await gate.reached()
            agent.kill()
            agent.wait()
            await asyncio.gather(start, return_exceptions=True)
    with home.agent_process("--plain"):
        async with home.client() as client:
            start = asyncio.create_task(begin(client, launch))
            while not await client.instances():
                await asyncio.sleep(0.005)
            assert any(part(pid) == 1 / 8 for pid in workers(home))
            os.close(writer)
            await start
            assert all(part(pid) == 1 for pid in workers(home))


@needs_root
def test_without_groups_a_session_is_nice_until_it_is_made_even() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    program = (
        "from snapshotter.shim import cpu_priority; cpu_priority.lower(); "
        "print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == cpu_priority.NICENESS
        cpu_priority.restore(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == before
        autogroup = Path(f"/proc/{process.pid}/autogroup")
        assert not autogroup.exists() or autogroup.read_text().endswith("nice 0\n")
        process.communicate(b"\n")
    cpu_priority.restore(process.pid)


def test_background_work_has_less_than_a_boot_with_a_waiting_caller() -> None:
    """However long both take, up to where either has its full share again."""
    assert max(part for _, part in cpu_priority.BACKGROUND) < min(p for _, p in cpu_priority.BOOT)
