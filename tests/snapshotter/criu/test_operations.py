"""Real processes through the real CRIU, in cells: what comes back, what cannot, and what is said
then.

Each row of the failure matrix in the cold-start measurements is a subject here. A subject says that
it is ready by closing its stdin pipe's place (descriptor 1), as the self test's does; what it finds
after the restore is its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotter.criu import operations, page_map
from snapshotter.criu.errors import CriuError, CriuFailed, CriuReason
from snapshotter.criu.lazy import PageRequest
from snapshotter.criu.processes import Criu
from snapshotter.criu.self_test import SelfTest
from snapshotter.criu.self_test_sandbox import Sandbox, SandboxProcess, cell
from snapshotter.linux import proc
from tests.fakes.ports import free_port

pytestmark = pytest.mark.root
TENANT = 20001
DEADLINE_S = 20.0
FINE = 42
_HEAD = """
import os, signal, socket, sys
sys.path[:0] = [{root!r}]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # in every thread that follows
def fine(good=True):
    os._exit(42 if good else 1)
def confine(uid):
    import ctypes
    from snapshotter.shim.sandbox import isolation
    isolation.confine(uid=uid, limits={{}})
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as it is after the exec of a worker
def wait():
    os.close(1)
    signal.sigwait([signal.SIGUSR1])
