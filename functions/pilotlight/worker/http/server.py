"""The instance's HTTP server: uvicorn's protocol on the inherited listener, in our own uvloop event
loop.

It uses uvicorn's Config and protocol classes, but not its Server, which polls ten times a second
and installs its own signal handlers. The constructor creates everything that can exist before the
snapshot (configuration, route table, binders); after a fork only the event loop is created and the
listener attached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from pilotlight.core.transport.calls_socket import INSTANCE_VARIABLE
from pilotlight.errors import NotFound
from pilotlight.protocol import (
    CONTENT_JSON,
    WORKER_ASGI,
    WORKER_END,
    WORKER_HEALTH,
    WORKER_INVOKE,
    WORKER_SANDBOX,
    WORKER_STATUS,
)
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.policies import Objectives
from pilotlight.worker.http.calls import Calls, no_method
from pilotlight.worker.http.connection import Connection
from pilotlight.worker.http.http_responses import send_json, send_problem
from pilotlight.worker.http.listener import serve_listener
from pilotlight.worker.snapshot import hooks
from pilotlight.worker.status import InstanceStatus
from pilotlight.worker.user_code import serialization, user_errors
from pilotlight.worker.user_code.asgi import WebApplication
from pilotlight.worker.user_code.target import Method, Target

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable

BACKLOG = 2048
"""Connections that wait in the kernel during the start; the activator opens at most `max_inputs`
plus a few."""
_HEALTH = b"GET %s HTTP/1.1\r\nHost: worker\r\n\r\n" % WORKER_HEALTH.encode()


class Server:
    """Serves one target. Created before the snapshot; `prepare`, `wake` and `run` are called once,
    in the instance."""

    def __init__(self, target: Target, spec: FunctionSpec) -> None:
        self._target = target
        slow_s = (spec.objectives or Objectives()).warm_latency_s
        self._calls = Calls(target.methods, max_inputs=spec.scaling.max_inputs, slow_s=slow_s)
        self._web = target.web
        self._sandbox: Callable[..., Awaitable[None]] | None = None
        if spec.sandbox:
            from pilotlight.worker.http.sandbox_requests import SandboxServer
            from pilotlight.worker.sandbox import lifetime

            self._sandbox = SandboxServer(lifetime.SANDBOX).answer
            lifetime.SANDBOX.on_end = self._end
        startup_s = spec.clocks.startup_s
        self._hook_s = min(hooks.HOOK_S, startup_s) if spec.snapshot else startup_s
        self._application: WebApplication | None = None
        self._standing = InstanceStatus()
        self._state = ServerState()
        self._config = _config(self._answer, websockets=self._web is not None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting: list[asyncio.AbstractServer] = []
        self._changed = asyncio.Event()
        self._draining = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Server connections={len(self._state.connections)} {self._calls!r}>"

    def _end(self) -> None:
        """Drain: the sandbox of this instance has ended."""
        self._draining.set()

    def rehearse(self) -> None:
        """Create an event loop and send one request to this server before the snapshot, so that
        lazily initialized state is in the shared pages."""
        self.prepare()
        try:
            self._running_loop.run_until_complete(self._request_self())
        finally:
            self._running_loop.close()
            self._loop = None
            asyncio.set_event_loop(None)

    def serve_examples(self, examples: Mapping[str, Method]) -> None:
        """Send the examples of methods to this server, as calls; the answers are discarded. Call
        `prepare` first."""
        for name, method in examples.items():
            if name in self._target.methods:
                body = serialization.as_json(hooks.example_document(method.example))
                path = WORKER_INVOKE + urllib.parse.quote(name, safe="")
                request = (
                    f"POST {path} HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n"
                    f"Content-Type: {CONTENT_JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                self._running_loop.run_until_complete(self._request_self(request.encode() + body))

    async def _request_self(self, request: bytes = _HEALTH) -> None:
        """`request`: read the answer to its end where it says `Connection: close`."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            await self._running_loop.connect_accepted_socket(self._connection, theirs)
            await self._running_loop.sock_sendall(ours, request)
            while await self._running_loop.sock_recv(ours, 65536) and request is not _HEALTH:
                pass
        while self._state.connections:
            self._changed.clear()
            await self._changed.wait()

    def prepare(self) -> None:
        """Create the event loop: the part of the wake that needs neither the instance's cgroup nor
        its environment."""
        self._loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self._loop)
        # an event belongs to the loop in which it was first awaited
        self._changed, self._draining = asyncio.Event(), asyncio.Event()

    def prepare_first_call(self) -> None:
        """Create, in a parked fork, what the first call needs, except user code."""
        self._calls.make_thread(self._running_loop)
        self._running_loop.run_until_complete(self._request_self())

    def wake(self, listener: socket.socket, standing: InstanceStatus) -> None:
        """Run enter(snap=False), build a web application, and accept on the listener. Raises what
        user code raises."""
        self._standing = standing
        self._running_loop.run_until_complete(self._wake(listener))

    def run(self, *, on_ready: Callable[[], None], shim: int) -> None:
        """Serve until SIGTERM or until the shim disconnects, finish in-flight calls, then run the
        exit hooks.

        Args:
            on_ready: called once, when connections are accepted.
            shim: the control channel; when it closes, this process has no owner and drains.
        """
        self._running_loop.run_until_complete(self._serve(on_ready, shim))

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the server has no event loop: call prepare() first")
        return self._loop

    async def _wake(self, listener: socket.socket) -> None:
        loop = self._running_loop
        loop.add_signal_handler(signal.SIGTERM, self._draining.set)
        await hooks.run_after_wake(self._target.enter_after_wake, each_s=self._hook_s)
        if self._web is not None:
            await self._web.startup()
            self._application = self._web
        if self._target.features is not None:
            self._target.features.open(os.environ)
        self._accepting.append(
            await serve_listener(loop, self._connection, listener, backlog=BACKLOG)
        )

    async def _serve(self, on_ready: Callable[[], None], shim: int) -> None:
        with end_of(shim) as end:
            self._running_loop.add_reader(end, self._draining.set)
            on_ready()
            await self._draining.wait()
            self._running_loop.remove_reader(end)
        await self._drain()

    async def _drain(self) -> None:
        """Stop accepting, wait for in-flight calls, then run the user's clean-up, which may close
        what in-flight calls use."""
        for server in self._accepting:
            server.close()
        self._calls.drain(on_end=self._changed.set)
        for connection in list(self._state.connections):
            connection.shutdown()
        while self._state.connections or self._state.tasks or self._calls.running:
            self._changed.clear()
            await self._changed.wait()
        for step in (self._shut_down_application, self._run_exit_hooks):
            try:
                await step()
            except (
                BaseException
            ) as e:  # user code: a failed clean-up is logged and must not stop the exit
                user_errors.report(e)

    async def _shut_down_application(self) -> None:
        if self._application is not None:
            await self._application.shutdown()

    async def _run_exit_hooks(self) -> None:
        await hooks.run_after_wake(self._target.exit, each_s=hooks.HOOK_S)

    def _connection(self) -> Connection:
        return Connection(
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=self._loop,
            begin=None if self._web is not None else self._calls.begin,
            on_closed=self._changed.set,
        )

    async def _answer(
        self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        path: str = scope["path"]
        try:
            if self._application is not None and (
                path == WORKER_ASGI or path.startswith(WORKER_ASGI + "/")
            ):
                await self._application(scope, receive, send)
            elif (
                self._sandbox is not None
                and path.startswith(WORKER_SANDBOX + "/")
                and scope["type"] == "http"
            ):
                await self._sandbox(scope, receive, send)
            elif path == WORKER_HEALTH and scope["type"] == "http":
                await self._answer_health(send)
            elif path == WORKER_STATUS and scope["type"] == "http":
                await send_json(send, self._standing.as_json(running=self._calls.running))
            elif path == WORKER_END and scope["type"] == "http" and scope["method"] == "POST":
                self._draining.set()
                await send_json(send, b"{}")
            elif scope["type"] == "http":
                await send_problem(send, self._nothing_at(path))
            else:
                await send(
                    {
                        "type": "websocket.close",
                        "code": 1008,
                        "reason": "this function has no WebSocket",
                    }
                )
        finally:
            if self._draining.is_set():
                # after uvicorn has removed this task from its list
                self._running_loop.call_soon(self._changed.set)

    def _nothing_at(self, path: str) -> NotFound:
        if path.startswith(WORKER_INVOKE) and self._application is None:
            return no_method(path)
        return NotFound(f"this function serves nothing at {path!r}")

    async def _answer_health(self, send: ASGISendCallable) -> None:
        body = {"instance": os.environ.get(INSTANCE_VARIABLE, ""), "running": self._calls.running}
        await send_json(send, serialization.as_json(body))


def _config(app: Any, *, websockets: bool) -> Config:
    protocol: Any = None
    if websockets:
        from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

        protocol = WSProtocol
    config = Config(
        app,
        http=Connection,
        ws=protocol,
        lifespan="off",  # we run it ourselves: once per instance, with errors as data
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    config.load()
    return config


@contextlib.contextmanager
def end_of(descriptor: int) -> Any:
    """A descriptor that becomes readable when the peer of `descriptor` closes, and not when data
    arrives (epoll(7))."""
    epoll = select.epoll()
    try:
        epoll.register(descriptor, select.EPOLLRDHUP)
        yield epoll.fileno()
    finally:
        epoll.close()
