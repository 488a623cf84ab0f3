"""Memory that comes while the process runs, through real CRIU and the kernel's userfaultfd: it is
exactly what was dumped, whatever the process does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.criu import page_map, working_set
from snapshotter.criu.errors import CriuError
from snapshotter.criu.lazy import PageRequest
from snapshotter.criu.processes import Criu
from snapshotter.criu.self_test import SelfTest
from snapshotter.criu.self_test_sandbox import Sandbox
from snapshotter.linux import proc
from snapshotter.shim.pages import page_files, page_server
from snapshotter.slots.replies import BootFailed, SlotConnectionLost
from tests.snapshotter.criu.test_operations import FINE, Bench, ended

pytestmark = pytest.mark.root
PAGE = 4096
MIB = 1 << 20
RECORDING = PageRequest(record=True)
"""Brings nothing that the process does not wait for: its memory stays missing."""


@pytest.fixture
def bench(short_tmp: Path, criu: Criu, criu_proof: SelfTest) -> Iterator[Bench]:
    assert criu_proof.kdat is not None
    for name in ("images", "work"):
        (short_tmp / name).mkdir()
    images, work = (
        os.open(short_tmp / name, os.O_RDONLY | os.O_DIRECTORY) for name in ("images", "work")
    )
    yield Bench(criu=criu, kdat=criu_proof.kdat, folder=short_tmp, images=images, work=work)
    os.close(images)
    os.close(work)


async def outcome(bench: Bench, pages: PageRequest) -> int:
    """Exit status of the subject, restored with these pages."""
    async with bench.place() as place:
        restored = await bench.restore(place, pages=pages)
        assert restored.lazy is not None
        status = await ended(await place.watch(restored.pid))
        await restored.lazy.kill()
        return status


def memory(pid: int) -> dict[int, bytes]:
    """Address → page of all private anonymous memory that can be read."""
    found = {}
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as mem:
        for line in maps:
            start, end, flags, inode, name = re.fullmatch(  # type: ignore[union-attr]
                r"(\w+)-(\w+) (\S+) \S+ \S+ (\d+)\s*(.*)\n", line
            ).groups()
            if flags[0] == "r" and flags[3] == "p" and inode == "0" and not name.startswith("[v"):
                for address in range(int(start, 16), int(end, 16), PAGE):
                    mem.seek(address)
                    found[address] = mem.read(PAGE)
    return found


def are_present(pid: int, addresses: list[int]) -> bool:
    """Whether the pages of all these addresses are in memory (proc(5), pagemap)."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for address in addresses:
            pagemap.seek(address // PAGE * 8)
            if not pagemap.read(8)[7] & 0x80:
                return False
    return True


async def all_ended(place: Sandbox) -> None:
    """Wait until nothing but its first process is left in it."""
    (first,) = children(place._process.pid)
    async with asyncio.timeout(10):
        while children(first):
            await asyncio.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


SUBJECT = """
    import mmap
    kept = os.urandom(1 << 20) * 8
    sparse = mmap.mmap(-1, 1 << 22)
    for i in range(0, 1 << 22, 40960):
        sparse[i : i + 8] = os.urandom(8)
    wait()
"""


async def test_memory_is_byte_for_byte_what_was_dumped(bench: Bench) -> None:
    """Compared with an eager restore of the same image, which CRIU makes alone."""
    await bench.frozen(SUBJECT)
    found = []
    for pages in (None, PageRequest()):
        async with bench.place() as place:
            restored = await bench.restore(place, pages=pages)
            process = await place.watch(restored.pid)
            if restored.lazy is not None:
                assert await asyncio.wait_for(restored.lazy.exited, 20) == 0
                await restored.lazy.kill()
            found.append(memory(proc.host_pid(process.pidfd)))
    eager, lazy = found
    assert eager.keys() == lazy.keys()
    assert sum(any(page) for page in lazy.values()) * PAGE > 8 * MIB
    differing = [address for address, page in eager.items() if page != lazy[address]]
    # where the kernel notes the processor of a thread that it resumes (rseq(2))
    assert len(differing) <= 1


async def test_the_working_set_is_there_before_it_is_touched(bench: Bench) -> None:
    code = "kept = bytearray(os.urandom(1 << 20) * 16)\nwait()\nfine(sum(kept[: 1 << 20]) > 0)"
    await bench.frozen(code)
    assert await outcome(bench, RECORDING) == FINE
    ranges = working_set.recorded(bench.folder / "work")
    accesses = (bench.folder / "work" / page_files.RECORD).read_bytes()
    recorded = [address for _, address in page_files.ACCESS.iter_unpack(accesses)]
    assert len(recorded) * PAGE in range(MIB, 12 * MIB)

    async with bench.place() as place:
        restored = await bench.restore(place, pages=PageRequest(working_set=ranges))
        process = await place.watch(restored.pid)
        assert restored.lazy is not None
        await restored.lazy.brought
        assert not restored.lazy.exited.done()  # the rest comes later
        assert are_present(proc.host_pid(process.pidfd), recorded)
        assert await ended(process) == FINE
        await restored.lazy.kill()


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param("fine(sum(kept[:]) == total)", id="reads"),
        pytest.param(
            """
pid = os.fork()
if pid == 0:
    fine(sum(kept[:]) == total)
good = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
fine(good and sum(kept[:]) == total)
""",
            id="forks",
        ),
        pytest.param(
            """
kept.resize(3 * SIZE)
fine(sum(kept[:SIZE]) == total and not any(kept[SIZE:]))
""",
            id="moves",
        ),
        pytest.param(
            """
kept.madvise(4, 4096, 8192)  # MADV_DONTNEED
fine(not any(kept[4096:12288]) and kept[:4096] == head and kept[12288:16384] == fourth)
""",
            id="discards",
        ),
        pytest.param(
            """
kept.close()
fine(sum(other) == total)
""",
            id="unmaps",
        ),
        pytest.param(
            """
import threading
sums = []
threads = [threading.Thread(target=lambda: sums.append(sum(kept[:]))) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
fine(sums == [total] * 4)
""",
            id="threads",
        ),
    ],
)
async def test_missing_memory_follows_what_the_process_does(bench: Bench, deed: str) -> None:
    """Nothing is brought ahead: each page comes by a fault, after the deed."""
    code = """
import mmap
SIZE = 1 << 20
kept, other = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), bytearray(SIZE)
data = os.urandom(SIZE)
kept[:], other[:] = data, data
total, head, fourth = sum(data), data[:4096], data[12288:16384]
wait()
"""
    await bench.frozen(code + deed)
    assert await outcome(bench, RECORDING) == FINE
    assert await outcome(bench, PageRequest()) == FINE, "and while the rest is brought"