"""
ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(kw_only=True)
class Bench:
    """Where images go and cells come from. `folder/images`, `folder/work`."""

    criu: Criu
    kdat: Path
    folder: Path
    images: int
    work: int

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[Sandbox]:
        async with cell() as found:
            await found.keep_kdat(os.open(self.kdat, os.O_RDONLY))
            yield found

    async def subject(
        self, place: Sandbox, code: str, *, uid: int = 0, stderr: int | None = None
    ) -> SandboxProcess:
        """A Python process that has come to its `wait()`."""
        readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Confined by itself: the interpreter may lie where only root may look.
        program = (
            _HEAD.format(root=ROOT) + (f"confine({uid})\n" if uid else "") + textwrap.dedent(code)
        )
        fds = [writable, *([] if stderr is None else [stderr])]
        process = await place.spawn([sys.executable, "-I", "-S", "-B", "-c", program], fds=fds)
        await proc.wait_readable(readable)
        os.close(readable)
        return process

    async def dump(
        self,
        place: Sandbox,
        pid: int,
        *,
        uid: int = 0,
        tcp: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        await operations.dump(
            place,
            criu=self.criu,
            pid=pid,
            images=self.images,
            work=self.work,
            uid=uid,
            cgroup={},
            tcp=tcp,
            deadline_s=deadline_s,
        )

    async def restore(
        self,
        place: Sandbox,
        *,
        uid: int = 0,
        tcp: bool = False,
        pages: PageRequest | None = None,
        stdio_keys: Mapping[str, str] | None = None,
        prepare: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> operations.Restored:
        return await operations.restore(
            place,
            criu=self.criu,
            images=self.images,
            work=self.work,
            uid=uid,
            cgroup={},
            tcp=tcp,
            lazy=pages,
            stdio_keys=stdio_keys,
            prepare=prepare,
            deadline_s=DEADLINE_S,
        )

    async def frozen(self, code: str, *, uid: int = 0, tcp: bool = False) -> None:
        """Images of a subject whose cell is gone afterwards."""
        async with self.place() as place:
            process = await self.subject(place, code, uid=uid)
            try:
                await self.dump(place, process.pid, uid=uid, tcp=tcp)
            finally:
                process.close()
        page_map.write_page_maps(self.folder / "images")

    async def outcome(self, *, uid: int = 0, tcp: bool = False, lazy: bool = False) -> int:
        """Exit status of the subject after a restore into a new cell."""
        async with self.place() as place:
            pages = PageRequest() if lazy else None
            restored = await self.restore(place, uid=uid, tcp=tcp, pages=pages)
            again = await place.watch(restored.pid)
            status = await ended(again)
            if restored.lazy is not None:
                await restored.lazy.kill()
            return status


async def ended(process: SandboxProcess) -> int:
    """Let it go on, and say how it ended."""
    signal.pidfd_send_signal(process.pidfd, signal.SIGUSR1)
    async with asyncio.timeout(DEADLINE_S):
        status = await process.exited
    process.close()
    return -1 if status is None else os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def bench_in(folder: Path, criu_proof: SelfTest) -> Iterator[Bench]:
    assert criu_proof.kdat is not None
    for name in ("images", "work"):
        (folder / name).mkdir()
    images, work = (
        os.open(folder / name, os.O_RDONLY | os.O_DIRECTORY) for name in ("images", "work")
    )
    kdat = criu_proof.kdat
    yield Bench(criu=criu_proof.criu(), kdat=kdat, folder=folder, images=images, work=work)
    os.close(images)
    os.close(work)


@pytest.fixture
def bench(short_tmp: Path, criu_proof: SelfTest) -> Iterator[Bench]:
    with bench_in(short_tmp, criu_proof) as made:
        yield made


@pytest.fixture(scope="module")
def waiting(
    tmp_path_factory: pytest.TempPathFactory, criu_proof: SelfTest
) -> tuple[int, Mapping[str, bytes]]:
    """The pid and the images of a process that waits."""

    async def dumped(bench: Bench) -> int:
        async with bench.place() as place:
            process = await bench.subject(place, "wait()\nfine()")
            await bench.dump(place, process.pid)
            process.close()
        return process.pid

    folder = tmp_path_factory.mktemp("waiting")
    with bench_in(folder, criu_proof) as made:
        pid = asyncio.run(dumped(made))
    return pid, {path.name: path.read_bytes() for path in (folder / "images").iterdir()}


async def test_process_comes_back_with_its_memory(bench: Bench) -> None:
    await bench.frozen("kept = os.urandom(8).hex() * 100_000\nwait()\nfine(len(kept) == 1_600_000)")
    assert await bench.outcome() == FINE
    assert await bench.outcome() == FINE, "an image can be restored again"
    assert not list((bench.folder / "images").glob("*.log")), "logs go to the work directory"


async def test_confined_process_of_another_uid_keeps_its_bars(bench: Bench) -> None:
    """The way of workers: uid of a tenant, no_new_privs, seccomp; CRIU with that real uid, where
    root lacks CAP_SYS_RESOURCE."""
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def bars():
            text = open("/proc/self/status").read()
            ring = libc.syscall(425, 1, 0)
            words = ("NoNewPrivs:\\t1", "Seccomp:\\t2", "CapEff:\\t0000000000000000")
            return os.getresuid() == (20001,) * 3 and ring == -1 and all(word in text for word in words)
        before = bars()
        wait()
        fine(before and bars())
    """
    await bench.frozen(code, uid=TENANT)
    assert await bench.outcome(uid=TENANT) == FINE


async def test_lazy_pages_come_when_they_are_touched(bench: Bench) -> None:
    await bench.frozen(
        "kept = bytearray(os.urandom(1 << 20) * 16)\ntold = "
        "hash(bytes(kept))\nwait()\nfine(hash(bytes(kept)) == told)"
    )
    assert await bench.outcome(lazy=True) == FINE


async def test_lazy_pages_of_a_confined_process(bench: Bench) -> None:
    await bench.frozen(
        "kept = bytearray(os.urandom(1 << 20) * 8)\nwait()\nfine(len(set(kept)) > 200)", uid=TENANT
    )
    assert await bench.outcome(uid=TENANT, lazy=True) == FINE


