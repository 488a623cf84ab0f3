"""What a dump learns of processes before it: memory by cause and paths, read within bounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from snapshotter.checkpointing.dumps import DumpBlocked, examine
from snapshotter.snapshots import memory_report

LARGE_BYTES, MAPPINGS = 8 * 1024 * 1024, 400
PROCESS = f"""
import ctypes, mmap, sys
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
large = mmap.mmap(-1, {LARGE_BYTES}, mmap.MAP_PRIVATE)
large.write(b"x" * {LARGE_BYTES})
pieces = mmap.mmap(-1, {MAPPINGS} * 4096, mmap.MAP_PRIVATE)
begin = ctypes.addressof(ctypes.c_char.from_buffer(pieces))
for number in range(0, {MAPPINGS}, 2):
    libc.mprotect(begin + number * 4096, 4096, mmap.PROT_READ)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def pid() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


def test_memory_and_paths_of_a_process_are_counted_where_they_are_read(pid: int) -> None:
    causes, weights_bytes, paths = examine(pid)
    assert causes[memory_report.LARGE] >= LARGE_BYTES
    assert memory_report.UNEXPLAINED not in causes
    assert weights_bytes == 0
    assert any("libc" in path for path in paths)


def test_memory_of_a_process_with_many_mappings_is_a_sum(pid: int) -> None:
    explained, _, paths = examine(pid)
    causes, _, same_paths = examine(pid, smaps_bytes=100_000)
    assert causes == {memory_report.UNEXPLAINED: sum(explained.values())}
    assert same_paths == paths


def test_processes_that_map_too_much_are_not_dumped(pid: int) -> None:
    with pytest.raises(DumpBlocked, match=r"open files \(more than 10000 bytes") as caught:
        examine(pid, maps_bytes=10_000)
    assert caught.value.reasons[0]["kind"] == "memory"
    assert not caught.value.passing
