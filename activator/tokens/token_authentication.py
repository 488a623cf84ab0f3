"""Middleware that verifies the tokens of requests before their callers are looked up, which is
synchronous. It is there only where an issuer has rules for callers, and has no part in warm calls
with an API key, which need no middleware."""

from __future__ import annotations

from typing import Final

from activator.access.resolver import RequestResolver
from activator.http.request import Handle, Request


class TokenAuthentication:
    """Verifies the token of a request, if it has one. Owner: the event loop."""

    header: Final = b"authorization"

    def __init__(self, resolver: RequestResolver) -> None:
        self._resolver = resolver

    def __repr__(self) -> str:
        return f"<TokenAuthentication {self._resolver!r}>"

    async def handle(self, request: Request, *, inner: Handle, gateway: object) -> None:
        """Answer a request by `inner`, once its token is verified."""
        await self._resolver.verify_token(request)
        await inner(request)
