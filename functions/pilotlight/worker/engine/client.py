"""Blocking client for the engine's own socket, used before the snapshot and before it serves.

Each request has a deadline and its own connection, since none may be open in a snapshot.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.worker.engine.errors import EngineHung, EngineRefused

_LOOK_S = 0.05
"""Polling interval until the engine listens, for which the kernel has no event."""
_MAX_SHOWN = 500
_CLOSE_S = 2.0
"""Longest wait for the engine to close its end of an answered connection."""


class _EngineConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class EngineClient:
    """Client of the engine that listens at `path`. Stateless."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<EngineClient {self._path}>"

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

        Raises EngineHung on timeout, EngineRefused for a status other than 2xx, OSError if the
        engine does not listen."""
        data = None if body is None else json.dumps(body).encode()
        with contextlib.closing(_EngineConnection(self._path, within_s)) as connection:
            try:
                connection.request(
                    method, path, data, {"Content-Type": "application/json", "Connection": "close"}
                )
                with connection.sock.dup() as ours:
                    answer = connection.getresponse()
                    content = answer.read()
                    _wait_closed(ours)
            except TimeoutError as e:
                raise EngineHung(
                    f"the engine did not answer {method} {path} within {within_s:.3g} s"
                ) from e
            except http.client.HTTPException as e:
                raise EngineRefused(
                    f"the engine's response to {method} {path} is incomplete or invalid: "
                    f"{type(e).__name__}"
                ) from e
        if not 200 <= answer.status < 300:
            shown = content[:_MAX_SHOWN].decode(errors="replace")
            raise EngineRefused(
                f"the engine answered {method} {path} with status {answer.status}: {shown}"
            )
        return content

    def wait_healthy(self, *, within_s: float, demand_alive: Callable[[], None]) -> None:
        """Wait until GET /health succeeds. `demand_alive` raises if the engine died; raises
        EngineHung on timeout."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            demand_alive()
            try:
                self.ask("GET", "/health", within_s=max(0.1, deadline - time.monotonic()))
                return
            except (OSError, EngineRefused):  # not listening or not healthy yet
                time.sleep(_LOOK_S)
        raise EngineHung(
            f"the engine was not healthy within {within_s:.0f} s: raise startup_timeout=, or take "
            f"a smaller model"
        )


def _wait_closed(ours: socket.socket) -> None:
    """Wait until the engine closes its end, which a busy engine does some time after its answer; an
    open connection blocks a snapshot."""
    ours.settimeout(_CLOSE_S)
    with contextlib.suppress(OSError):
        while ours.recv(4096):
            pass
