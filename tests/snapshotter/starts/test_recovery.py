"""kill -9 of the agent, of its spawner, of shims and of everything: who goes on, who is swept
away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from snapshotter.client import AgentClient
from snapshotter.errors import AgentUnavailable
from snapshotter.linux.cgroups import Cgroups
from snapshotter.starts.leftovers import end_leftovers
from snapshotter.types import AgentEvent, InstanceInfo, LaunchSpec, StartKind
from tests.fakes.agent_home import AgentHome, ask, instance_id
from tests.fakes.process_trees import is_running

MODES = [pytest.param((), id="as we are"), pytest.param(("--plain",), id="plain")]


async def begin(client: AgentClient, launch: LaunchSpec) -> InstanceInfo:
    return await client.start(
        launch, instance_id=instance_id(), lessee="act-1", secret_env={"TOKEN": "t"}
    )


def slots(home: AgentHome) -> set[str]:
    return {p.name for p in (home.paths.run / "slots").iterdir()}


@pytest.mark.e2e
@pytest.mark.parametrize("mode", MODES)
async def test_a_restarted_agent_finds_everything_as_it_was(
    home: AgentHome, mode: tuple[str, ...]
) -> None:
    with home.agent_process(*mode) as agent:
        async with home.client() as client:
            infos = [await begin(client, home.launch()) for _ in range(3)]
            single = await begin(client, home.launch("f-2@v1", boot=["thread"]))
            [template] = await client.templates()
            agent.kill()
            agent.wait()

    await ask(infos[0], "/print/alone")
    with pytest.raises(OSError):
        await ask(infos[2], "/exit/6")

    with home.agent_process(*mode):
        async with home.client() as client:
            adopted = {i.id: i for i in await client.adopt(lessee="act-1")}
            assert adopted == {i.id: i for i in [*infos[:2], single]}
            [again] = await client.templates()
            assert (again.pid, again.phases_ms) == (template.pid, template.phases_ms)
            assert (await begin(client, home.launch())).start_kind is StartKind.FORK
            assert [
                line["text"] async for line in await client.logs(labels={}, instance_id=infos[0].id)
            ] == ["alone"]
            parts = [
                part async for part in client.exec(infos[1].id, ["/bin/sh", "-c", "echo $TOKEN"])
            ]
            assert parts == [{"stream": "stdout", "text": "t\n"}, {"exit_status": 0}]
            await client.stop(infos[0].id, grace_s=5)
            await client.stop(single.id, grace_s=5)
            assert infos[0].id not in {i.id for i in await client.instances()}
    assert slots(home) == set()
    assert Cgroups.find(home.paths.run).names() == set()


@pytest.mark.e2e
async def test_a_slot_that_cannot_be_read_is_ended_and_the_others_go_on(home: AgentHome) -> None:
    with home.agent_process() as agent:
        async with home.client() as client:
            broken, sound = (
                await begin(client, home.launch()),
                await begin(client, home.launch("f-2@v1")),
            )
            agent.kill()
            agent.wait()
    record = Path(broken.socket).with_name("housing.json")
    record.write_text("{}")

    with home.agent_process():
        async with home.client() as client:
            assert [i.id for i in await client.instances()] == [sound.id]
            assert not record.parent.exists()


@pytest.mark.e2e
async def test_a_boot_that_was_under_way_becomes_a_template_of_the_next_agent(
    home: AgentHome,
) -> None:
    gate = home.paths.home.parent / "gate"
    os.mkfifo(gate, 0o666)
    gate.chmod(0o666)
    launch = home.launch(boot=["print:waiting", f"read:{gate}"], uid=None)
    with home.agent_process("--plain") as agent:
        async with home.client() as client:
            start = asyncio.create_task(begin(client, launch))
            writer = await asyncio.to_thread(os.open, gate, os.O_WRONLY)
            agent.kill()
            agent.wait()
            with pytest.raises(AgentUnavailable):
                await start
    with home.agent_process("--plain"):
        async with home.client() as client:
            start = asyncio.create_task(begin(client, launch))
            while not await client.instances():
                await asyncio.sleep(0.005)
            os.close(writer)
            assert (await start).start_kind is StartKind.COLD
            assert len(await client.templates()) == 1
            assert len(slots(home)) == 2  # its slot, and the spare one


@pytest.mark.e2e
@pytest.mark.parametrize("mode", MODES)
async def test_after_the_death_of_everything_nothing_stale_is_left(
    home: AgentHome, mode: tuple[str, ...]
) -> None:
    with home.agent_process(*mode) as agent:
        async with home.client() as client:
            info = await begin(client, home.launch())
            agent.kill()
            agent.wait()
    for shim in shims(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(shim, signal.SIGKILL)

    with home.agent_process(*mode):
        async with home.client() as client:
            assert await client.instances() == []
            assert await client.templates() == []
            assert Path(info.socket).parent.name not in slots(home)
            assert Cgroups.find(home.paths.run).names() == set()
            assert (await begin(client, home.launch())).start_kind is StartKind.COLD


@pytest.mark.e2e
async def test_a_killed_spawner_is_replaced(home: AgentHome) -> None:
    async with home.agent(), home.client() as client:
        first = await begin(client, home.launch())
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            if b"snapshotter.shim.spawner" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        for name in ("f-2@v1", "f-3@v1"):
            assert (await begin(client, home.launch(name))).start_kind is StartKind.COLD
        assert isinstance(await ask(first, "/"), int)


@pytest.mark.e2e
async def test_a_killed_shim_is_the_end_of_its_slot_and_the_next_start_works(
    home: AgentHome,
) -> None:
    async with home.agent(), home.client() as client:
        info = await begin(client, home.launch())
        first_event = asyncio.create_task(next_event(client, "instance_gone"))
        await asyncio.sleep(0)
        [template] = await client.templates()
        shim = int(Path(f"/proc/{template.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(shim, signal.SIGKILL)

        event = await first_event
        assert (event.kind, event.subject, event.reason) == ("instance_gone", info.id, "slot_lost")
        assert (await begin(client, home.launch())).start_kind is StartKind.COLD


async def next_event(client: AgentClient, kind: str) -> AgentEvent:
    async for event in client.watch():
        if event.kind == kind:
            return event
    raise AssertionError("the stream ended")


def shims(home: AgentHome) -> list[int]:
    """Pids of the processes that hold this home's shim sockets: found by the log directory that
    each has open.

    By what it is, not by its name: in a root of their own they have it from a mount that is none of
    this namespace's."""
    logs, found = (home.paths.home / "node/logs").stat(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and any(_is_same(fd, logs) for fd in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found


def _is_same(descriptor: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), status)
    except OSError:  # closed meanwhile, or nothing that can be asked
        return False


@pytest.mark.e2e
@pytest.mark.parametrize("mode", MODES)
async def test_what_a_killed_agent_left_is_ended_and_another_homes_is_not(
    short_tmp: Path, mode: tuple[str, ...]
) -> None:
    home, other = AgentHome(short_tmp / "a"), AgentHome(short_tmp / "b")
    with home.agent_process(*mode) as agent, other.agent_process(*mode):
        async with home.client() as client, other.client() as theirs:
            infos = [await begin(client, home.launch()) for _ in range(2)]
            running = await begin(theirs, other.launch())
            agent.kill()
            agent.wait()

            left = await end_leftovers(home.paths.run, grace_s=5.0)

            assert (left.instances, left.slots >= 1) == (2, True)
            assert slots(home) == set()
            assert Cgroups.find(home.paths.run).names() == set()
            assert [pid for pid in (i.pid for i in infos) if is_running(pid)] == []
            assert (await end_leftovers(home.paths.run, grace_s=5.0)).is_empty
            await ask(running, "/print/alone")
            assert [i.id for i in await theirs.instances()] == [running.id]
