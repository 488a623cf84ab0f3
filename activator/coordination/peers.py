"""The other activators, which run the same gateway: on this machine, each behind its own Unix
socket, or in a cluster, with mutual TLS.

Callers reach the activator that the kernel (SO_REUSEPORT, socket(7)) or a cluster's Service picks,
but a submitted call is held by one of them. A request about a call that is not held here is
forwarded to the others, once (the header `pilotlight-passed-on` marks it, and with the platform's
token it says that the request was counted); an id that a caller
chose belongs to the member that its hash selects, so that a repeated PUT reaches the same one.

Connections to another activator are limited, and a followed call occupies one for as long as it
runs: all forwarded requests of one tenant occupy at most half of the connections to one activator,
a caller that does not read is cut off, and `catch_up`, which must not wait, has its own
connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import httpx

from activator.http.forwarding import body_of, relay, target_url
from activator.http.request import CALLING, HOP_BY_HOP, Request
from pilotlight import errors
from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.core.transport.endpoint import Endpoint, TlsCredentials

log = logging.getLogger(__name__)

PASSED_ON = b"pilotlight-passed-on"
"""On a request that another activator forwards; on a 404, that it is the answer of what holds the
call, so that no other activator is asked."""
CALLING_FUNCTION = b"pilotlight-calling-function"
"""On a forwarded request that a function made, with the platform's token: the function, and the
call in which it made it (`routing.call_origin.CallingFunction`)."""
PLATFORM_TOKEN = HEADER_PLATFORM_TOKEN.encode()
_OWN = frozenset({PASSED_ON, CALLING_FUNCTION, PLATFORM_TOKEN})
HEALTH = "/healthz"
CATCH_UP_S = 1.5
"""How long a change waits for the other activators: each waits at most a second for its own
feed."""
_IDLE_S = 630.0
"""Read timeout: a followed call may be silent for long; after that the client asks again."""
UNREAD_S = 10.0
"""How long a caller may leave a response unread."""
MAX_CONNECTIONS = 256
"""Per peer; one tenant's requests may use half as many in all."""


Places = Callable[[int], Endpoint]


