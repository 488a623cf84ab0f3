"""How the platform's processes call the controller over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

    from pilotlight.core.transport.endpoint import Endpoint

HEADER_PLATFORM_TOKEN = "pilotlight-platform-token"
"""Carries the token that authenticates the platform's own processes."""


def controller_client(
    controller: Endpoint, *, token: str, timeout_s: float, read_s: float | None = None
) -> httpx.AsyncClient:
    """Return an HTTP client of the controller, authenticated by `token`.

    `read_s`: limit of the wait for a response, where it differs from `timeout_s` (a long poll)."""
    import httpx

    timeout = httpx.Timeout(timeout_s, read=timeout_s if read_s is None else read_s)
    return controller.client(headers={HEADER_PLATFORM_TOKEN: token}, timeout=timeout)
