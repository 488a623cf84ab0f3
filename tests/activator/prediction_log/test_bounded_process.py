"""What a record can do to the process that parses it, and to the records of others."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from activator.prediction_log.bounded_process import BeyondLimits, BoundedProcess, Compute
from activator.prediction_log.frames import LoggedCall
from activator.prediction_log.queue import PredictionQueue
from activator.prediction_log.writer import RowMaker
from pilotlight.spec.prediction_log import Content, PredictionLogSpec
from tests.activator.prediction_log.rows import logged

KEY = b"k" * 32
COSTLY = PredictionLogSpec(
    sample=1.0, inputs=Content.FULL, outputs=Content.FULL, scrub=("$..a",) * 32
)


def die() -> None:
    ctypes.string_at(0)


def fill_memory() -> None:
    held = [bytes(1 << 20) for _ in range(4096)]
    raise AssertionError(len(held))


def compute_for_ever() -> None:
    while True:
        pass


def grow_without_end() -> None:
    sum(1 for _ in iter(int, 1))


FATAL = {each.__name__: each for each in (die, fill_memory, compute_for_ever, grow_without_end)}
HELD = os.getpid()
OUTSIDE: dict[str, Callable[[], object]] = {
    "socket": socket.socket,
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "pair": socket.socketpair,
    "read": lambda: Path("/etc/passwd").read_bytes(),
    "write": lambda: Path("/tmp/x").write_bytes(b""),
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(HELD, signal.SIGTERM),
    "thread": lambda: threading.Thread(target=int).start(),
    "memfd": lambda: os.memfd_create("x"),
}


def obey(data: bytes) -> bytes:
    name = data.decode()
    if name in FATAL:
        FATAL[name]()
    if name in OUTSIDE:
        try:
            OUTSIDE[name]()
        except (OSError, RuntimeError) as e:
            return type(e).__name__.encode()
        return b"done"
    if name == "invalid":
        raise ValueError("no row")
    if name == "deep":
        raise RecursionError("nested too deeply")
    return data


@pytest.fixture(name="process")
def _process() -> Iterator[BoundedProcess]:
    process = BoundedProcess(lambda: obey, cpu_s=0.3, memory_bytes=1 << 28)
    yield process
    process.close()


@pytest.mark.parametrize("how", FATAL)
def test_what_ends_the_process_is_lost_alone(process: BoundedProcess, how: str) -> None:
    assert process.run(b"before") == b"before"
    with pytest.raises(BeyondLimits):
        process.run(how.encode())
    assert process.run(b"after") == b"after"
    assert process.starts == 2


@pytest.mark.parametrize("how", OUTSIDE)
def test_the_process_reaches_nothing(process: BoundedProcess, how: str) -> None:
    refused = {"thread": b"RuntimeError"}.get(how, b"PermissionError")
    assert process.run(how.encode()) == refused
    assert process.starts == 1


def test_an_error_of_the_function_ends_nothing(process: BoundedProcess) -> None:
    with pytest.raises(ValueError, match="no row"):
        process.run(b"invalid")
    with pytest.raises(ValueError, match="nested too deeply"):
        process.run(b"deep")
    assert process.run(b"x" * 2**22) == b"x" * 2**22
    assert process.starts == 1


def test_no_depth_of_a_record_pauses_its_tenant() -> None:
    """Near some depth a record is parsed, and cannot be written: it is invalid, and lost alone."""
    terms = PredictionLogSpec(sample=1.0, inputs=Content.FULL, outputs=Content.FULL)
    rows = RowMaker(KEY)
    try:
        for depth in range(950, 1000):
            with contextlib.suppress(ValueError):
                assert rows.make(logged(1, body=b"[" * depth + b"]" * depth, terms=terms), 0.0)
        assert rows.make(logged(2), 0.0)
    finally:
        rows.close()


def test_a_missing_library_is_told() -> None:
    def prepare() -> Compute:
        raise ImportError("no such library")

    with pytest.raises(ImportError, match="no such library"):
        BoundedProcess(prepare, cpu_s=1, memory_bytes=1 << 28).start()


def test_a_costly_record_is_lost_alone_and_its_tenant_waits() -> None:
    rows = RowMaker(KEY, cpu_s=0.05)
    body = json.dumps([[{"a": 1}] * 20] * 1000).encode()
    costly = logged(1, body=body, terms=COSTLY)
    try:
        for now, tenant_pause_s in ((0.0, 1.0), (10.0, 2.0), (20.0, 4.0)):
            with pytest.raises(BeyondLimits, match="ended"):
                rows.make(costly, now)
            with pytest.raises(BeyondLimits, match="pause"):
                rows.make(logged(2), now + tenant_pause_s - 0.1)
            assert json.loads(rows.make(logged(3, tenant="t-2"), now))["input"] == '{"x":1}'
            assert rows.make(logged(4), now + tenant_pause_s + 0.1)
    finally:
        rows.close()


def test_tenants_take_turns_in_the_queue() -> None:
    queue = PredictionQueue()
    for number in range(3):
        queue.put(logged(number, tenant="t-1"))
    queue.put(logged(9, tenant="t-2"))

    def name(one: LoggedCall) -> str:
        return str(one.facts["request_id"])

    assert [name(one) for one in queue.pop_batch()] == ["req-0", "req-9", "req-1", "req-2"]
    assert len(queue) == 0
    assert not queue.is_filled.is_set()


WRITER = """
import socket, subprocess, sys
from activator.prediction_log import writer
writer._run = lambda *_, **__: attempts()

def attempts():
    for attempt in (
        lambda: socket.create_connection(("127.0.0.1", 1)),
        lambda: socket.socket(socket.AF_UNIX),
        lambda: subprocess.run(["/bin/true"]),
    ):
        try:
            attempt()
            print("done", flush=True)
        except PermissionError:
            print("refused", flush=True)

sys.exit(writer.main())
"""


@pytest.mark.slow  # a process that loads pyarrow
def test_the_writer_makes_no_socket_and_runs_no_program(tmp_path: Path) -> None:
    given = [sys.executable, "-c", WRITER, str(tmp_path), "1000000", "1"]
    ended = subprocess.run(given, input=KEY, capture_output=True, check=True, timeout=60)
    assert ended.stdout.split() == [b"refused"] * 3
