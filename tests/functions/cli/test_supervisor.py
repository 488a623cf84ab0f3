"""The supervisor with small stand-ins for the four processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.cli.supervisor.child import Child, ProcessFailed, ProcessSpec, describe_exit_status
from pilotlight.cli.supervisor.local_platform import find_platform
from pilotlight.cli.supervisor.process_log import ProcessLog
from pilotlight.cli.supervisor.run_platform import supervise
from pilotlight.cli.supervisor.stale_processes import (
    find_stale_pid,
    stop_stale_process,
    terminate,
)
from pilotlight.cli.supervisor.supervisor import (
    Notice,
    StopMode,
    Supervisor,
    platform_processes,
    restart_delay_s,
    stop_orphans,
)
from pilotlight.core import pid_file
from tests.fakes.ports import free_port

PATIENCE_S = 30.0
STUCK = """
import signal, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("listening", flush=True)
    signal.sigwait({signal.SIGTERM})
"""
"""An activator (`python -m activator PORT`) that has its address until it ends."""
FAKE = str(Path(__file__).parents[2] / "fakes/supervised.py")


class Place:
    """A run directory, a journal that the stand-ins write, and the notices so far."""

    def __init__(self, root: Path) -> None:
        self.run = root
        self.journal = root / "journal"
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()

    def spec(self, name: str, mode: str = "serve", **settings: Any) -> ProcessSpec:
        return ProcessSpec(
            name=name, argv=(sys.executable, "-S", FAKE, mode, name, str(self.journal)), **settings
        )

    def supervisor(self, *specs: ProcessSpec) -> Supervisor:
        return Supervisor(
            specs, run=self.run, logs=self.run / "logs", announce=self.notices.put_nowait
        )

    def child(self, spec: ProcessSpec) -> Child:
        return Child(
            spec,
            run=self.run,
            log=ProcessLog(path=self.run / f"{spec.name}.log"),
        )

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines()

    async def notice(self, kind: str, process: str) -> Notice:
        async with asyncio.timeout(PATIENCE_S):
            while (notice := await self.notices.get()).kind != kind or notice.process != process:
                pass
        return notice


@pytest.fixture
def place() -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(prefix="pl"))
    yield Place(root)
    shutil.rmtree(root)


def test_restart_delay_doubles_from_a_tenth_to_five_seconds() -> None:
    assert [restart_delay_s(n) for n in range(1, 9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.parametrize(
    "status, text",
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_exit_statuses_are_named(status: int, text: str) -> None:
    assert describe_exit_status(status) == text


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/self/autogroup").exists(),
    reason="needs root and a kernel with autogroup",
)
async def test_a_process_that_goes_before_others_has_the_niceness_of_its_session_said(
    place: Place,
) -> None:
    child = place.child(ProcessSpec(name="gate", argv=place.spec("gate").argv, niceness=-10))
    await child.start()
    try:
        assert Path(f"/proc/{child.pid}/autogroup").read_text().endswith("nice -10\n")
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        await child.stop(grace_s=5)


async def test_starts_in_order_and_stops_in_the_opposite_one(place: Place) -> None:
    supervisor = place.supervisor(place.spec("cache"), place.spec("agent"), place.spec("gate"))
    await supervisor.start()
    await supervisor.stop(StopMode.ALL)
    assert place.lines() == [
        "start cache",
        "start agent",
        "start gate",
        "stop gate",
        "stop agent",
        "stop cache",
    ]


async def test_pid_files_hold_the_live_pid_and_go_with_the_process(place: Place) -> None:
    child = place.child(place.spec("cache"))
    await child.start()
    assert (place.run / "cache.pid").read_text().split()[0] == str(child.pid)
    assert repr(child) == f"<Child cache pid {child.pid}>"
    assert await child.stop() == 0
    assert not (place.run / "cache.pid").exists()
    assert repr(child) == "<Child cache down>"


async def test_a_killed_process_is_restarted_alone(place: Place) -> None:
    supervisor = place.supervisor(place.spec("cache"), place.spec("gate"))
    await supervisor.start()
    gate, cache_pid = supervisor.children[1].pid, supervisor.children[0].pid
    running = asyncio.create_task(supervisor.run_until_stopped())
    os.kill(gate, signal.SIGKILL)
    assert "killed by SIGKILL" in (await place.notice("died", "gate")).text
    await place.notice("ready", "gate")
    assert supervisor.children[1].pid not in (0, gate)
    assert supervisor.children[0].pid == cache_pid
    supervisor.request_stop(StopMode.ALL)
    await running
    assert place.lines()[-2:] == ["stop gate", "stop cache"]


def _answer(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        return connection.recv(64)


@pytest.mark.parametrize("keeps", [True, False])
async def test_connections_made_while_a_process_is_restarted_wait_for_it(
    place: Place, keeps: bool
) -> None:
    address = ("127.0.0.1", free_port())
    listen = f"127.0.0.1:{address[1]}"
    child = place.child(place.spec("gate", "answer", listen=listen, keeps_listeners=keeps))
    await child.start()
    first = child.pid
    assert await asyncio.to_thread(_answer, address) == b"%d" % first
    child.signal(signal.SIGKILL)
    assert await child.wait_gone() == -signal.SIGKILL
    if not keeps:
        with pytest.raises(ConnectionRefusedError):
            _answer(address)
    else:
        caller = asyncio.create_task(asyncio.to_thread(_answer, address))
        await asyncio.sleep(0.05)
        assert not caller.done()
        await child.start()
        assert await caller == b"%d" % child.pid != b"%d" % first
    await child.stop()
    with pytest.raises(ConnectionRefusedError):
        _answer(address)


async def test_connections_are_refused_once_a_restart_failed(place: Place) -> None:
    address = ("127.0.0.1", free_port())
    listen = f"127.0.0.1:{address[1]}"
    child = place.child(place.spec("gate", "answer", listen=listen, keeps_listeners=True))
    await child.start()
    child.signal(signal.SIGKILL)
    await child.wait_gone()
    caller = asyncio.create_task(asyncio.to_thread(_answer, address))
    child.spec = place.spec("gate", "broken", listen=listen, keeps_listeners=True)
    with pytest.raises(ProcessFailed, match="the database is on fire"):
        await child.start()
    with pytest.raises(ConnectionResetError):
        await caller
    with pytest.raises(ConnectionRefusedError):
        _answer(address)


async def test_a_process_that_dies_while_starting_shows_its_last_words_and_takes_the_others_down(
    place: Place,
) -> None:
    supervisor = place.supervisor(
        place.spec("cache"), place.spec("agent", "broken"), place.spec("gate")
    )
    with pytest.raises(
        ProcessFailed,
        match=r"^agent exited while starting \(exit status 3\): the database is on fire$",
    ) as failure:
        await supervisor.start()
    assert failure.value.detail["log_tail"] == ["the database is on fire"]
    assert place.lines() == ["start cache", "stop cache"]


async def test_a_process_that_never_gets_ready_is_stopped_after_its_time(place: Place) -> None:
    child = place.child(place.spec("agent", "mute", ready_timeout_s=0.2))
    with pytest.raises(ProcessFailed, match=r"agent was not ready within 0\.2 s"):
        await child.start()
    assert not child.is_alive


async def test_a_cancelled_start_leaves_nothing_running(place: Place) -> None:
    child = place.child(place.spec("agent", "mute"))
    starting = asyncio.create_task(child.start())
    await asyncio.sleep(0)
    pid = child.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(place: Place) -> None:
    child = place.child(place.spec("gate", "stubborn", grace_s=0.1))
    await child.start()
    assert await child.stop() == -signal.SIGKILL


async def test_a_second_request_to_stop_kills_what_still_drains(place: Place) -> None:
    supervisor = place.supervisor(place.spec("gate", "stubborn", grace_s=60))
    await supervisor.start()
    running = asyncio.create_task(supervisor.run_until_stopped())
    supervisor.request_stop(StopMode.ALL)
    supervisor.request_stop(StopMode.ALL)
    async with asyncio.timeout(PATIENCE_S):
        await running
    assert not supervisor.children[0].is_alive


async def test_a_stop_while_starting_is_obeyed(place: Place) -> None:
    supervisor = place.supervisor(place.spec("cache"), place.spec("gate", "mute"))
    supervisor.request_stop(StopMode.ALL)
    started: list[bool] = []
    async with asyncio.timeout(PATIENCE_S):
        await supervisor.run(started=lambda: started.append(True))
    assert not started
    assert [child.pid for child in supervisor.children] == [0, 0]


def test_children_die_with_a_killed_supervisor(place: Place) -> None:
    script = f"""
