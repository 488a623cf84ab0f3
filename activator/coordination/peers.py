"""The other activators, with the same gateway: of this machine, each behind a Unix socket of its
own, or of a cluster, with mutual TLS.

Callers reach whichever activator the kernel picks (SO_REUSEPORT, socket(7)), or a cluster's
Service, but a submitted call lives in one of them. A question about a call that is not here is
passed on to the others, once (the header `pilotlight-passed-on` marks it); an id that a caller
chose belongs to the member that its hash names, so that the same PUT sent twice meets itself.

Connections to another activator are bounded, and a followed call holds one for as long as it runs:
all requests of one tenant that are with the others hold no more than half of those to one of them,
nobody holds one by not reading, and what must not wait (`catch_up`) has its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from activator.http.request import HOP_BY_HOP, Headers, Request
from pilotlight import errors
from weight_cache.addresses import Address, Credentials
from weight_cache.cookies import no_cookies
from weight_cache.settings import SettingsInvalid

log = logging.getLogger(__name__)

PASSED_ON = b"pilotlight-passed-on"
HEALTH = "/healthz"
CATCH_UP_S = 1.5
"""How long a change may wait for the other activators: each waits a second at most for its own
feed."""
_IDLE_S = 630.0
"""Read time-out: a followed call may be silent for long; then the client asks again."""
UNREAD_S = 10.0
"""How long a caller may leave an answer unread."""
MAX_CONNECTIONS = 256
"""To each of the others; one tenant's requests have half as many in all."""


Places = Callable[[int], Address]


