"""Requests permission for the processor's tiles (Intel AMX) on behalf of restored processes.

The kernel stores the permission with the process; CRIU neither saves nor restores it, so the first
tile instruction after a restore would be a SIGILL. Matrix libraries request it once, when they are
loaded, and use tiles for bfloat16 and int8. A process is stopped briefly (ptrace(2), PTRACE_SEIZE)
and made to repeat the request: its main thread executes one system call through an instruction of
its vDSO, and its registers are restored. If the kernel refuses, nothing changes: the process could
not have had the permission before (its signal stacks are too small). x86-64 only. Sources:
arch_prctl(2), Documentation/arch/x86/xstate.rst, ptrace(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import signal
import struct
import time
from collections.abc import Iterable

_log = logging.getLogger(__name__)
_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP, _ARCH_REQ_XCOMP_PERM = 0x1021, 0x1023
_TILE_DATA = 18
"""Number of the tile data component of the processor's state."""
_SEIZE, _INTERRUPT, _GETREGS, _SETREGS, _STEP, _DETACH = 0x4206, 0x4207, 12, 13, 9, 17
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_REGISTERS = 27
"""Number of 8-byte fields of struct user_regs_struct; indices of those that are used:"""
_RAX, _RSI, _RDI, _ORIG_RAX, _RIP = 10, 13, 14, 15, 16
_RDX = 12
_ALL_CHILDREN = 0x40000000
_PATIENCE_S = 1.0
_SYSCALL = b"\x0f\x05"


class AmxRequestFailed(Exception):
    """Raised when a process could not be made to request the permission."""


def request_tile_permission(pids: Iterable[int]) -> None:
    """Make each of these processes request tiles, if this machine has them. Blocking, some 0.2 ms
    each; never raises."""
    if not has_tiles():
        return
    for pid in pids:
        try:
            _request_permission(pid)
        except (AmxRequestFailed, OSError) as e:
            _log.warning("tiles.not_asked pid=%s error=%s", pid, e)


@functools.cache
def has_tiles() -> bool:
    """Whether this processor has tiles, and the kernel grants them."""
    if os.uname().machine != "x86_64":
        return False
    found = ctypes.c_uint64()
    return _libc.syscall(_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, ctypes.byref(found)) == 0 and bool(
        found.value >> _TILE_DATA & 1
    )


def _request_permission(pid: int) -> None:
    instruction = _instruction(pid)
    _ptrace(_SEIZE, pid)
    try:
        _ptrace(_INTERRUPT, pid)
        _wait_stop(pid)
        _call(pid, instruction)
    finally:
        with contextlib.suppress(OSError):  # it has exited
            _ptrace(_DETACH, pid)


def _call(pid: int, instruction: int) -> None:
    """Execute one system call in the stopped process with all signals blocked, and restore its
    state."""
    registers, mask = ctypes.create_string_buffer(8 * _REGISTERS), ctypes.c_uint64()
    _ptrace(_GETREGS, pid, 0, ctypes.addressof(registers))
    _ptrace(_GETSIGMASK, pid, 8, ctypes.addressof(mask))
    values = list(struct.unpack(f"{_REGISTERS}Q", registers.raw))
    values[_RAX], values[_RDI], values[_RSI], values[_RDX] = (
        _ARCH_PRCTL,
        _ARCH_REQ_XCOMP_PERM,
        _TILE_DATA,
        0,
    )
    # -1: an interrupted system call must not be restarted yet
    values[_ORIG_RAX], values[_RIP] = 0xFFFFFFFFFFFFFFFF, instruction
    changed = ctypes.create_string_buffer(struct.pack(f"{_REGISTERS}Q", *values))
    blocked = ctypes.c_uint64(0xFFFFFFFFFFFFFFFF)
    _ptrace(_SETSIGMASK, pid, 8, ctypes.addressof(blocked))
    _ptrace(_SETREGS, pid, 0, ctypes.addressof(changed))
    try:
        _ptrace(_STEP, pid)
        _wait_stop(pid)
    finally:
        _ptrace(_SETREGS, pid, 0, ctypes.addressof(registers))
        _ptrace(_SETSIGMASK, pid, 8, ctypes.addressof(mask))


def _instruction(pid: int) -> int:
    """Address of a `syscall` instruction in its vDSO. Raises AmxRequestFailed, OSError."""
    with open(f"/proc/{pid}/maps") as f:
        spans = [line.split()[0] for line in f if line.rstrip().endswith("[vdso]")]
    if not spans:
        raise AmxRequestFailed("it has no vDSO")
    start, end = (int(part, 16) for part in spans[0].split("-"))
    with open(f"/proc/{pid}/mem", "rb") as f:
        f.seek(start)
        found = f.read(end - start).find(_SYSCALL)
    if found < 0:
        raise AmxRequestFailed("its vDSO contains no syscall instruction")
    return start + found


def _wait_stop(pid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG | _ALL_CHILDREN)
        if found == pid:
            if os.WIFSTOPPED(status):
                return
            raise AmxRequestFailed(
                f"it exited: {signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else 'exited'}"
            )
        time.sleep(0.0001)  # waitpid(2) has no timeout
    raise AmxRequestFailed(f"it did not stop within {_PATIENCE_S:g} s")


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if (
        _libc.ptrace(
            ctypes.c_long(request),
            ctypes.c_long(pid),
            ctypes.c_void_p(address),
            ctypes.c_void_p(data),
        )
        < 0
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace({request:#x}) of process {pid}: {os.strerror(code)}")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
