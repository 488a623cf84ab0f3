"""Errors of CRIU operations."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class CriuReason(enum.StrEnum):
    """The cause of a CRIU failure, derived from its log (`snapshotter.criu.logs`)."""

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
    """Base of every failure of a CRIU operation. Afterwards the dumped process may be stopped or
    damaged: kill it."""


class CriuUnavailable(CriuError):
    """Raised when this machine has no usable CRIU; the message says what is missing and how to
    install it."""


class CriuFailed(CriuError):
    """Raised when CRIU reports a failure.

    Attributes:
        operation: `dump`, `restore`, …
        errno: as reported by CRIU, 0 if none (the usual case).
        reason: the class of the cause.
        cause: the log lines that show it, "" if there are none.
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
    """Raised when an operation exceeded its deadline; CRIU has been killed."""

    def __init__(self, operation: str, deadline_s: float, *, log_tail: Sequence[str] = ()) -> None:
        super().__init__(f"criu {operation}: not done within {deadline_s:g} s; killed")
        self.operation = operation
        self.deadline_s = deadline_s
        self.log_tail = tuple(log_tail)


class CriuExited(CriuError):
    """Raised when CRIU exited without an answer, or sent an invalid one. `status` is its wait
    status, None if unknown."""

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
