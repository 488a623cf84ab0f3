"""A worker that the agent has put into a pod, until its launcher has it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from snapshotter.criu.errors import CriuError
from snapshotter.linux import amx, proc
from snapshotter.pods.entry.pod_entry import Entry

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Returned:
    """A worker restored into its pod, or booted there. After `control` was passed to the launcher,
    `kept` is set.

    Attributes:
        pid: its pid in the pod.
    """

    pid: int
    control: socket.socket
    phases_ms: Mapping[str, float]
    kept: bool = False


async def keep_if_passed_on(entry: Entry, found: Returned) -> None:
    """Keep the worker before the sandbox is closed, if it was passed on; otherwise it is killed,
    which its launcher detects."""
    if found.kept:
        try:
            await entry.keep()
        except CriuError as e:
            _log.warning("pods.not_kept pid=%d error=%s", found.pid, e)


def apply_pod_settings(worker: int, pod: int) -> None:
    """Apply the pod's OOM score, which CRIU does not restore, and the permission for the
    processor's tiles."""
    if amx.has_tiles():
        amx.request_tile_permission(proc.process_tree(worker))
    score = Path(f"/proc/{pod}/oom_score_adj").read_text()
    for one in proc.process_tree(worker):
        with contextlib.suppress(OSError):
            Path(f"/proc/{one}/oom_score_adj").write_text(score)


@contextlib.contextmanager
def stdio_of(pod: int) -> Iterator[tuple[int, ...]]:
    """The launcher's stdout and stderr, for a worker that had its own when it was dumped."""
    fds: list[int] = []
    try:
        for number in (1, 2):
            try:
                fds.append(
                    os.open(f"/proc/{pod}/fd/{number}", os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
                )
            except OSError:  # a socket: output before the worker serves is lost
                fds.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        yield tuple(fds)
    finally:
        for fd in fds:
            os.close(fd)
