"""The control channel between a worker and its shim: one JSON object per datagram, with
descriptors attached (docs/reference/internals/shim.md)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_DESCRIPTORS = 16
"""Maximum per message: four, and one for each cgroup hierarchy of version 1."""
MAX_DATAGRAM_BYTES = 128 * 1024
"""Limit of the protocol; below Linux's default socket buffer (net.core.wmem_default, 208 KiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimOrder:
    """One order from the shim.

    Attributes:
        op: `fork`, `serve`, `park`, `checkpoint`, `checkpoint_in_place`, `prove`, `boot` (to a
            worker without a function) or, to a parked fork, `assign`.
        instance: the instance to become; for `park` the parked fork's own name.
        env: the instance's environment, including secrets. Only `assign` carries it; for `fork` and
            `serve` it arrives on `go`.
        descriptors: `fork` and `serve`: listener, stdout, stderr, go, cgroup files; `assign`: the
            first three; `park`: channel, go, cgroup files; `checkpoint`: listener, channel, go,
            cgroup files; `checkpoint_in_place`: listener, channel; `prove`, `boot`: none.
        start: the part of the start before the order (`kind`, `phases_ms`), if the launcher sends
            it with the environment.
        answers: of `prove`: answers of another process to compare with, in place of the own ones.
        records: of `prove`: the memory that a start and its first call access is recorded: serve
            the examples as well, and stay until the shim disconnects.
    """

    op: str
    instance: str
    env: Mapping[str, str]
    descriptors: tuple[int, ...]
    start: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    records: bool = False


class ShimChannel:
    """The worker's end of the socket pair with the shim. Used by one thread of one process at a
    time; forked children share it for sending only."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._shared = False

    def __repr__(self) -> str:
        return f"<ShimChannel fd={self._socket.fileno()}>"

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._socket.fileno()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Let a process that is forked in this context keep its copy of the channel."""
        self._shared = True
        try:
            yield
        finally:
            self._shared = False

    def close_in_fork(self) -> None:
        """Close the channel in a child that user code forked: it would tie a snapshot of the
        process tree to the shim."""
        if not self._shared:
            self._socket.close()

    def close(self) -> None:
        """Close the channel."""
        self._socket.close()

    def replace(self, connection: socket.socket) -> None:
        """Use another connection to a shim, after a restore."""
        self._socket.close()
        self._socket = connection

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one event. Raises OSError if the shim has disconnected."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if descriptors:
            socket.send_fds(self._socket, [data], list(descriptors))
        else:
            self._socket.send(data)

    def receive(self) -> ShimOrder | None:
        """Wait for the next order; None if the shim has disconnected. Raises ValueError for an
        invalid order."""
        data, descriptors, _, _ = socket.recv_fds(
            self._socket, MAX_DATAGRAM_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return None
        try:
            body = json.loads(data)
            env = {str(k): str(v) for k, v in body.get("env", {}).items()}
            return ShimOrder(
                op=body["op"],
                instance=body["instance"],
                env=env,
                descriptors=tuple(descriptors),
                answers=dict(body.get("answers", {})),
                records=bool(body.get("records", False)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError(f"the shim sent an invalid order: {data[:200]!r}") from e
