"""Which device nodes the processes of a cgroup may open: the `devices` controller of cgroup v1, or
a program of type BPF_PROG_TYPE_CGROUP_DEVICE attached to a group of v2.

A group has a list of rules, and opening any other device fails with EPERM, whatever the mode of its
node and wherever the node is. Making a node (mknod) is never allowed. A descriptor that is already
open is not checked again, so a group gets its rules before a process enters it. Rules of the groups
above apply as well.

Sources: kernel documentation, admin-guide/cgroup-v1/devices and admin-guide/cgroup-v2, "Device
controller"; linux/bpf.h; bpf(2); kernel/bpf/cgroup.c. Needs CAP_SYS_ADMIN (v2: or CAP_BPF and
CAP_NET_ADMIN).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from snapshotter.shim.sandbox.system_calls import DENIED, MACHINES, numbers

_BPF_PROG_LOAD, _BPF_PROG_ATTACH, _BPF_PROG_DETACH = 5, 8, 9
_PROG_TYPE_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6
_EXCLUSIVE, _ALLOW_MULTI = 0, 2
"""Flags of an attachment. Without a flag it replaces the group's program, and the programs of
groups above with BPF_F_ALLOW_MULTI, as systemd and container runtimes attach them, apply too."""
_TYPES: Final = {"b": 1, "c": 2}
_READ, _WRITE = 2, 4
"""BPF_DEVCG_ACC_*; 1, making a node, is never allowed."""
_LICENSE = b"Apache-2.0"

_LOAD_WORD, _MOVE, _MOVE_IMMEDIATE, _AND_IMMEDIATE, _SHIFT_RIGHT = 0x61, 0xBC, 0xB4, 0x54, 0x74
_JUMP_NOT_EQUAL, _JUMP_NOT_EQUAL_REGISTER, _EXIT = 0x55, 0x5D, 0x95
"""Opcodes (linux/bpf_common.h): 32-bit arithmetic, 64-bit comparison."""
_RESULT, _CONTEXT, _TYPE, _ACCESS, _MAJOR, _MINOR = range(6)
"""Registers of the program. The context is read once, then its register is scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRule:
    """One device, or all of a major number (`minor` None), that may be read and written. `kind`: c
    or b (character or block device)."""

    kind: Literal["b", "c"] = "c"
    major: int
    minor: int | None = None

    @classmethod
    def of_node(cls, path: Path) -> DeviceRule:
        """The rule for the device node `path`, which is not followed. Raises OSError, ValueError
        if it is not a device."""
        status = os.lstat(path)
        if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            raise ValueError(f"{path} is not a device node")
        return cls(
            kind="c" if stat.S_ISCHR(status.st_mode) else "b",
            major=os.major(status.st_rdev),
            minor=os.minor(status.st_rdev),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.major}:{'*' if self.minor is None else self.minor} rw"


STANDARD: Final = (
    *(DeviceRule(major=1, minor=minor) for minor in (3, 5, 7, 8, 9)),
    *(DeviceRule(major=5, minor=minor) for minor in (0, 2)),
    DeviceRule(major=136),
)
"""null, zero, full, random, urandom; tty, ptmx; pts/* (kernel, admin-guide/devices.txt): the device
nodes of every slot (`root_directory`)."""


def allow_only(directory: Path, rules: Iterable[DeviceRule], *, version: int) -> None:
    """Restrict a group without children to these devices, in place of what it allowed before.
    Raises OSError that names the rule or the group."""
    if version == 2:
        with _loaded(program(rules)) as loaded:
            _attach(directory, loaded, _EXCLUSIVE)
        return
    _write(directory / "devices.deny", "a")
    for rule in rules:
        _write(directory / "devices.allow", str(rule))


def probe(base: Path, *, version: int) -> None:
    """Check that groups below `base` can be restricted, without a change of its rules: in v1 it is
    allowed a standard device, in v2 a program that allows everything is attached and detached.
    Raises OSError."""
    if version != 2:
        _write(base / "devices.allow", str(STANDARD[0]))
        return
    with _loaded(_instruction(_MOVE_IMMEDIATE, _RESULT, immediate=1) + _exit()) as loaded:
        _attach(base, loaded, _ALLOW_MULTI)
        with _open(base) as group:
            detach = struct.pack("=IIII", group, loaded, _ATTACH_CGROUP_DEVICE, 0)
            _bpf(_BPF_PROG_DETACH, detach, f"detach a device program from {base}")


