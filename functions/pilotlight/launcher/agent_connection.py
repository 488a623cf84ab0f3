"""Connection to the node agent: one JSON object per line over a Unix stream socket. Reconnects.

The agent may restart while the pod lives, so the connection is retried with exponential backoff for
the pod's lifetime. Each connection begins with the announcement. The end of the connection tells
the agent that the pod has ended."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""Maximum pause between attempts: a newly installed node agent is detected within it."""
MAX_LINE_BYTES = 1024 * 1024
"""Maximum line length, as in the agent; a launch document has some 100 KiB."""
_DESCRIPTORS = 4


class AgentConnection:
    """Connection to the node agent. Owner: the launcher's loop, which polls `fileno` if it is open
    (for writing if `wants_write`), and then calls `turn`, also at `next_at`.

    Attributes:
        fds: received descriptors that have not been taken.
    """

    def __init__(self, path: Path, announcement: Callable[[], Mapping[str, Any]]) -> None:
        """`announcement` returns the first message of each connection."""
        self._path = path
        self._announcement = announcement
        self._socket: socket.socket | None = None
        self._pause_s = FIRST_PAUSE_S
        self._incoming = b""
        self._outgoing: deque[bytes] = deque()
        self.next_at = 0.0
        self.why = ""
        self.fds: list[int] = []

    def __repr__(self) -> str:
        return (
            f"<AgentConnection {self._path} {'open' if self._socket else self.why or 'not tried'}>"
        )

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self._socket is not None

    @property
    def is_missing(self) -> bool:
        """Whether no agent has created a socket."""
        return self._socket is None and not self._path.exists()

    def fileno(self) -> int:
        """The descriptor; -1 while the connection is closed."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._outgoing)

    def turn(self) -> list[dict[str, Any]]:
        """Connect if due, then send and receive without blocking; return the received messages in
        order."""
        if self._socket is None:
            self._connect()
        if self._socket is None:
            return []
        try:
            self._flush(self._socket)
            return self._receive(self._socket)
        except (OSError, ValueError) as e:
            self._lose(str(e) or type(e).__name__)
            return []

    def announce(self) -> None:
        """Send the announcement: first on each connection, and again when it has changed. Without a
        connection, connect at the next turn."""
        self.next_at = 0.0
        self.send({"op": "announce", **self._announcement()})

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the connected agent. Without one it is dropped, because the
        announcement tells the next agent everything."""
        if self._socket is None:
            return
        self._outgoing.append(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        try:
            self._flush(self._socket)
        except OSError as e:
            self._lose(str(e))

    def close(self) -> None:
        """Close the connection."""
        self._lose("closed")

    def _connect(self) -> None:
        now = time.monotonic()
        if now < self.next_at:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.setblocking(False)
            connection.connect(str(self._path))
        except OSError as e:
            connection.close()
            self.why = _why(self._path, e)
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)
            self.next_at = now + self._pause_s
            return
        self._socket, self._pause_s, self.why = connection, FIRST_PAUSE_S, ""
        self.announce()

    def _flush(self, connection: socket.socket) -> None:
        while self._outgoing:
            line = self._outgoing.popleft()
            try:
                sent = connection.send(line, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            if sent < len(line):
                self._outgoing.appendleft(line[sent:])
                return

    def _receive(self, connection: socket.socket) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    connection, 65536, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return messages
            self.fds += descriptors
            if not data:
                self._lose("the node agent closed the connection")
                return messages
            *lines, self._incoming = (self._incoming + data).split(b"\n")
            if len(self._incoming) > MAX_LINE_BYTES:
                raise ValueError(f"the node agent sent a line of more than {MAX_LINE_BYTES} bytes")
            messages += [_parsed(line) for line in lines]

    def _lose(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
        while self.fds:
            os.close(self.fds.pop())
        self._socket, self._incoming, self.why = None, b"", why
        self._outgoing.clear()
        self.next_at = time.monotonic() + self._pause_s


def _parsed(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ValueError(f"the node agent sent an invalid message: {line[:80]!r}")
    return message


def _why(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"no node agent has created {path} yet"
    if error.errno in (errno.ECONNREFUSED, errno.EAGAIN):
        return f"the node agent at {path} is not listening"
    return f"the node agent at {path} cannot be reached: {os.strerror(error.errno or 0)}"
