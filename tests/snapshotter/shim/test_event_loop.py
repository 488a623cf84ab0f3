"""The shim's loop: what user code writes to has a bound on the shim's CPU time, and nothing else
waits for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.shim import seqpacket
from snapshotter.shim.event_loop import PACED_SHARE, Peer, Poller
from snapshotter.shim.log_capture import LogCapture
from snapshotter.shim.log_file import LogFile
from snapshotter.shim.log_pipe import LogPipe

MESSAGES = "import socket\nworker = socket.socket(fileno=0)\nwhile True: worker.send({data!r})"
FLOOD = "import os\nwhile True: os.write(1, {data!r})"


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[tuple[Poller, LogFile, int]]:
    """A loop, a log, and the end of its stdout to write to."""
    directory = os.open(tmp_path, os.O_RDONLY)
    poller, pipes = Poller(), list[LogPipe]()
    recorder = LogCapture(poller, lambda *_: None, directory=directory, max_bytes=1024 * 1024)
    log = recorder.open("i-1")
    stdout, stderr = recorder.pipes_into(log, pipes)
    os.close(stderr)
    yield poller, log, stdout
    os.close(stdout)
    recorder.finish(log, pipes)
    os.close(directory)


@pytest.mark.slow  # the rate shows once the burst, half a second of CPU time, is used up
@pytest.mark.parametrize("data", [b"x" * 65536, b"\n" * 4096], ids=["much", "short lines"])
def test_a_flood_of_output_costs_the_shim_little_cpu(
    recorder: tuple[Poller, LogFile, int], data: bytes
) -> None:
    poller, _, stdout = recorder
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", FLOOD.format(data=data)], stdout=stdout
    ) as process:
        try:
            _turn_for(poller, cpu_s=0.6)
            used = _turn_until_paced(poller, real_s=6.0)
        finally:
            process.kill()
    # without a pace it is all of a processor
    assert _is_paced(*used[-1]), used


def test_output_of_a_working_day_is_read_at_once(
    recorder: tuple[Poller, LogFile, int], tmp_path: Path
) -> None:
    poller, _, stdout = recorder
    for number in range(200):
        os.write(stdout, b"line %d\n" % number * 10)
        poller.poll_once(0.0)
    assert (tmp_path / "i-1.log").read_bytes().count(b"\n") == 2000


def _turn_for(poller: Poller, *, cpu_s: float = 1e9, real_s: float = 60.0) -> tuple[float, float]:
    """Turns of the loop until it has used so much of either time; what it used of both."""
    cpu, real = time.thread_time(), time.monotonic()
    while time.thread_time() - cpu < cpu_s and time.monotonic() - real < real_s:
        poller.poll_once(0.1)
    return time.thread_time() - cpu, time.monotonic() - real


def _turn_until_paced(poller: Poller, *, real_s: float) -> list[tuple[float, float]]:
    """What it used of both times in turns of that length, of which a machine that is busy may need
    three: the burst counts what handlers use, and accrues while the writer waits for a processor."""
    used = [_turn_for(poller, real_s=real_s)]
    while not _is_paced(*used[-1]) and len(used) < 3:
        used.append(_turn_for(poller, real_s=real_s))
    return used


def _is_paced(used_s: float, took_s: float) -> bool:
    return used_s < took_s * PACED_SHARE * 3 + 0.05


def test_a_descriptor_that_rests_can_be_forgotten_and_holds_up_no_other() -> None:
    poller, heard = Poller(), list[str]()
    busy, busy_end = os.pipe()
    other, other_end = os.pipe()

    def handle(_: int) -> None:
        heard.append("busy")
        work(0.6)

    poller.watch(busy, handle, paced=True)
    poller.watch(other, lambda _: heard.append(os.read(other, 1).decode()))
    os.write(busy_end, b"x")  # it is never read: ready for ever
    poller.poll_once(1.0)
    os.write(other_end, b"o")
    poller.poll_once(0.05)
    poller.poll_once(0.05)
    assert heard == ["busy", "o"]
    poller.unwatch(busy)
    poller.unwatch(busy)
    poller.poll_once(0.0)
    for fd in (busy, busy_end, other, other_end):
        os.close(fd)


def work(cpu_s: float) -> None:
    """Use a processor."""
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The shim's and the worker's end of a control channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.slow  # as above
@pytest.mark.parametrize(
    "data", [b'{"event":[' + b"0," * 40_000 + b"0]}", b"{}"], ids=["long", "short"]
)
def test_a_flood_of_messages_of_a_worker_costs_the_shim_little_cpu(
    channel: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    (shim, worker), poller = channel, Poller()
    peer = Peer(shim, poller, lambda *_: None, lambda: None, paced=True)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", MESSAGES.format(data=data)], stdin=worker.fileno()
    ) as process:
        try:
            _turn_for(poller, cpu_s=0.6)
            used = _turn_until_paced(poller, real_s=4.0)
        finally:
            process.kill()
    peer.close()
    # without a pace it is all of a processor
    assert _is_paced(*used[-1]), used


def test_a_peer_that_sends_what_is_not_our_protocol_again_and_again_is_cut_off(
    channel: tuple[socket.socket, socket.socket],
) -> None:
    (shim, worker), poller, lost = channel, Poller(), list[str]()

    def hear(message: object, fds: list[int]) -> None:
        raise ValueError("not ours")

    peer = Peer(shim, poller, hear, lambda: lost.append("lost"), paced=True)
    for n in range(100):
        worker.send(b"[" if n % 2 else b"{}")
        poller.poll_once(0.0)
    assert peer.is_open
    worker.send(b"{}")
    poller.poll_once(0.0)
    assert (peer.is_open, lost) == (False, ["lost"])


def test_what_a_worker_said_before_it_died_is_read_and_not_without_end(
    channel: tuple[socket.socket, socket.socket],
) -> None:
    """Its children have the descriptor, too, and may write on."""
    (shim, worker), poller, heard = channel, Poller(), list[object]()

    def hear(message: object, fds: list[int]) -> None:
        heard.append(message)
        worker.send(b"{}")

    peer = Peer(shim, poller, hear, lambda: None, paced=True)
    worker.send(b'{"event":"failed"}')
    peer.read_all()
    peer.close()
    assert heard[0] == {"event": "failed"}
    assert len(heard) < 5000


def test_an_order_for_a_worker_whose_channel_rests_arrives(
    channel: tuple[socket.socket, socket.socket],
) -> None:
    (shim, worker), poller = channel, Poller()
    peer = Peer(shim, poller, lambda *_: work(0.51), lambda: None, paced=True)
    worker.send(b"{}")
    poller.poll_once(1.0)  # it rests from now on
    for n in range(20):
        peer.push({"op": "fork", "n": n, "pad": "x" * 50_000}, [])
    worker.setblocking(False)
    got = list[int]()
    until = time.monotonic() + 10
    while len(got) < 20 and time.monotonic() < until:
        poller.poll_once(0.05)
        with contextlib.suppress(BlockingIOError):
            while True:
                message, _ = seqpacket.receive(worker)
                assert message is not None
                got.append(message["n"])
    peer.close()
    assert got == list(range(20))


def test_the_shims_own_work_is_not_charged_to_who_caused_it() -> None:
    poller, heard = Poller(), list[str]()
    readable, writable = os.pipe()

    def handle(_: int) -> None:
        heard.append(os.read(readable, 1).decode())
        if heard == ["a"]:
            with poller.unmetered():
                work(0.51)

    poller.watch(readable, handle, paced=True)
    os.write(writable, b"ab")
    poller.poll_once(0.1)
    poller.poll_once(0.1)
    poller.unwatch(readable)
    os.close(readable)
    os.close(writable)
    assert heard == ["a", "b"]
