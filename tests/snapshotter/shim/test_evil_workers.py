"""What a worker says to its shim is user code's word: it ends, stops and delays nobody outside of
its slot."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from snapshotter.errors import AgentUnavailable, SnapshotterError, StartFailed
from snapshotter.linux import proc
from snapshotter.linux.cgroups import Cgroups
from snapshotter.shim import seqpacket
from snapshotter.shim.instances import failure_of
from tests.fakes.agent_home import AgentHome, instance_id
from tests.fakes.waiting import until
from tests.snapshotter.shim.evil_worker import BURN_S, SO_PEERPIDFD

pytestmark = pytest.mark.root
ROOT = Path(__file__).parents[3]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="slots of their own need root")


def has_peer_pidfds() -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True


@pytest.fixture
def home(short_tmp: Path) -> AgentHome:
    home = AgentHome(short_tmp)
    shutil.copy(
        Path(__file__).with_name("evil_worker.py"), home.runtime["pilotlight"] / "worker/boot.py"
    )
    return home


def waits(pid: int) -> bool:
    """Whether it neither computes nor wants to (proc(5): state S)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def launch(home: AgentHome, evil: str, **changes: Any) -> Any:
    return home.launch(env={"PILOTLIGHT_EVIL": evil}, **changes)


@needs_root
@pytest.mark.slow  # a start that ends by its clock
@pytest.mark.skipif(not has_peer_pidfds(), reason="Linux 6.5 has SO_PEERPIDFD")
async def test_the_agent_is_not_taken_for_an_instance(home: AgentHome) -> None:
    with home.agent_process() as agent:
        async with home.client() as client:
            with pytest.raises(SnapshotterError):
                await client.start(
                    launch(home, "pidfd", startup_timeout_s=3.0),
                    instance_id=instance_id(),
                    lessee="a-1",
                    secret_env={},
                )
            assert all(info.pid != agent.pid for info in await client.instances())
        assert agent.poll() is None
        assert Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"


@needs_root
@pytest.mark.slow  # two agents
async def test_a_snapshot_point_that_makes_no_sense_keeps_no_agent_from_starting(
    home: AgentHome,
) -> None:
    with home.agent_process() as agent:
        async with home.client() as client:
            start = asyncio.create_task(
                client.start(
                    launch(home, "point", startup_timeout_s=600.0),
                    instance_id=instance_id(),
                    lessee="a-1",
                    secret_env={},
                )
            )
            await until(lambda: any((home.paths.run / "slots").glob("*/launch.json")))
            await asyncio.sleep(0.3)  # it has said so by then
            agent.kill()
            agent.wait()
            with pytest.raises(AgentUnavailable):
                await start
    with home.agent_process() as agent:
        async with home.client() as client:
            assert await client.templates() == []
            assert agent.poll() is None
    # a boot that went on ends with the agent
    assert list((home.paths.run / "slots").iterdir()) == []


@needs_root
@pytest.mark.slow  # watches an agent for a while
async def test_an_instance_that_tells_of_failures_without_end_costs_the_agent_nothing(
    home: AgentHome,
) -> None:
    with home.agent_process() as agent:
        async with home.client() as client:
            await client.start(
                launch(home, "flood"), instance_id=instance_id(), lessee="a-1", secret_env={}
            )
            before_ns, memory, began = (
                proc.cpu_ns(agent.pid),
                proc.rss_bytes(agent.pid),
                time.monotonic(),
            )
            await asyncio.sleep(2.0)
            assert len(await client.instances()) == 1
            assert proc.cpu_ns(agent.pid) - before_ns < 250_000_000 * (time.monotonic() - began)
            assert proc.rss_bytes(agent.pid) - memory < 32 * 1024**2


@needs_root
@pytest.mark.slow  # a slot, and what its Template computes
async def test_what_a_template_computes_is_charged_to_the_next_start_once(home: AgentHome) -> None:
    async with home.agent(namespaces=True), home.client() as client:
        burning = launch(home, "burn")
        await client.prepare(burning)
        (template,) = await client.templates()
        async with asyncio.timeout(30):
            # counted in ticks
            while proc.cpu_ns(template.pid) < BURN_S * 0.9e9 or not waits(template.pid):
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)  # the kernel counts up to a tick late
        infos = [
            await client.start(burning, instance_id=instance_id(), lessee="a-1", secret_env={})
            for _ in range(2)
        ]
        if not infos[0].cpu_file:
            pytest.skip("no controller counts CPU time here")
        first, second = (-info.cpu_from_ns for info in infos)
        assert first > BURN_S * 1e9 / 2
        assert second <= 0


@needs_root
@pytest.mark.slow  # a slot
async def test_a_fork_that_did_not_enter_its_cgroups_is_ended_whatever_its_worker_says(
    home: AgentHome,
) -> None:
    async with home.agent(namespaces=True), home.client() as client:
        if Cgroups.find(home.paths.run).version != 1:
            pytest.skip("forks enter their cgroups by themselves under cgroup v1 only")
        with pytest.raises(StartFailed):
            await client.start(
                launch(home, "stay"), instance_id=instance_id(), lessee="a-1", secret_env={}
            )


@needs_root
def test_a_process_outside_of_the_namespace_is_no_process_of_the_slot() -> None:
    """As a shim sees the pidfd of a process of the host: its number is 0 (proc(5))."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from snapshotter.shim import child\n"
        "try: print(child.pid_of(int(sys.argv[1])))\n"
        "except ProcessLookupError: print('refused')\n"
    )
    pidfd = os.pidfd_open(os.getpid())
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        "-c",
        program,
        str(pidfd),
        str(ROOT),
    ]
    done = subprocess.run(
        command, pass_fds=(pidfd,), capture_output=True, text=True, timeout=30, check=False
    )
    os.close(pidfd)
    assert done.stdout == "refused\n", done.stderr


def test_a_failure_is_cut_to_what_an_error_needs() -> None:
    error = {
        "type": "T",
        "message": "m" * 200_000,
        "traceback": "t" * 10,
        "pad": [[]] * 1000,
        **{f"k{n}": "v" for n in range(100)},
    }
    told = failure_of(
        {"event": "failed", "instance": "i", "phase": "enter", "error": error, "more": "x" * 1000}
    )
    assert (told["error"]["type"], told["error"]["traceback"], told["phase"]) == (
        "T",
        "t" * 10,
        "enter",
    )
    assert len(seqpacket.encode(told)) < 64 * 1024


def test_a_peer_that_does_not_read_is_cut_off_by_bytes_too() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        outbox = seqpacket.SendQueue(ours, limit_bytes=1_000_000)

        def flood() -> None:
            for _ in range(100):
                outbox.push({"event": "x" * 50_000})

        with pytest.raises(OSError, match="1000000 bytes"):
            flood()
        assert not outbox
