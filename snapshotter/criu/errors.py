"""What can go wrong between us and CRIU."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class CriuReason(enum.StrEnum):
    """Why CRIU could not do it, as far as its log tells (`snapshotter.criu.logs`)."""

    IO_URING = "io_uring"
    UNIX_PEER = "unix_peer"
    TCP_CONNECTION = "tcp_connection"
    SOCKET = "socket"
    DEVICE = "device"
    GHOST_FILE = "ghost_file"
    UNLINKED_FILE = "unlinked_file"
    FILE_LOCK = "file_lock"
    FOREIGN_MOUNT = "foreign_mount"
    CHANGED_FILE = "changed_file"
    MISSING_FILE = "missing_file"
    PID_TAKEN = "pid_taken"
    ADDRESS_TAKEN = "address_taken"
    NO_SPACE = "no_space"
    NO_MEMORY = "no_memory"
    DAMAGED_IMAGE = "damaged_image"
    CPU = "cpu"
    NO_PROCESS = "no_process"
    TRACED = "traced"
    TERMINAL = "terminal"
    PERMISSION = "permission"
    KERNEL = "kernel"
    OTHER = "other"


class CriuError(Exception):
    """Base of every failure of a CRIU operation. After it, the process that was dumped may be
    stopped or damaged: end it."""


class CriuUnavailable(CriuError):
    """Raised when this machine has no CRIU that we can drive; says what is missing and how to get
    it."""


class CriuFailed(CriuError):
    """Raised when CRIU says that it could not.

    Attributes:
        operation: `dump`, `restore`, …
        errno: what CRIU reports, 0 when it reports none (it mostly does).
        reason: the class of the cause.
        cause: the log lines that name it, "" when there are none.
        log_tail: the last lines of CRIU's log.
    """

    def __init__(
        self,
        operation: str,
        *,
        errno: int,
        reason: CriuReason,
        message: str,
        cause: str = "",
        log_tail: Sequence[str] = (),
    ) -> None:
        super().__init__(f"criu {operation}: {message}")
        self.operation = operation
        self.errno = errno
        self.reason = reason
        self.message = message
        self.cause = cause
        self.log_tail = tuple(log_tail)


class CriuTimeout(CriuError):
    """Raised when an operation overran its deadline; CRIU has been killed."""

    def __init__(self, operation: str, deadline_s: float, *, log_tail: Sequence[str] = ()) -> None:
        super().__init__(f"criu {operation}: not done within {deadline_s:g} s; killed")
        self.operation = operation
        self.deadline_s = deadline_s
        self.log_tail = tuple(log_tail)


class CriuExited(CriuError):
    """Raised when CRIU ended without an answer, or answered what is no answer. `status` is its wait
    status, None when not known."""

    def __init__(
        self,
        operation: str,
        message: str,
        *,
        status: int | None = None,
        log_tail: Sequence[str] = (),
    ) -> None:
        super().__init__(f"criu {operation}: {message}")
        self.operation = operation
        self.status = status
        self.log_tail = tuple(log_tail)
