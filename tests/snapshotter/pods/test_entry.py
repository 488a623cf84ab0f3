"""A snapshot's worker comes back in a pod that waits: real CRIU, the real launcher, and namespaces
that stand in for a pod's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from snapshotter.criu import operations
from snapshotter.criu.bundle import CriuBundle, make_bundle
from snapshotter.criu.errors import CriuUnavailable
from snapshotter.criu.operations import Restored
from snapshotter.errors import Unsupported
from snapshotter.pods.entry.pod_entry import Brought, Entry, entered, groups_of
from snapshotter.pods.entry.processes import EntryProcesses
from tests.fakes.agent_home import MIB
from tests.fakes.fake_shim import function_spec
from tests.fakes.launched_pod import Pod, pod
from tests.fakes.pod_agent import FakePodAgent
from tests.fakes.slot_workshop import PATIENCE_S, Image, Workshop

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

AS_A_POD = """
ip link set lo up
mount -t tmpfs none /usr/local/sbin
exec "$@"
"""
"""The pod's root has no CRIU: here it lies in /usr/local/sbin."""
IN_NAMESPACES = [
    "unshare",
    "--mount",
    "--uts",
    "--ipc",
    "--net",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
    "sh",
    "-ec",
    AS_A_POD,
    "sh",
]


@pytest.fixture
def stand_in() -> Iterator[Pod]:
    with pod({}, function_spec(), wrapper=IN_NAMESPACES, secrets={"TOKEN": "s3cret"}) as made:
        yield made


@pytest.fixture
async def processes() -> AsyncIterator[EntryProcesses]:
    async with contextlib.aclosing(EntryProcesses()) as found:
        yield found


def first_pid(stand_in: Pod) -> int:
    """Of the pod's first process, by our numbers."""
    wrapper = stand_in.process.pid
    return int(Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()[0])


