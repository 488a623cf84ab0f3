"""Workers that cannot be forked, restored ahead with the real CRIU: they stand still until a start
takes them, count as Templates, and go as they do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from snapshotter.client import AgentClient
from snapshotter.linux import proc
from snapshotter.linux.cgroups import Cgroups
from snapshotter.starts import frozen_workers, tcp_connections
from snapshotter.types import InstanceInfo, LaunchSpec, StartKind, TemplateInfo
from tests.fakes.agent_home import MIB, AgentHome, ask, begin
from tests.fakes.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,  # real dumps and restores
    pytest.mark.usefixtures("criu", "patient_restores"),
]


def server(home: AgentHome, **changes: Any) -> LaunchSpec:
    """It has a thread and a child."""
    return home.launch(boot=["thread", "process", f"allocate:{16 * MIB}"], **changes)


async def kept(client: AgentClient) -> TemplateInfo:
    """The one that stands still, once its memory was measured."""
    while not (found := await client.templates()) or not found[0].pss_bytes:
        await asyncio.sleep(0.01)
    [template] = found
    return template


def states(pid: int) -> set[str]:
    """States of a process and its descendants (proc(5))."""
    return {
        Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0]
        for one in proc.process_tree(pid)
    }


async def restored(client: AgentClient, launch: LaunchSpec) -> InstanceInfo:
    """A snapshot, and the first instance from it."""
    await client.checkpoint(launch)
    info = await begin(client, launch)
    assert info.start_kind is StartKind.RESTORE
    return info


async def test_the_next_start_continues_one_that_stood_still_and_has_another_put_there(
    home: AgentHome, client: AgentClient
) -> None:
    launch = server(home)
    first = await restored(client, launch)
    template = await kept(client)
    assert states(template.pid) == {"T"}
    assert template.pss_bytes > 16 * MIB
    assert template.pid not in {i.pid for i in await client.instances()}

    second = await begin(client, launch, secret_env={"TOKEN": "t0p"})

    assert (second.start_kind, second.pid) == (StartKind.WAKE, template.pid)
    assert "T" not in states(second.pid)
    assert await ask(second, "/restored") is True
    assert await ask(second, "/env/TOKEN") == "t0p"
    assert await ask(first, "/env/TOKEN") is None
    assert (await kept(client)).pid not in (first.pid, second.pid)


@pytest.mark.parametrize("why", ["needed", "idle", "ended"])
async def test_one_that_stands_still_is_gone_with_all_its_processes(
    home: AgentHome, why: str
) -> None:
    """Evicted for an instance, without calls for a time, and with its agent."""
    launch = server(home)
    settings: dict[str, Any] = {"memory_bytes": 512 * MIB, "parked_idle_s": 600.0}
    if why == "idle":
        settings["parked_idle_s"] = 1.0
    async with home.agent(snapshots=True, **settings), home.client() as client:
        first = await restored(client, launch)
        template = await kept(client)
        pids = proc.process_tree(template.pid)
        assert len(pids) > 1
        if why == "needed":
            await begin(client, home.launch("f-2@v1", memory_bytes=256 * MIB))
        elif why == "idle":
            await asyncio.sleep(1.5)  # it stays while the revision has an instance
            assert await kept(client)
            await client.stop(first.id, grace_s=0)
        if why != "ended":
            await until(lambda: not any(map(is_there, pids)))
            assert template.pid not in {t.pid for t in await client.templates()}
    await until(lambda: not any(map(is_there, pids)))
    assert Cgroups.find(home.paths.run).names() == set()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_new_agent_finds_one_that_stands_still(home: AgentHome) -> None:
    launch = server(home)
    with home.agent_process(snapshots=True) as process:
        async with home.client() as client:
            await restored(client, launch)
            template = await kept(client)
        process.kill()
        process.wait()
    async with home.agent(snapshots=True), home.client() as client:
        assert (await kept(client)).pid == template.pid
        assert states(template.pid) == {"T"}
        assert (await begin(client, launch)).start_kind is StartKind.WAKE


async def test_one_that_has_connected_to_somebody_is_not_kept(
    home: AgentHome, client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[int]()

    def has_outside(pids: list[int]) -> bool:
        looked.extend(pids)
        return True

    monkeypatch.setattr(tcp_connections, "has_outside", has_outside)
    launch = server(home)
    await restored(client, launch)

    await until(lambda: looked and not any(map(is_there, looked)))

    assert await client.templates() == []
    assert (await begin(client, launch)).start_kind is StartKind.RESTORE


async def test_one_that_does_not_stay_stopped_is_ended_and_none_is_kept_again(
    home: AgentHome, client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_workers, "WATCH_S", 0.2)
    launch = home.launch(boot=["thread", "unstoppable"])
    first = await restored(client, launch)
    pid = (await kept(client)).pid

    async with asyncio.timeout(20):
        while is_there(pid) or await client.templates():
            await asyncio.sleep(0.02)

    assert is_there(first.pid)
    assert (await begin(client, launch)).start_kind is StartKind.RESTORE
    assert await client.templates() == []