class ActivatorPeers:
    """Owner: the event loop. With one activator there are none, and every question is answered
    here.

    `count` of them are meant to be there, and share the ids that callers choose; `members` are
    those that are, some more while the number is being changed, and these are asked, too."""

    def __init__(
        self,
        place: Places,
        *,
        index: int,
        count: int,
        members: Callable[[], Iterable[str]] = tuple,
        max_connections: int = MAX_CONNECTIONS,
        unread_s: float = UNREAD_S,
    ) -> None:
        self._index = index
        self._count = count
        self._place = place
        self._members = members
        self._known: dict[int, httpx.AsyncClient] = {}
        self._for_changes: dict[int, httpx.AsyncClient] = {}
        """Those of `catch_up`: no caller's requests are in front of it."""
        self._max_connections = max_connections
        self._unread_s = unread_s
        self._of_tenants: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<ActivatorPeers of {self._index}: {len(self._others())}>"

    def _others(self) -> list[int]:
        numbers = {number for number in map(_number, self._members()) if number is not None}
        return sorted((numbers | set(range(self._count))) - {self._index})

    def _client(self, index: int, clients: dict[int, httpx.AsyncClient]) -> httpx.AsyncClient:
        if index not in clients:
            address = self._place(index)
            timeout = httpx.Timeout(5.0, read=_IDLE_S, write=_IDLE_S)
            limits = httpx.Limits(
                max_connections=self._max_connections, max_keepalive_connections=20
            )
            clients[index] = httpx.AsyncClient(
                transport=address.transport(limits=limits),
                base_url=address.base_url,
                timeout=timeout,
                cookies=no_cookies(),
            )
        return clients[index]

    @contextmanager
    def _share(self, tenant: str) -> Iterator[None]:
        """One of the tenant's requests to the others. Raises TooManyRequests."""
        if self._of_tenants[tenant] >= max(1, self._max_connections // 2):
            raise errors.TooManyRequests(
                "too many requests of this tenant are with other activators", retry_after_s=1
            )
        self._of_tenants[tenant] += 1
        try:
            yield
        finally:
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    async def ask(self, request: Request, tenant: str) -> bool:
        """Pass a tenant's request without a body on to each until one does not answer 404; False
        when none knew. Raises TooManyRequests."""
        with self._share(tenant):
            for index in self._others():
                try:
                    response = await self._send(self._client(index, self._known), request, None)
                except httpx.HTTPError as e:
                    log.info("sibling does not answer error=%r", e)
                    continue
                if response.status_code == 404:
                    await response.aclose()
                    continue
                await _relay(request, response, self._unread_s)
                return True
        return False

    async def hand_over(self, request: Request, tenant: str, call_id: str) -> bool:
        """Pass a tenant's PUT on to the member that owns `call_id`; False when that is us.

        Raises Unavailable while the owner is down, TooManyRequests.
        """
        owner = zlib.crc32(call_id.encode()) % self._count
        if owner == self._index or PASSED_ON in request.headers:
            return False
        with self._share(tenant):
            try:
                response = await self._send(
                    self._client(owner, self._known), request, _body(request)
                )
            except httpx.HTTPError as e:
                raise errors.Unavailable(
                    f"activator a-{owner}, which keeps this call, is being restarted",
                    retry_after_s=1,
                ) from e
            await _relay(request, response, self._unread_s)
        return True

    async def catch_up(self) -> None:
        """Return once the others know all that the controller knows at this moment: a key that was
        revoked is revoked everywhere.

        Who does not answer in time is not waited for; its feed tells it within moments, or before
        it serves again."""
        await asyncio.gather(
            *(self._caught_up(self._client(index, self._for_changes)) for index in self._others())
        )

    async def _caught_up(self, client: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await client.get(HEALTH, headers=[(PASSED_ON, b"1")])
        except (httpx.HTTPError, TimeoutError) as e:
            log.info("sibling may be behind error=%r", e)

    async def _send(
        self, client: httpx.AsyncClient, request: Request, body: AsyncIterator[bytes] | None
    ) -> httpx.Response:
        query = request.scope["query_string"]
        url = client.base_url.copy_with(
            raw_path=request.scope["raw_path"] + (b"?" + query if query else b"")
        )
        skip = HOP_BY_HOP if body is not None else HOP_BY_HOP | {b"content-length"}
        headers = [(k, v) for k, v in request.scope["headers"] if k not in skip]
        out = client.build_request(
            request.verb, url, headers=[*headers, (PASSED_ON, b"1")], content=body
        )
        return await client.send(out, stream=True)

    async def is_process_alive(self, member: str) -> bool:
        """Whether the process of activator `member` accepts connections."""
        if (number := _number(member)) is None:
            return True  # not one of ours: not ours to judge
        try:
            async with asyncio.timeout(1.0):
                probe = await self._place(number).connect(asyncio.get_running_loop(), _Probe)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except socket.gaierror as e:
            # a pod's name goes with the pod; names that cannot be asked about say nothing
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


def peer_addresses(run: Path, url: str | None, credentials: Credentials | None) -> Places:
    """Where each activator is: behind its socket in `run`, or at `url` (`activator.sibling_url`).
    Raises SettingsInvalid."""
    if url is None:
        return lambda index: Address.at(socket_of(run, index))

    def place(index: int) -> Address:
        return Address.parse(
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


async def _relay(request: Request, response: httpx.Response, unread_s: float) -> None:
    try:
        headers: Headers = [
            (k.lower(), v)
            for k, v in response.headers.raw
            if k.lower() not in HOP_BY_HOP and k.lower() != b"date"
        ]
        await request.wait_read(unread_s)
        await request.start(response.status_code, headers)
        async for chunk in response.aiter_raw():
            await request.wait_read(unread_s)
            await request.chunk(chunk)
        await request.wait_read(unread_s)
        await request.chunk(b"", more=False)
    except httpx.HTTPError:
        # the head is out: a broken connection is the only honest end
        request.scope["connection"].transport.abort()
    finally:
        await response.aclose()


async def _body(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise errors.ClientClosedRequest("the caller left while sending its body")
        if message["body"]:
            yield message["body"]
        if not message.get("more_body", False):
            return
