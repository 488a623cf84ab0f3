"""JSON datagrams with descriptors over SOCK_SEQPACKET: the protocol between agent, spawner, shim
and worker.

One datagram is one JSON object; descriptors are passed as SCM_RIGHTS (unix(7)). Standard library
only: the shim imports this.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DATAGRAM_BYTES = 128 * 1024
"""Longest message. Below the default socket buffer (208 KiB), so that one always fits."""
_MAX_DESCRIPTORS = 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


class MessageTooLong(ValueError):
    """Raised when a message does not fit in one datagram."""


def encode(message: Mapping[str, Any]) -> bytes:
    """The datagram of `message`. Raises MessageTooLong."""
    raw = json.dumps(message, separators=(",", ":")).encode()
    if len(raw) > MAX_DATAGRAM_BYTES:
        raise MessageTooLong(
            f"message of {len(raw)} bytes exceeds {MAX_DATAGRAM_BYTES}: environment and secrets "
            f"must fit in one message"
        )
    return raw


def send(sock: socket.socket, raw: bytes, fds: Sequence[int] = ()) -> None:
    """Send one datagram. Raises OSError (EAGAIN when the peer's buffer is full)."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([raw], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors (close-on-exec); None at the end. Raises OSError,
    ValueError for invalid JSON."""
    raw, ancillary, _, _ = sock.recvmsg(
        MAX_DATAGRAM_BYTES + 1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not raw:
        close_all(fds)
        return None, []
    try:
        message = json.loads(raw)
        if not isinstance(message, dict):
            raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    except ValueError:
        close_all(fds)
        raise
    except RecursionError as e:
        # for example a hundred thousand brackets: user code shares the worker's channel
        close_all(fds)
        raise ValueError("a message is nested too deeply") from e
    return message, list(fds)


def close_all(fds: Sequence[int]) -> None:
    """Close every descriptor."""
    for fd in fds:
        os.close(fd)


class SendQueue:
    """Messages to one peer, in order, never blocking. Owner: one thread; descriptors are closed
    once sent.

    A peer that does not read is disconnected when more than `limit` messages, or `limit_bytes` of
    them, are queued (`push` raises OSError): it can reconnect and fetch the state.
    """

    def __init__(
        self, sock: socket.socket, limit: int = 4096, limit_bytes: int = 8 * 1024**2
    ) -> None:
        self._sock = sock
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._waiting: deque[tuple[bytes, list[int]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue one message and send what can be sent. Takes ownership of `fds`. Raises OSError,
        MessageTooLong."""
        try:
            raw = encode(message)
        except MessageTooLong:
            close_all(fds)
            raise
        self._waiting.append((raw, list(fds)))
        self._bytes += len(raw)
        if len(self._waiting) > self._limit or self._bytes > self._limit_bytes:
            self.clear()
            raise OSError(
                f"the peer does not read: more than {self._limit} messages or "
                f"{self._limit_bytes} bytes are queued"
            )
        self.flush()

    def flush(self) -> None:
        """Send until the peer's buffer is full. Raises OSError when the peer has disconnected."""
        while self._waiting:
            raw, fds = self._waiting[0]
            try:
                send(self._sock, raw, fds)
            except BlockingIOError:
                return
            self._waiting.popleft()
            self._bytes -= len(raw)
            close_all(fds)

    def clear(self) -> None:
        """Discard queued messages."""
        self._bytes = 0
        while self._waiting:
            close_all(self._waiting.popleft()[1])
