"""The control channel between a worker and its shim: one JSON object per datagram, descriptors
beside it (docs/internals.md)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_DESCRIPTORS = 16
"""Beside one message: four, and one for each cgroup hierarchy of version 1."""
MAX_DATAGRAM_BYTES = 128 * 1024
"""Bound of the contract; under Linux's default socket buffer (net.core.wmem_default, 208 KiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimOrder:
    """One order of the shim.

    Attributes:
        op: `fork`, `serve`, `park`, `checkpoint`, `checkpoint_in_place`, `prove` or, to a parked
        fork, `assign`. instance: the instance to become; for `park` the parked fork's own name.
        env: the instance's environment, secrets included. Only `assign` brings it along; to `fork`
        and `serve` it comes on `go`. descriptors: listener, stdout, stderr, go, and ways into
        cgroups; `assign`: the first three; `park`: channel, go, ways;
            `checkpoint`: listener, channel, go, ways; `checkpoint_in_place`: listener, channel;
            `prove`: none.
        start: what was before the order, where a launcher says it beside the environment: `kind`,
        `phases_ms`.
    """

    op: str
    instance: str
    env: Mapping[str, str]
    descriptors: tuple[int, ...]
    start: Mapping[str, Any] = field(default_factory=dict)


class ShimChannel:
    """Our end of a pair with the shim. Used by one thread of one process at a time; forked children
    share it to send only."""

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
        """A process forked in this context keeps its copy."""
        self._shared = True
        try:
            yield
        finally:
            self._shared = False

    def leave_fork(self) -> None:
        """In the child of a fork: one that user code made has no business with the shim, and would
        tie a snapshot of the tree to it."""
        if not self._shared:
            self._socket.close()

    def close(self) -> None:
        """Nothing more is sent or received here."""
        self._socket.close()

    def replace(self, connection: socket.socket) -> None:
        """From now on this is the way to the shim: another one's, after a restore."""
        self._socket.close()
        self._socket = connection

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one event. Raises OSError when the shim is gone."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if descriptors:
            socket.send_fds(self._socket, [data], list(descriptors))
        else:
            self._socket.send(data)

    def receive(self) -> ShimOrder | None:
        """The next order, waiting for it; None when the shim is gone. Raises ValueError for a
        broken one."""
        data, descriptors, _, _ = socket.recv_fds(
            self._socket, MAX_DATAGRAM_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return None
        try:
            body = json.loads(data)
            env = {str(k): str(v) for k, v in body.get("env", {}).items()}
            return ShimOrder(
                op=body["op"], instance=body["instance"], env=env, descriptors=tuple(descriptors)
            )
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ValueError(f"the shim sent an order that is not one: {data[:200]!r}") from e
