"""Instances that sleep: they stand still and keep their memory, wake as the same process, and end
in good order from either state."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapshotter.errors import InstanceUnknown
from snapshotter.linux import proc
from snapshotter.linux.cgroups import Group
from snapshotter.types import InstanceState, StartKind
from tests.fakes.agent_home import AgentHome, ask, begin, instance_id


def states(pid: int) -> set[str]:
    """Of the process and its descendants, as proc(5) letters."""
    return {
        Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0]
        for one in proc.process_tree(pid)
    }


async def stopped(pid: int) -> None:
    """Until the whole tree is stopped: on a busy machine a process acts on its SIGSTOP when it is
    next scheduled."""
    async with asyncio.timeout(30):
        while states(pid) != {"T"}:
            await asyncio.sleep(0.005)


async def test_an_instance_stands_still_and_goes_on_as_the_same_process(home: AgentHome) -> None:
    async with home.agent(namespaces=os.geteuid() == 0), home.client() as client:
        info = await begin(client, home.launch())
        before = await ask(info, "/")

        asleep = await client.sleep(info.id)
        waiting = asyncio.create_task(ask(info, "/"))
        listed = {one.id: one.state for one in await client.instances()}

        assert asleep.state is InstanceState.ASLEEP
        assert listed[info.id] is InstanceState.ASLEEP
        await stopped(info.pid)
        assert not waiting.done()

        awake = await client.wake(info.id)

        assert (awake.state, awake.start_kind, awake.pid) == (
            InstanceState.READY,
            StartKind.WAKE,
            info.pid,
        )
        assert await waiting == before == await ask(info, "/")


async def test_twice_is_once_and_whoever_is_gone_is_unknown(home: AgentHome) -> None:
    async with home.agent(namespaces=os.geteuid() == 0), home.client() as client:
        info = await begin(client, home.launch())
        assert await client.sleep(info.id) == await client.sleep(info.id)
        assert await client.wake(info.id) == await client.wake(info.id)
        await client.stop(info.id, grace_s=0)

        for ask_for in (client.sleep, client.wake):
            with pytest.raises(InstanceUnknown):
                await ask_for(info.id)
            with pytest.raises(InstanceUnknown):
                await ask_for(instance_id())


async def test_one_that_sleeps_runs_its_exit_hooks_when_it_is_stopped(home: AgentHome) -> None:
    async with home.agent(namespaces=os.geteuid() == 0), home.client() as client:
        info = await begin(client, home.launch())
        await client.sleep(info.id)

        await client.stop(info.id, grace_s=30)

        assert await client.instances() == []
        assert not Path(f"/proc/{info.pid}").exists()


@pytest.mark.e2e
async def test_an_agent_that_was_killed_and_restarted_finds_it_asleep(home: AgentHome) -> None:
    with home.agent_process() as agent:
        async with home.client() as client:
            info = await begin(client, home.launch())
            await client.sleep(info.id)
            agent.kill()
            agent.wait()
    with home.agent_process():
        async with home.client() as client:
            (found,) = await client.adopt(lessee="act-1")
            assert found.state is InstanceState.ASLEEP
            await client.wake(info.id)
            assert await ask(info, "/") is not None


def test_a_tree_that_forks_while_it_is_stopped_stands_still_whole() -> None:
    program = (
        "import os, sys, time\n"
        "for _ in range(30):\n"
        "    if os.fork() == 0:\n"
        "        while True: time.sleep(0.001)\n"
        "    time.sleep(0.002)\n"
        "while True: time.sleep(0.001)\n"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True)
    try:
        while len(proc.process_tree(process.pid)) < 3:
            time.sleep(0.001)
        proc.stop_tree(process.pid)
        deadline = time.monotonic() + 30
        while states(process.pid) != {"T"} and time.monotonic() < deadline:
            time.sleep(0.005)
        assert states(process.pid) == {"T"}
        proc.continue_tree(process.pid)
        while "T" in states(process.pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert "T" not in states(process.pid)
    finally:
        os.killpg(process.pid, 9)  # one signal for all: the tree may still be forking
        process.wait()


def test_who_left_the_tree_stands_still_with_it(tmp_path: Path) -> None:
    """What is forked twice has no parent in the tree; its cgroup knows it, whatever it calls
    itself."""
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n"
        "        while True: time.sleep(0.001)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "while True: time.sleep(0.001)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    orphan = int(process.stdout.readline())
    try:
        (tmp_path / "cgroup.procs").write_text(f"{process.pid}\n{orphan}\n")
        group = Group(directories={"cpu": tmp_path, "memory": tmp_path}, version=2)
        assert sorted(group.members()) == sorted((process.pid, orphan))

        for step, letters in ((proc.stop_tree, {"T"}), (proc.continue_tree, {"S", "R"})):
            step(process.pid, group.members)
            deadline = time.monotonic() + 20
            while not states(orphan) <= letters and time.monotonic() < deadline:
                time.sleep(0.005)
            assert states(orphan) <= letters
    finally:
        process.kill()
        os.kill(orphan, 9)
        process.wait()
        process.stdout.close()
