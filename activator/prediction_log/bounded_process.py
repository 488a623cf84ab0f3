"""Processes of the writer that work on what callers sent: one record, or one file, at a time, with
bounds of processor time and memory, and no system calls but those that computing needs.

A record that ends its process, or exceeds a bound, is lost alone: the process is forked again."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Final, NoReturn

from snapshotter.shim.sandbox.isolation import allow_only
from snapshotter.shim.sandbox.system_calls import ALLOWED

ANSWER_S: Final = 120.0
"""Longest wait for an answer: on a busy machine a second of processor time takes long."""
_OUTSIDE: Final = frozenset(
    {
        *("accept", "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt"),
        *("listen", "recvfrom", "recvmmsg", "recvmsg", "sendmmsg", "sendmsg", "sendto"),
        *("setsockopt", "shutdown", "execve", "execveat", "pidfd_open", "pidfd_send_signal"),
        *("tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "seccomp", "personality"),
        *("msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop"),
        *("shmat", "shmctl", "shmdt", "shmget", "mq_open", "mq_timedreceive", "mq_timedsend"),
    }
)
WRITER_CALLS: Final = frozenset({*ALLOWED, "clone"} - _OUTSIDE)
"""Of the writer process: no sockets, and no other program."""
COMPUTING_CALLS: Final = frozenset(
    {
        *("read", "write", "close", "exit", "exit_group", "brk", "mmap", "munmap", "mremap"),
        *("mprotect", "madvise", "futex", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn"),
        *("setitimer", "clock_gettime", "gettimeofday", "getrandom", "sched_yield"),
        *("restart_syscall", "getpid", "gettid", "sched_getaffinity", "getrusage", "sysinfo"),
    }
)
"""Of a process that computes: no file is opened, nothing is signalled or forked."""
_PR_SET_PDEATHSIG: Final = 1
_LENGTH: Final = struct.Struct(">?I")
_PAGE: Final = resource.getpagesize()
_OF_INPUT: Final = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
"""What a computation may raise because of what a caller sent: no reason to end the process."""

Compute = Callable[[bytes], bytes]


class BeyondLimits(ValueError):
    """Raised when a computation ended its process, or exceeded its time or memory."""


class BoundedProcess:
    """Runs a function of bytes in a process of its own, forked on first use. Owner: the writer
    process, which must have no other threads.

    Attributes:
        starts: processes that were forked.
    """

    def __init__(self, prepare: Callable[[], Compute], *, cpu_s: float, memory_bytes: int) -> None:
        """`prepare`: imports what is needed, in the process, and returns the function.
        `cpu_s`: processor time of one computation. `memory_bytes`: more address space than the
        process has once it is prepared."""
        self._prepare = prepare
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._pid = 0
        self._to, self._from = -1, -1
        self.starts = 0

    def __repr__(self) -> str:
        return f"<BoundedProcess {self._pid}, {self.starts} starts, {self._cpu_s:g} s of CPU time>"

    def run(self, data: bytes) -> bytes:
        """Return the result. Raises ValueError where the function does, BeyondLimits, and what
        `start` raises."""
        if not self._pid:
            self.start()
        try:
            _write(self._to, _message(data))
            if not select.select([self._from], [], [], ANSWER_S)[0]:
                raise BeyondLimits(f"no answer within {ANSWER_S:g} s")
            is_valid, answer = _read(self._from)
        except (OSError, EOFError, BeyondLimits) as e:
            self.close()
            raise BeyondLimits(str(e)) from e
        if not is_valid:
            raise ValueError(answer.decode("utf-8", "replace"))
        return answer

    def close(self) -> None:
        """End the process."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._to)
            os.close(self._from)
            self._pid = 0

    def start(self) -> None:
        """Fork and prepare the process. Raises ImportError where `prepare` does, OSError."""
        parent = os.getpid()
        its_input, self._to = os.pipe()
        self._from, its_output = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            self._serve(parent, its_input, its_output)
        os.close(its_input)
        os.close(its_output)
        self.starts += 1
        try:
            is_prepared, why = _read(self._from)
        except EOFError as e:
            self.close()
            raise OSError("the process ended before it was prepared") from e
        if not is_prepared:
            self.close()
            raise ImportError(why.decode())

    def _serve(self, parent: int, its_input: int, its_output: int) -> NoReturn:
        """Compute, in the forked process, until its parent has ended."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            os.dup2(its_input, 0)
            os.dup2(its_output, 1)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            try:
                compute = self._prepare()
            except ImportError as e:
                _write(1, _message(str(e).encode(), is_valid=False))
                raise
            self._confine()
            _write(1, _message(b""))
            while True:
                _, data = _read(0)
                signal.setitimer(signal.ITIMER_PROF, self._cpu_s)  # then the kernel ends it
                try:
                    is_valid, answer = True, compute(data)
                except _OF_INPUT as e:
                    is_valid, answer = False, repr(e)[:1000].encode()
                signal.setitimer(signal.ITIMER_PROF, 0)
                _write(1, _message(answer, is_valid=is_valid))
        finally:  # also after MemoryError: no code of the parent runs in this process
            os._exit(1)

    def _confine(self) -> None:
        with open("/proc/self/statm", encoding="ascii") as f:
            most = int(f.read().split()[0]) * _PAGE + self._memory_bytes
        for kind, bound in (
            (resource.RLIMIT_AS, most),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, 0),
        ):
            resource.setrlimit(kind, (bound, bound))
        sys.stdout = sys.stderr = None
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        allow_only(COMPUTING_CALLS)


def _message(data: bytes, *, is_valid: bool = True) -> bytes:
    return _LENGTH.pack(is_valid, len(data)) + data


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int) -> tuple[bool, bytes]:
    """Read a message. Raises EOFError."""
    flag, size = _LENGTH.unpack(_read_exactly(descriptor, _LENGTH.size))
    return flag, _read_exactly(descriptor, size)


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            raise EOFError("the process has ended")
        data += piece
    return bytes(data)
