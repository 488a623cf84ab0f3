"""Brings the memory of a lazily restored process tree from its image: first the working set, in
whole ranges and while CRIU is still at work; pages that the process waits for, at once; the rest
later, in the background. A page that was never written is filled with zeros, and when the process
walks through such pages, so are more and more of those that follow.

CRIU registers the private anonymous memory of each process with a userfaultfd(2) and sends it to
`lazy-pages.socket` in its work directory, as it does for its own page daemon (criu/uffd.c): for
each process its pid and the descriptor, and a word when the restore is complete. This server
replaces the daemon: it knows the working set, needs no program to be started, copies from the page
cache once and not twice, and keeps no page waiting for a large background copy.

A forked child of the shim, and so killed with its slot: memory is never served by a process that
may be gone before its user. The kernel reports forks, mremap(2), munmap(2) and madvise(2) of the
process as events and delays these calls until they have been read; copies meanwhile fail with
EAGAIN. Standard library only; one thread.

When recording, only pages that the process waits for are brought, and their addresses are
written to a file in the order of the accesses: the working set of later restores (REAP, ASPLOS
2021)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from snapshotter.shim.pages.missing_pages import MissingPages
from snapshotter.shim.pages.page_files import (
    ACCESS,
    EMPTY,
    MAX_RECORDED,
    PagesLost,
    Ranges,
)
from snapshotter.shim.pages.page_image import AROUND_BYTES, PageImage

_FINISHED = 0x52535446
"""CRIU's word for a complete restore, where a pid could be (LAZY_PAGES_RESTORE_FINISHED)."""
_PID = struct.Struct("<i")
_MESSAGE = struct.Struct("<B7xQQQ")
"""`uffd_msg` of linux/userfaultfd.h: event, and three words."""
_PAGEFAULT, _FORK, _REMAP, _REMOVE, _UNMAP = 0x12, 0x13, 0x14, 0x15, 0x16
_FLAG_WRITE = 1
_COPY = struct.Struct("<QQQQq")
_UFFDIO_COPY, _UFFDIO_ZEROPAGE, _UFFDIO_WAKE = 0xC028AA03, 0xC020AA04, 0x8010AA02
_RANGE, _ZEROPAGE = struct.Struct("<QQ"), struct.Struct("<QQQq")
_PAGE = mmap.PAGESIZE
_MESSAGES_AT_ONCE = 64
_STEP_BYTES = 64 * _PAGE
"""Copied between two looks for faults: some 0.1 ms."""
_RETRY_S = 0.001
"""Pause before memory is tried again that CRIU has not registered yet, or that the process
changes."""
_BACKGROUND_S = 0.1
"""How long after the restore, the working set and the last fault the rest is brought: the first
call needs the processors."""
_BUSY_PAUSE_S, _BUSY_MOST_S = 0.01, 1.0
"""How long the rest waits while others wait for a processor, such as further restores: 1 ms per MB
of it would delay them; and how long in all, because a machine may be busy for hours."""
_MANY_FAULTS = 512
"""After so many faults the rest is brought at once: the process uses much more than the working
set."""
_NO_MEMORY_TRIES = 200


@dataclass(slots=True)
class Piece:
    """A part of the working set, and the argument of the call that brings it."""

    start: int
    end: int
    argument: bytearray


@dataclass(eq=False, kw_only=True)
class Memory:
    """One address space. `wanted`: the pieces of the working set that are to be brought; `brought`:
    those that are there and that `missing` still has. The last zeros were `zeroed_bytes` before the
    address `zeroed_end`."""

    pid: int
    uffd: int
    image: PageImage
    missing: MissingPages
    wanted: deque[Piece] = field(default_factory=deque)
    brought: list[Piece] = field(default_factory=list)
    zeroed_bytes: int = 0
    zeroed_end: int = 0

    def on_change(self, event: int, words: tuple[int, int, int]) -> None:
        """The process has moved, discarded or unmapped memory: what the image has of it is obsolete
        there, also of the working set."""
        if event == _REMAP:
            source, target, length = words
            self.missing.move(source, target, length)
            self._discard_wanted(source, source + length)
            self._discard_wanted(target, target + length)
        else:
            start, end, _ = words
            self.missing.remove(start, end)
            self._discard_wanted(start, end)

    def _discard_wanted(self, start: int, end: int) -> None:
        self.wanted = deque(one for one in self.wanted if one.end <= start or one.start >= end)


