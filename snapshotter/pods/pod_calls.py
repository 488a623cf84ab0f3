"""Passes calls of functions in pods to the activator that claimed the pod, over mutual TLS.

All pods of a tenant connect to one socket, `calls.sock` in the tenant's directory of the node. The
kernel says which pod a peer is in (`pod_process.pod_of_peer`). The agent states it to the
activators until one answers that it has claimed the pod, and then passes bytes on in both
directions. It neither parses nor keeps them.

A pod costs the agent a bounded share: connections, connections that are being opened, and bytes
between the two ends. An end that does not read stops the other."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.transport.endpoint import HANDSHAKE_TIMEOUT_S, Endpoint
from pilotlight.core.transport.pod_calls import (
    MAX_LINE_BYTES,
    OPENING_TIMEOUT_S,
    Answer,
    PodAnswer,
    PodStatement,
)
from pilotlight.core.transport.tls import explain_tls_error
from snapshotter.errors import Unsupported
from snapshotter.pods.pod_process import pod_of_peer

_log = logging.getLogger(__name__)

MAX_OF_POD = 512
"""Open connections of one pod, as of one instance at an activator: eight maps with the default
concurrency of 64."""
MAX_OF_TENANT = 1024
"""Open connections of one tenant's pods on this node."""
OPENED_AT_ONCE_BY_POD, OPENED_AT_ONCE = 8, 32
"""Connections to activators that are being opened, for one pod and for all: a handshake takes a
millisecond of the event loop, and a pod that opens thousands waits behind itself."""
BUFFER_BYTES = 64 * 1024
"""Bytes that wait for one end before the other is not read any further."""
MAX_REMEMBERED = 1024
"""Pods whose activator is remembered after their last connection: more than run on a node."""
LAST_BYTES_S = 10.0
"""How long a pod may take to read the rest of an answer whose connection has ended."""
_BACKLOG = 1024
_WAY_OUT = (
    "to call without it, use an API key: set PILOTLIGHT_API_KEY and PILOTLIGHT_URL in a secret of "
    "the function"
)


class NotConnected(Exception):
    """Raised when no activator takes a pod's connection; it is answered with `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False, slots=True)
class _Pod:
    """What one pod has open."""

    connections: int = 0
    opening: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(OPENED_AT_ONCE_BY_POD)
    )


class PodCalls:
    """Connections of all pods of this node to their activators. Owner: the event loop."""

    def __init__(
        self,
        activators: Endpoint,
        *,
        identify: Callable[[socket.socket], str] = pod_of_peer,
        resolve: Callable[[Endpoint], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        """`activators`: `https://` name that resolves to all activators, and is in the certificate
        of each. `resolve`: None = with DNS."""
        assert activators.credentials is not None
        self._activators = activators
        self._identify = identify
        self._resolve = resolve or addresses_of
        self._context = activators.credentials.client_context()
        self._pods: dict[str, _Pod] = {}
        self._of_tenants: Counter[str] = Counter()
        self._opening = asyncio.Semaphore(OPENED_AT_ONCE)
        self._claimed_by: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return (
            f"<PodCalls to {self._activators}: {self._of_tenants.total()} connections of "
            f"{len(self._pods)} pods>"
        )

    async def listen(self, path: Path, tenant: str) -> asyncio.Server:
        """Serve the socket of a tenant, replacing that of an earlier agent. Raises OSError."""
        path.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: _PodEnd(self, tenant), path, backlog=_BACKLOG
        )
        path.chmod(0o666)  # the kernel identifies the peer
        return server

    def begin(self, end: _PodEnd) -> None:
        """Pass a new connection on, or answer why not."""
        try:
            uid = self._identify(end.socket)
            self._count(end, uid)
        except Unsupported as e:
            _log.warning("pods.calls_refused tenant=%s why=%s", end.tenant, e)
            end.refuse(403, f"{e}; {_WAY_OUT}")
        except NotConnected as e:
            end.refuse(e.status, str(e))
        else:
            task = asyncio.create_task(self._connect(end, uid), name=f"calls of {uid}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _count(self, end: _PodEnd, uid: str) -> None:
        pod = self._pods.setdefault(uid, _Pod())
        if pod.connections >= MAX_OF_POD:
            raise NotConnected(
                503, f"too many connections of this pod: it may have {MAX_OF_POD} at once"
            )
        if self._of_tenants[end.tenant] >= MAX_OF_TENANT:
            raise NotConnected(
                503,
                f"too many connections of this tenant's pods on this node: they may have "
                f"{MAX_OF_TENANT} at once",
            )
        pod.connections += 1
        self._of_tenants[end.tenant] += 1
        end.pod = uid

    def end(self, end: _PodEnd) -> None:
        """Count a connection out."""
        if end.pod is None:
            return
        pod = self._pods[end.pod]
        pod.connections -= 1
        if not pod.connections:
            del self._pods[end.pod]
        self._of_tenants[end.tenant] -= 1
        if not self._of_tenants[end.tenant]:
            del self._of_tenants[end.tenant]

    async def _connect(self, end: _PodEnd, uid: str) -> None:
        try:
            async with self._turn(self._pods[uid]):
                if not end.is_closed:
                    end.join(await self._find(PodStatement(end.tenant, uid)))
        except NotConnected as e:
            _log.warning("pods.calls_not_connected tenant=%s pod=%s why=%s", end.tenant, uid, e)
            end.refuse(e.status, str(e))
        except BaseException:
            end.abort()
            raise

    @asynccontextmanager
    async def _turn(self, pod: _Pod) -> AsyncIterator[None]:
        """Wait for a turn to open a connection: with at most OPENED_AT_ONCE_BY_POD of each pod in
        the queue, no pod delays the others for long."""
        async with pod.opening, self._opening:
            yield

    async def _find(self, statement: PodStatement) -> _ActivatorEnd:
        """Connect to the activator that has claimed the pod: first to the one that had. Raises
        NotConnected."""
        failures: list[str] = []
        known = self._claimed_by.pop(statement.pod, None)
        if known is not None and (end := await self._ask(known, statement, failures)) is not None:
            return end
        for address in await self._addresses(failures):
            if address == known:
                continue
            if (end := await self._ask(address, statement, failures)) is not None:
                return end
        if failures:
            raise NotConnected(
                503, f"no activator that answers has claimed this pod: {'; '.join(failures)}"
            )
        raise NotConnected(
            403,
            "no activator has claimed this pod: functions call others while they run a call, and "
            "not in enter(snap=False), in the startup of a web application or in exit(); "
            f"{_WAY_OUT}",
        )

    async def _addresses(self, failures: list[str]) -> Sequence[str]:
        try:
            return await self._resolve(self._activators)
        except OSError as e:
            failures.append(f"{self._activators.host} cannot be resolved: {e.strerror or e}")
            return ()

    async def _ask(
        self, address: str, statement: PodStatement, failures: list[str]
    ) -> _ActivatorEnd | None:
        """Ask one activator; None if it has not claimed the pod, or does not answer, which is added
        to `failures`. Raises NotConnected for a refusal."""
        end: _ActivatorEnd | None = None
        try:
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                _, end = await asyncio.get_running_loop().create_connection(
                    _ActivatorEnd,
                    address,
                    self._activators.port,
                    ssl=self._context,
                    server_hostname=self._activators.host,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                )
                answer = PodAnswer.parse(await end.ask(statement.to_line()))
        except ssl.SSLError as e:
            failures.append(explain_tls_error(e, f"the activator at {address}"))
        except (OSError, ValueError) as e:  # TimeoutError is an OSError
            failures.append(f"the activator at {address} does not answer: {e or type(e).__name__}")
        else:
            if answer.answer is Answer.LEASED:
                self._remember(statement.pod, address)
                return end
            end.abort()
            if answer.answer is Answer.REFUSED:
                raise NotConnected(403, answer.why)
            return None
        if end is not None:
            end.abort()
        return None

    def _remember(self, pod: str, activator: str) -> None:
        self._claimed_by[pod] = activator
        if len(self._claimed_by) > MAX_REMEMBERED:
            del self._claimed_by[next(iter(self._claimed_by))]

    async def aclose(self) -> None:
        """End the connections that are being opened."""
        await cancel_all(self._tasks)


async def addresses_of(activators: Endpoint) -> Sequence[str]:
    """The addresses that the name of an endpoint has now. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        activators.host, activators.port, type=socket.SOCK_STREAM
    )
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


