"""`POST /v1/functions/{app}/{function}:bind`: the name of a function that is bound to arguments of
its class, or to options (`pilotlight.spec.bound`). The controller makes it if it is not there.

Only callers of the function's own tenant make one, and it takes what a call takes of their quotas;
options, which change what instances cost, need a key that may deploy. Everyone else calls a bound
function that is there by its name."""

from __future__ import annotations

import json
from typing import Any

from activator.access.grants import AccessGrant
from activator.control_plane.proxy import ControlPlaneProxy
from activator.http.request import Request
from pilotlight import errors
from pilotlight.client.errors import error_from_response
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import BIND_PATH
from pilotlight.spec.identifiers import Scope

MAX_BODY_BYTES = 65_536


class BindingsApi:
    """Handles `:bind`. Owner: the event loop."""

    def __init__(self, control: ControlPlaneProxy, *, token: str, body_timeout_s: float) -> None:
        """`token`: the platform's, for the controller."""
        self._control = control
        self._proof = (HEADER_PLATFORM_TOKEN.encode(), token.encode())
        self._body_timeout_s = body_timeout_s

    def __repr__(self) -> str:
        return f"<BindingsApi by {self._control!r}>"

    async def bind(self, request: Request, entry: AccessGrant, method: str) -> None:
        """Answer with the name, once every activator can route to it. Raises Forbidden,
        InvalidInput, and what the controller answers."""
        caller, target = entry.caller, entry.target
        if entry.calling_tenant or caller.is_anonymous:
            raise errors.Forbidden(
                "binding a function needs an API key of the function's own tenant: ask its owner "
                "for the name of a bound function, and call that"
            )
        caller.require_key()
        request.target = None  # not a call, whatever the result
        await entry.admit(holds=0)
        body = await request.body(limit_bytes=MAX_BODY_BYTES, timeout_s=self._body_timeout_s)
        arguments, options = _parsed(body)
        if options and not caller.scope.reaches(Scope.DEPLOY):
            raise errors.Forbidden(
                "options of a handle (with_options) change what instances cost: use an API key of "
                "scope 'deploy'; a function needs one from a secret (PILOTLIGHT_API_KEY)"
            )
        wanted = {
            "tenant": target.tenant,
            "environment": target.environment,
            "app": target.app,
            "function": target.function,
            "actor": caller.key_id,
            "arguments": arguments,
            "options": options,
        }
        response = await self._control.post_json(BIND_PATH, caller, self._proof, wanted)
        if response.is_error:
            raise error_from_response(
                response.status_code, dict(response.headers), response.content
            )
        await request.respond_json(200, response.json())


def _parsed(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as e:
        raise errors.InvalidInput(f"the body is not JSON: {type(e).__name__}") from e
    arguments = found.get("arguments", {}) if isinstance(found, dict) else None
    options = found.get("options", {}) if isinstance(found, dict) else None
    if not isinstance(arguments, dict) or not isinstance(options, dict):
        raise errors.InvalidInput(
            'the body must be an object: {"arguments": {…}}, and for other options {"options": {…}}'
        )
    return arguments, options
