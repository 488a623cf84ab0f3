"""Knative's queue-proxy: stands before a pod's worker, counts what is in it, and lets in no more
than containerConcurrency.

Bytes pass through as they are, so streams and WebSockets do; two parsers listen in to see where
requests and answers begin and end. Source of behaviour: knative/serving pkg/queue."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

PORT = 8012
QUEUE_FACTOR = 10
"""Requests that may wait, for each that may run."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 26\r\nconnection: "
    b"close\r\n\r\npending request queue full"
)


class Load:
    """Requests inside, over time. Owner: the event loop. `proxied`: those that Knative's activator
    had counted already."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside = 0
        self._area = 0.0
        self._since = self._begun = clock()

    @property
    def inside(self) -> int:
        """How many now."""
        return self._inside

    def add(self, count: int) -> None:
        """One came (1) or went (-1)."""
        now = self._clock()
        self._area += self._inside * (now - self._since)
        self._since = now
        self._inside += count

    def take_average(self) -> float:
        """∫ concurrency dt ÷ elapsed since the last take."""
        self.add(0)
        elapsed = max(1e-6, self._since - self._begun)
        average, self._area, self._begun = self._area / elapsed, 0.0, self._since
        return average


class QueueProxy:
    """One pod's. Owner: the event loop. `is_ready`: set by the kubelet once the worker answers its
    readiness probe."""

    def __init__(self, address: str, *, concurrency: int, worker_port: int = 8080) -> None:
        self.address = address
        self.concurrency = concurrency
        self.worker_port = worker_port
        self.is_ready = False
        self.load, self.proxied = Load(), Load()
        self._asked_at = 0.0
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    def __repr__(self) -> str:
        return f"<QueueProxy {self.address} running={self._running} waiting={len(self._waiting)}>"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        loop = asyncio.get_running_loop()
        # in two steps: one that is cancelled in the middle would leave its socket behind
        self._server = await loop.create_server(
            lambda: _Link(self, self._links), self.address, PORT, start_serving=False
        )
        await self._server.start_serving()

    def close(self) -> None:
        """Cut everything. Does not wait, so that nothing can interrupt it."""
        if self._server is not None:
            self._server.close()
            for link in list(self._links):
                link.cut()

    async def stop(self) -> None:
        """Cut everything, and wait until it is gone."""
        self.close()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    def enter_nowait(self) -> bool:
        """Take a slot if there is one."""
        if self.concurrency and self._running >= self.concurrency:
            return False
        self._running += 1
        return True

    def is_full(self) -> bool:
        """Whether not even waiting is possible."""
        return bool(self.concurrency) and len(self._waiting) >= QUEUE_FACTOR * self.concurrency

    async def enter(self) -> None:
        """Wait for a slot; cancelled, it is given on."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Give the slot to whoever waits longest."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
        self._running -= 1

    def count(self, change: int, *, is_proxied: bool) -> None:
        """A request came or went."""
        self.load.add(change)
        if is_proxied:
            self.proxied.add(change)
        if change > 0:
            self._asked_at = asyncio.get_running_loop().time()

    async def drain(self, quiet_s: float) -> None:
        """Until no request has come for so long; those that run are not waited for."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (left_s := max(began, self._asked_at) + quiet_s - loop.time()) > 0:
            await asyncio.sleep(left_s)


class _Link(asyncio.Protocol):
    """A client's connection, and one of its own to the worker."""

    def __init__(self, proxy: QueueProxy, links: set[_Link]) -> None:
        self._proxy = proxy
        self._links = links
        self._parser = httptools.HttpRequestParser(self)
        self._held: list[bytes] = []
        self._is_probe = self._is_proxied = self._is_inside = self._is_raw = False
        self._has_slot = False
        self._task: asyncio.Task[None] | None = None
        self._worker: _Worker | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client."""
        self.transport = cast(asyncio.Transport, transport)
        self._links.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, and its request with it."""
        self._links.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._worker is not None:
            self._worker.transport.abort()
        self.finished()

    def cut(self) -> None:
        """Both ends."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of whatever it became."""
        if not self._is_raw:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                self._is_raw = True
            except httptools.HttpParserError:
                self.transport.close()
                return
        if self._is_probe:
            return
        if self._has_slot and self._worker is not None:
            self._worker.transport.write(data)
        else:
            self._held.append(data)

    def on_message_begin(self) -> None:
        """A request."""
        self._is_probe = self._is_proxied = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Only two are looked at."""
        lowered = name.lower()
        self._is_probe |= lowered == b"k-network-probe" and value == b"queue"
        self._is_proxied |= lowered == b"k-proxy-request"

    def on_headers_complete(self) -> None:
        """Now it is known what it is."""
        if not self._is_probe:
            self._is_inside = True
            self._proxy.count(1, is_proxied=self._is_proxied)
            self._task = asyncio.get_running_loop().create_task(self._admit())

    def on_message_complete(self) -> None:
        """A probe is answered when it is whole."""
        if self._is_probe:
            status = b"200 OK" if self._proxy.is_ready else b"503 Service Unavailable"
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 5\r\n\r\nqueue")
            self._held.clear()

    async def _admit(self) -> None:
        if not self._proxy.enter_nowait():
            if self._proxy.is_full():
                self.transport.write(_FULL)
                self.transport.close()
                return
            await self._proxy.enter()
        self._has_slot = True
        if self._worker is None:
            loop = asyncio.get_running_loop()
            try:
                _, self._worker = await loop.create_connection(
                    lambda: _Worker(self), self._proxy.address, self._proxy.worker_port
                )
            except OSError:
                self.refuse(
                    f"dial tcp 127.0.0.1:{self._proxy.worker_port}: connect: connection refused"
                )
                return
        self._worker.transport.write(b"".join(self._held))
        self._held.clear()

    def refuse(self, why: str) -> None:
        """Say what Go's reverse proxy says when it does not reach the worker, or loses it."""
        body = f"{why}\n".encode()
        lines = [
            b"HTTP/1.1 502 Bad Gateway",
            b"content-type: text/plain; charset=utf-8",
            b"x-content-type-options: nosniff",
            b"content-length: %d" % len(body),
            b"connection: close",
            b"",
            body,
        ]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    @property
    def is_waiting(self) -> bool:
        """Whether a request is with the worker."""
        return self._has_slot

    def finished(self) -> None:
        """The answer is complete, or nobody wants it."""
        if self._is_inside:
            self._is_inside = False
            self._proxy.count(-1, is_proxied=self._is_proxied)
        if self._has_slot:
            self._has_slot = False
            self._proxy.leave()


class _Worker(asyncio.Protocol):
    """The connection to the worker."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._parser = httptools.HttpResponseParser(self)
        self._is_raw = self._has_begun = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The worker ended it, and so does this."""
        if self._link.is_waiting and not self._has_begun and not self._is_raw:
            self._link.refuse("EOF")
        elif exc is not None:
            self._link.transport.abort()
        else:
            self._link.transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes of answers."""
        self._has_begun = True
        self._link.transport.write(data)
        if self._is_raw:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_raw = True
        except httptools.HttpParserError:
            self._is_raw = True

    def on_message_complete(self) -> None:
        """An answer is complete, unless it only says what comes (100, 101)."""
        if self._parser.get_status_code() >= 200:
            self._has_begun = False
            self._link.finished()
