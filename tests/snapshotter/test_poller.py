"""The shim's loop: what user code writes to has a bound on the shim's CPU time, and nothing else waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.logpipe import LogFile, LogPipe
from snapshotter.poller import PACED_SHARE, Poller
from snapshotter.recorder import Recorder

FLOOD = "import os\nwhile True: os.write(1, {data!r})"


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[tuple[Poller, LogFile, int]]:
    """A loop, a log, and the end of its stdout to write to."""
    directory = os.open(tmp_path, os.O_RDONLY)
    poller, pipes = Poller(), list[LogPipe]()
    recorder = Recorder(poller, lambda *_: None, directory=directory, max_bytes=1024 * 1024)
    log = recorder.open("i-1")
    stdout, stderr = recorder.pipes_into(log, pipes)
    os.close(stderr)
    yield poller, log, stdout
    os.close(stdout)
    recorder.finish(log, pipes)
    os.close(directory)


@pytest.mark.slow  # the rate shows once the burst, half a second of CPU time, is used up
@pytest.mark.parametrize("data", [b"x" * 65536, b"\n" * 4096], ids=["much", "short lines"])
def test_a_flood_of_output_costs_the_shim_little_cpu(recorder: tuple[Poller, LogFile, int], data: bytes) -> None:
    poller, _, stdout = recorder
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", FLOOD.format(data=data)], stdout=stdout) as process:
        try:
            _turn_for(poller, cpu_s=0.6)
            used_s, took_s = _turn_for(poller, real_s=6.0)
        finally:
            process.kill()
    assert used_s < took_s * PACED_SHARE * 2 + 0.05


def test_output_of_a_working_day_is_read_at_once(recorder: tuple[Poller, LogFile, int], tmp_path: Path) -> None:
    poller, _, stdout = recorder
    for number in range(200):
        os.write(stdout, b"line %d\n" % number * 10)
        poller.turn(0.0)
    assert (tmp_path / "i-1.log").read_bytes().count(b"\n") == 2000


def _turn_for(poller: Poller, *, cpu_s: float = 1e9, real_s: float = 60.0) -> tuple[float, float]:
    """Turns of the loop until it has used so much of either time; what it used of both."""
    cpu, real = time.thread_time(), time.monotonic()
    while time.thread_time() - cpu < cpu_s and time.monotonic() - real < real_s:
        poller.turn(0.1)
    return time.thread_time() - cpu, time.monotonic() - real


def test_a_descriptor_that_rests_can_be_forgotten_and_holds_up_no_other() -> None:
    poller, heard = Poller(), list[str]()
    busy, busy_end = os.pipe()
    other, other_end = os.pipe()

    def work(_: int) -> None:
        heard.append("busy")
        until = time.thread_time() + 0.6
        while time.thread_time() < until:
            pass

    poller.watch(busy, work, paced=True)
    poller.watch(other, lambda _: heard.append(os.read(other, 1).decode()))
    os.write(busy_end, b"x")  # it is never read: ready for ever
    poller.turn(1.0)
    os.write(other_end, b"o")
    poller.turn(0.05)
    poller.turn(0.05)
    assert heard == ["busy", "o"]
    poller.unwatch(busy)
    poller.unwatch(busy)
    poller.turn(0.0)
    for fd in (busy, busy_end, other, other_end):
        os.close(fd)
