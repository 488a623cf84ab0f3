"""A slot as the agent holds it: what its shim says is checked, and a slot whose shim says nonsense
is ended, not believed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.shim import seqpacket
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.replies import BootFailed, SlotConnectionLost
from snapshotter.slots.slot import Slot

POINT: dict[str, Any] = {"threads": [], "phases_ms": {"boot": 1.0}, "joins": True, "obstacles": []}
WRONG_POINTS = [{"listens": 5}, {"connections_inside": []}, {"threads": None}, {"obstacles": [5]}]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Whose pidfd is the shim's, and the worker's."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def connected(directory: Path) -> Iterator[tuple[Slot, socket.socket]]:
    """A slot, and the shim's end of its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        slot = Slot("s-1", directory, ours, -1)
        yield slot, theirs
        if not slot.is_lost:
            slot.close()


def say(shim: socket.socket, message: dict[str, Any], *pids: int) -> None:
    """One message of a shim, with pidfds."""
    fds = [os.pidfd_open(pid) for pid in pids]
    seqpacket.send(shim, seqpacket.encode(message), fds)
    seqpacket.close_all(fds)


def state(**changes: Any) -> dict[str, Any]:
    return {
        "event": "state",
        "worker": "resident",
        "pid": 5,
        "point": {**POINT, **changes},
        "failure": None,
        "status": None,
    }


@pytest.mark.parametrize("wrong", WRONG_POINTS)
async def test_a_snapshot_point_that_makes_no_sense_loses_the_slot(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with connected(tmp_path) as (slot, shim):
        say(shim, {"event": "snapshot_point", **POINT, **wrong})
        with pytest.raises(BootFailed):
            await slot.point
        assert (slot.is_lost, slot.worker) == (True, "empty")
        assert seqpacket.receive(shim)[0] == {"op": "shutdown"}


@pytest.mark.parametrize("phases", [{"fork": -5000.0}, {"fork": 10**400}, None])
async def test_a_snapshot_point_with_phases_that_are_none_is_reached_without_them(
    tmp_path: Path, phases: object
) -> None:
    with connected(tmp_path) as (slot, shim):
        say(shim, {"event": "snapshot_point", **POINT, "phases_ms": phases})
        assert (await slot.point).phases_ms == {}
        assert slot.worker == "resident"


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"event": []},
        {"event": "booted"},
        {"event": "exec_exited"},
        {"event": "quiesced", "listens": 5},
    ],
)
async def test_a_message_that_is_not_our_protocol_loses_the_slot_and_nothing_else(
    tmp_path: Path, message: dict[str, Any]
) -> None:
    with connected(tmp_path) as (slot, shim):
        say(shim, message)
        say(shim, {"event": "state_end"})
        with pytest.raises((BootFailed, SlotConnectionLost)):
            await slot.adopt()


@pytest.mark.parametrize("wrong", WRONG_POINTS)
async def test_a_slot_that_cannot_be_mirrored_is_not_adopted(
    tmp_path: Path, process: subprocess.Popen[bytes], wrong: dict[str, Any]
) -> None:
    with connected(tmp_path) as (slot, shim):
        say(shim, state(**wrong), process.pid, process.pid)
        say(shim, {"event": "state_end"})
        with pytest.raises(SlotConnectionLost):
            await slot.adopt()


async def test_a_new_agent_ends_the_slots_that_it_cannot_take_over(
    short_tmp: Path, process: subprocess.Popen[bytes]
) -> None:
    directory = short_tmp / "s-1"
    directory.mkdir()

    def shim(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            seqpacket.receive(connection)
            say(connection, state(listens=5), process.pid, process.pid)
            say(connection, {"event": "state_end"})
            while seqpacket.receive(connection)[0] is not None:
                pass

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / "shim.sock"))
        listener.listen(8)
        thread = threading.Thread(target=shim, args=(listener,))
        thread.start()
        assert await SlotPool(short_tmp, short_tmp, log_max_bytes=1, namespaced=False).adopt() == []
        await asyncio.to_thread(thread.join)
    assert process.wait(30) == -9
    assert not directory.exists()
