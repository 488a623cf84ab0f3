"""Specification of functions that start an HTTP server of their own (`@web_server`).

The record is part of a `FunctionSpec`, and so of its revision. Values out of range raise
InvalidInput naming key, value and bound."""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.errors import InvalidInput

FIRST_PORT, LAST_PORT = 1024, 65535
"""Bounds of the port: functions do not run as root, which alone may listen below."""
MAX_STARTUP_S = 7 * 86_400.0
MAX_EXAMPLE_CHARS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServerSpec:
    """A server that the function starts when it is called, once, before the snapshot.

    Attributes:
        port: the TCP port at which it listens, on the loopback interface of its instance.
        startup_s: time from the call of the function until the server answers.
        example: path that it answers with a status below 500 once it is ready, and with the same
            status after a restore; None: it is ready when it answers GET / with any status."""

    port: int
    startup_s: float = 5.0
    example: str | None = None

    def __post_init__(self) -> None:
        if not FIRST_PORT <= self.port <= LAST_PORT:
            raise InvalidInput(
                f"web_server: port = {self.port}: must be {FIRST_PORT} to {LAST_PORT} (lower ones "
                f"need root, which functions are not): let the server listen at one of these",
                parameter="port",
            )
        if not 0 < self.startup_s <= MAX_STARTUP_S:
            raise InvalidInput(
                f"web_server: startup_timeout = {self.startup_s:g}: must be more than 0 s and at "
                f"most 7 days",
                parameter="startup_timeout",
            )
        if self.example is not None and not _is_path(self.example):
            raise InvalidInput(
                f"web_server: example = {self.example[:80]!r}: must be a path of the server in "
                f"printable ASCII, such as '/health', of at most {MAX_EXAMPLE_CHARS} characters",
                parameter="example",
            )


def _is_path(text: str) -> bool:
    """Whether it can be the target of a request line."""
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return text.startswith("/") and is_plain and len(text) <= MAX_EXAMPLE_CHARS
