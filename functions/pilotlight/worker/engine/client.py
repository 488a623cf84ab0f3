"""Questions to the engine over its own socket, blocking, each with a deadline: before the snapshot
and before it serves.

One connection per question, closed again: none may be open in a snapshot.
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
"""Between two looks whether it listens: the kernel has no event for that."""
_MAX_SHOWN = 500
_CLOSE_S = 2.0
"""Longest wait for the engine to close its end of an answered connection."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class EngineClient:
    """Asks the engine that listens at `path`. Stateless."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<EngineClient {self._path}>"

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, within_s: float
    ) -> Any:
        """The JSON of the answer, None where it has no body. Raises as `read`."""
        content = self.read(method, path, body, within_s=within_s)
        return json.loads(content) if content else None

    def read(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, within_s: float
    ) -> bytes:
        """The whole answer.

        Raises EngineHung when time is up, EngineRefused for an answer of another status than 2xx,
        OSError when nobody listens."""
        data = None if body is None else json.dumps(body).encode()
        with contextlib.closing(_Connection(self._path, within_s)) as connection:
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
                    f"the engine broke off its answer to {method} {path}: {type(e).__name__}"
                ) from e
        if not 200 <= answer.status < 300:
            told = content[:_MAX_SHOWN].decode(errors="replace")
            raise EngineRefused(f"the engine answered {method} {path} with {answer.status}: {told}")
        return content

    def wait_healthy(self, *, within_s: float, demand_alive: Callable[[], None]) -> None:
        """Until GET /health is answered. `demand_alive` raises when it is dead; raises EngineHung
        when time is up."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            demand_alive()
            try:
                self.ask("GET", "/health", within_s=max(0.1, deadline - time.monotonic()))
                return
            except (OSError, EngineRefused):  # not there yet, or not yet healthy
                time.sleep(_LOOK_S)
        raise EngineHung(
            f"the engine was not healthy within {within_s:.0f} s: raise startup_timeout=, or take "
            f"a smaller model"
        )


def _wait_closed(ours: socket.socket) -> None:
    """Wait until the engine closed its end: a busy engine does that some time after its answer, and
    until then a snapshot is refused."""
    ours.settimeout(_CLOSE_S)
    with contextlib.suppress(OSError):
        while ours.recv(4096):
            pass
