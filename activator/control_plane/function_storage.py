"""Storage for functions: commits and reloads of volumes, and operations on dicts and queues.
Requests at the socket of an instance, which is the identity, become requests to the controller for
that instance's tenant and environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from activator.http.request import Request
from activator.quotas.admission import admit
from activator.quotas.store_protocol import QuotaCheck
from activator.routing.api_keys import FunctionPrincipal, Principal
from pilotlight import errors
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.spec.collection import INTERNAL_COLLECTIONS, MAX_REQUEST_BYTES
from snapshotter.volumes.heads import VOLUMES_PATH

WAIT_S = 3600.0
"""Longest commit or reload: a call that waits ends with its own deadline."""
MAX_CONNECTIONS = 256
"""Connections to the controller. A tenant has at most as many as are left to others (dynamic
thresholds: Choudhury and Hahne, 1998), so that tenants whose requests wait cannot fill them."""
BODY_S = 60.0
"""How long the body of a request may take to arrive."""
_VOLUME = re.compile(r"/v1/volumes/([A-Za-z0-9._-]{1,64}):(commit|reload)")
_COLLECTION = re.compile(r"/v1/(dicts|queues)/([A-Za-z0-9._-]{1,64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRequest:
    """What a function asks. `last`: the last two segments of the controller's path."""

    what: str
    prefix: str
    last: tuple[str, str]
    max_of_tenant: int

    @property
    def is_volume(self) -> bool:
        """Whether it is about a volume, which only functions of one machine mount."""
        return self.what == "volumes"


def parse_storage_path(path: str) -> StorageRequest | None:
    """What a request's path asks of the storage; None for other paths."""
    if (found := _VOLUME.fullmatch(path)) is not None:
        last = found[1], found[2]
        # the controller has one turn for each tenant
        return StorageRequest(what="volumes", prefix=VOLUMES_PATH, last=last, max_of_tenant=16)
    if (found := _COLLECTION.fullmatch(path)) is not None:
        last = found[1], found[2]
        # twice as many as the controller lets wait for values of queues
        return StorageRequest(
            what="dicts and queues", prefix=INTERNAL_COLLECTIONS, last=last, max_of_tenant=64
        )
    return None


class FunctionStorage:
    """Passes requests of functions to the controller. Owner: the event loop."""

    def __init__(
        self,
        controller: Endpoint,
        *,
        token: str,
        mounts_volumes: bool,
        operations: Callable[[Principal], QuotaCheck | None],
    ) -> None:
        """`operations`: the quotas that a caller's requests count in (`AccessCache.operations`)."""
        self._client = controller.client(
            headers={HEADER_PLATFORM_TOKEN: token},
            timeout=httpx.Timeout(10.0, read=WAIT_S),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        )
        self._mounts_volumes = mounts_volumes
        self._operations = operations
        self._waiting: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"<FunctionStorage {self._waiting.total()} requests>"

    async def answer(
        self, request: Request, caller: FunctionPrincipal, asked: StorageRequest
    ) -> None:
        """Answer a request. Raises Forbidden, TooLarge, OverQuota, Unavailable, and what the
        controller says."""
        if asked.is_volume and not self._mounts_volumes:
            raise errors.Forbidden("pods mount no volumes: deploy to a platform of one machine")
        who = (caller.tenant, asked.what)
        most = max(1, min(asked.max_of_tenant, MAX_CONNECTIONS - self._waiting.total()))
        if self._waiting[who] >= most:
            raise errors.OverQuota(
                f"{self._waiting[who]} requests to {asked.what} of this tenant's functions are in "
                f"progress: try again later",
                retry_after_s=1.0,
                quota=asked.what,
                of="tenant",
                limit=most,
            )
        parts = (caller.tenant, caller.environment or "", *asked.last)
        path = "/".join((asked.prefix, *(quote(part, safe="") for part in parts)))
        self._waiting[who] += 1
        try:
            body = await request.body(limit_bytes=MAX_REQUEST_BYTES, timeout_s=BODY_S)
            headers = {"content-type": "application/json"} if body else {}
            with await admit(self._operations(caller)):
                answer = await self._client.post(path, content=body, headers=headers)
        except httpx.HTTPError as e:
            raise errors.Unavailable(
                f"the controller does not answer ({e!r}): nothing is known to be stored; try again",
                retry_after_s=1.0,
            ) from e
        finally:
            self._waiting -= Counter({who: 1})
        fields = [
            (b"content-type", answer.headers.get("content-type", "application/json").encode()),
            (b"content-length", str(len(answer.content)).encode()),
            (b"x-request-id", request.id.encode()),
        ]
        await request.respond(answer.status_code, fields, answer.content)

    async def aclose(self) -> None:
        """Close connections."""
        await self._client.aclose()