class PageServer:
    """One restore. Owner: `run`, which is all that the process does."""

    def __init__(
        self,
        images: int,
        working_set: Mapping[int, Ranges],
        *,
        record: int = -1,
        ready: int = -1,
    ) -> None:
        """Reads the working set into this process, while CRIU is at work. `record`: descriptor of
        the file of accesses; -1: do not record. `ready`: descriptor that is closed once the working
        set is there; -1: none. Raises PagesLost, OSError."""
        self._images = images
        self._record = record
        self._ready = ready
        self._faults = 0
        self._zeros = mmap.mmap(-1, _STEP_BYTES)
        self._zeros_address = ctypes.addressof(ctypes.c_char.from_buffer(self._zeros))
        self._prepared = {pid: self._prepare(pid, ranges) for pid, ranges in working_set.items()}
        self._memories: dict[int, Memory] = {}
        self._around: deque[tuple[Memory, int]] = deque()
        self._is_restored = False
        self._background_at = 0.0
        self._load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._busy_s = 0.0
        self._no_memory = 0
        self._poll = select.poll()

    def run(self, connection: socket.socket) -> None:
        """Serve until nothing is missing. `connection`: of CRIU. Raises PagesLost, OSError."""
        self._poll.register(connection, select.POLLIN)
        timeout_s: float | None = None
        while self._memories or not self._is_restored:
            events = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
            for fd, _ in events:
                if fd in self._memories:
                    self._on_messages(self._memories[fd])
                elif fd == connection.fileno():
                    self._on_criu(connection)
            timeout_s = 0.0 if events else self._work()

    def _prepare(self, pid: int, ranges: Ranges) -> tuple[PageImage, deque[Piece]]:
        """The image of a process, and the pieces of its working set, mapped in."""
        image = PageImage(self._images, pid)
        pieces: deque[Piece] = deque()
        places = [
            [(start - EMPTY, end, 0)] if start & EMPTY else list(image.missing.within(start, end))
            for start, end in ranges
        ]
        in_image = [
            one
            for (start, _), found in zip(ranges, places, strict=True)
            if not start & EMPTY
            for one in found
        ]
        image.read_ahead(in_image)
        for (start, _), found in zip(ranges, places, strict=True):
            source = self._zeros_address if start & EMPTY else image.address
            for at, until, position in found:
                for here in range(at, until, _STEP_BYTES):
                    length = min(_STEP_BYTES, until - here)
                    offset = position + here - at if source == image.address else 0
                    argument = _COPY.pack(here, source + offset, length, 0, 0)
                    pieces.append(Piece(here, here + length, bytearray(argument)))
        image.map_in_all((position, until - at) for at, until, position in in_image)
        return image, pieces

    # -- CRIU

    def _on_criu(self, connection: socket.socket) -> None:
        word = connection.recv(_PID.size, socket.MSG_WAITALL)
        if len(word) < _PID.size:
            if not self._is_restored:
                raise PagesLost("CRIU has disconnected before the end of the restore")
            self._poll.unregister(connection)
            return
        (pid,) = _PID.unpack(word)
        if pid == _FINISHED:
            self._is_restored = True
            self._background_at = time.monotonic() + _BACKGROUND_S
        elif pid > 0:  # a zombie's is negative: it has no memory
            _, (uffd,), _, _ = socket.recv_fds(connection, 1, 1)
            image, wanted = self._prepared.get(pid) or (PageImage(self._images, pid), deque())
            self._add(Memory(pid=pid, uffd=uffd, image=image, missing=image.missing, wanted=wanted))

    def _add(self, memory: Memory) -> None:
        os.set_blocking(memory.uffd, False)
        self._memories[memory.uffd] = memory
        self._poll.register(memory.uffd, select.POLLIN)

    def _drop(self, memory: Memory) -> None:
        """Nothing of it is missing, or it is gone: memory that is touched from now on is the
        kernel's."""
        if self._memories.pop(memory.uffd, None) is not None:
            self._poll.unregister(memory.uffd)
            os.close(memory.uffd)

    # -- the process

    def _on_messages(self, memory: Memory) -> None:
        try:
            data = os.read(memory.uffd, _MESSAGES_AT_ONCE * _MESSAGE.size)
        except BlockingIOError:
            return
        _mark_copied(memory)
        # what has moved or is gone comes first: a page is then filled where it belongs now
        messages = sorted(_MESSAGE.iter_unpack(data), key=lambda one: one[0] == _PAGEFAULT)
        for event, *words in messages:
            if memory.uffd not in self._memories:
                return
            if event == _PAGEFAULT:
                self._on_fault(memory, flags=words[0], address=words[1] & ~(_PAGE - 1))
            elif event == _FORK:
                uffd, missing = words[0] & 0xFFFFFFFF, memory.missing.copy()
                self._add(replace(memory, uffd=uffd, missing=missing, wanted=deque(), brought=[]))
            elif event in (_REMAP, _REMOVE, _UNMAP):
                memory.on_change(event, (words[0], words[1], words[2]))

    def _on_fault(self, memory: Memory, *, flags: int, address: int) -> None:
        self._faults += 1
        if self._is_restored and self._faults <= _MANY_FAULTS:
            self._background_at = time.monotonic() + _BACKGROUND_S
        is_recording = self._record >= 0 and self._faults <= MAX_RECORDED
        found = memory.missing.first_within(address, address + _PAGE)
        if is_recording:
            os.write(
                self._record, ACCESS.pack(memory.pid, address | (EMPTY if found is None else 0))
            )
        if found is None:
            is_write = bool(flags & _FLAG_WRITE)
            if is_recording or not is_write or not self._zero_ahead(memory, address):
                self._zero(memory, address, is_write=is_write)
            return
        if not self._copy(memory, *found):
            if memory.uffd in self._memories:
                self._wake(memory, address)
        elif not is_recording:
            self._around.append((memory, address & ~(AROUND_BYTES - 1)))

    def _zero_ahead(self, memory: Memory, address: int) -> bool:
        """Fill this page and those that follow, if the process has reached it through the last
        ones: twice as many each time, like a read-ahead. False: nothing was filled."""
        is_next = address == memory.zeroed_end
        length = min(2 * memory.zeroed_bytes, _STEP_BYTES) if is_next else _PAGE
        found = memory.missing.first_within(address, address + length)
        length = length if found is None else found[0] - address
        memory.zeroed_bytes, memory.zeroed_end = _PAGE, address + _PAGE
        while length > _PAGE:
            try:
                _uffd_copy(memory.uffd, address, self._zeros_address, length)
            except _CopyFailed as e:
                if e.copied:
                    return True
                length = length // (2 * _PAGE) * _PAGE  # of one mapping only
            else:
                memory.zeroed_bytes, memory.zeroed_end = length, address + length
                return True
        return False

    def _zero(self, memory: Memory, address: int, *, is_write: bool) -> None:
        """A page that was never touched, or was discarded, or has arrived meanwhile."""
        try:
            if is_write:  # the shared page of zeros would be copied at once
                _uffd_copy(memory.uffd, address, self._zeros_address, _PAGE)
            else:
                argument = bytearray(_ZEROPAGE.pack(address, _PAGE, 0, 0))
                fcntl.ioctl(memory.uffd, _UFFDIO_ZEROPAGE, argument)
        except OSError as e:
            if e.errno == errno.EEXIST:
                fcntl.ioctl(memory.uffd, _UFFDIO_WAKE, bytearray(_RANGE.pack(address, _PAGE)))
            elif e.errno == errno.ESRCH:
                self._drop(memory)
            elif e.errno in (errno.EAGAIN, errno.ENOENT, errno.ENOMEM):
                self._wake(memory, address)
            else:
                raise

    def _wake(self, memory: Memory, address: int) -> None:
        """Have a waiting thread ask again, after a pause: its page could not be filled now."""
        time.sleep(_RETRY_S)
        fcntl.ioctl(memory.uffd, _UFFDIO_WAKE, bytearray(_RANGE.pack(address, _PAGE)))

    # -- ahead of the process

    def _work(self) -> float | None:
        """One step of what no thread waits for yet; returns after how many seconds to look again,
        None: after the next event."""
        if self._record >= 0 and self._faults <= MAX_RECORDED:
            return None
        if self._around:
            memory, start = self._around.popleft()
            for one in list(memory.missing.within(start, start + AROUND_BYTES)):
                is_gone = self._memories.get(memory.uffd) is not memory
                if is_gone or not self._copy(memory, *one):
                    break  # it comes with its first access, or later
            return 0.0
        for memory in self._memories.values():
            if memory.wanted:
                return self._copy_wanted(memory)
            _mark_copied(memory)
        if not self._is_restored:
            return None
        self._say_ready()
        wait_s = self._rest_waits_s()
        if wait_s > 0:
            return wait_s
        for memory in list(self._memories.values()):
            found = memory.missing.first()
            if found is None:
                self._drop(memory)
                continue
            start, end, position = found
            until = min(end, start + _STEP_BYTES)
            return 0.0 if self._copy(memory, start, until, position) else _RETRY_S
        return 0.0

    def _say_ready(self) -> None:
        """Say that the working set is there."""
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    def _rest_waits_s(self) -> float:
        """After how many seconds to look again whether the rest may come; 0: now."""
        left_s = self._background_at - time.monotonic()
        if left_s > 0:
            return left_s
        may_wait = self._busy_s < _BUSY_MOST_S and self._faults <= _MANY_FAULTS
        if may_wait and is_busy(os.pread(self._load, 128, 0), processors=os.cpu_count() or 1):
            self._busy_s += _BUSY_PAUSE_S
            return _BUSY_PAUSE_S
        return 0.0

    def _copy_wanted(self, memory: Memory) -> float:
        left = _STEP_BYTES
        while memory.wanted and left > 0:
            piece = memory.wanted[0]
            try:
                fcntl.ioctl(memory.uffd, _UFFDIO_COPY, piece.argument)
            except OSError as e:
                copied = _COPY.unpack(piece.argument)[4]
                if e.errno == errno.ESRCH:
                    self._drop(memory)
                    return 0.0
                is_early = e.errno == errno.ENOENT and not self._is_restored
                if is_early or (e.errno == errno.EAGAIN and copied <= 0):
                    return _RETRY_S
                self._copy_rest(memory, piece, max(0, copied))
            else:
                memory.brought.append(piece)
            left -= piece.end - piece.start
            if memory.wanted:
                memory.wanted.popleft()
        return 0.0

    def _copy_rest(self, memory: Memory, piece: Piece, copied: int) -> None:
        """The rest of a piece of which a part was there already."""
        memory.missing.remove(piece.start, piece.start + copied)
        while (found := memory.missing.first_within(piece.start, piece.end)) is not None:
            if not self._copy(memory, *found):
                return  # it comes with its first access, or later

    def _copy(self, memory: Memory, start: int, end: int, position: int) -> bool:
        """Copy pages that are missing. False: they could not be copied now. Raises PagesLost."""
        memory.image.map_in(position, end - start)
        try:
            _uffd_copy(memory.uffd, start, memory.image.address + position, end - start)
        except _CopyFailed as e:
            if e.copied > 0:
                memory.missing.remove(start, start + e.copied)
                return True
            return self._on_copy_failed(memory, start, e.errno or 0)
        memory.missing.remove(start, end)
        self._no_memory = 0
        return True

    def _on_copy_failed(self, memory: Memory, start: int, code: int) -> bool:
        if code == errno.EEXIST or (code == errno.ENOENT and self._is_restored):
            # it is there already, or not mapped any longer
            memory.missing.remove(start, start + _PAGE)
            return True
        if code == errno.ESRCH:
            self._drop(memory)
        elif code == errno.ENOMEM:
            self._no_memory += 1
            if self._no_memory > _NO_MEMORY_TRIES:
                raise PagesLost("no memory is left for the process")
            time.sleep(_RETRY_S)
        elif code not in (errno.EAGAIN, errno.ENOENT):
            raise PagesLost(f"memory at {start:#x} cannot be filled: {os.strerror(code)}")
        return False


def is_busy(loadavg: bytes, *, processors: int) -> bool:
    """Whether more threads can run than there are processors, the caller included (proc(5),
    loadavg: the fourth field)."""
    return int(loadavg.split()[3].partition(b"/")[0]) > processors


def _mark_copied(memory: Memory) -> None:
    """Have what was brought no longer missing. Not with each piece: the process waits for the next
    ones meanwhile."""
    for piece in memory.brought:
        memory.missing.remove(piece.start, piece.end)
    memory.brought.clear()


class _CopyFailed(OSError):
    """Raised when not everything was copied; `copied`: how many bytes were."""

    copied = 0


def _uffd_copy(uffd: int, target: int, source: int, length: int) -> None:
    argument = bytearray(_COPY.pack(target, source, length, 0, 0))
    try:
        fcntl.ioctl(uffd, _UFFDIO_COPY, argument)
    except OSError as e:
        failed = _CopyFailed(e.errno, os.strerror(e.errno or 0))
        failed.copied = max(0, _COPY.unpack(argument)[4])
        raise failed from e