import asyncio, os, signal
from pathlib import Path
from pilotlight.cli.supervisor.supervisor import Supervisor
from pilotlight.cli.supervisor.child import ProcessSpec
async def go():
    spec = ProcessSpec(name="gate", argv={place.spec("gate").argv!r})
    s = Supervisor([spec], run=Path({str(place.run)!r}), logs=Path({str(place.run)!r}), announce=print)
    await s.start()
    print(s.children[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(go())
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    pid = int(out.stdout.split()[-1])
    assert out.returncode == -signal.SIGKILL, out.stderr
    assert terminate(pid, grace_s=PATIENCE_S)  # it was told already; this only waits for its end
    assert place.lines() == ["start gate", "stop gate"]


async def test_a_process_left_behind_is_stopped_by_its_pid_file(place: Place) -> None:
    left = place.child(place.spec("gate"))
    await left.start()
    old = left.pid
    stopped = await stop_orphans(
        [place.spec("gate")], run=place.run, announce=place.notices.put_nowait
    )
    assert stopped == {"gate": old}
    assert str(old) in (await place.notice("orphan", "gate")).text
    assert place.lines() == ["start gate", "stop gate"]


async def test_a_process_left_behind_is_stopped_before_its_address_is_taken(place: Place) -> None:
    port, home = free_port(), place.run / "h"
    (place.run / "activator.py").write_text(STUCK)
    config = place.run / "platform.yaml"
    config.write_text(
        f"platform: {{home: '{home}', run: '{place.run}/r'}}\n"
        f"activator: {{listen: '127.0.0.1:{port}'}}\nweight_cache: {{unknown: 1}}\n"
    )
    platform = find_platform(config=config, home=None, environ={}, cwd=place.run)
    platform.paths.make()
    left = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "activator", str(port)),
        cwd=place.run,
        env={},
        stdout=asyncio.subprocess.PIPE,
    )
    assert left.stdout is not None
    await left.stdout.readline()
    pid_file.write(place.run / "r/activator.pid", left.pid)

    # the weight cache cannot start: its section is invalid
    with pytest.raises(ProcessFailed, match="weight_cache"):
        await supervise(platform, announce=place.notices.put_nowait, started=lambda: None)
    assert await left.wait() == 0
    assert str(left.pid) in (await place.notice("orphan", "activator")).text


