"""Replies and errors of a slot when a worker is booted, snapshotted, restored or validated."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from snapshotter.shim import messages


class SlotConnectionLost(Exception):
    """Raised when a slot's shim has exited or does not answer."""


class BootFailed(Exception):
    """Raised when a worker exited, or reported a failure, before its snapshot point, or could not
    be restored to it."""

    def __init__(
        self, message: str, *, error: Mapping[str, Any] | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.error = error
        self.status = status


class CheckpointFailed(Exception):
    """Raised when a process could not be quiesced; `obstacles`: the reasons, if known."""

    def __init__(self, message: str, obstacles: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.obstacles = tuple(obstacles)


@dataclass(frozen=True, kw_only=True)
class SnapshotPoint:
    """A worker that has reached its snapshot point.

    Attributes:
        threads: names of its surplus threads and processes: if there are any, it cannot be forked.
        phases_ms: time to reach the point, by phase.
        joins: whether its forks enter their cgroups themselves.
        obstacles: obstacles to a snapshot on disk (`kind`, `fd`, `what`, `where`, `message`).
        listens: addresses of TCP listeners in its tree.
        connections_inside: TCP connections with both ends in its tree.
        imports: packages of the image that it imported: `modules` (name, ms, parts), in order, and
            `ended`: why these are not all.
        answers: its answers to its examples: method → digest and type.
    """

    threads: tuple[str, ...]
    phases_ms: Mapping[str, float]
    joins: bool = False
    obstacles: tuple[Mapping[str, Any], ...] = ()
    listens: tuple[str, ...] = ()
    connections_inside: int = 0
    imports: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; input of `Slot.resume`."""
        return {
            "threads": list(self.threads),
            "phases_ms": dict(self.phases_ms),
            "joins": self.joins,
            "obstacles": [dict(o) for o in self.obstacles],
            "listens": list(self.listens),
            "connections_inside": self.connections_inside,
            "imports": dict(self.imports),
            "answers": dict(self.answers),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`; keys that an older shim does not send are empty. Raises
        ValueError: an older shim does not validate either."""
        point = messages.point_of(body)
        return cls(
            **{
                **point,
                **{name: tuple(point[name]) for name in ("threads", "obstacles", "listens")},
            }
        )


@dataclass(frozen=True, kw_only=True)
class QuiesceResult:
    """A process quiesced for a dump, unless there are obstacles.

    Attributes:
        pid, host_pid: in the slot, and on the host (0 when it has exited).
        stdio: what stdout and stderr are, for a process dumped in place; None for a fork, which has
            neither.
    """

    pid: int
    host_pid: int
    obstacles: tuple[Mapping[str, Any], ...]
    phases_ms: Mapping[str, float]
    stdio: Mapping[str, str] | None
    listens: tuple[str, ...] = ()
    connections_inside: int = 0


@dataclass(frozen=True, kw_only=True)
class ExampleCheckResult:
    """Result of running a worker's examples again. `notes`: answers that could be compared by type
    only."""

    ok: bool
    error: Mapping[str, Any] | None
    phases_ms: Mapping[str, float]
    notes: tuple[Any, ...] = ()


@dataclass(kw_only=True, eq=False)
class CriuRun:
    """A CRIU process in a slot. Owner: its creator, who closes `socket` and `pidfd`.

    Attributes:
        socket: our end of its RPC socket; None if it was started without one.
        stdio_fds: descriptor numbers of stdout and stderr in CRIU; () if none were requested.
        exited: its wait status once it has exited; None if unknown.
    """

    socket: socket.socket | None
    pidfd: int
    stdio_fds: tuple[int, ...]
    exited: asyncio.Future[int | None]
    end: Callable[[], None] = field(repr=False)

    def kill(self) -> None:
        """SIGKILL; no error if it has exited."""
        self.end()

    def close(self) -> None:
        """Close the descriptors that were not taken over."""
        if self.socket is not None:
            self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
