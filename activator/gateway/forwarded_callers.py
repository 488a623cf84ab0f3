"""Who makes a request that another server forwards, as far as that server is trusted: the address
that a proxy of `activator.trusted_proxies`, or the process for gRPC, reports, and the function that
another activator names, which sends the platform's token. A request that another activator forwards
is marked, too."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from activator.coordination.peers import CALLING_FUNCTION, PASSED_ON, PLATFORM_TOKEN
from activator.http.request import CALLER, CALLING, FORWARDED, Scope
from activator.http.trusted_proxies import TrustedProxies
from activator.routing.call_origin import CallingFunction
from pilotlight.protocol import HEADER_GRPC_CALLER, HEADER_GRPC_TOKEN

GRPC_CALLER, GRPC_TOKEN = HEADER_GRPC_CALLER.encode(), HEADER_GRPC_TOKEN.encode()


class ForwardedCallers:
    """Records callers in the scopes of requests. Immutable."""

    def __init__(self, proxies: Collection[str], *, token: str, grpc_token: str = "") -> None:
        """`proxies`: networks. `token`: of the platform; "" = no activator forwards requests.
        `grpc_token`: of the process for gRPC; "" = there is none. Raises ValueError for an invalid
        network."""
        self._proxies = TrustedProxies(proxies) if proxies else None
        self._token = token.encode()
        self._grpc_token = grpc_token.encode()

    def __repr__(self) -> str:
        return f"<ForwardedCallers {self._proxies!r}>"

    def record(self, scope: Scope) -> None:
        """Write what a trusted server says about the caller into a request's scope."""
        if self._grpc_token and scope["type"] == "http" and self._record_grpc_caller(scope):
            return
        if self._proxies is not None:
            self._proxies.record_caller(scope)
        if self._token and scope["type"] == "http":
            said = dict(scope["headers"])
            is_said = PASSED_ON in said or CALLING_FUNCTION in said
            if is_said and hmac.compare_digest(said.get(PLATFORM_TOKEN, b""), self._token):
                if PASSED_ON in said:
                    scope[FORWARDED] = True
                # it goes no further
                scope["headers"] = [line for line in scope["headers"] if line[0] != PLATFORM_TOKEN]
                if CALLING_FUNCTION in said:
                    scope[CALLING] = CallingFunction.from_json(said[CALLING_FUNCTION])

    def _record_grpc_caller(self, scope: Scope) -> bool:
        """Write the address of a gRPC caller; False for other requests."""
        said = dict(scope["headers"])
        if not hmac.compare_digest(said.get(GRPC_TOKEN, b""), self._grpc_token):
            return False
        address = said.get(GRPC_CALLER, b"").decode("latin-1")
        if self._proxies is not None:
            forwarded = said.get(b"x-forwarded-for", b"").decode("latin-1")
            address = self._proxies.caller(address, forwarded)
        scope[CALLER] = address
        scope["headers"] = [line for line in scope["headers"] if line[0] != GRPC_TOKEN]
        return True
