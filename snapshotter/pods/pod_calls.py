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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.core.transport.pod_calls import (
    END,
    ENDING_S,
    IDLE_S,
    MAX_LINE_BYTES,
    OPENING_TIMEOUT_S,
    Answer,
    FrameReader,
    PodAnswer,
    PodStatement,
    frame,
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
OPENED_AT_ONCE_BY_POD, OPENED_AT_ONCE_BY_TENANT, OPENED_AT_ONCE = 8, 16, 32
"""Connections that are being opened for one pod, for one tenant's and for all: a handshake takes
milliseconds of the event loop, and a pod that opens thousands waits behind itself."""
BUFFER_BYTES = 64 * 1024
"""Bytes that wait for one end before the other is not read any further."""
DIAL_TIMEOUT_S = 3.0
"""Limit of a connection and its handshake: the turn of another pod waits for it."""
LAST_S = 10.0
"""How long an activator that did not answer is asked after the others."""
MAX_IDLE = 64
"""Connections to one activator that are kept for the next pod: a handshake takes ten times the CPU
time of what follows it."""
MAX_REMEMBERED = 1024
"""Pods whose activator is remembered after their last connection: more than run on a node."""
LOG_S = 1.0
"""Interval of the log's lines about refusals of one tenant."""
LAST_BYTES_S = 10.0
"""How long a pod may take to read the rest of an answer whose connection has ended."""
ACCEPTED_PER_S = 1000
"""Connections of one tenant's pods that are accepted in a second, on average; MAX_OF_TENANT at
once."""
_BURST_S = MAX_OF_TENANT / ACCEPTED_PER_S
_BACKLOG = 2 * MAX_OF_TENANT
"""More than may be open, so that none is turned away unanswered."""
_LOG_SAYS = "the node agent's log says why"
_WAY_OUT = (
    "to call without it, use an API key: set PILOTLIGHT_API_KEY and PILOTLIGHT_URL in a secret of "
    "the function"
)


class NotConnected(Exception):
    """Raised when no activator takes a pod's connection; it is answered with `status`.

    Attributes:
        detail: for the log alone: it has names and addresses of the cluster."""

    def __init__(self, status: int, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


@dataclass(eq=False, slots=True)
class _Share:
    """What one pod, or one tenant's pods, have open."""

    opening: asyncio.Semaphore
    connections: int = 0


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
        self._pods: dict[str, _Share] = {}
        self._tenants: dict[str, _Share] = {}
        self._opening = asyncio.Semaphore(OPENED_AT_ONCE)
        self._claimed_by: dict[str, str] = {}
        self._idle: dict[str, list[_ActivatorEnd]] = {}
        self._ends: set[_ActivatorEnd] = set()
        self._failed_at: dict[str, float] = {}
        self._logged_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return (
            f"<PodCalls to {self._activators}: "
            f"{sum(pod.connections for pod in self._pods.values())} connections of "
            f"{len(self._pods)} pods>"
        )

    def listen(self, path: Path, tenant: str) -> CallsListener:
        """Serve the socket of a tenant, replacing that of an earlier agent. Raises OSError."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o666)  # the kernel identifies the peer
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return CallsListener(self, listener, tenant)

    def begin(self, end: _PodEnd) -> None:
        """Pass a new connection on, or answer why not."""
        try:
            uid = self._identify(end.socket)
            self._count(end, uid)
        except Unsupported as e:
            self._log_refusal(end, str(e))
            end.refuse(403, f"{e}; {_WAY_OUT}")
        except NotConnected as e:
            self._log_refusal(end, e.detail or str(e))
            end.refuse(e.status, str(e))
        else:
            task = asyncio.create_task(self._connect(end, uid), name=f"calls of {uid}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _count(self, end: _PodEnd, uid: str) -> None:
        """Count a connection. Raises NotConnected for one too many."""
        pod = self._pods.get(uid) or _Share(asyncio.Semaphore(OPENED_AT_ONCE_BY_POD))
        tenant = self._tenants.get(end.tenant) or _Share(
            asyncio.Semaphore(OPENED_AT_ONCE_BY_TENANT)
        )
        if pod.connections >= MAX_OF_POD:
            raise NotConnected(
                503, f"too many connections of this pod: it may have {MAX_OF_POD} at once"
            )
        if tenant.connections >= MAX_OF_TENANT:
            raise NotConnected(
                503,
                f"too many connections of this tenant's pods on this node: they may have "
                f"{MAX_OF_TENANT} at once",
            )
        self._pods[uid], self._tenants[end.tenant] = pod, tenant
        pod.connections += 1
        tenant.connections += 1
        end.pod = uid

    def end(self, end: _PodEnd) -> None:
        """Count a connection out."""
        if end.pod is None:
            return
        for shares, key in ((self._pods, end.pod), (self._tenants, end.tenant)):
            shares[key].connections -= 1
            if not shares[key].connections:
                del shares[key]

    async def _connect(self, end: _PodEnd, uid: str) -> None:
        try:
            async with self._turn(self._pods[uid], self._tenants[end.tenant]):
                if not end.is_closed:
                    end.join(await self._find(PodStatement(end.tenant, uid)))
        except NotConnected as e:
            self._log_refusal(end, e.detail or str(e))
            end.refuse(e.status, str(e))
        except BaseException:
            end.abort()
            raise

    @asynccontextmanager
    async def _turn(self, pod: _Share, tenant: _Share) -> AsyncIterator[None]:
        """Wait for a turn to open a connection. Each queue has a bounded number of each pod, or of
        each tenant, so that none delays the others for long."""
        async with pod.opening, tenant.opening, self._opening:
            yield

    async def _find(self, statement: PodStatement) -> _ActivatorEnd:
        """Connect to the activator that has claimed the pod: first to the one that had. Raises
        NotConnected."""
        failures: list[str] = []
        known = self._claimed_by.get(statement.pod)
        if known is not None:
            if (end := await self._ask(known, statement, failures)) is not None:
                return end
            self._claimed_by.pop(statement.pod, None)
        for address in sorted(await self._addresses(failures), key=self._has_failed):
            if address == known:
                continue
            if (end := await self._ask(address, statement, failures)) is not None:
                return end
        if failures:
            raise NotConnected(
                503,
                f"no activator that answers has claimed this pod; {_LOG_SAYS}",
                detail="; ".join(failures),
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
        answer: PodAnswer | None = None
        try:
            while answer is None and (end := self._take_idle(address)) is not None:
                # one that was kept may be of an activator that has been restarted
                with suppress(ConnectionError, ssl.SSLError, ValueError):
                    answer = await end.ask(statement)
            if answer is None:
                end = await self._dial(address)
                answer = await end.ask(statement)
        except (OSError, ValueError) as e:  # TimeoutError and ssl.SSLError are OSErrors
            self._failed_at[address] = time.monotonic()
            name = f"the activator at {address}"
            failures.append(
                explain_tls_error(e, name)
                if isinstance(e, ssl.SSLError)
                else f"{name} does not answer: {e or type(e).__name__}"
            )
            return None
        self._failed_at.pop(address, None)
        assert end is not None
        if answer.answer is Answer.LEASED:
            self._remember(statement.pod, address)
            return end
        end.keep()
        if answer.answer is Answer.NOT_LEASED:
            return None
        if answer.answer is Answer.REFUSED:
            raise NotConnected(403, answer.why)
        raise NotConnected(
            503,
            f"the activator does not know the agent of this node, or not yet; {_LOG_SAYS}",
            detail=answer.why,
        )

    def _has_failed(self, address: str) -> bool:
        """Whether an activator did not answer a moment ago: such a one is asked last."""
        failed_at = self._failed_at.get(address)
        return failed_at is not None and time.monotonic() - failed_at < LAST_S

    async def _dial(self, address: str) -> _ActivatorEnd:
        """Open a connection. Raises OSError."""
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, end = await asyncio.get_running_loop().create_connection(
                lambda: _ActivatorEnd(self._ends, self._idle.setdefault(address, [])),
                address,
                self._activators.port,
                ssl=self._context,
                server_hostname=self._activators.host,
                ssl_handshake_timeout=DIAL_TIMEOUT_S,
            )
        return end

    def _take_idle(self, address: str) -> _ActivatorEnd | None:
        idle = self._idle.get(address)
        return idle.pop() if idle else None

    def _log_refusal(self, end: _PodEnd, why: str) -> None:
        """Log at most one refusal of a tenant in LOG_S: pods cause them as often as they like."""
        now = time.monotonic()
        if now - self._logged_at.get(end.tenant, -LOG_S) >= LOG_S:
            self._logged_at[end.tenant] = now
            _log.warning(
                "pods.calls_refused tenant=%s pod=%s why=%s", end.tenant, end.pod or "-", why
            )

    def _remember(self, pod: str, activator: str) -> None:
        self._claimed_by.pop(pod, None)
        self._claimed_by[pod] = activator
        if len(self._claimed_by) > MAX_REMEMBERED:
            del self._claimed_by[next(iter(self._claimed_by))]

    async def aclose(self) -> None:
        """End all connections."""
        await cancel_all(self._tasks)
        ends = list(self._ends)
        for end in ends:
            end.abort()
        await asyncio.gather(*(end.closed for end in ends))


class CallsListener:
    """The socket of one tenant. Owner: the event loop."""

    def __init__(self, calls: PodCalls, listener: socket.socket, tenant: str) -> None:
        self._calls = calls
        self._listener = listener
        self._tenant = tenant
        self._task = asyncio.create_task(self._accept(), name=f"calls of {tenant}")

    async def _accept(self) -> None:
        """Accept at a bounded rate: a connection costs the event loop, which all tenants share,
        more than it costs the pod."""
        loop = asyncio.get_running_loop()
        next_at = 0.0
        while True:
            next_at = max(loop.time(), next_at) + 1 / ACCEPTED_PER_S
            if (ahead_s := next_at - loop.time() - _BURST_S) > 0:
                await asyncio.sleep(ahead_s)
            try:
                connection, _ = await loop.sock_accept(self._listener)
                await loop.connect_accepted_socket(
                    lambda: _PodEnd(self._calls, self._tenant), connection
                )
            except OSError as e:  # too many open files, for example
                _log.error("pods.calls_not_accepted tenant=%s error=%s", self._tenant, e)
                await asyncio.sleep(1)

    def close(self) -> None:
        """Stop accepting. Connections go on."""
        self._task.cancel()
        self._listener.close()


async def addresses_of(activators: Endpoint) -> Sequence[str]:
    """The addresses that the name of an endpoint has now. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        activators.host, activators.port, type=socket.SOCK_STREAM
    )
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


class _PodEnd(asyncio.Protocol):
    """A pod's connection. It is read once an activator takes it. Owner: the event loop."""

    transport: asyncio.Transport

    def __init__(self, calls: PodCalls, tenant: str) -> None:
        self._calls = calls
        self._activator: _ActivatorEnd | None = None
        self.tenant = tenant
        self.pod: str | None = None
        self.is_closed = False
        self._bound: asyncio.TimerHandle | None = None

    @property
    def socket(self) -> socket.socket:
        """The connected socket."""
        found: socket.socket = self.transport.get_extra_info("socket")
        return found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(BUFFER_BYTES)
        self.transport.pause_reading()
        self._calls.begin(self)

    def data_received(self, data: bytes) -> None:
        if self._activator is not None:
            self._activator.send(data)

    def pause_writing(self) -> None:
        if self._activator is not None:
            self._activator.pause_reading()

    def resume_writing(self) -> None:
        if self._activator is not None:
            self._activator.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._bound is not None:
            self._bound.cancel()
        self._calls.end(self)
        if self._activator is not None:
            self._activator.hang_up()

    def join(self, activator: _ActivatorEnd) -> None:
        """Pass bytes on in both directions from now on."""
        if activator.transport.is_closing():
            self.abort()
            return
        self._activator = activator
        activator.begin(self)
        if self.is_closed:
            activator.hang_up()
        else:
            self.transport.resume_reading()

    def finish(self) -> None:
        """The activator has ended the connection: send what the pod has not read yet, for a limited
        time."""
        self._activator = None
        if not self.is_closed:
            self.transport.close()
            self._bound = asyncio.get_running_loop().call_later(LAST_BYTES_S, self.abort)

    def abort(self) -> None:
        """End the connection at once."""
        if not self.is_closed:
            self.transport.abort()

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


class _ActivatorEnd(asyncio.Protocol):
    """A connection to an activator: it waits for an answer, carries a pod's connection, or is kept
    for the next one. Owner: the event loop."""

    transport: asyncio.Transport

    def __init__(self, ends: set[_ActivatorEnd], idle: list[_ActivatorEnd]) -> None:
        """`ends`: all of the agent; `idle`: where it is kept."""
        self._ends = ends
        self._idle = idle
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line = b""
        self._answered: asyncio.Future[PodAnswer] | None = None
        self._pod: _PodEnd | None = None
        self._frames: FrameReader | None = None
        self._has_ended = False
        self._bound: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._ends.add(self)
        self.transport.set_write_buffer_limits(BUFFER_BYTES)

    async def ask(self, statement: PodStatement) -> PodAnswer:
        """Send a statement, and return the answer. Where there is none the connection is aborted.
        Raises OSError, ValueError."""
        self._abort_after(None)
        self._answered = asyncio.get_running_loop().create_future()
        try:
            if self.transport.is_closing():
                raise ConnectionResetError("it closed the connection")
            self.transport.write(statement.to_line())
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                return await self._answered
        except BaseException:
            self.transport.abort()
            raise
        finally:
            self._answered = None

    def begin(self, pod: _PodEnd) -> None:
        """Carry the connection of a pod."""
        self._pod, self._frames, self._has_ended = pod, FrameReader(), False

    def send(self, data: bytes) -> None:
        """Send bytes of the pod."""
        if not self._has_ended:
            self.transport.write(frame(data))

    def hang_up(self) -> None:
        """The pod has ended its connection: wait for the activator's end, and keep this one."""
        self._pod = None
        if not self._has_ended and not self.transport.is_closing():
            self._has_ended = True
            self.transport.write(END)
            self.resume_reading()
            self._abort_after(ENDING_S)

    def keep(self) -> None:
        """Keep it for the next statement, for a while."""
        if self.transport.is_closing():
            return
        if len(self._idle) >= MAX_IDLE:
            self.transport.abort()
            return
        self._idle.append(self)
        self._abort_after(IDLE_S)

    def abort(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    def pause_reading(self) -> None:
        """The pod does not read."""
        if not self._has_ended:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """The pod reads again, or is gone."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            if self._frames is None:
                self._read_line(data)
            else:
                self._read_frames(self._frames, data)
        except ValueError as e:
            _log.warning("pods.activator_not_understood error=%s", e)
            if self._answered is not None and not self._answered.done():
                self._answered.set_exception(e)
            self.transport.abort()

    def _read_line(self, data: bytes) -> None:
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            raise ValueError("its answer is too long")
        if not end:
            return
        if rest or self._answered is None or self._answered.done():
            raise ValueError("it sent what was not asked for")
        self._line = b""
        self._answered.set_result(PodAnswer.parse(line))

    def _read_frames(self, frames: FrameReader, data: bytes) -> None:
        payload, rest = frames.feed(data)
        pod = self._pod
        if payload and pod is not None:
            pod.transport.write(payload)
        if not frames.is_complete:
            return
        if rest:
            raise ValueError("it sent what was not asked for")
        self._pod = self._frames = None
        if not self._has_ended:
            self.transport.write(END)
        if pod is not None:
            pod.finish()
        self.resume_reading()
        self.keep()

    def pause_writing(self) -> None:
        if self._pod is not None:
            self._pod.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._pod is not None:
            self._pod.transport.resume_reading()

    def _abort_after(self, seconds: float | None) -> None:
        if self._bound is not None:
            self._bound.cancel()
        self._bound = (
            None
            if seconds is None
            else asyncio.get_running_loop().call_later(seconds, self.transport.abort)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._abort_after(None)
        self.closed.set_result(None)
        self._ends.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionResetError("it closed the connection"))
        if self._pod is not None:
            self._pod.finish()
