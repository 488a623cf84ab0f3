"""Blocking client for a server's own socket, used before the snapshot and before it serves.

Each request has a deadline and its own connection, since none may be open in a snapshot.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pilotlight.worker.engine.errors import ServerHung, ServerRefused

_LOOK_S = 0.05
"""Polling interval until the engine listens, for which the kernel has no event."""
_MAX_SHOWN = 500
_CLOSE_S = 2.0
"""Longest wait for the server to close its end of an answered connection."""
MAX_BODY_BYTES = 1024**2
"""Part of a body that is read where only its status counts."""

Address = str | tuple[str, int]
"""Of a server: the path of its Unix socket, or host and port."""


class _ServerConnection(http.client.HTTPConnection):
    def __init__(self, address: Address, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._address = address

    def connect(self) -> None:
        if not isinstance(self._address, str):
            self.sock = socket.create_connection(self._address, self.timeout)
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._address)


class ServerClient:
    """Client of the server that listens at `address`. Stateless."""

    def __init__(self, address: Address, *, noun: str = "engine") -> None:
        """`noun`: what messages call the server."""
        self._address = address
        self._noun = noun

    def __repr__(self) -> str:
        return f"<ServerClient {self._address}>"

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, within_s: float
    ) -> Any:
        """Send a request; returns the response's JSON, None for an empty body. Raises as `read`."""
        content = self.read(method, path, body, within_s=within_s)
        return json.loads(content) if content else None

    def read(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, within_s: float
    ) -> bytes:
        """Send a request; returns the response's body.

        Raises ServerHung on timeout, ServerRefused for a status other than 2xx, OSError if the
        server does not listen."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with self._response(method, path, data, headers, within_s=within_s) as (answer, _, ours):
            content = answer.read()
            _wait_closed(ours)
        if not 200 <= answer.status < 300:
            shown = content[:_MAX_SHOWN].decode(errors="replace")
            raise ServerRefused(
                f"the {self._noun} answered {method} {path} with status {answer.status}: {shown}"
            )
        return content

    def status(self, path: str, *, within_s: float) -> int:
        """GET a path; returns the status. Of a body, MAX_BODY_BYTES are read while they come.
        Raises ServerHung, ServerRefused for what is not HTTP, OSError if the server does not
        listen."""
        with self._response("GET", path, None, {}, within_s=within_s) as (answer, read, ours):
            read.settimeout(_CLOSE_S)
            with contextlib.suppress(TimeoutError):
                answer.read(MAX_BODY_BYTES)
            _wait_closed(ours, most_bytes=MAX_BODY_BYTES)
        return answer.status

    @contextlib.contextmanager
    def _response(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        *,
        within_s: float,
    ) -> Iterator[tuple[http.client.HTTPResponse, socket.socket, socket.socket]]:
        """A response, the socket that it is read from, and a copy that stays open; all are closed
        afterwards. Raises ServerHung, ServerRefused, OSError."""
        with contextlib.closing(_ServerConnection(self._address, within_s)) as connection:
            try:
                connection.request(method, path, data, {**headers, "Connection": "close"})
                read = connection.sock  # which a response that ends it takes away
                with read.dup() as ours:
                    yield connection.getresponse(), read, ours
            except TimeoutError as e:
                raise ServerHung(
                    f"the {self._noun} did not answer {method} {path} within {within_s:.3g} s"
                ) from e
            except http.client.HTTPException as e:
                raise ServerRefused(
                    f"the {self._noun}'s response to {method} {path} is incomplete or invalid: "
                    f"{type(e).__name__}"
                ) from e

    def wait_healthy(self, *, within_s: float, require_alive: Callable[[], None]) -> None:
        """Wait until GET /health succeeds. `require_alive` raises if the engine died; raises
        ServerHung on timeout."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            require_alive()
            try:
                self.ask("GET", "/health", within_s=max(0.1, deadline - time.monotonic()))
                return
            except (OSError, ServerRefused):  # not listening or not healthy yet
                time.sleep(_LOOK_S)
        raise ServerHung(
            f"the engine was not healthy within {within_s:.0f} s: raise startup_timeout=, or take "
            f"a smaller model"
        )


def _wait_closed(ours: socket.socket, *, most_bytes: int | None = None) -> None:
    """Wait until the server closes its end, which a busy one does some time after its answer; an
    open connection blocks a snapshot. `most_bytes`: stop after as many."""
    ours.settimeout(_CLOSE_S)
    taken = 0
    with contextlib.suppress(OSError):
        while (piece := ours.recv(4096)) and (most_bytes is None or taken < most_bytes):
            taken += len(piece)
