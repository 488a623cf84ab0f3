"""Pid files that identify a process: its pid, and its start in clock ticks since boot (proc(5),
`starttime`), because a pid is used again after its process has ended. `boot_id` is for records that
are valid until the next boot."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Return the id of the running kernel's boot (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write(pid_file: Path, pid: int) -> None:
    """Record a running process. Raises OSError."""
    pid_file.write_text(f"{pid} {_start_ticks(pid) or 0}\n")


def read(pid_file: Path) -> int | None:
    """The pid of the recorded process; None if it has ended, or the file is missing or invalid."""
    try:
        pid, ticks = map(int, pid_file.read_text().split())
    except (OSError, ValueError):
        return None
    return pid if ticks == _start_ticks(pid) else None


def _start_ticks(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
