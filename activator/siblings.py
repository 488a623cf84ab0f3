"""The other activators, with the same gateway: of this machine, each behind a Unix socket of its own, or of a cluster, with mutual TLS.

Callers reach whichever activator the kernel picks (SO_REUSEPORT, socket(7)), or a cluster's Service, but a submitted call lives in one of
them. A question about a call that is not here is passed on to the others, once (the header `pilotlight-passed-on` marks it); an id that a
caller chose belongs to the member that its hash names, so that the same PUT sent twice meets itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import httpx

from activator.request import HOP_BY_HOP, Headers, Request
from pilotlight import errors
from weight_cache.addresses import Address, Credentials
from weight_cache.settings import SettingsInvalid

log = logging.getLogger(__name__)

PASSED_ON = b"pilotlight-passed-on"
HEALTH = "/healthz"
CATCH_UP_S = 1.5
"""How long a change may wait for the other activators: each waits a second at most for its own feed."""
_IDLE_S = 630.0
"""Read time-out: a followed call may be silent for long; then the client asks again."""


Places = Callable[[int], Address]


class Siblings:
    """Owner: the event loop. With one activator there are none, and every question is answered here.

    `count` of them are meant to be there, and share the ids that callers choose; `members` are those that are, some more while
    the number is being changed, and these are asked, too.
    """

    def __init__(self, place: Places, *, index: int, count: int, members: Callable[[], Iterable[str]] = tuple) -> None:
        self._index = index
        self._count = count
        self._place = place
        self._members = members
        self._known: dict[int, httpx.AsyncClient] = {}

    def __repr__(self) -> str:
        return f"<Siblings of {self._index}: {len(self._others())}>"

    def _others(self) -> list[int]:
        numbers = {number for number in map(_number, self._members()) if number is not None}
        return sorted((numbers | set(range(self._count))) - {self._index})

    def _client(self, index: int) -> httpx.AsyncClient:
        if index not in self._known:
            address = self._place(index)
            timeout = httpx.Timeout(5.0, read=_IDLE_S, write=_IDLE_S)
            self._known[index] = httpx.AsyncClient(transport=address.transport(), base_url=address.base_url, timeout=timeout)
        return self._known[index]

    async def ask(self, request: Request) -> bool:
        """Pass a request without a body on to each until one does not answer 404; False when none knew."""
        for index in self._others():
            try:
                response = await self._send(self._client(index), request, None)
            except httpx.HTTPError as e:
                log.info("sibling does not answer error=%r", e)
                continue
            if response.status_code == 404:
                await response.aclose()
                continue
            await _relay(request, response)
            return True
        return False

    async def hand_over(self, request: Request, call_id: str) -> bool:
        """Pass a PUT on to the member that owns `call_id`; False when that is us. Raises Unavailable while the owner is down."""
        owner = zlib.crc32(call_id.encode()) % self._count
        if owner == self._index or PASSED_ON in request.headers:
            return False
        try:
            response = await self._send(self._client(owner), request, _body(request))
        except httpx.HTTPError as e:
            raise errors.Unavailable(f"activator a-{owner}, which keeps this call, is being restarted", retry_after_s=1) from e
        await _relay(request, response)
        return True

    async def catch_up(self) -> None:
        """Return once the others know all that the controller knows at this moment: a key that was revoked is revoked everywhere.

        Who does not answer in time is not waited for; its feed tells it within moments, or before it serves again.
        """
        await asyncio.gather(*(self._caught_up(self._client(index)) for index in self._others()))

    async def _caught_up(self, client: httpx.AsyncClient) -> None:
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await client.get(HEALTH, headers=[(PASSED_ON, b"1")])
        except (httpx.HTTPError, TimeoutError) as e:
            log.info("sibling may be behind error=%r", e)

    async def _send(self, client: httpx.AsyncClient, request: Request, body: AsyncIterator[bytes] | None) -> httpx.Response:
        query = request.scope["query_string"]
        url = client.base_url.copy_with(raw_path=request.scope["raw_path"] + (b"?" + query if query else b""))
        skip = HOP_BY_HOP if body is not None else HOP_BY_HOP | {b"content-length"}
        headers = [(k, v) for k, v in request.scope["headers"] if k not in skip]
        out = client.build_request(request.verb, url, headers=[*headers, (PASSED_ON, b"1")], content=body)
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
            return e.errno != socket.EAI_NONAME  # a pod's name goes with the pod; names that cannot be asked about say nothing
        except (OSError, TimeoutError):
            return True
        probe.close()
        return True

    async def aclose(self) -> None:
        """Close the connections."""
        for client in self._known.values():
            await client.aclose()


class _Probe(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.close = transport.close


def _number(member: str) -> int | None:
    number = member.removeprefix("a-")
    return int(number) if number.isdigit() else None


def places(run: Path, url: str | None, credentials: Credentials | None) -> Places:
    """Where each activator is: behind its socket in `run`, or at `url` (`activator.sibling_url`). Raises SettingsInvalid."""
    if url is None:
        return lambda index: Address.at(socket_of(run, index))

    def place(index: int) -> Address:
        return Address.parse(url.replace("{index}", str(index)).replace("{member}", f"a-{index}"), credentials)

    try:
        place(0)
    except ValueError as e:
        raise SettingsInvalid(f"activator.sibling_url = {e}") from e
    return place


def socket_of(run: Path, index: int) -> Path:
    """`<run>/activator-<index>.sock`."""
    return run / f"activator-{index}.sock"


async def _relay(request: Request, response: httpx.Response) -> None:
    try:
        headers: Headers = [(k.lower(), v) for k, v in response.headers.raw if k.lower() not in HOP_BY_HOP and k.lower() != b"date"]
        await request.start(response.status_code, headers)
        async for chunk in response.aiter_raw():
            await request.chunk(chunk)
        await request.chunk(b"", more=False)
    except httpx.HTTPError:
        request.scope["connection"].transport.abort()  # the head is out: a broken connection is the only honest end
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