async def test_several_clones_at_once(bench: Bench) -> None:
    await bench.frozen("wait()\nfine()")
    for index in range(3):
        (bench.folder / f"work{index}").mkdir()

    async def clone(index: int) -> int:
        work = os.open(bench.folder / f"work{index}", os.O_RDONLY | os.O_DIRECTORY)
        try:
            mine = Bench(
                criu=bench.criu,
                kdat=bench.kdat,
                folder=bench.folder,
                images=bench.images,
                work=work,
            )
            return await mine.outcome()
        finally:
            os.close(work)

    assert await asyncio.gather(*(clone(i) for i in range(3))) == [FINE] * 3


async def test_stdout_and_stderr_are_plugged_into_the_new_pipes(bench: Bench) -> None:
    readable, writable = os.pipe2(os.O_CLOEXEC)
    key = f"pipe:[{os.fstat(writable).st_ino}]"
    async with bench.place() as place:
        process = await bench.subject(
            place, "wait()\nos.write(2, b'again')\nfine()", stderr=writable
        )
        await bench.dump(place, process.pid)
        process.close()
    os.close(readable)
    ours, out = os.pipe2(os.O_CLOEXEC)
    theirs, err = os.pipe2(os.O_CLOEXEC)
    async with bench.place() as place:
        place.stdio = (out, err)
        restored = await bench.restore(place, stdio_keys={"stdout": "pipe:[1]", "stderr": key})
        assert await ended(await place.watch(restored.pid)) == FINE
    assert os.read(theirs, 64) == b"again"
    for fd in (ours, out, theirs, err):
        os.close(fd)


# PORT: one that the kernel gives to nobody else between dump and restore.
WORKING = {
    "listener": """
        s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", PORT)); s.listen()
        port = s.getsockname()[1]; wait()
        c = socket.create_connection(("127.0.0.1", port), 5); s.accept(); fine()
    """,
    "unix listener": """
        import tempfile
        path = tempfile.mkdtemp() + "/s"; s = socket.socket(socket.AF_UNIX); s.bind(path); s.listen(); wait()
        c = socket.socket(socket.AF_UNIX); c.connect(path); fine()
    """,
    "socket pair": "a, b = socket.socketpair(); a.send(b'x'); wait(); fine(b.recv(1) == b'x')",
    "deleted file of 8 MiB": """
        import tempfile
        f = tempfile.TemporaryFile(); f.write(b"x" * (8 << 20)); f.flush(); wait()
        f.seek(0); fine(len(f.read()) == 8 << 20)
    """,
    "memfd": "fd = os.memfd_create('m'); os.write(fd, b'y' * (1 << 20)); wait(); "
    "fine(os.fstat(fd).st_size == 1 << 20)",
    "threads": """
        import threading
        for _ in range(8): threading.Thread(target=threading.Event().wait, daemon=True).start()
        wait(); fine(threading.active_count() == 9)
    """,
    "epoll in a thread": """
        import threading, select
        e = select.epoll(); a, b = socket.socketpair(); e.register(a, select.EPOLLIN); threading.Thread(target=e.poll, daemon=True).start()
        wait(); fine()
    """,
    "inotify": "import ctypes; c = ctypes.CDLL(None); fd = c.inotify_init1(0); "
    "c.inotify_add_watch(fd, b'/tmp', 2); wait(); fine()",
    "child process": """
        child = os.fork()
        if not child:
            os.close(1); signal.pause()
        wait(); os.kill(child, 9); fine(os.waitpid(child, 0)[0] == child)
    """,
    "file lock": """
        import fcntl, tempfile
        fd, _ = tempfile.mkstemp(); fcntl.flock(fd, fcntl.LOCK_EX); wait(); fine()
    """,
    "inner pipe": "r, w = os.pipe(); os.write(w, b'z'); wait(); fine(os.read(r, 1) == b'z')",
}


@pytest.mark.parametrize("name", WORKING)
async def test_what_comes_back(bench: Bench, name: str) -> None:
    await bench.frozen(WORKING[name].replace("PORT", str(free_port())))
    assert await bench.outcome() == FINE