def program(rules: Iterable[DeviceRule]) -> bytes:
    """The eBPF program for these rules: 1 allows the access that its context (struct
    bpf_cgroup_dev_ctx) describes, 0 refuses it."""
    code = b"".join(
        (
            _instruction(_LOAD_WORD, _TYPE, _CONTEXT, offset=0),
            _instruction(_AND_IMMEDIATE, _TYPE, immediate=0xFFFF),
            _instruction(_LOAD_WORD, _ACCESS, _CONTEXT, offset=0),
            _instruction(_SHIFT_RIGHT, _ACCESS, immediate=16),
            _instruction(_LOAD_WORD, _MAJOR, _CONTEXT, offset=4),
            _instruction(_LOAD_WORD, _MINOR, _CONTEXT, offset=8),
        )
    )
    for rule in dict.fromkeys(rules):
        code += _block(rule)
    return code + _instruction(_MOVE_IMMEDIATE, _RESULT, immediate=0) + _exit()


def _block(rule: DeviceRule) -> bytes:
    """Allow the access if it is to the rule's device, and to read or write it only; otherwise
    continue after the block."""
    checks = [
        _instruction(_JUMP_NOT_EQUAL, _TYPE, offset=-1, immediate=_TYPES[rule.kind]),
        _instruction(_MOVE, _CONTEXT, _ACCESS),
        _instruction(_AND_IMMEDIATE, _CONTEXT, immediate=_READ | _WRITE),
        _instruction(_JUMP_NOT_EQUAL_REGISTER, _CONTEXT, _ACCESS, offset=-1),
        _instruction(_JUMP_NOT_EQUAL, _MAJOR, offset=-1, immediate=rule.major),
    ]
    if rule.minor is not None:
        checks.append(_instruction(_JUMP_NOT_EQUAL, _MINOR, offset=-1, immediate=rule.minor))
    checks += [_instruction(_MOVE_IMMEDIATE, _RESULT, immediate=1), _exit()]
    # a jump's offset counts from the instruction after it
    return b"".join(
        line[:2] + struct.pack("<h", len(checks) - 1 - i) + line[4:]
        if line[0] in (_JUMP_NOT_EQUAL, _JUMP_NOT_EQUAL_REGISTER)
        else line
        for i, line in enumerate(checks)
    )


def _instruction(
    code: int, target: int, source: int = 0, *, offset: int = 0, immediate: int = 0
) -> bytes:
    """struct bpf_insn."""
    return struct.pack("<BBhi", code, source << 4 | target, offset, immediate)


def _exit() -> bytes:
    return _instruction(_EXIT, 0)


@contextlib.contextmanager
def _loaded(code: bytes) -> Iterator[int]:
    """Descriptor of a program in the kernel. A group to which it was attached keeps it. Raises
    OSError."""
    text = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(_LICENSE)
    attributes = struct.pack(
        "=IIQQ",
        _PROG_TYPE_CGROUP_DEVICE,
        len(code) // 8,
        ctypes.addressof(text),
        ctypes.addressof(license_),
    )
    fd = _bpf(_BPF_PROG_LOAD, attributes, "load a device program")
    try:
        yield fd
    finally:
        os.close(fd)


def _attach(directory: Path, loaded: int, flags: int) -> None:
    with _open(directory) as group:
        attach = struct.pack("=IIII", group, loaded, _ATTACH_CGROUP_DEVICE, flags)
        _bpf(_BPF_PROG_ATTACH, attach, f"attach a device program to {directory}")


def _bpf(command: int, attributes: bytes, what: str) -> int:
    """bpf(2). Raises OSError that says `what` was tried."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"{what}: the number of bpf(2) is unknown on {machine}")
    holder = ctypes.create_string_buffer(attributes, len(attributes))
    result = int(
        _libc.syscall(
            numbers(DENIED, machine)["bpf"],
            ctypes.c_int(command),
            ctypes.c_void_p(ctypes.addressof(holder)),
            ctypes.c_uint(len(attributes)),
        )
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


@contextlib.contextmanager
def _open(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(file: Path, text: str) -> None:
    """One write(2) of a whole rule. Raises OSError that names both."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as e:
        raise OSError(e.errno, f"{file.name} {text!r} in {file.parent}: {e.strerror}") from e


_libc = ctypes.CDLL(None, use_errno=True)