class _End(asyncio.Protocol):
    """One end of a passed-on connection. Owner: the event loop."""

    transport: asyncio.Transport
    other: _End | None = None
    is_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.is_closed:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closed:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self.other is not None:
            self.other.finish()

    def finish(self) -> None:
        """End the connection because the other end has ended."""
        self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        self.transport.abort()


class _PodEnd(_End):
    """A pod's connection. It is read once an activator takes it."""

    def __init__(self, calls: PodCalls, tenant: str) -> None:
        self._calls = calls
        self.tenant = tenant
        self.pod: str | None = None

    @property
    def socket(self) -> socket.socket:
        """The connected socket."""
        found: socket.socket = self.transport.get_extra_info("socket")
        return found

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.pause_reading()
        self._calls.begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._calls.end(self)
        super().connection_lost(exc)

    def join(self, activator: _ActivatorEnd) -> None:
        """Pass bytes on in both directions from now on."""
        if self.is_closed or activator.is_closed:
            activator.abort()
            self.abort()
            return
        self.other, activator.other = activator, self
        if rest := activator.take_rest():
            self.transport.write(rest)
        self.transport.resume_reading()

    def finish(self) -> None:
        """Send what the pod has not read yet, for a limited time."""
        if not self.is_closed:
            self.transport.close()
            asyncio.get_running_loop().call_later(LAST_BYTES_S, self._abort_if_open)

    def _abort_if_open(self) -> None:
        if not self.is_closed:
            self.abort()

    def refuse(self, status: int, message: str) -> None:
        """Answer the request, which is not read, with a problem document (RFC 9457)."""
        title = {403: "Forbidden", 503: "Service Unavailable"}[status]
        body = json.dumps({"type": "about:blank", "status": status, "detail": message}).encode()
        again = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\n{again}"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.finish()


class _ActivatorEnd(_End):
    """A connection to an activator. Before it is joined it reads one line."""

    def __init__(self) -> None:
        self._received = b""
        self._line: asyncio.Future[bytes] | None = None

    async def ask(self, statement: bytes) -> bytes:
        """Send a line and return the one that answers it. Raises ConnectionError, ValueError."""
        self._line = asyncio.get_running_loop().create_future()
        self.transport.write(statement)
        self._look()
        return await self._line

    def take_rest(self) -> bytes:
        """What came after the answer."""
        rest, self._received = self._received, b""
        return rest

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            super().data_received(data)
            return
        self._received += data
        self._look()

    def _look(self) -> None:
        if self._line is None or self._line.done():
            return
        line, end, rest = self._received.partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            self._line.set_exception(ValueError("its answer is too long"))
        elif end:
            self._received = rest
            self._line.set_result(line)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._line is not None and not self._line.done():
            self._line.set_exception(exc or ConnectionResetError("it closed the connection"))
        super().connection_lost(exc)
