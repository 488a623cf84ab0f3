"""Small tests of kernel features, each in a forked process.

Executed as `python -I -S -B kernel_probes.py UID`, standard library only. Prints `{name: {"on":
bool, "why": text}}`: if off, the reason and the remedy. A probe that is killed counts as off as
well.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID = (
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
)
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_SECCOMP_RET_ALLOW = 0x7FFF0000
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_UFFD_USER_MODE_ONLY = 1

_libc = ctypes.CDLL(None, use_errno=True)


def namespaces(_: str) -> str:
    """PID, mount, IPC and UTS namespaces, with a new /proc. Returns "" or the reason."""
    if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS) != 0:
        return f"unshare: {_reason()}; slots need root (or CAP_SYS_ADMIN in a privileged container)"
    if _libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) != 0:
        return f"mount: {_reason()}; slots need CAP_SYS_ADMIN over their mount namespace"
    child = os.fork()
    if not child:
        os._exit(
            0
            if os.getpid() == 1
            and _libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None) == 0
            else 1
        )
    return (
        "" if os.waitpid(child, 0)[1] == 0 else "a new PID namespace could not mount its own /proc"
    )


def uids(base: str) -> str:
    """Permanent change to another uid."""
    try:
        os.setgroups([])
        os.setresgid(int(base), int(base), int(base))
        os.setresuid(int(base), int(base), int(base))
    except PermissionError as e:
        return (
            f"setresuid: {e.strerror}; a uid per tenant requires root. Without it all workers "
            f"share one uid, and only one tenant can be served"
        )
    try:
        os.setresuid(0, 0, 0)
    except PermissionError:
        return ""
    return "a dropped uid could be regained: the kernel does not separate uids here"


def seccomp(_: str) -> str:
    """Installation of a filter (one that allows everything)."""
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return f"no_new_privs: {_reason()}"
    # BPF_RET | BPF_K
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, _SECCOMP_RET_ALLOW))
    program = ctypes.create_string_buffer(struct.pack("H6xP", 1, ctypes.addressof(instruction)))
    if (
        _libc.prctl(
            _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(program)), 0, 0
        )
        != 0
    ):
        return f"prctl(PR_SET_SECCOMP): {_reason()}; the kernel needs CONFIG_SECCOMP_FILTER"
    return ""


def fork_server(_: str) -> str:
    """Mechanisms of a Template: fork, a descriptor over a socket pair, a pidfd."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        ancillary = there.recvmsg(1, socket.CMSG_SPACE(4))[1]
        os.write(array.array("i", ancillary[0][2][:4])[0], b"forked")
        os._exit(0)
    try:
        watch = os.pidfd_open(child)
    except OSError as e:
        os.kill(child, signal.SIGKILL)
        return f"pidfd_open: {e.strerror}; requires Linux 5.3 or newer"
    receive, send = os.pipe()
    here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [send]))])
    output = os.read(receive, 16)
    os.waitid(os.P_PIDFD, watch, os.WEXITED)
    return (
        ""
        if output == b"forked"
        else "a forked child could not use a descriptor that was passed to it"
    )


def userfaultfd(_: str) -> str:
    """Prerequisite of lazily restored memory."""
    number = _SYS_USERFAULTFD.get(os.uname().machine)
    if number is None:
        return f"not supported on {os.uname().machine}"
    for flags in (0, _UFFD_USER_MODE_ONLY):
        if _libc.syscall(number, os.O_CLOEXEC | flags) >= 0:
            return (
                ""
                if flags == 0
                else "only for faults in user mode; root, or sysctl "
                "vm.unprivileged_userfaultfd=1, lifts that"
            )
    return f"userfaultfd: {_reason()}; set sysctl vm.unprivileged_userfaultfd=1, or run as root"


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


PROBES: dict[str, Callable[[str], str]] = {
    "namespaces": namespaces,
    "uids": uids,
    "seccomp": seccomp,
    "fork_server": fork_server,
    "userfaultfd": userfaultfd,
}
_TIMEOUT_S = 4


def in_fork(probe: Callable[[str], str], argument: str) -> str:
    """Run a probe in a forked process. Returns "" or the reason."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(_TIMEOUT_S)
        try:
            os.write(send, probe(argument).encode() or b"\0")
        except OSError as e:
            os.write(send, str(e).encode())
        finally:  # whatever it raised: this process ends here
            os._exit(0)
    os.close(send)
    why = os.read(receive, 4096).decode()
    os.close(receive)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return why.strip("\0") if why else f"the probe ended with status {status}"


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reasons = {name: in_fork(probe, sys.argv[1]) for name, probe in PROBES.items()}
    print(json.dumps({name: {"on": not why, "why": why} for name, why in reasons.items()}))
