"""The server of an instance that runs a server of its own, to whose socket it proxies each
connection. It serves until SIGTERM, until the shim disconnects, or until that server dies."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import uvloop

from pilotlight.worker.engine.client import Address
from pilotlight.worker.engine.errors import ServerDied
from pilotlight.worker.engine.one_request import OneRequest
from pilotlight.worker.engine.process_tree import ExitWatcher
from pilotlight.worker.engine.tcp_proxy import END_QUESTION, STATUS_QUESTION, ProxyPair, ProxySide
from pilotlight.worker.http.listener import serve_listener
from pilotlight.worker.http.server import BACKLOG, end_of
from pilotlight.worker.status import InstanceStatus

QUIET_S = 0.1
"""A connection that was quiet for this long, while the engine runs no request, carries no call."""
SILENT_S = 5.0
"""The same if the engine does not report its requests: longer than a token takes."""
_LOOK_S = 0.1
"""Polling interval while draining: the engine reports a number of requests, not an event."""
_IN_FLIGHT = re.compile(
    rb"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE
)


class SpliceServer:
    """Server of such an instance. Owner: the worker's main thread; `wake` and `run` are called
    once."""

    def __init__(
        self,
        address: Address,
        standing: InstanceStatus | None = None,
        *,
        noun: str = "engine",
        is_engine: bool = True,
    ) -> None:
        """`address`: of the server; `standing`: the status served at WORKER_STATUS; `noun`: what
        messages call the server; `is_engine`: whether a connection carries any number of requests,
        which the server counts, or one."""
        self._address = address
        self._noun = noun
        self._is_engine = is_engine
        self._standing = standing or InstanceStatus()
        self._loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._pairs: set[ProxyPair] = set()
        self._accepting: Any = None
        self._ending = asyncio.Event()
        self._answers = {STATUS_QUESTION: self._status, END_QUESTION: self._end}
        self._dead: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<SpliceServer pairs={len(self._pairs)}>"

    def wake(self, listener: socket.socket) -> None:
        """Accept on the listener."""
        self._loop.run_until_complete(self._wake(listener))

    def run(self, *, on_ready: Callable[[], None], shim: int, deaths: ExitWatcher) -> None:
        """Serve; returns when drained. Raises ServerDied if the server ended.

        Args:
            on_ready: called once, when connections are accepted.
            shim: the control channel; when it closes, this process has no owner and drains.
            deaths: readable when a process of the server has ended.
        """
        self._loop.run_until_complete(self._serve(on_ready, shim, deaths))

    async def _wake(self, listener: socket.socket) -> None:
        self._loop.add_signal_handler(signal.SIGTERM, self._ending.set)
        self._accepting = await serve_listener(self._loop, self._accept, listener, backlog=BACKLOG)

    def _accept(self) -> ProxySide:
        pair = ProxyPair(
            self._address,
            self._loop,
            self._pairs.discard,
            self._answers,
            edits=None if self._is_engine else OneRequest(),
            on_refused=self._refused,
        )
        self._pairs.add(pair)
        return pair.caller

    def _status(self) -> bytes:
        """The status; a connection whose caller sent the most recent bytes is a running call, as is
        one that carries its only request."""
        running = sum(
            pair.is_asking() if self._is_engine else pair.last is not None for pair in self._pairs
        )
        return self._standing.as_json(running=running)

    def _end(self) -> bytes:
        self._ending.set()
        return b"{}"

    async def _serve(self, on_ready: Callable[[], None], shim: int, deaths: ExitWatcher) -> None:
        with end_of(shim) as end:
            self._loop.add_reader(end, self._ending.set)
            self._loop.add_reader(deaths.fileno(), self._die, deaths)
            on_ready()
            await self._ending.wait()
            self._loop.remove_reader(end)
            await self._drain()
            self._loop.remove_reader(deaths.fileno())
        if self._dead:
            raise ServerDied(f"the {self._noun} died: {', '.join(self._dead)} ended")

    def _refused(self) -> None:
        self._dead = self._dead or ("its listener",)
        self._ending.set()

    def _die(self, deaths: ExitWatcher) -> None:
        """Close all connections if the server died; pending bytes still go out."""
        names = deaths.names()
        if not names:
            return
        self._loop.remove_reader(deaths.fileno())
        self._dead = tuple(names)
        for pair in list(self._pairs):
            pair.close()
        self._ending.set()

    async def _drain(self) -> None:
        """Stop accepting, then wait for in-flight requests. A connection that carries one request
        ends with it. Those of an engine are not parsed: a connection has a request in flight if its
        caller sent the most recent bytes, or has not read all of the response. The other
        connections may be in the middle of a response; the engine's own count of requests tells
        when none is."""
        self._accepting.close()
        while self._pairs and not self._dead:
            if not self._is_engine:
                if all(pair.last is None for pair in self._pairs):
                    break
            elif (
                not any(pair.is_asking() or pair.is_behind() for pair in self._pairs)
                and await self._is_idle()
            ):
                break
            await asyncio.sleep(_LOOK_S)
        for pair in list(self._pairs):
            pair.close()
        await asyncio.sleep(0)  # lets closed transports call connection_lost

    async def _is_idle(self) -> bool:
        """Whether the engine runs no request and no bytes have moved for a while."""
        counts = await self._counts()
        quiet_s = time.monotonic() - max((pair.moved_at for pair in self._pairs), default=0.0)
        return not any(counts) and quiet_s > (QUIET_S if counts else SILENT_S)

    async def _counts(self) -> list[float]:
        """Running and waiting requests as the engine reports them; empty if it does not."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._address))
        except OSError:
            return []
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(_LOOK_S * 50):
                return [float(value) for value in _IN_FLIGHT.findall(await reader.read())]
        except (OSError, TimeoutError):
            return []
        finally:
            writer.close()