async def test_a_process_that_walks_through_empty_memory_finds_it_ahead_of_its_steps(
    bench: Bench,
) -> None:
    """The pages between, which the dump has, are not covered by zeros."""
    code = """
import ctypes, mmap
def area():
    made = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return made, ctypes.addressof(ctypes.c_char.from_buffer(made))
def walk(made, pages):
    for page in pages:
        made[page * 4096] = 1
def is_present(address):
    with open("/proc/self/pagemap", "rb", buffering=0) as f:
        return os.pread(f.fileno(), 8, address // 4096 * 8)[7] & 0x80
SIZE = 1 << 20
(empty, at), (mixed, _), (jumped, there) = area(), area(), area()
walk(mixed, range(0, 256, 9))
empty.madvise(15); mixed.madvise(15); jumped.madvise(15)  # MADV_NOHUGEPAGE
wait()
"""
    deed = """
walk(empty, range(40))
walk(jumped, range(0, 80, 2))
for page in range(256):
    if page % 9:
        walk(mixed, [page])
ahead = is_present(at + 41 * 4096), is_present(there + 81 * 4096)
zeros = not any(empty[40 * 4096:]) and empty[::4096] == b"\\1" * 40 + bytes(216)
fine(ahead == (0x80, 0) and zeros and mixed[::4096] == b"\\1" * 256)
"""
    await bench.frozen(code + deed)
    assert await outcome(bench, PageRequest()) == FINE
    assert await outcome(bench, RECORDING) != FINE, "a record has every access"


@pytest.mark.parametrize("name", ["pages-1.img", "lazy-*.map"])
async def test_a_truncated_image_is_not_served(bench: Bench, name: str) -> None:
    """What names its size has found that before; a server that maps it finds it again."""
    await bench.frozen("kept = os.urandom(1 << 20) * 4\nwait()\nfine()")
    images = bench.folder / "images"
    pid = int(next(images.glob("lazy-*.map")).stem.removeprefix("lazy-"))
    page_server.PageServer(bench.images, {pid: [(0, 1 << 47)]})
    (path,) = images.glob(name)
    if name.endswith("map"):
        os.truncate(path, path.stat().st_size - 24)
    else:  # pages that CRIU restores itself may be behind those of the server
        _, ranges = page_files.read_map(next(images.glob("lazy-*.map")).read_bytes())
        os.truncate(path, max(at + end - start for start, end, at in ranges) - PAGE)
    with pytest.raises(page_files.PagesLost, match="truncated"):
        page_server.PageServer(bench.images, {pid: [(0, 1 << 47)]})