async def test_both_ends_of_a_connection_inside_come_back_when_told(bench: Bench) -> None:
    code = f"""
        s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", {free_port()})); s.listen()
        c = socket.create_connection(s.getsockname()); a, _ = s.accept(); wait()
        c.send(b"x"); fine(a.recv(1) == b"x")
    """
    with pytest.raises(CriuFailed) as caught:
        await bench.frozen(code)
    assert caught.value.reason is CriuReason.TCP_CONNECTION
    assert "enter(snap=False)" in caught.value.message
    await bench.frozen(code, tcp=True)
    assert await bench.outcome(tcp=True) == FINE


REFUSED = {
    "io_uring": (
        CriuReason.IO_URING,
        "import ctypes; fd = ctypes.CDLL(None).syscall(425, 4, bytes(120)); assert fd > 0; wait()",
    ),
    "ghost file above the limit": (
        CriuReason.GHOST_FILE,
        (
            "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x' * (65 << 20)); f.flush(); "
            "wait()"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_dumped_is_named(bench: Bench, name: str) -> None:
    reason, code = REFUSED[name]
    with pytest.raises(CriuFailed) as caught:
        await bench.frozen(code)
    assert caught.value.reason is reason, (caught.value.cause, caught.value.log_tail)


async def test_unix_connection_to_an_outside_peer_is_named(bench: Bench) -> None:
    path = bench.folder / "outside.sock"

    async def there_and_back() -> None:
        """CRIU may notice at the dump or only at the restore."""
        await bench.frozen(f"c = socket.socket(socket.AF_UNIX); c.connect({str(path)!r}); wait()")
        await bench.outcome()

    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(CriuFailed) as caught:
            await there_and_back()
    assert caught.value.reason is CriuReason.UNIX_PEER, (caught.value.cause, caught.value.log_tail)


async def test_file_that_changed_since_is_named(bench: Bench) -> None:
    path = bench.folder / "data"
    path.write_bytes(b"x" * 5)
    await bench.frozen(f"f = open({str(path)!r}); wait()")
    path.write_bytes(b"x" * 18)
    with pytest.raises(CriuFailed) as caught:
        await bench.outcome()
    assert caught.value.reason is CriuReason.CHANGED_FILE, (
        caught.value.cause,
        caught.value.log_tail,
    )


async def test_file_that_is_gone_is_named(bench: Bench) -> None:
    path = bench.folder / "data"
    path.write_bytes(b"x")
    await bench.frozen(f"f = open({str(path)!r}); wait()")
    path.unlink()
    with pytest.raises(CriuFailed) as caught:
        await bench.outcome()
    assert caught.value.reason is CriuReason.MISSING_FILE, (
        caught.value.cause,
        caught.value.log_tail,
    )


async def test_taken_pid_is_named(bench: Bench) -> None:
    async with bench.place() as place:
        process = await bench.subject(place, "wait()\nfine()")
        await bench.dump(place, process.pid)
        await process.exited
        restored = await bench.restore(place)
        first = await place.watch(restored.pid)
        with pytest.raises(CriuFailed) as caught:
            await bench.restore(place)
        assert await ended(first) == FINE, "the one that was there goes on"
        process.close()
    assert caught.value.reason is CriuReason.PID_TAKEN, (caught.value.cause, caught.value.log_tail)


async def test_taken_address_is_named(bench: Bench) -> None:
    port = free_port()
    await bench.frozen(f"s = socket.socket(); s.bind(('127.0.0.1', {port})); s.listen(); wait()")
    with contextlib.closing(socket.socket()) as blocker:
        blocker.bind(("127.0.0.1", port))
        blocker.listen()
        with pytest.raises(CriuFailed) as caught:
            await bench.outcome()
    assert caught.value.reason is CriuReason.ADDRESS_TAKEN, (
        caught.value.cause,
        caught.value.log_tail,
    )


async def test_process_that_is_not_there_is_named(bench: Bench) -> None:
    async with bench.place() as place:
        with pytest.raises(CriuFailed) as caught:
            await bench.dump(place, 4711)
    assert caught.value.reason is CriuReason.NO_PROCESS, (caught.value.cause, caught.value.log_tail)


@pytest.mark.parametrize("damage", ["truncated", "missing", "foreign", "flipped"])
@pytest.mark.parametrize(
    "image", ["inventory.img", "pstree.img", "core-{pid}.img", "mm-{pid}.img", "pagemap-{pid}.img"]
)
async def test_damaged_image_is_never_a_success(
    bench: Bench, waiting: tuple[int, Mapping[str, bytes]], damage: str, image: str
) -> None:
    pid, images = waiting
    for name, content in images.items():
        (bench.folder / "images" / name).write_bytes(content)
    path = bench.folder / "images" / image.format(pid=pid)
    content = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "missing":
            path.unlink()
        case "foreign":
            path.write_bytes(b"#!/bin/sh\n" + content[10:])
        case "flipped":
            path.write_bytes(bytes([content[0] ^ 0xFF]) + content[1:])
    with pytest.raises(CriuError):
        await bench.outcome()


async def test_full_disk_is_named(bench: Bench) -> None:
    small = bench.folder / "small"
    small.mkdir()
    mounted = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)
    )
    assert await mounted.wait() == 0
    images = os.open(small, os.O_RDONLY | os.O_DIRECTORY)
    try:
        async with bench.place() as place:
            process = await bench.subject(place, "kept = os.urandom(8 << 20); wait()\nfine()")
            with pytest.raises(CriuFailed) as caught:
                await operations.dump(
                    place,
                    criu=bench.criu,
                    pid=process.pid,
                    images=images,
                    work=bench.work,
                    uid=0,
                    cgroup={},
                    deadline_s=DEADLINE_S,
                )
            assert await ended(process) == FINE, "a refused dump leaves the process running"
        assert caught.value.reason is CriuReason.NO_SPACE, (
            caught.value.cause,
            caught.value.log_tail,
        )
    finally:
        os.close(images)
        await (await asyncio.create_subprocess_exec("umount", str(small))).wait()


@pytest.mark.parametrize("after_ms", [0, 5, 10, 20, 40, 80])
async def test_killed_criu_leaves_the_process_running_or_gone_but_not_stuck(
    bench: Bench, after_ms: int
) -> None:
    """Whoever asked ends the process after an error; it must be possible, and the process must not
    be left stopped."""
    async with bench.place() as place:
        process = await bench.subject(place, "kept = os.urandom(64 << 20)\nwait()\nfine()")
        started: list[SandboxProcess] = []
        order = place.criu

        async def remember(*args: object, **more: object) -> SandboxProcess:
            started.append(await order(*args, **more))  # type: ignore[arg-type]
            return started[-1]

        place.criu = remember  # type: ignore[method-assign]
        task = asyncio.create_task(bench.dump(place, process.pid))
        while not started:
            await asyncio.sleep(0)
        await asyncio.sleep(after_ms / 1e3)
        with contextlib.suppress(OSError):  # its descriptor is closed when it was faster
            started[0].kill()
        with contextlib.suppress(CriuError):
            await task
        state = _state(process)
        assert state in ("gone", "running"), state
        proc.send_signal(process.pidfd, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            await process.exited
        process.close()


def _state(process: SandboxProcess) -> str:
    """After the moment that the kernel needs to take the tracer's death in."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        pid = proc.host_pid(process.pidfd)
        try:
            letter = (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else "X"
            )
        except FileNotFoundError:
            letter = "X"
        if letter in "XZ":
            return "gone"
        if letter in "SRD":
            return "running"
        if time.monotonic() > deadline:
            return letter
        time.sleep(0.01)