class ActivatorPeers:
    """Forwards requests to the other activators. Owner: the event loop.

    `count`: the configured number of activators, which share the ids that callers choose.
    `members`: those that are running, which can be more while the number is being changed; requests
    are forwarded to these, too. `token`: of the platform, by which the others believe who made a
    request."""

    def __init__(
        self,
        place: Places,
        *,
        index: int,
        count: int,
        members: Callable[[], Iterable[str]] = tuple,
        token: str = "",
        max_connections: int = MAX_CONNECTIONS,
        unread_s: float = UNREAD_S,
    ) -> None:
        self._index = index
        self._count = count
        self._address_of = place
        self._members = members
        self._token = token.encode()
        self._known: dict[int, httpx.AsyncClient] = {}
        self._for_changes: dict[int, httpx.AsyncClient] = {}
        """Clients for `catch_up`, so that it never queues behind callers' requests."""
        self._max_connections = max_connections
        self._unread_s = unread_s
        self._of_tenants: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<ActivatorPeers of {self._index}: {len(self._others())}, {self.held} requests>"

    @property
    def held(self) -> int:
        """Number of requests in progress at other activators."""
        return self._of_tenants.total()

    def _others(self) -> list[int]:
        numbers = {number for number in map(_number, self._members()) if number is not None}
        return sorted((numbers | set(range(self._count))) - {self._index})

    def _client(self, index: int, clients: dict[int, httpx.AsyncClient]) -> httpx.AsyncClient:
        if index not in clients:
            address = self._address_of(index)
            timeout = httpx.Timeout(5.0, read=_IDLE_S, write=_IDLE_S)
            limits = httpx.Limits(
                max_connections=self._max_connections, max_keepalive_connections=20
            )
            clients[index] = address.client(timeout=timeout, limits=limits)
        return clients[index]

    @contextmanager
    def _share(self, tenant: str) -> Iterator[None]:
        """Count one forwarded request of the tenant while the context lasts. Raises
        TooManyRequests."""
        if self._of_tenants[tenant] >= max(1, self._max_connections // 2):
            raise errors.TooManyRequests(
                "too many requests of this tenant are being forwarded to other activators",
                retry_after_s=1,
            )
        self._of_tenants[tenant] += 1
        try:
            yield
        finally:
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    async def forward(self, request: Request, tenant: str, body: bytes | None = None) -> bool:
        """Forward a tenant's request, with its body if it has one, to each peer until one does not
        answer 404, or is the one that holds the call; False when none did.

        Raises TooManyRequests."""
        with self._share(tenant):
            for index in self._others():
                try:
                    response = await self._send(self._client(index, self._known), request, body)
                except httpx.HTTPError as e:
                    log.info("peer activator does not answer error=%r", e)
                    continue
                if response.status_code == 404 and PASSED_ON.decode() not in response.headers:
                    await response.aclose()
                    continue
                async with aclosing(response):
                    await relay(request, response, self._unread_s)
                return True
        return False

    async def forward_to_owner(self, request: Request, tenant: str, call_id: str) -> bool:
        """Forward a tenant's PUT to the member that owns `call_id`; False when this activator owns
        it.

        Raises Unavailable while the owner is down, TooManyRequests.
        """
        owner = zlib.crc32(call_id.encode()) % self._count
        if owner == self._index or PASSED_ON in request.headers:
            return False
        with self._share(tenant):
            try:
                response = await self._send(
                    self._client(owner, self._known), request, body_of(request)
                )
            except httpx.HTTPError as e:
                raise errors.Unavailable(
                    f"activator a-{owner}, which holds this call, does not answer: retry",
                    retry_after_s=1,
                ) from e
            async with aclosing(response):
                await relay(request, response, self._unread_s)
        return True

    async def catch_up(self) -> None:
        """Return once the other activators have applied all changes that the controller has at this
        moment: a revoked key is then revoked everywhere.

        Peers that do not answer in time are skipped; they receive the change from their feed within
        moments, or before they serve again."""
        await asyncio.gather(
            *(
                self._wait_caught_up(self._client(index, self._for_changes))
                for index in self._others()
            )
        )

    async def _wait_caught_up(self, client: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await client.get(HEALTH, headers=[(PASSED_ON, b"1")])
        except (httpx.HTTPError, TimeoutError) as e:
            log.info("peer activator may have stale routes error=%r", e)

    async def _send(
        self, client: httpx.AsyncClient, request: Request, body: AsyncIterator[bytes] | bytes | None
    ) -> httpx.Response:
        url = target_url(client, request, request.scope["raw_path"])
        skip = HOP_BY_HOP if body is not None else HOP_BY_HOP | {b"content-length"}
        headers = [(k, v) for k, v in request.scope["headers"] if k not in skip | _OWN]
        headers.append((PASSED_ON, b"1"))
        if self._token:
            headers.append((PLATFORM_TOKEN, self._token))
        if (calling := request.scope.get(CALLING)) is not None:
            headers.append((CALLING_FUNCTION, calling.to_json()))
        out = client.build_request(request.verb, url, headers=headers, content=body)
        return await client.send(out, stream=True)

    async def is_process_alive(self, member: str) -> bool:
        """Whether the process of activator `member` accepts connections."""
        if (number := _number(member)) is None:
            return True  # not an activator of this platform: assume that it lives
        try:
            async with asyncio.timeout(1.0):
                probe = await self._address_of(number).connect(asyncio.get_running_loop(), _Probe)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except socket.gaierror as e:
            # a pod's name is removed with the pod; other lookup failures prove nothing
            return e.errno != socket.EAI_NONAME
        except (OSError, TimeoutError):
            return True
        probe.close()
        return True

    async def aclose(self) -> None:
        """Close the connections."""
        for client in (*self._known.values(), *self._for_changes.values()):
            await client.aclose()


class _Probe(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.close = transport.close


def _number(member: str) -> int | None:
    number = member.removeprefix("a-")
    return int(number) if number.isdigit() else None


def peer_addresses(run: Path, url: str | None, credentials: TlsCredentials | None) -> Places:
    """Return the address of each activator: its socket in `run`, or at `url`
    (`activator.sibling_url`). Raises SettingsInvalid."""
    if url is None:
        return lambda index: Endpoint.at(socket_of(run, index))

    def place(index: int) -> Endpoint:
        return Endpoint.parse(
            url.replace("{index}", str(index)).replace("{member}", f"a-{index}"), credentials
        )

    try:
        place(0)
    except ValueError as e:
        raise SettingsInvalid(f"activator.sibling_url = {e}") from e
    return place


def socket_of(run: Path, index: int) -> Path:
    """`<run>/activator-<index>.sock`."""
    return run / f"activator-{index}.sock"
