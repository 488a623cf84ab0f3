"""Confines a process before user code runs in it: uid, capabilities, privileges, limits, system
calls.

Called in the child between fork and exec, by a single-threaded parent. Standard library only.
Sources: prctl(2), seccomp(2), capabilities(7), setrlimit(2); system call numbers from the kernel's
tables.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

from snapshotter.shim.sandbox.system_calls import ALLOWED, DENIED, numbers

(
    _PR_SET_DUMPABLE,
    _PR_SET_SECCOMP,
    _PR_CAPBSET_DROP,
    _PR_SET_CHILD_SUBREAPER,
    _PR_SET_NO_NEW_PRIVS,
) = 4, 22, 24, 36, 38
_PR_SET_THP_DISABLE = 41
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_SECCOMP_MODE_FILTER = 2
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_LOG = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522

_RET_KILL, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LD_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARG0, _OFFSET_ARG1 = 0, 4, 16, 24
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET: a user namespace would
grant capabilities again."""
_X32_BIT = 0x40000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

ABSENT = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "clone3": 435}
"""System calls answered with ENOSYS that libraries try first and can do without: an open io_uring
cannot be checkpointed, and clone3's flags cannot be filtered."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET, _SOCKETPAIR = {"x86_64": 41, "aarch64": 198}, {"x86_64": 53, "aarch64": 199}
_AF_UNIX = 1
FAMILIES = {"AF_UNIX": _AF_UNIX, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
"""Address families of sockets that are allowed (address_families(7)); others fail with
EAFNOSUPPORT, as on a kernel without them. AF_VSOCK would reach the machine's hypervisor from any
network namespace; the rest is kernel code that functions do not need."""
_DATAGRAM_BIT = 0x2
"""Set in SOCK_DGRAM and SOCK_RAW, not in SOCK_STREAM and SOCK_SEQPACKET: an end of a datagram pair
can send to any name."""


class IsolationFailed(OSError):
    """Raised when a restriction could not be applied; the process must exit."""


def confine(*, uid: int | None, limits: Mapping[str, int], log_refused: bool = False) -> None:
    """Apply all restrictions, in the order that the kernel requires. `limits`: names of RLIMIT_*,
    without the prefix. Raises OSError.

    `log_refused`: the kernel logs denied system calls (`seccomp_log`). With `uid` None the process
    keeps its uid, but as root it loses every capability.
    """
    lower_limits(limits)
    if os.geteuid() == 0:
        if uid:
            drop_bounding_set()
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        else:
            _drop_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    install_filter(os.uname().machine, log_refused=log_refused)


def forbid_imports() -> None:
    """Disable imports from files: in the new root, files belong to a tenant. Built-in and frozen
    modules remain."""
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if getattr(finder, "__name__", "") in ("BuiltinImporter", "FrozenImporter")
    ]


def become_subreaper() -> None:
    """Make orphaned descendants children of this process (PR_SET_CHILD_SUBREAPER). Raises
    OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def refuse_huge_pages() -> None:
    """Disable automatic huge pages for this process and its children, if the kernel uses them
    (PR_SET_THP_DISABLE).

    With them the duration of a restore varies between 117 and 754 ms (a page that CRIU writes
    becomes 512). Raises OSError.
    """
    if makes_huge_pages():
        _prctl(_PR_SET_THP_DISABLE, 1)


@functools.cache
def makes_huge_pages() -> bool:
    """Whether this kernel uses huge pages automatically. Cached: a slot's root does not have the
    file."""
    try:
        with open(_HUGE_PAGES) as f:
            return "[always]" in f.read()
    except FileNotFoundError:
        return False


