"""Decides which origin serves a request where the dashboard has its own
(`controller.dashboard_url`).

| request | at the dashboard's host | at any other host |
|---|---|---|
| `/`, `/dashboard…` | served | GET and HEAD: 308 to the dashboard's origin; others: 404 |
| `/dashboard/static/…` | served | served: public files, which the API's reference loads too |
| `/healthz`, `/readyz` | served | served |
| all else: API, calls, `/fn/`, `/t/`, WebSockets | 404 | served |

The host is that of the `Host` header: `X-Forwarded-Host` is not read, since any caller can write
it. Forms are not redirected, so that the key in a form goes only to the origin of its page. Only
the request's path and query reach the redirect, and its cookies are not read."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final
from urllib.parse import quote

from activator.http.request import Handle, Request
from pilotlight import errors
from pilotlight.core.dashboard.dashboard_origin import (
    DASHBOARD_PATH,
    DASHBOARD_STATIC_PATH,
    DashboardOrigin,
)

_EVERYWHERE = ("/healthz", "/readyz")
_AS_WRITTEN = "/?%:@!$&'()*+,;=-._~"
"""Characters allowed in a path or a query (RFC 3986, section 3.3 and 3.4) besides letters and
digits."""


class DashboardHost:
    """Middleware that sends each request to the origin that serves it. Stateless."""

    header: Final = b""

    def __init__(self, origin: DashboardOrigin) -> None:
        self._origin = origin

    def __repr__(self) -> str:
        return f"<DashboardHost {self._origin.url}>"

    def owns(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request with these headers is for the dashboard's origin."""
        return self._origin.owns(headers.get(b"host", b""))

    def misplaced(self, request: Request) -> bool:
        """Whether the origin of this request does not serve its path."""
        path = request.path
        if path in _EVERYWHERE or path.startswith(DASHBOARD_STATIC_PATH):
            return False
        return (path == "/" or path.startswith(DASHBOARD_PATH)) != self.owns(request.headers)

    def handle(
        self, request: Request, *, inner: Handle, gateway: object
    ) -> Coroutine[Any, Any, None]:
        """Answer a misplaced request, and others by `inner`. Raises NotFound."""
        return self.answer(request) if self.misplaced(request) else inner(request)

    async def answer(self, request: Request) -> None:
        """Answer a misplaced request. Raises NotFound."""
        if self.owns(request.headers):
            raise self.not_here(request)
        if request.verb not in ("GET", "HEAD"):
            raise errors.NotFound(
                f"the dashboard is served at {self._origin.url}{DASHBOARD_PATH}: open it there"
            )
        path, query = (
            request.scope["raw_path"] if request.path != "/" else DASHBOARD_PATH.encode(),
            request.scope["query_string"],
        )
        place = self._origin.url + quote(path + (b"?" + query if query else b""), safe=_AS_WRITTEN)
        headers = [
            (b"location", place.encode()),
            (b"cache-control", b"no-store"),
            (b"content-length", b"0"),
        ]
        await request.respond(308, [*headers, (b"x-request-id", request.id.encode())], b"")

    def not_here(self, request: Request) -> errors.NotFound:
        """Return the error for a path that the other origin serves."""
        return errors.NotFound(
            f"{request.path} is not served at this host, which serves only the dashboard "
            f"({self._origin.url}{DASHBOARD_PATH})"
        )