def mount_points(pid: str) -> list[str]:
    """Where something is mounted, as that process sees it."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines]


async def brought(shop: Workshop, image: Image) -> Brought:
    _, order = await shop.take(image.spec)
    uid = image.spec.uid or 0
    return Brought(
        binds=order["binds"],
        uid=uid,
        writable_bytes=64 * MIB,
        python=order["python"],
        files=image.files,
        kdat=shop.kdat,
    )


async def kit_of(shop: Workshop) -> CriuBundle:
    return await make_bundle(shop.criu.binary, shop.home.paths.home)


async def restore_into(entry: Entry, shop: Workshop, image: Image) -> Restored:
    work = shop.home.paths.home / "work"
    work.mkdir()
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (image.directory, work)]
    try:
        return await operations.restore(
            entry,
            criu=shop.criu,
            images=fds[0],
            work=fds[1],
            uid=image.spec.uid or 0,
            cgroup={},
            deadline_s=PATIENCE_S,
        )
    finally:
        for fd in fds:
            os.close(fd)


def ask(stand_in: Pod, path: str) -> str:
    """What the worker answers on the pod's own loopback address."""
    url = stand_in.base_url + path
    code = (
        f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=20).read().decode())"
    )
    command = ["nsenter", "--net", "--target", str(first_pid(stand_in)), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def test_a_waiting_pod_receives_a_restored_worker_and_its_launcher_looks_after_it(
    shop: Workshop, stand_in: Pod, processes: EntryProcesses
) -> None:
    image = await shop.dump(await shop.boot(boot=["remember:warm"]))
    with FakePodAgent(stand_in.node) as agent:
        stand_in.begin()
        with await asyncio.to_thread(agent.accept) as line:
            launcher = first_pid(stand_in)
            mounts_before = mount_points(str(launcher))
            pidfd = os.pidfd_open(launcher)
            async with entered(
                processes, pidfd, await brought(shop, image), await kit_of(shop)
            ) as entry:
                restored = await restore_into(entry, shop, image)
                worker = await entry.attach(restored.pid)
                assert worker.socket is not None
                line.say(
                    "restored",
                    fds=[worker.socket.fileno()],
                    pid=restored.pid,
                    phases_ms={"restore": 1.0},
                )
                await entry.keep()
                worker.socket.close()
                worker.close()
            os.close(pidfd)
            ready = await asyncio.to_thread(line.hear)

            assert (ready["op"], ready["start_kind"]) == ("ready", "RESTORE")
            assert "warm" in await asyncio.to_thread(ask, stand_in, "/memory")
            assert "s3cret" in await asyncio.to_thread(ask, stand_in, "/env/TOKEN")
            shared = ("net", "ipc", "uts", "pid")
            ours = [os.readlink(f"/proc/{launcher}/ns/{name}") for name in shared]
            (child,) = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            assert [os.readlink(f"/proc/{child}/ns/{name}") for name in shared] == ours
            # what was mounted for the worker, the pod does not see
            assert "/usr" in mount_points(child)
            assert mount_points(str(launcher)) == mounts_before
            status = Path(f"/proc/{child}/status").read_text()
            assert re.search(r"^Uid:\t20001\t20001", status, re.MULTILINE)
            assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
            assert (
                Path(f"/proc/{child}/cgroup").read_text()
                == Path(f"/proc/{launcher}/cgroup").read_text()
            )
    os.kill(launcher, 15)
    await asyncio.to_thread(stand_in.wait_exit)
    assert "launcher.exit" in stand_in.said


async def test_what_was_restored_and_not_kept_is_gone(
    shop: Workshop, stand_in: Pod, processes: EntryProcesses
) -> None:
    image = await shop.dump(await shop.boot())
    with FakePodAgent(stand_in.node) as agent:
        stand_in.begin()
        with await asyncio.to_thread(agent.accept) as line:
            launcher = first_pid(stand_in)
            pidfd = os.pidfd_open(launcher)
            async with entered(
                processes, pidfd, await brought(shop, image), await kit_of(shop)
            ) as entry:
                await restore_into(entry, shop, image)
            os.close(pidfd)
            async with asyncio.timeout(PATIENCE_S):
                while Path(f"/proc/{launcher}/task/{launcher}/children").read_text():
                    await asyncio.sleep(0.01)
            line.say("refused", code="x", message="enough")
            assert await asyncio.to_thread(stand_in.wait_exit) == 69


async def test_a_pod_that_is_gone_cannot_be_entered(
    shop: Workshop, processes: EntryProcesses
) -> None:
    image = await shop.dump(await shop.boot())
    gone = await asyncio.to_thread(subprocess.Popen, ["true"])
    pidfd = os.pidfd_open(gone.pid)
    await asyncio.to_thread(gone.wait)
    with pytest.raises(CriuUnavailable, match="no longer exist"):
        async with entered(processes, pidfd, await brought(shop, image), await kit_of(shop)):
            pass
    os.close(pidfd)


def test_the_groups_of_a_process_are_found_in_every_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text(
        "4:memory:/kubepods/p1\n2:name=systemd:/x\n0::/kubepods/p1\n"
    )
    for name in ("memory/kubepods/p1", "kubepods/p1"):
        (tmp_path / "cg" / name).mkdir(parents=True)
        (tmp_path / "cg" / name / "cgroup.procs").touch()

    found = groups_of(5, root=tmp_path / "cg", proc=tmp_path / "proc")

    assert found == [
        str(tmp_path / "cg" / name / "cgroup.procs")
        for name in ("memory/kubepods/p1", "kubepods/p1")
    ]


@pytest.mark.parametrize("line", ["0::/../../kubepods/p1\n", "0::/elsewhere\n", ""])
def test_a_pod_whose_groups_cannot_be_seen_is_not_entered(tmp_path: Path, line: str) -> None:
    (tmp_path / "proc/5").mkdir(parents=True)
    (tmp_path / "proc/5/cgroup").write_text(line)
    (tmp_path / "kubepods/p1").mkdir(parents=True)
    (tmp_path / "kubepods/p1/cgroup.procs").touch()

    with pytest.raises(Unsupported, match="not visible"):
        groups_of(5, root=tmp_path / "a/b", proc=tmp_path / "proc")
