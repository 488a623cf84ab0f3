"""Something done by a child process under another uid, as code would do it that has taken over a
process of that user."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_NEWNS = 0x00020000


def as_user(uid: int, action: Callable[[], str], *, sees_as: int | None = None) -> str:
    """What `action` returns there, or the name of the OSError that it raises. `sees_as`: a process
    whose mount namespace it is in."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writable, _said(uid, action, sees_as).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


def _said(uid: int, action: Callable[[], str], sees_as: int | None) -> str:
    try:
        if sees_as is not None:
            namespace = os.open(f"/proc/{sees_as}/ns/mnt", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEWNS) != 0:
                return f"setns: {os.strerror(ctypes.get_errno())}"
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return action()
    except OSError as e:
        return type(e).__name__


def status_of(pid: int) -> dict[str, str]:
    """The lines of /proc/<pid>/status, by name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
