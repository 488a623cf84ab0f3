"""Faults while environment snapshots are made and used, with real slots, real CRIU and the real
worker: a start goes on COLD, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.errors import AgentUnavailable
from snapshotter.types import ENVIRONMENT_PREFIX, StartKind
from tests.fakes.agent_home import begin
from tests.fakes.import_home import (
    ImportHome,
    answer,
    environments,
    made,
    serving,
    settled,
)

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("criu")]
PACKAGES = "import sqlalchemy, numpy"
"""Of the platform's own environment, which a process of its own has. The imports of one alone may
be too quick to be kept."""


@pytest.fixture
def home(short_tmp: Path) -> ImportHome:
    return ImportHome(short_tmp)


async def test_a_damaged_one_is_quarantined_and_the_start_is_cold(home: ImportHome) -> None:
    async with serving(home) as client:
        await begin(client, home.function("f-1@v1"))
        environment = await made(home, client)
        images = home.paths.home / "node/snapshots" / environment["id"] / "images"
        pages = next(images.glob("pages-*"))
        with pages.open("r+b") as file:
            file.write(b"\xff" * 4096)

        assert (await begin(client, home.function("f-1@v2"))).start_kind is StartKind.COLD
        assert environment["id"] not in [one["id"] for one in environments(home)]


@contextlib.contextmanager
def small_disk(home: ImportHome) -> Iterator[None]:
    """The snapshots have a disk of their own, on which no image has room."""
    directory = home.paths.home / "node" / "snapshots"
    directory.mkdir(parents=True, mode=0o700)
    size = "size=2m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


async def test_on_a_full_disk_none_is_made_and_starts_are_cold(home: ImportHome) -> None:
    with small_disk(home):
        async with serving(home) as client:
            await begin(client, home.function("f-1@v1"))
            assert (await settled(client))["snapshots"] == 0
            info = await begin(client, home.function("f-1@v2"))
            assert info.start_kind is StartKind.COLD
            assert await answer(info) == [7, 2, 1]
            assert (await settled(client))["off"] == []
            left = [path.name for path in (home.paths.home / "node/snapshots").iterdir()]
            assert not [name for name in left if name.startswith("sn-")]


def slots(home: ImportHome) -> list[dict[str, Any]]:
    """What the agent keeps of its slots."""
    found = []
    for file in home.paths.run.glob("slots/*/housing.json"):
        with contextlib.suppress(OSError, ValueError):  # it is just being cleared
            found.append(json.loads(file.read_text()))
    return found


def is_imported(home: ImportHome) -> bool:
    """A worker imports the packages, for an environment snapshot."""
    return any(one["launch"]["revision"].startswith(ENVIRONMENT_PREFIX) for one in slots(home))


def is_dumped(home: ImportHome) -> bool:
    """Its images are written."""
    directory = home.paths.home / "node/snapshots"
    return is_imported(home) and any(directory.glob("*/images/pages-*.img")) and not has_one(home)


def is_proven(home: ImportHome) -> bool:
    """It is there, and has no proof."""
    return has_one(home) and not environments(home)


def is_rehearsed(home: ImportHome) -> bool:
    """The function is booted in it, before a start is."""
    return any(one["environment"] and one["transient"] for one in slots(home))


def has_one(home: ImportHome) -> bool:
    """It is published."""
    files = (home.paths.home / "node/snapshots").glob("sn-*/manifest.json")
    return any(ENVIRONMENT_PREFIX in file.read_text() for file in files)


@pytest.mark.timeout(240)
async def test_an_agent_that_is_killed_while_it_makes_one_leaves_nothing_behind(
    home: ImportHome,
) -> None:
    """At each step; the next agent begins anew, and the last one makes it."""
    for n, is_reached in enumerate((is_imported, is_dumped, is_proven, is_rehearsed)):
        with home.agent_process(snapshots=True, environment_snapshots=16) as agent:
            async with home.client() as client:
                launch = home.function(f"f-{n}@v1", PACKAGES)
                await begin(client, launch)
                async with asyncio.timeout(40):
                    while not is_reached(home):
                        await asyncio.sleep(0.002)
                agent.send_signal(signal.SIGKILL)
                agent.wait()
    with home.agent_process(snapshots=True, environment_snapshots=16):
        async with home.client() as client:
            await begin(client, home.function("f-9@v1", PACKAGES))
            await made(home, client)
            info = await begin(client, home.function("f-9@v2", PACKAGES))
            assert info.start_kind is StartKind.IMPORT
            await settled(client)
            assert not [one for one in slots(home) if one["transient"]]
            assert len(environments(home)) == 1


@pytest.mark.timeout(240)
async def test_a_start_that_an_agent_was_killed_in_leaves_nothing_behind(
    home: ImportHome,
) -> None:
    """The packages here are those of the platform's own environment: the agent is a process. The
    next one continues the boot, or begins anew if the process was not restored yet."""
    slow = f"{PACKAGES}, time; time.sleep(1.5)"
    with home.agent_process(snapshots=True, environment_snapshots=16) as agent:
        async with home.client() as client:
            await begin(client, home.function("f-1@v1", PACKAGES))
            await made(home, client)
            launch = home.function("f-1@v2", slow, answer="numpy.ones(2).sum()")
            starting = asyncio.create_task(begin(client, launch))
            async with asyncio.timeout(30):
                while not any(
                    json.loads(file.read_text()).get("environment")
                    for file in home.paths.run.glob("slots/*/housing.json")
                ):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.7)  # it is restored, and runs user code
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            with pytest.raises(AgentUnavailable):
                await starting
    with home.agent_process(snapshots=True, environment_snapshots=16):
        async with home.client() as client:
            info = await begin(client, launch)
            assert info.start_kind in (StartKind.FORK, StartKind.IMPORT)
            assert await answer(info) == [7, 2, 2.0]
            assert len(list(home.paths.run.glob("slots/*/housing.json"))) == 2
