"""Forks parked ahead: they are assigned, counted, dropped when nobody comes, and gone with whoever
they belong to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.client import AgentClient
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.slots.occupied_slot import OccupiedSlot, ParkedSpot
from snapshotter.slots.slot import Slot
from snapshotter.starts.prefork_pool import PreforkPool
from snapshotter.starts.templates import Template, Templates
from snapshotter.types import RevisionKey, StartKind, TemplateInfo
from tests.fakes.agent_home import (
    MIB,
    AgentHome,
    ask,
    begin,
    instance_id,
    settled_descriptors,
)


@pytest.fixture(params=["namespaces", "plain"])
async def client(request: pytest.FixtureRequest, home: AgentHome) -> AsyncIterator[AgentClient]:
    if request.param == "namespaces" and os.geteuid() != 0:
        pytest.skip("needs root")
    async with (
        home.agent(namespaces=request.param == "namespaces", parked_per_template=1),
        home.client() as client,
    ):
        yield client


async def template_with(client: AgentClient, parked: int) -> TemplateInfo:
    """The one Template, once so many are parked behind it (bounded by the test's own timeout)."""
    while True:
        [template] = await client.templates()
        if template.parked == parked:
            return template
        await asyncio.sleep(0.005)


def groups(home: AgentHome) -> set[str]:
    return {name for name in Cgroups.find(home.paths.run).names() if name[:2] in ("p-", "i-")}


def children(template: TemplateInfo) -> set[int]:
    return set(
        map(int, Path(f"/proc/{template.pid}/task/{template.pid}/children").read_text().split())
    )


async def test_after_a_start_one_is_parked_and_the_next_start_is_its_assignment(
    home: AgentHome, client: AgentClient
) -> None:
    first = await begin(client, home.launch())
    template = await template_with(client, 1)
    assert [i.id for i in await client.instances()] == [first.id]
    [parked] = children(template) - {first.pid}

    second = await begin(client, home.launch(), secret_env={"TOKEN": "t"})

    assert (second.start_kind, list(second.phases_ms), second.pid) == (
        StartKind.FORK,
        ["assign", "wake"],
        parked,
    )
    assert await ask(second, "/env/TOKEN") == "t"
    assert {i.id for i in await client.instances()} == {first.id, second.id}
    await template_with(client, 1)  # and the next one


async def test_secrets_of_one_instance_are_not_in_a_parked_fork(
    home: AgentHome, client: AgentClient
) -> None:
    first = await begin(client, home.launch(), secret_env={"TOKEN": "first"})
    await template_with(client, 1)

    assert await ask(await begin(client, home.launch()), "/env/TOKEN") is None
    assert await ask(first, "/env/TOKEN") == "first"


async def test_an_assigned_fork_is_logged_stopped_and_explained_like_any_instance(
    home: AgentHome, client: AgentClient
) -> None:
    await begin(client, home.launch())
    await template_with(client, 1)
    info = await begin(client, home.launch())
    await ask(info, "/print/hello")
    with pytest.raises(OSError):
        await ask(info, "/exit/9")

    lines: list[str] = []
    while not lines:  # what it printed passes through its shim
        lines = [line["text"] async for line in await client.logs(labels={}, instance_id=info.id)]
    assert lines == ["hello"]
    while info.id in {i.id for i in await client.instances()}:
        await asyncio.sleep(0.005)
    stopped = await begin(client, home.launch())
    await client.stop(stopped.id, grace_s=5)
    assert stopped.id not in {i.id for i in await client.instances()}


async def test_a_parked_fork_that_died_costs_nobody_anything(
    home: AgentHome, client: AgentClient
) -> None:
    first = await begin(client, home.launch())
    template = await template_with(client, 1)
    [parked] = children(template) - {first.pid}
    os.kill(parked, 9)

    again = await begin(client, home.launch())
    assert again.start_kind is StartKind.FORK
    assert isinstance(await ask(again, "/"), int)


async def test_a_parked_fork_that_dies_before_it_reads_its_assignment_costs_nobody_anything(
    home: AgentHome, client: AgentClient
) -> None:
    first = await begin(client, home.launch())
    template = await template_with(client, 1)
    [parked] = children(template) - {first.pid}
    os.kill(parked, signal.SIGSTOP)
    name = instance_id()
    start = asyncio.create_task(begin(client, home.launch(), instance_id=name))
    # made by the shim when it assigns
    while not (home.paths.home / "node" / "logs" / f"{name}.log").exists():
        await asyncio.sleep(0.001)
    os.kill(parked, signal.SIGKILL)

    again = await start
    assert (again.id, again.start_kind, next(iter(again.phases_ms))) == (
        name,
        StartKind.FORK,
        "fork",
    )
    assert isinstance(await ask(again, "/"), int)


async def test_with_the_template_go_those_that_are_parked(
    home: AgentHome, client: AgentClient
) -> None:
    first = await begin(client, home.launch())
    template = await template_with(client, 1)
    [parked] = children(template) - {first.pid}
    await client.drop_template(RevisionKey("f-1@v1-abc"))

    while Path(f"/proc/{parked}/fd").exists():
        await asyncio.sleep(0.005)
    while any(name.startswith("p-") for name in groups(home)):
        await asyncio.sleep(0.005)
    assert isinstance(await ask(first, "/"), int)


async def test_a_burst_takes_the_parked_one_and_forks_the_others(
    home: AgentHome, client: AgentClient
) -> None:
    await begin(client, home.launch())
    await template_with(client, 1)
    infos = await asyncio.gather(*(begin(client, home.launch()) for _ in range(4)))
    assert sorted(next(iter(i.phases_ms)) for i in infos) == ["assign", "fork", "fork", "fork"]


async def test_many_lives_leave_nothing_but_the_one_that_is_parked(
    home: AgentHome, client: AgentClient
) -> None:
    await client.stop((await begin(client, home.launch())).id, grace_s=5)
    await template_with(client, 1)
    before = await settled_descriptors()
    for _ in range(5):
        info = await begin(client, home.launch())
        await client.stop(info.id, grace_s=5)
        template = await template_with(client, 1)
    assert await settled_descriptors() == before
    assert len(children(template)) == 1
    assert len([name for name in groups(home) if name.startswith("i-")]) == 0


async def test_nobody_stays_parked_for_long(home: AgentHome) -> None:
    async with home.agent(parked_per_template=1, parked_idle_s=1.0), home.client() as client:
        info = await begin(client, home.launch())
        template = await template_with(client, 1)
        await client.stop(info.id, grace_s=5)
        template = await template_with(client, 0)
        while children(template):
            await asyncio.sleep(0.005)


class FakeSlot:
    """A slot with one fork that waits: this very process, which is larger than any small budget."""

    id, worker_pid = "s-1", 0

    def __init__(self) -> None:
        self.parked = {"p-1": os.getpid()}
        self.unparked = 0

    def unpark(self) -> None:
        self.unparked += 1


@pytest.mark.parametrize("budget_bytes, unparked", [(MIB, 1), (2**50, 0)])
async def test_beyond_the_budget_nothing_stays_parked(
    home: AgentHome, budget_bytes: int, unparked: int
) -> None:
    slot, group = FakeSlot(), Group(directories={}, version=0)
    occupied = OccupiedSlot(
        slot=cast("Slot", slot),
        launch=home.launch(),
        group=group,
        spots=[ParkedSpot(name="p-1", group=group)],
    )
    templates, background_tasks = Templates(), BackgroundTasks()
    templates.add(
        Template(occupied=occupied, threads=(), phases_ms={}, single=False, last_used_at=0.0)
    )
    cgroups = Cgroups(bases={}, version=0)
    prefork_pool = PreforkPool(
        cgroups=cgroups,
        templates=templates,
        background_tasks=background_tasks,
        per_template=1,
        idle_s=60,
        budget_bytes=budget_bytes,
    )

    prefork_pool.on_parked(cast("Slot", slot))
    await background_tasks.aclose()

    assert (slot.unparked, len(occupied.spots)) == (unparked, 1 - unparked)
    assert (templates.pss_bytes() > MIB) == (not unparked)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "mode", [pytest.param((), id="as we are"), pytest.param(("--plain",), id="plain")]
)
async def test_a_restarted_agent_drops_what_the_earlier_one_had_parked(
    home: AgentHome, mode: tuple[str, ...]
) -> None:
    with home.agent_process(*mode) as agent:
        async with home.client() as client:
            first = await begin(client, home.launch())
            await template_with(client, 1)
            assigned = await begin(client, home.launch())
            template = await template_with(client, 1)
            [parked] = children(template) - {first.pid, assigned.pid}
            agent.kill()
            agent.wait()
    with home.agent_process(*mode):
        async with home.client() as client:
            assert {i.id for i in await client.adopt(lessee="act-1")} == {first.id, assigned.id}
            while Path(f"/proc/{parked}/fd").exists():
                await asyncio.sleep(0.005)
            assert isinstance(await ask(assigned, "/"), int)
            assert (await begin(client, home.launch())).start_kind is StartKind.FORK
            await template_with(client, 1)
    assert Cgroups.find(home.paths.run).names() == set()