def lower_limits(limits: Mapping[str, int]) -> None:
    """Set soft and hard limits, never above the current hard limit."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def install_filter(machine: str, *, log_refused: bool = False) -> None:
    """Install the system call filter for this process and its children, permanently. Without effect
    on unknown machines (`has_filter`).

    `log_refused`: as in `confine`. Raises IsolationFailed.
    """
    if not has_filter(machine):
        return
    _install(machine, _program_of(machine), log_refused=log_refused)


def allow_only(calls: Collection[str]) -> None:
    """Refuse (EPERM) all system calls but these, which `system_calls.ALLOWED` must have, and
    `clone`, of processes and threads in the same namespaces. Permanent, for this process and its
    children; a second filter refuses more. Without effect on unknown machines (`has_filter`).
    Raises IsolationFailed."""
    machine = os.uname().machine
    if not has_filter(machine):
        return
    known = numbers(ALLOWED, machine)
    ranges = _ranges(known[name] for name in calls if name in known)
    code = [
        (_LD_ABS, 0, 0, _OFFSET_ARCH),
        (_JEQ, 1, 0, _ARCHITECTURES[machine]),
        (_RET, 0, 0, _RET_KILL),
        (_LD_ABS, 0, 0, _OFFSET_NUMBER),
    ]
    for first, last in ranges:  # x32 calls are above all of them
        code += [(_JGE, 0, 2, first), (_JGE, 1, 0, last + 1), (_RET, 0, 0, _RET_ALLOW)]
    code += [(_JEQ, 0, 1, ABSENT["clone3"]), (_RET, 0, 0, _RET_ERRNO | errno.ENOSYS)]
    if "clone" in calls:
        code += [
            (_JEQ, 0, 3, _CLONE[machine]),
            (_LD_ABS, 0, 0, _OFFSET_ARG0),
            (_JSET, 1, 0, _NEW_NAMESPACES),
            (_RET, 0, 0, _RET_ALLOW),
        ]
    code.append((_RET, 0, 0, _RET_ERRNO | errno.EPERM))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _install(machine, b"".join(struct.pack("HBBI", *line) for line in code), log_refused=False)


def _install(machine: str, program: bytes, *, log_refused: bool) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(header, len(header))
    if not log_refused:
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(holder))
        return
    number, address = (
        numbers(ALLOWED, machine)["seccomp"],
        ctypes.c_void_p(ctypes.addressof(holder)),
    )
    if _libc.syscall(number, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_LOG, address) != 0:
        raise IsolationFailed(
            ctypes.get_errno(), "seccomp with SECCOMP_FILTER_FLAG_LOG: needs Linux 4.14"
        )


@functools.cache
def _program_of(machine: str) -> bytes:
    """Cached: a slot has many processes."""
    return filter_program(machine)


def has_filter(machine: str) -> bool:
    """Whether system call numbers of this machine are known."""
    return machine in _ARCHITECTURES


def filter_program(machine: str, *, unix_sockets: bool = True, more: Collection[str] = ()) -> bytes:
    """The classic BPF program: checks the architecture, allowed calls and socket families; clone
    cannot create namespaces.

    The kernel caches which numbers are allowed regardless of arguments (Linux 5.11), so the
    program's length costs them nothing.

    Without `unix_sockets` no socket can be created that could send a descriptor to an outside
    process; connected pairs can. `more`: calls of `system_calls.DENIED` that are allowed
    nevertheless.
    """
    denied = numbers(DENIED, machine)
    granted = {name: denied.pop(name) for name in more}
    code = [
        (_LD_ABS, 0, 0, _OFFSET_ARCH),
        (_JEQ, 1, 0, _ARCHITECTURES[machine]),
        (_RET, 0, 0, _RET_KILL),
        (_LD_ABS, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [(_JGE, 0, 1, _X32_BIT), (_RET, 0, 0, _RET_ERRNO | errno.ENOSYS)]
    for first, last in _ranges([*numbers(ALLOWED, machine).values(), *granted.values()]):
        code += [(_JGE, 0, 2, first), (_JGE, 1, 0, last + 1), (_RET, 0, 0, _RET_ALLOW)]
    for first, last in _ranges(denied.values()):
        code += [
            (_JGE, 0, 2, first),
            (_JGE, 1, 0, last + 1),
            (_RET, 0, 0, _RET_ERRNO | errno.EPERM),
        ]
    refused, allowed = (_RET, 0, 0, _RET_ERRNO | errno.EAFNOSUPPORT), (_RET, 0, 0, _RET_ALLOW)
    families = [family for family in FAMILIES.values() if unix_sockets or family != _AF_UNIX]
    code += [(_JEQ, 0, len(families) + 3, _SOCKET[machine]), (_LD_ABS, 0, 0, _OFFSET_ARG0)]
    # jump to `allowed`
    code += [(_JEQ, len(families) - i, 0, family) for i, family in enumerate(families)]
    code += [refused, allowed]
    if unix_sockets:
        code += [(_JEQ, 0, 1, _SOCKETPAIR[machine]), allowed]
    else:
        code += [
            (_JEQ, 0, 6, _SOCKETPAIR[machine]),
            (_LD_ABS, 0, 0, _OFFSET_ARG0),
            (_JEQ, 0, 3, _AF_UNIX),
        ]
        code += [(_LD_ABS, 0, 0, _OFFSET_ARG1), (_JSET, 0, 1, _DATAGRAM_BIT), refused, allowed]
    code += [
        (_JEQ, 0, 4, _CLONE[machine]),
        (_LD_ABS, 0, 0, _OFFSET_ARG0),
        (_JSET, 0, 1, _NEW_NAMESPACES),
        (_RET, 0, 0, _RET_ERRNO | errno.EPERM),
        (_RET, 0, 0, _RET_ALLOW),
        (_RET, 0, 0, _RET_ERRNO | errno.ENOSYS),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in code)


def _ranges(given: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last number of each run without a gap, ascending."""
    ordered = sorted(given)
    starts = [n for i, n in enumerate(ordered) if i == 0 or ordered[i - 1] != n - 1]
    ends = [n for i, n in enumerate(ordered) if i + 1 == len(ordered) or ordered[i + 1] != n + 1]
    return zip(starts, ends, strict=True)


def drop_bounding_set() -> None:
    """Ensure that no program executed by this process or its children gains a capability. Raises
    OSError."""
    with open("/proc/sys/kernel/cap_last_cap") as f:
        last = int(f.read())
    for capability in range(last + 1):
        _prctl(_PR_CAPBSET_DROP, capability)


def _drop_capabilities() -> None:
    drop_bounding_set()
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    if _libc.capset(header, bytes(24)) != 0:
        raise IsolationFailed(ctypes.get_errno(), "capset")


def _prctl(option: int, value: int, more: int = 0) -> None:
    if (
        _libc.prctl(
            option,
            ctypes.c_ulong(value),
            ctypes.c_ulong(more),
            ctypes.c_ulong(0),
            ctypes.c_ulong(0),
        )
        != 0
    ):
        code = ctypes.get_errno()
        raise IsolationFailed(code, f"prctl({option}): {os.strerror(code)}")


_libc = ctypes.CDLL(None, use_errno=True)
