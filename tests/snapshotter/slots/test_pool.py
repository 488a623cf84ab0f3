"""Slots that are made ahead: whoever leaves while it waits for one leaves it to the next. No shim
runs on that no agent can find."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter.errors import Unsupported
from snapshotter.linux import proc
from snapshotter.linux.slot_network import Network
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.slot import Slot


@pytest.fixture
async def slot_pool(short_tmp: Path) -> AsyncIterator[SlotPool]:
    (short_tmp / "logs").mkdir()
    slot_pool = SlotPool(
        short_tmp / "slots", short_tmp / "logs", log_max_bytes=1024, namespaced=False
    )
    await slot_pool.open()
    yield slot_pool
    await slot_pool.aclose()


@pytest.mark.parametrize("turns", range(4))
async def test_a_slot_of_a_caller_who_leaves_is_the_next_ones(
    slot_pool: SlotPool, short_tmp: Path, turns: int
) -> None:
    (made,) = [path.name for path in (short_tmp / "slots").iterdir()]
    leaving = asyncio.create_task(slot_pool.acquire())
    for _ in range(turns):
        await asyncio.sleep(0)
    if leaving.cancel():
        with pytest.raises(asyncio.CancelledError):
            await leaving
        slot = await slot_pool.acquire()
    else:
        slot = await leaving
    assert slot.id == made
    await slot.end()


async def test_a_slot_that_is_being_made_for_a_caller_who_leaves_is_kept(
    slot_pool: SlotPool, short_tmp: Path
) -> None:
    first = await slot_pool.acquire()
    leaving = asyncio.create_task(slot_pool.acquire())
    while not (made := {path.name for path in (short_tmp / "slots").iterdir()} - {first.id}):
        await asyncio.sleep(0)  # the next one is under way once a caller needs it
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    second = await slot_pool.acquire()
    assert {second.id} == made
    for slot in (first, second):
        await slot.end()


NAMESPACED = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
]


@pytest.mark.parametrize("is_namespaced", NAMESPACED)
async def test_a_shim_ends_once_its_socket_is_removed_and_no_agent_is_connected(
    short_tmp: Path, is_namespaced: bool
) -> None:
    slot_pool = SlotPool(short_tmp / "slots", short_tmp, log_max_bytes=1, namespaced=is_namespaced)
    await slot_pool.open()
    kept, removed = await slot_pool.acquire(), await slot_pool.acquire()
    shims = []
    for slot in (kept, removed):
        await slot.adopt()
        shims.append(os.pidfd_open(slot.shim_pid))
    for slot in (kept, removed):
        slot.close()
    shutil.rmtree(removed.directory)
    async with asyncio.timeout(20):
        await proc.wait_readable(shims[1])
    assert not has_exited(shims[0]), "its socket is there: the next agent finds it"
    await kept.end()
    async with asyncio.timeout(20):
        await proc.wait_readable(shims[0])
    for shim in shims:
        os.close(shim)
    await slot_pool.aclose()


class Recorded(SlotPool):
    """Records a pidfd of every shim that the spawner made."""

    def _request_slot(
        self, order: dict[str, object], listener: int
    ) -> tuple[dict[str, object], list[int]]:
        answer, fds = super()._request_slot(order, listener)
        self.shims = [*getattr(self, "shims", []), *map(os.dup, fds)]
        return answer, fds


async def test_a_shim_whose_agent_ends_meanwhile_is_killed(short_tmp: Path) -> None:
    slot_pool = Recorded(short_tmp / "slots", short_tmp, log_max_bytes=1, namespaced=False)
    await slot_pool.open()
    making = asyncio.create_task(slot_pool._make(Network.HOST))
    while len([*(short_tmp / "slots").iterdir()]) < 2:
        await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert len(slot_pool.shims) == 2
    async with asyncio.timeout(5):
        await proc.wait_readable(slot_pool.shims[1])
    await slot_pool.aclose()
    for shim in slot_pool.shims:
        os.close(shim)


async def test_a_caller_who_leaves_while_the_pool_closes_leaves_no_slot(short_tmp: Path) -> None:
    slot_pool = Recorded(short_tmp / "slots", short_tmp, log_max_bytes=1, namespaced=False)
    await slot_pool.open()
    first = await slot_pool.acquire()
    leaving = asyncio.create_task(slot_pool.acquire())
    await asyncio.sleep(0)
    closing = asyncio.create_task(slot_pool.aclose())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await first.end()
    await closing
    with pytest.raises(Unsupported, match="the node agent is ending"):
        await slot_pool.acquire()
    async with asyncio.timeout(5):
        for shim in slot_pool.shims:
            await proc.wait_readable(shim)
            os.close(shim)
    assert [*(short_tmp / "slots").iterdir()] == []


def has_exited(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


class Refused(SlotPool):
    """On a machine that lets nobody mount: a slot with namespaces ends before it answers, and says
    why."""

    async def _make(self, kind: Network) -> Slot:
        slot = await super()._make(kind)
        if self.namespaced:
            shim = os.pidfd_open(slot.shim_pid)
            proc.send_signal(shim, signal.SIGKILL)
            await proc.wait_readable(shim)
            os.close(shim)
            (slot.directory / "shim.err").write_text(
                "Traceback\nOSError: [Errno 1] mount tmpfs on /x: Operation not permitted\n"
            )
        return slot


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
async def test_where_slots_with_namespaces_do_not_come_up_there_are_plain_ones_and_it_is_said_why(
    short_tmp: Path,
) -> None:
    (short_tmp / "logs").mkdir()
    slot_pool = Refused(
        short_tmp / "slots", short_tmp / "logs", log_max_bytes=1024, namespaced=True
    )
    await slot_pool.open()
    try:
        assert not slot_pool.namespaced
        assert "mount tmpfs on /x: Operation not permitted" in str(slot_pool.why_not)
        slot = await slot_pool.acquire()
        await slot.adopt()
        await slot.end()
    finally:
        await slot_pool.aclose()
