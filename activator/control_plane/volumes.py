"""Commits and reloads of volumes for functions: requests at the socket of an instance, which is the
identity, become requests to the controller for that instance's tenant and environment."""

from __future__ import annotations

import re
from collections import Counter
from urllib.parse import quote

import httpx

from activator.http.request import Request
from activator.routing.api_keys import FunctionPrincipal
from pilotlight import errors
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from snapshotter.volumes.heads import VOLUMES_PATH

WAIT_S = 3600.0
"""Longest commit or reload: a call that waits ends with its own deadline."""
MAX_OF_TENANT = 16
"""Requests of a tenant that wait: the controller has one turn for each tenant."""
_PATH = re.compile(r"/v1/volumes/([A-Za-z0-9._-]{1,64}):(commit|reload)")


def parse_volume_path(path: str) -> tuple[str, str] | None:
    """The volume's name and the verb of a request's path; None for other paths."""
    found = _PATH.fullmatch(path)
    return None if found is None else (found[1], found[2])


class FunctionVolumes:
    """Passes requests of functions to the controller. Owner: the event loop."""

    def __init__(self, controller: Endpoint, *, token: str) -> None:
        self._client = controller_client(controller, token=token, timeout_s=10.0, read_s=WAIT_S)
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<FunctionVolumes {self._waiting.total()} requests>"

    async def answer(self, request: Request, caller: FunctionPrincipal) -> None:
        """Answer a request. Raises Unavailable, TooManyRequests, and what the controller says."""
        found = parse_volume_path(request.path)
        assert found is not None, request.path
        tenant, (name, verb) = caller.tenant, found
        if self._waiting[tenant] >= MAX_OF_TENANT:
            raise errors.OverQuota(
                f"{MAX_OF_TENANT} commits and reloads of this tenant are waiting: try again later",
                retry_after_s=1.0,
                quota="volumes",
                of="tenant",
                limit=MAX_OF_TENANT,
            )
        parts = (quote(part, safe="") for part in (tenant, caller.environment or "", name, verb))
        self._waiting[tenant] += 1
        try:
            answer = await self._client.post("/".join((VOLUMES_PATH, *parts)))
        except httpx.HTTPError as e:
            raise errors.Unavailable(
                f"the controller does not answer ({e!r}): nothing is known to be committed; "
                f"{verb} again",
                retry_after_s=1.0,
            ) from e
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        headers = [
            (b"content-type", answer.headers.get("content-type", "application/json").encode()),
            (b"content-length", str(len(answer.content)).encode()),
            (b"x-request-id", request.id.encode()),
        ]
        await request.respond(answer.status_code, headers, answer.content)

    async def aclose(self) -> None:
        """Close connections."""
        await self._client.aclose()
