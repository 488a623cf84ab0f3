"""The counter of an instance's CPU time, on the real machine: its start, its pauses, commands
beside it, and starts that fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.client import AgentClient
from snapshotter.errors import StartFailed, StartStopped, StartTimeout
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.cpu_counter import CpuCounter, counted_ns
from snapshotter.types import LaunchSpec
from tests.fakes.agent_home import AgentHome, begin, instance_id
from tests.snapshotter.agent.test_agent import watching

BURN_S = 0.3
BURN = (
    f"import time\nuntil = time.process_time() + {BURN_S}\nwhile time.process_time() < until: "
    f"pass\n"
)
BURN_NS = int(BURN_S * 1e9)

needs_cgroups = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")


@pytest.fixture
async def client(home: AgentHome) -> AsyncIterator[AgentClient]:
    async with home.agent(namespaces=os.geteuid() == 0), home.client() as client:
        yield client


async def read_above(counter: CpuCounter, least_ns: int) -> int:
    """Its value once it is that high: the kernel counts up to a tick late."""
    async with asyncio.timeout(10):
        while (found := counter.read_ns() or 0) < least_ns:
            await asyncio.sleep(0.005)
    return found


def test_both_kinds_of_cgroup_are_understood() -> None:
    assert counted_ns(b"123456789\n") == 123456789
    assert counted_ns(b"usage_usec 42\nuser_usec 40\nsystem_usec 2\n") == 42_000
    with pytest.raises(ValueError, match="invalid literal"):
        counted_ns(b"nothing 1\n")


def test_without_a_cgroup_the_process_is_asked_and_children_that_it_reaped_count() -> None:
    code = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', "
        f"{BURN!r}])\nprint(flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        counter = CpuCounter("", process.pid)
        process.stdout.readline()
        assert repr(counter) == f"<CpuCounter /proc/{process.pid}/stat>"
        assert BURN_NS * 9 // 10 < (counter.read_ns() or 0) < 20 * BURN_NS
    assert counter.read_ns() is None


@needs_cgroups
async def test_a_group_counts_those_that_have_ended_and_is_unknown_once_it_is_gone(
    short_tmp: Path,
) -> None:
    cgroups = Cgroups.find(short_tmp)
    group = cgroups.make("counted", memory_bytes=64 * 1024**2, cpu=1.0)
    if not group.cpu_file:
        await group.remove()
        pytest.skip("no controller counts CPU time here")
    try:
        enter = "".join(f"open({path!r}, 'w').write('0')\n" for path in group.procs)
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", enter + BURN], check=True)
        counter = CpuCounter(group.cpu_file, 0)
        assert await read_above(counter, BURN_NS * 9 // 10) < 20 * BURN_NS
        async with asyncio.timeout(10):
            # until the kernel has counted the last of it
            while counter.read_ns() != group.cpu_ns():
                await asyncio.sleep(0.005)
    finally:
        await group.remove()
        cgroups.remove_empty()
    assert counter.read_ns() is None
    counter.close()
    counter.close()


@needs_cgroups
async def test_a_command_beside_an_instance_is_counted_as_its_own(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch())
    counter = CpuCounter.of(info)
    assert counter is not None
    before = counter.read_ns()
    assert before is not None
    assert before > info.cpu_from_ns, "its start"
    loop = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
    parts = [part async for part in client.exec(info.id, ["/bin/sh", "-c", loop])]
    assert parts[-1] == {"exit_status": 0}, parts
    await read_above(counter, before + 50_000_000)
    counter.close()


@needs_cgroups
async def test_the_first_start_has_the_boot_that_it_caused_and_the_next_one_has_not(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch()
    first, second = await begin(client, launch), await begin(client, launch)
    boot, fork = (-min(0, info.cpu_from_ns) for info in (first, second))
    assert boot > 10_000_000, "an interpreter and its imports"
    assert fork == 0


@needs_cgroups
async def test_the_end_of_an_instance_says_where_its_counter_stood(
    home: AgentHome, client: AgentClient
) -> None:
    info = await begin(client, home.launch())
    gone = await watching(client, "instance_gone")
    await client.stop(info.id, grace_s=10)
    assert (await gone).detail["cpu_ns"] > info.cpu_from_ns


async def failure(client: AgentClient, launch: LaunchSpec) -> StartFailed:
    """Of a start that fails."""
    with pytest.raises(StartFailed) as failed:
        await client.start(launch, instance_id=instance_id(), lessee="a", secret_env={})
    return failed.value


@needs_cgroups
@pytest.mark.parametrize(
    "steps",
    [
        {"boot": ["burn", "raise:x"]},
        {"wake": ["burn", "raise:x"]},
        {"forkable": False, "boot": ["burn", "raise:x"]},
    ],
)
async def test_a_start_that_fails_says_what_it_used(
    home: AgentHome, client: AgentClient, steps: dict[str, Any]
) -> None:
    error = await failure(client, home.launch(**steps))
    assert error.detail["cpu_ns"] > BURN_NS * 9 // 10


@needs_cgroups
async def test_a_boot_that_fails_is_one_starts_and_not_that_of_each_that_waited(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(boot=["burn", "raise:x"])
    errors = await asyncio.gather(*(failure(client, launch) for _ in range(3)))
    used = sorted(error.detail["cpu_ns"] for error in errors)
    assert used[:2] == [0, 0]
    assert used[2] > BURN_NS * 9 // 10


@needs_cgroups
@pytest.mark.slow  # a start that ends by its clock
async def test_a_start_that_takes_too_long_says_what_it_used(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(forkable=False, boot=["hang"], startup_timeout_s=2.0)
    with pytest.raises(StartTimeout) as failed:
        await client.start(launch, instance_id=instance_id(), lessee="a", secret_env={})
    assert failed.value.detail["cpu_ns"] > 1_000_000, "its shim, and what came of the boot"


@needs_cgroups
async def test_a_start_that_is_stopped_says_what_it_used(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch(forkable=False, boot=["burn", "hang"])
    name = instance_id()
    start = asyncio.create_task(client.start(launch, instance_id=name, lessee="a", secret_env={}))
    async with asyncio.timeout(40):
        while not any(
            "burnt" in line["text"]
            for line in [line async for line in await client.logs(labels={"app": "a"})]
        ):
            await asyncio.sleep(0.05)
    await client.stop(name, grace_s=0)
    with pytest.raises(StartStopped) as stopped:
        await start
    assert stopped.value.detail["cpu_ns"] > BURN_NS * 9 // 10


@needs_cgroups
async def test_a_boot_that_the_platform_asked_for_is_nobodys(
    home: AgentHome, client: AgentClient
) -> None:
    launch = home.launch()
    await client.prepare(launch)
    assert (await begin(client, launch)).cpu_from_ns == 0


@needs_cgroups
async def test_who_wakes_begins_anew(home: AgentHome, client: AgentClient) -> None:
    info = await begin(client, home.launch())
    await client.sleep(info.id)
    assert (await client.wake(info.id)).cpu_from_ns > info.cpu_from_ns
