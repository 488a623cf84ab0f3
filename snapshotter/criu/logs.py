"""Analysis of CRIU's log after a failure: the lines that show the cause, its class, and a message
with the remedy.

CRIU's own summary (`cr_errmsg`) is the first error it logged, which is often noise; the cause is
among the last ones. The table was derived by provoking each failure (tests/snapshotter/criu)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from snapshotter.criu.errors import CriuReason as R

TAIL_LINES = 40
_CAUSE_LINES = 3
_ERROR = re.compile(r"^(?:\(\d+\.\d+\))?\s*(?:\d+:\s+)?Error \((?P<where>[^)]*)\):\s*(?P<text>.*)$")
_NOISE = ("Can't setup RLIMIT_NOFILE", "Dumping FAILED", "Restoring FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of a failure. `lines`: the relevant log lines, oldest first; `message`: an
    explanation with the remedy."""

    reason: R
    lines: tuple[str, ...]
    message: str


_TABLE: tuple[tuple[R, str, str], ...] = (
    (
        R.NO_SPACE,
        r"No space left on device|Disk quota exceeded",
        "no space left for the images: free disk space, or lower the snapshot budget",
    ),
    (
        R.FOREIGN_MOUNT,
        r"Can't lookup mount=",
        "an open or mapped file is outside the slot's file system",
    ),
    (
        R.IO_URING,
        r"io_uring|send_fds failed \(-22\)|Can't retrieve FDs from socket",
        (
            "the process has an io_uring open, which cannot be checkpointed: prevent libraries "
            "from opening one (UV_USE_IO_URING=0)"
        ),
    ),
    (
        R.KERNEL,
        r"Can't get 1:(16|34) opt",
        (
            "this CRIU does not support this kernel's TCP sockets (kernels from 6.16 need 4.2): "
            "install a newer one (scripts/install-criu)"
        ),
    ),
    (
        R.TCP_CONNECTION,
        r"consider using --tcp-established|Connected TCP socket|--tcp-established option",
        (
            "an established TCP connection is open: close it before the snapshot point, or open it in "
            "enter(snap=False)"
        ),
    ),
    (
        R.UNIX_PEER,
        (
            r"Peer .*unresolved|unix.*[Ee]xternal socket|is external|peer .* not found|Can't dump "
            r"half of"
        ),
        (
            "a Unix socket is connected to a process outside: close it before the snapshot point, "
            "or open it in enter(snap=False)"
        ),
    ),
    (
        R.GHOST_FILE,
        r"Can't dump ghost file|ghost file .* bigger|ghost_limit",
        "a deleted file that is still open is larger than 64 MiB: close it",
    ),
    (
        R.UNLINKED_FILE,
        r"Can't create link remap|link-remap|link_remap",
        "an unlinked file that is still open cannot be dumped: close it",
    ),
    (
        R.FILE_LOCK,
        r"file lock|file_lock|--file-locks",
        "a file lock is held across the snapshot: release it",
    ),
    (
        R.CHANGED_FILE,
        r"has bad (size|mode|build-id|checksum)|bad size|has bad",
        "an open or mapped file has changed since: make a new snapshot",
    ),
    (
        R.ADDRESS_TAKEN,
        r"Address already in use",
        (
            "an address it listens on is in use: restore it where the address is free, or set "
            "SO_REUSEADDR"
        ),
    ),
    (
        R.PID_TAKEN,
        (
            r"Can't fork for \d+: File exists|Can't attach to init|Pid \d+ do not match|pid.*File "
            r"exists"
        ),
        "a process id of the image is already in use",
    ),
    (
        R.CPU,
        r"[Cc]pu ?info|CPU (capabilities|features|instruction)|FPU feature|cpuinfo",
        "this CPU lacks features that the image requires",
    ),
    (
        R.DEVICE,
        (
            r"Can't (dump|lookup|handle).*(chr|device|/dev/)|/dev/nvidia|Unsupported device|Unknown "
            r"(chrdev|chr)"
        ),
        "a device is open: close it before the snapshot point",
    ),
    (
        R.TERMINAL,
        r"\btty\b|pts|session leader|--shell-job",
        "a terminal, or a session from outside the slot, is open",
    ),
    (
        R.TRACED,
        r"traced|PTRACE_SEIZE|Unable to seize|ptrace prevent|already being traced",
        "the process is being traced (a debugger?) and cannot be seized",
    ),
    (
        R.NO_PROCESS,
        r"No such process|Unable to (find|open) .*pid|Can't open /proc/\d+",
        "the process has exited",
    ),
    (R.NO_MEMORY, r"Cannot allocate memory|Out of memory", "not enough memory"),
    (
        R.SOCKET,
        (
            r"[Uu]nknown (socket|shutdown)|[Uu]nsupported (socket|address)|Unsupported .*socket|not "
            r"supported.*socket|netlink"
        ),
        "a socket of an unsupported kind is open: close it",
    ),
    (
        R.MISSING_FILE,
        r"Can't (open|link) .*No such file|No such file or directory",
        "a file that was open or mapped does not exist",
    ),
    (
        R.DAMAGED_IMAGE,
        (
            r"[Ii]mage|magic|Unexpected EOF|Unable to (parse|read)|Can't read pages|Bad "
            r".*pagemap|unpack"
        ),
        "the image is damaged or incomplete: make a new snapshot",
    ),
    (
        R.PERMISSION,
        r"Can't get rlimit|Operation not permitted|Permission denied",
        "CRIU lacks a permission: it needs root with CAP_SYS_ADMIN and CAP_SYS_PTRACE",
    ),
    (
        R.KERNEL,
        r"vdso|kerndat|[Kk]ernel|Function not implemented",
        "this CRIU does not support this kernel: install a newer one (scripts/install-criu)",
    ),
)
_OTHER = "it logged no reason"


def lines_of(log: bytes) -> list[str]:
    """The log's lines, with invalid UTF-8 replaced."""
    return log.decode(errors="replace").splitlines()


def tail(log: bytes) -> tuple[str, ...]:
    """The last lines of the log."""
    return tuple(lines_of(log)[-TAIL_LINES:])


def errors_of(lines: Sequence[str]) -> list[str]:
    """The texts of the error lines, without time, process and messages that every run may have."""
    found = [m["text"].strip() for m in map(_ERROR.match, lines) if m]
    return [text for text in found if not any(noise in text for noise in _NOISE)]


def cause_of(log: bytes, *, fallback: str = "") -> Cause:
    """The cause of a failure. `fallback`: the error in the answer, used if the log contains
    none."""
    errors = errors_of(lines_of(log))
    if not errors and fallback and not any(noise in fallback for noise in _NOISE):
        errors = [fallback]
    last = tuple(dict.fromkeys(errors[-_CAUSE_LINES:]))
    for reason, pattern, words in _TABLE:
        matching = [text for text in errors if re.search(pattern, text)]
        if matching:
            return Cause(reason=reason, lines=last, message=f"{words} ({matching[-1]})")
    return Cause(reason=R.OTHER, lines=last, message=last[-1] if last else _OTHER)
