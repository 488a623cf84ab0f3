"""Slots that are made ahead: whoever leaves while it waits for one leaves it to the next."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshotter import processes
from snapshotter.network import Network
from snapshotter.nursery import Nursery
from snapshotter.slots import Slot


@pytest.fixture
async def nursery(short_tmp: Path) -> AsyncIterator[Nursery]:
    (short_tmp / "logs").mkdir()
    nursery = Nursery(short_tmp / "slots", short_tmp / "logs", log_max_bytes=1024, namespaced=False)
    await nursery.open()
    yield nursery
    await nursery.aclose()


@pytest.mark.parametrize("turns", range(4))
async def test_a_slot_of_a_caller_who_leaves_is_the_next_ones(nursery: Nursery, short_tmp: Path, turns: int) -> None:
    (made,) = [path.name for path in (short_tmp / "slots").iterdir()]
    leaving = asyncio.create_task(nursery.take())
    for _ in range(turns):
        await asyncio.sleep(0)
    if leaving.cancel():
        with pytest.raises(asyncio.CancelledError):
            await leaving
        slot = await nursery.take()
    else:
        slot = await leaving
    assert slot.id == made
    await slot.end()


async def test_a_slot_that_is_being_made_for_a_caller_who_leaves_is_kept(nursery: Nursery, short_tmp: Path) -> None:
    first = await nursery.take()
    await asyncio.sleep(0)  # the next one is under way
    (made,) = {path.name for path in (short_tmp / "slots").iterdir()} - {first.id}
    leaving = asyncio.create_task(nursery.take())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    second = await nursery.take()
    assert second.id == made
    for slot in (first, second):
        await slot.end()


class Refused(Nursery):
    """On a machine that lets nobody mount: a slot with namespaces ends before it answers, and says why."""

    async def _make(self, kind: Network) -> Slot:
        slot = await super()._make(kind)
        if self.namespaced:
            shim = os.pidfd_open(slot.shim_pid)
            processes.send_signal(shim, signal.SIGKILL)
            await processes.wait_gone(shim)
            os.close(shim)
            (slot.directory / "shim.err").write_text("Traceback\nOSError: [Errno 1] mount tmpfs on /x: Operation not permitted\n")
        return slot


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
async def test_where_slots_with_namespaces_do_not_come_up_there_are_plain_ones_and_it_is_said_why(short_tmp: Path) -> None:
    (short_tmp / "logs").mkdir()
    nursery = Refused(short_tmp / "slots", short_tmp / "logs", log_max_bytes=1024, namespaced=True)
    await nursery.open()
    try:
        assert not nursery.namespaced
        assert "mount tmpfs on /x: Operation not permitted" in str(nursery.why_not)
        slot = await nursery.take()
        await slot.adopt()
        await slot.end()
    finally:
        await nursery.aclose()
