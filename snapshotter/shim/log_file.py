"""The log file of an instance or slot, with its limits; runs in the shim.

Disk use is limited three times: a file is rotated when full (one older file is kept), a process
that exceeds REFILL_BYTES_PER_S after its burst loses bytes, and so does any while the disk is below
its floor. Lost bytes are counted, not parsed. All logs of a tenant, and of the node, are limited by
the agent (`slots.log_pruning`)."""

from __future__ import annotations

import os

REFILL_BYTES_PER_S = 1024 * 1024
"""Sustained output rate of one process: far above real logs, far below what would keep a core busy.
"""
_FLOOR_EVERY_BYTES = 256 * 1024
"""Bytes of one log between two checks of the free disk."""


class LogFile:
    """The log of one instance or slot: `<name>.log`, and `<name>.log.1` after a rotation. Owner:
    the shim's loop.

    Attributes:
        dropped_bytes: bytes that were read and discarded.
    """

    def __init__(
        self, directory_fd: int, name: str, *, max_bytes: int, now: float, floor_bytes: int = 0
    ) -> None:
        self._directory_fd = directory_fd
        self._name = f"{name}.log"
        self._max_bytes = max_bytes
        self._allowance = float(max_bytes)
        self._refilled_at = now
        self._floor_bytes = floor_bytes
        self._unchecked = _FLOOR_EVERY_BYTES
        self._is_below = False
        self._fd, self._size = self._open()
        self.dropped_bytes = 0

    def __repr__(self) -> str:
        return f"<LogFile {self._name} {self._size} bytes, {self.dropped_bytes} dropped>"

    def allows(self, size: int, now: float) -> bool:
        """Whether `size` more bytes are within the allowance; deducts them, or counts them as
        dropped."""
        self._allowance = min(
            float(self._max_bytes), self._allowance + (now - self._refilled_at) * REFILL_BYTES_PER_S
        )
        self._refilled_at = now
        if self._allowance < size:
            self.dropped_bytes += size
            return False
        self._allowance -= size
        return True

    def write(self, data: bytes) -> None:
        """Append formatted lines. If the disk is full or below its floor they count as dropped: a
        log never blocks a function."""
        if self._floor_bytes and self._is_full(len(data)):
            self.dropped_bytes += len(data)
            return
        if self._size + len(data) > self._max_bytes and self._size:
            self._rotate()
        try:
            self._size += os.write(self._fd, data)
        except OSError:
            self.dropped_bytes += len(data)

    def _is_full(self, size: int) -> bool:
        self._unchecked += size
        if self._unchecked >= _FLOOR_EVERY_BYTES:
            self._unchecked = 0
            found = os.fstatvfs(self._directory_fd)
            self._is_below = found.f_bavail * found.f_frsize < self._floor_bytes
        return self._is_below

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _rotate(self) -> None:
        os.close(self._fd)
        os.rename(
            self._name,
            f"{self._name}.1",
            src_dir_fd=self._directory_fd,
            dst_dir_fd=self._directory_fd,
        )
        self._fd, self._size = self._open()

    def _open(self) -> tuple[int, int]:
        fd = os.open(
            self._name,
            os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC,
            0o600,
            dir_fd=self._directory_fd,
        )
        return fd, os.fstat(fd).st_size