async def test_a_working_set_that_is_not_of_this_image_costs_time_only(bench: Bench) -> None:
    await bench.frozen("kept = os.urandom(1 << 20) * 4\nwait()\nfine(len(kept) == 4 << 20)")
    (path,) = (bench.folder / "images").glob("pagemap-*.img")
    pid = int(path.stem.removeprefix("pagemap-"))
    wrong = [(pid, PAGE, 9 * PAGE), (pid, 1 << 46, (1 << 46) + PAGE), (pid, 3 * PAGE | 1, 5 * PAGE)]
    ranges = b"".join(page_files.WORKING_SET_RANGE.pack(*one) for one in wrong)
    assert await outcome(bench, PageRequest(working_set=ranges)) == FINE


async def test_a_server_that_is_killed_before_crius_end_fails_the_restore(bench: Bench) -> None:
    await bench.frozen("kept = os.urandom(1 << 20) * 64\nwait()\nfine()")
    async with bench.place() as place:
        serve = place.serve_pages

        async def killed(*args: object, **options: object) -> object:
            process = await serve(*args, **options)  # type: ignore[arg-type]
            process.kill()
            return process

        place.serve_pages = killed  # type: ignore[assignment,method-assign]
        with pytest.raises(CriuError):
            await bench.restore(place, pages=PageRequest())


async def test_a_page_server_that_does_not_start_fails_the_restore(bench: Bench) -> None:
    """CRIU was started at the same time; nothing of it stays."""
    await bench.frozen("wait()\nfine()")
    async with bench.place() as place:

        async def lost(*_: object, **options: object) -> object:
            for fd in options["fds"]:  # type: ignore[attr-defined]
                os.close(fd)
            raise SlotConnectionLost("CRIU could not be started: no more processes")

        place.serve_pages = lost  # type: ignore[assignment,method-assign]
        with pytest.raises(SlotConnectionLost):
            await bench.restore(place, pages=PageRequest())
        await all_ended(place)


@pytest.mark.parametrize("ends", ["raises", "is cancelled"])
async def test_what_a_restore_is_prepared_with_fails_it(bench: Bench, ends: str) -> None:
    """CRIU and the page server run already, and end with it."""
    await bench.frozen("wait()\nfine()")
    async with bench.place() as place:
        is_reached = asyncio.Event()

        async def prepare() -> None:
            is_reached.set()
            if ends == "raises":
                raise BootFailed("no space is left for the tree")
            await asyncio.Event().wait()

        restoring = asyncio.create_task(bench.restore(place, pages=PageRequest(), prepare=prepare))
        await is_reached.wait()
        if ends == "is cancelled":
            await asyncio.sleep(0.05)
            restoring.cancel()
        with pytest.raises((BootFailed, asyncio.CancelledError)):
            await restoring
        await all_ended(place)


async def test_what_criu_reads_itself_are_the_pages_that_are_not_lazy(bench: Bench) -> None:
    await bench.frozen("kept = os.urandom(1 << 20)\nwait()\nfine()")
    images = bench.folder / "images"
    ((file, parts),) = page_map.eager_parts(images).items()
    (path,) = images.glob("lazy-*.map")
    _, lazy = page_files.read_map(path.read_bytes())
    size = sum(length for _, length in parts) + sum(end - start for start, end, _ in lazy)
    assert size == Path(file).stat().st_size
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError):
        page_map.eager_parts(images)


@pytest.mark.parametrize("runnable, is_busy", [(1, False), (2, False), (3, True), (40, True)])
def test_the_rest_waits_while_others_wait_for_a_processor(runnable: int, is_busy: bool) -> None:
    loadavg = b"0.50 9.00 9.00 %d/123 4567\n" % runnable
    assert page_server.is_busy(loadavg, processors=2) == is_busy


@pytest.mark.slow(
    "starts programs that keep every processor busy, and waits for a page server beside them"
)
async def test_the_rest_comes_to_a_machine_that_stays_busy(bench: Bench) -> None:
    await bench.frozen("kept = os.urandom(1 << 20) * 8\nwait()\nfine()")
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [
        await asyncio.create_subprocess_exec(*spin) for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        async with bench.place() as place:
            restored = await bench.restore(place, pages=PageRequest())
            process = await place.watch(restored.pid)
            assert restored.lazy is not None
            assert await asyncio.wait_for(restored.lazy.exited, 30) == 0
            await restored.lazy.kill()
            process.kill()
    finally:
        for one in spinning:
            one.kill()
            await one.wait()


def test_an_image_that_is_not_understood_has_no_map(tmp_path: Path) -> None:
    (tmp_path / "pagemap-7.img").write_bytes(b"nonsense")
    (tmp_path / "mm-7.img").write_bytes(b"")
    page_map.write_page_maps(tmp_path)
    names = os.listdir(tmp_path)
    assert not page_map.are_complete(names)
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "pagemap-7.img").unlink()
    assert page_map.are_complete(os.listdir(tmp_path)), "no process, nothing to bring"
