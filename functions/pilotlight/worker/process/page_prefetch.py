"""Finds the pages that a call will touch before the snapshot, and prefaults them while a fork is
parked.

The first call of a fork has two extra costs: file pages (weights, libraries) are not in its page
tables yet, and anonymous pages that the call writes (mostly reference counts) are shared and must
be copied, one fault each: some 2000 faults, 8 ms, for a MiniLM sentence. These pages can be found
without running user code in the fork. File pages: those that the Template has mapped in. Written
pages: while the warm-up runs, a child holds a copy of everything, so that written pages become
exclusive to this process (proc(5), pagemap: bit 56).

Prefaulting uses madvise(2) with MADV_POPULATE_READ and MADV_POPULATE_WRITE (Linux 5.14; without
them, pages are not prefaulted)."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Ranges = list[tuple[int, int]]
"""Address and length, in bytes."""

PAGE = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_PRESENT, _FILE, _EXCLUSIVE = 0x80, 0x20, 0x01
"""Bits 63, 61 and 56 of a pagemap entry, in its top byte."""
_MAX_WRITTEN_BYTES = 64 * 1024**2
"""Limit of the pages that a warm-up writes; above it, every parked fork would need too large a
private copy."""


@dataclass(slots=True, kw_only=True)
class TouchedPages:
    """Pages that a call touches. Filled before the snapshot, used in parked forks."""

    written: Ranges = field(default_factory=list)
    files: Ranges = field(default_factory=list)

    def watch(self, warm_up: Callable[[], None]) -> None:
        """Run the warm-up and record the pages that it writes. Raises what it raises."""
        with _copy_of_everything():
            warm_up()
            self.written = _matching(
                _PRESENT | _FILE | _EXCLUSIVE,
                _PRESENT | _EXCLUSIVE,
                lambda path: not path.startswith("[v"),
            )
        if sum(length for _, length in self.written) > _MAX_WRITTEN_BYTES:
            self.written = []

    def record(self) -> None:
        """Record the file pages that this process has mapped in."""
        self.files = _matching(
            _PRESENT | _FILE, _PRESENT | _FILE, lambda path: path.startswith("/")
        )

    def populate(self) -> None:
        """Map file pages in and make written pages private. Ignores pages that no longer exist."""
        _populate(self.files, _POPULATE_READ)
        _populate(self.written, _POPULATE_WRITE)


@contextlib.contextmanager
def _copy_of_everything() -> Iterator[None]:
    """Keep an idle forked child."""
    waits, ends = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ends)
            os.read(waits, 1)
        finally:
            os._exit(0)
    os.close(waits)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ends)


def _matching(mask: int, value: int, wanted: Callable[[str], bool]) -> Ranges:
    """Ranges of mapped pages whose top pagemap byte, masked, has the value; empty if the kernel
    does not provide a pagemap."""
    table = bytes(1 if top & mask == value else 0 for top in range(256))
    found: Ranges = []
    try:
        with (
            open("/proc/self/maps") as maps,
            open("/proc/self/pagemap", "rb", buffering=0) as pagemap,
        ):
            for line in maps.read().splitlines():
                addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in addresses.split("-"))
                if permissions.startswith("r") and wanted(path[0] if path else ""):
                    tops = os.pread(pagemap.fileno(), (end - start) // PAGE * 8, start // PAGE * 8)[
                        7::8
                    ].translate(table)
                    found += [
                        (start + run.start() * PAGE, (run.end() - run.start()) * PAGE)
                        for run in re.finditer(b"\x01+", tops)
                    ]
    except OSError:
        return []
    return found


def _populate(ranges: Ranges, advice: int) -> None:
    import ctypes

    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, length in ranges:
        # the kernel does not support it
        if advise(start, length, advice) and ctypes.get_errno() == errno.EINVAL:
            return