async def test_another_process_with_the_same_pid_is_left_alone(place: Place) -> None:
    file = place.run / "gate.pid"
    pid_file.write(file, os.getpid())
    assert find_stale_pid(file, (sys.executable, "-m", "activator")) is None
    words = Path("/proc/self/cmdline").read_text().split("\0")
    assert find_stale_pid(file, words) == os.getpid()
    pid, ticks = map(int, file.read_text().split())
    file.write_text(f"{pid} {ticks - 1}\n")  # it had started before this process did
    assert find_stale_pid(file, words) is None
    assert (
        await stop_stale_process(file, argv=(sys.executable, "-m", "activator"), grace_s=1) is None
    )
    assert not file.exists()


def test_a_log_is_set_aside_when_it_outgrows_its_bound_and_keeps_its_writers(place: Place) -> None:
    log = ProcessLog(path=place.run / "gate.log", max_bytes=100)
    descriptor = log.open()
    for round_number in range(5):
        os.write(descriptor, f"{round_number}".encode() * 101)
        assert log.rotate()
    os.write(descriptor, b"after\nlast\n")
    os.close(descriptor)
    assert not log.rotate()
    assert log.tail(1) == ["last"]
    assert log.tail(5, since_byte=6) == ["last"]
    assert sorted(p.name for p in place.run.glob("gate.log*")) == [
        "gate.log",
        "gate.log.1",
        "gate.log.2",
        "gate.log.3",
    ]
    assert (place.run / "gate.log.1").read_text() == "4" * 101


def test_a_controller_has_time_to_migrate_a_large_ledger() -> None:
    timeouts = {
        spec.name: spec.ready_timeout_s for spec in platform_processes(Path("platform.yaml"))
    }
    assert timeouts == {"weight_cache": 60, "snapshotter": 60, "controller": 3600, "activator": 60}
