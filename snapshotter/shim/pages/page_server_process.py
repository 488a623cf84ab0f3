"""The process of a page server: a forked child of the shim, for one restore. Standard library
only."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable

from snapshotter.shim.pages.page_files import RECORD, read_working_set
from snapshotter.shim.pages.page_server import PageServer

SOCKET = "lazy-pages.socket"
_TAMPERED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD)


def fork(
    *,
    images: int,
    work: int,
    working_set: int,
    record: bool,
    ready: int = -1,
    enter: Callable[[], None] = lambda: None,
) -> int:
    """Start a page server for one restore; returns its pid. It listens when this returns.

    images, work: directories, as for CRIU. working_set: file of `page_files.WORKING_SET_RANGE`s in
    the order in which to bring them. ready: end of a pipe that is closed once these are there (-1:
    none). enter: called first in the new process. The caller keeps the descriptors.

    It exits with status 0 when everything was brought or the processes have exited, otherwise the
    processes must be killed. Raises OSError.
    """
    path = f"/proc/self/fd/{work}/{SOCKET}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            _leave_shim(enter)
            recorded = _open_record(work) if record else -1
            _close_others(listener.fileno(), images, working_set, recorded, ready)
            wanted = {} if record else read_working_set(working_set)
            server = PageServer(images, wanted, record=recorded, ready=ready)
            connection, _ = listener.accept()
            server.run(connection)
            status = 0
        except Exception:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(status)


def _leave_shim(enter: Callable[[], None]) -> None:
    gc.disable()
    signal.set_wakeup_fd(-1)
    for number in _TAMPERED:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    enter()


def _open_record(work: int) -> int:
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(RECORD, flags, 0o600, dir_fd=work)


def _close_others(*kept: int) -> None:
    """Close all descriptors but these and stderr: those of the shim have other owners."""
    low = 0
    for fd in sorted({2, *kept} - {-1}):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
