"""Who makes a request that another server forwards, as far as that server is trusted: the address
that a proxy of `activator.trusted_proxies` reports, and the function that another activator names,
which sends the platform's token. A request that another activator forwards is marked, too."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from activator.coordination.peers import CALLING_FUNCTION, PASSED_ON, PLATFORM_TOKEN
from activator.http.request import CALLING, FORWARDED, Scope
from activator.http.trusted_proxies import TrustedProxies
from activator.routing.call_origin import CallingFunction


class ForwardedCallers:
    """Records callers in the scopes of requests. Immutable."""

    def __init__(self, proxies: Collection[str], *, token: str) -> None:
        """`proxies`: networks. `token`: of the platform; "" = no activator forwards requests.
        Raises ValueError for an invalid network."""
        self._proxies = TrustedProxies(proxies) if proxies else None
        self._token = token.encode()

    def __repr__(self) -> str:
        return f"<ForwardedCallers {self._proxies!r}>"

    def record(self, scope: Scope) -> None:
        """Write what a trusted server says about the caller into a request's scope."""
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
