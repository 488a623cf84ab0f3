"""Slots that are made ahead: whoever leaves while it waits for one leaves it to the next."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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
