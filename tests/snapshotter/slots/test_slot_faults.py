"""CRIU is killed, or finds an image that is not whole; and fifty restores, after which nothing is
left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from snapshotter.criu.errors import CriuError
from snapshotter.linux import proc
from snapshotter.slots.replies import SlotConnectionLost
from tests.fakes.agent_home import MIB
from tests.fakes.slot_workshop import Place, Workshop

pytestmark = pytest.mark.root
CYCLES = 50
BALLAST_MIB = 4
"""Of files in each slot."""


ATTEMPTS = 20


async def kill_criu(place: Place, during: asyncio.Task[Any]) -> bool:
    """As soon as there is one in the slot. A yield, not a nap: it lives for milliseconds. False: a
    busy machine did not show it before `during` ended."""
    while not during.done():
        for pid in proc.process_tree(place.slot.shim_pid):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
            if name == "criu":
                os.kill(pid, signal.SIGKILL)
                return True
        await asyncio.sleep(0)
    return False


async def gone(pids: Iterable[int]) -> None:
    """Until the last is: of a shim, until its parent has reaped it. Bounded by the test's own
    timeout."""
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        await asyncio.sleep(0.01)


async def settled(place: Place, count: int) -> None:
    """Until so many processes are below the shim, the dead included."""
    while len(proc.process_tree(place.slot.shim_pid)) != count + 1:
        await asyncio.sleep(0.005)


async def test_criu_killed_while_it_dumps_leaves_the_template_and_nothing_else(
    shop: Workshop,
) -> None:
    template = await shop.boot(boot=[f"allocate:{64 * MIB}", "remember:warm"])
    sibling = await shop.start(template)
    for n in range(ATTEMPTS):
        dumping = asyncio.create_task(shop.dump(template, name=f"killed-{n}"))
        was_killed = await kill_criu(template, dumping)
        try:
            await dumping
        except CriuError:
            assert was_killed
            break
    else:
        pytest.fail(f"{ATTEMPTS} dumps ended before they were hit")

    await settled(template, 2)
    assert await shop.ask(template, sibling, "/memory") == ["warm"]
    place = await shop.restore(await shop.dump(template, name="c-2"))
    assert await shop.ask(place, await shop.start(place, in_place=True), "/memory") == ["warm"]


async def test_criu_killed_while_it_restores_leaves_a_slot_that_can_be_ended(
    shop: Workshop,
) -> None:
    image = await shop.dump(await shop.boot(boot=[f"allocate:{64 * MIB}", "remember:warm"]))
    for _ in range(ATTEMPTS):
        before = len(shop.places)
        restoring = asyncio.create_task(shop.restore(image))
        while not restoring.done() and (
            len(shop.places) == before or shop.places[-1].slot.worker != "furnished"
        ):
            await asyncio.sleep(0)
        place = shop.places[-1]
        was_killed = await kill_criu(place, restoring)
        try:
            await shop.clear(await restoring)
        except (CriuError, SlotConnectionLost):
            assert was_killed
            break
    else:
        pytest.fail(f"{ATTEMPTS} restores ended before they were hit")
    shim = place.slot.shim_pid
    below = proc.process_tree(shim)
    await shop.clear(place)

    await gone(below)
    assert (await shop.restore(image)).slot.worker == "resident"


@pytest.mark.parametrize("damage", ["missing", "empty", "foreign"])
async def test_an_image_without_its_pages_is_refused(shop: Workshop, damage: str) -> None:
    image = await shop.dump(await shop.boot())
    pages = next(image.directory.glob("pages-*.img"))
    if damage == "missing":
        pages.unlink()
    else:
        pages.write_bytes(b"" if damage == "empty" else b"x" * 100)
    with pytest.raises(CriuError):
        await shop.restore(image, deadline_s=1)  # with too few pages this CRIU reads for ever
    place = shop.places[-1]
    shim = place.slot.shim_pid
    await shop.clear(place)
    await gone([shim])


async def spare_made() -> None:
    """Until the pool has made its spare slot, which it begins some time after one was acquired."""
    await asyncio.gather(
        *(task for task in asyncio.all_tasks() if task.get_name().startswith("spare slot"))
    )


def footprint(shop: Workshop) -> dict[str, object]:
    """What a slot could leave behind."""
    run = shop.home.paths.run
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "slots": len(list((run / "s").iterdir())),
        "groups": sorted(shop.cgroups.names()),
        # other tests have theirs
        "mounts": Path("/proc/self/mounts").read_text().count(str(run.parent)),
        "processes": sum(
            str(run) in _arguments(pid) for pid in Path("/proc").iterdir() if pid.name.isdecimal()
        ),
        "sockets": sum(
            str(run) in line for line in Path("/proc/net/unix").read_text().splitlines()
        ),
    }


def _arguments(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def shared_kib() -> int:
    """Pages of all tmpfs and memfds of the machine."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Shmem"].split()[0])


@pytest.mark.slow  # fifty restores
async def test_after_fifty_restores_nothing_is_left(shop: Workshop) -> None:
    template = await shop.boot(boot=[f"grow:/tmp/ballast={BALLAST_MIB}", "unlinked:/dev/shm/gone"])
    image = await shop.dump(template)
    before, zombies, pages = None, None, 0
    for cycle in range(CYCLES):
        place = await shop.restore(image)
        running = await shop.start(place, in_place=True)
        assert await shop.ask(place, running, "/opened") == ["/dev/shm/gone"]
        await shop.stop(running, place.slot)
        await shop.clear(place)
        if cycle == 0:
            await spare_made()
            before, zombies, pages = footprint(shop), _zombies(), shared_kib()
    await spare_made()
    assert footprint(shop) == before
    assert _zombies() <= (zombies or set())
    most, until = CYCLES * BALLAST_MIB * 1024 // 2, time.monotonic() + 20
    # what others on the machine hold meanwhile goes
    while shared_kib() - pages >= most and time.monotonic() < until:
        await asyncio.sleep(0.1)
    assert shared_kib() - pages < most


def _zombies() -> set[str]:
    """Pids of the dead that nobody reaped, below this test and its slots."""
    me, found = str(os.getpid()), set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and parent == me:
            found.add(stat.parent.name)
    return found
