"""The sockets by which functions call other functions: a Unix socket for each instance on this
machine, in its slot, served by the activator that leases the instance. The connections of an
instance in a pod are passed on by the node agent (`pod_connections`), and served alike.

The node agent makes the directory in the slot (`snapshotter.slots.sockets.make_calls_directory`);
only the slot and activators can enter it. The kernel's uid of each peer is checked as well.
Connections are bounded for an instance and for its tenant, and bodies, quotas and queues as for
every caller, so that an instance cannot exhaust the activator. All instances share one HTTP server
configuration, without the fast path: calls of functions have a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from activator.balancing.instance import Instance
from activator.gateway.calls_by_functions import CallsByFunctions
from activator.http.connection_limits import ConnectionLimits
from activator.http.server import ClientConnection
from activator.routing.api_keys import FUNCTION_KEY, FunctionPrincipal
from activator.routing.call_target import CallTarget
from activator.worker_client.address import is_tcp
from pilotlight.core.rpc import peer_uid
from pilotlight.core.transport.calls_socket import CALLS_DIRECTORY, calls_socket

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Open connections of one instance: eight maps with the default concurrency of 64."""
_BACKLOG = 2 * MAX_CONNECTIONS
"""Connections that wait to be accepted: more than an instance may have, so that none is turned away
unanswered."""


class CallingInstance:
    """An instance whose function may call others. Owner: the event loop.

    Attributes:
        caller: the function as a caller.
        connections: number of open connections.
        bucket: under what its connections are counted with those of its tenant; "" = by the peer's
            uid."""

    def __init__(
        self, sockets: InstanceSockets, target: CallTarget, instance: Instance, *, bucket: str = ""
    ) -> None:
        self.target = target
        self.instance = instance
        self.caller = FunctionPrincipal(f"{FUNCTION_KEY}{target.name}")
        self.connections = 0
        self.bucket = bucket
        self._sockets = sockets

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.instance.id} {self.connections} connections>"

    def is_peer(self, transport: asyncio.BaseTransport) -> bool:
        """Return whether the peer of a connection is the instance: that of a pod was checked before
        it was accepted."""
        return True

    def instances_in_pod(self, ids: Iterable[str]) -> Sequence[Instance]:
        """Those of these instances that take calls."""
        found = (self._sockets.in_pod(instance_id) for instance_id in ids)
        return [one.instance for one in found if one is not None]

    def close(self) -> None:
        """Stop accepting connections; requests in progress go on. Idempotent."""
        self._sockets.forget(self)


class InstanceSocket(CallingInstance):
    """The socket of one instance in a slot. Owner: the event loop."""

    def __init__(self, sockets: InstanceSockets, target: CallTarget, instance: Instance) -> None:
        super().__init__(sockets, target, instance)
        self._path = calls_socket(Path(instance.info.socket).parent / CALLS_DIRECTORY, instance.id)
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._is_closed = False

    def open(self) -> None:
        """Listen. Connections queue until the server accepts them. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # left by an earlier process
            listener.bind(self._path)
            is_apart = self.target.launch.uid not in (None, os.geteuid())
            os.chmod(self._path, 0o666 if is_apart else 0o600)  # its directory limits access
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.get_running_loop().create_task(
            self._accept(listener), name=f"calls of {self.instance.id}"
        )

    async def _accept(self, listener: socket.socket) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: self._sockets.connection(self), sock=listener, backlog=_BACKLOG
        )

    def is_peer(self, transport: asyncio.BaseTransport) -> bool:
        """Return whether the peer is a process of the instance's slot, by the uid that the kernel
        reports."""
        peer = transport.get_extra_info("socket")
        uid = self.target.launch.uid
        return peer is not None and peer_uid(peer) == (os.geteuid() if uid is None else uid)

    def close(self) -> None:
        """Stop accepting connections; requests in progress go on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        super().close()
        if self._server is not None:
            self._server.close()
        elif self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            self._listener.close()
        with contextlib.suppress(OSError):  # the slot's directory may be gone
            os.unlink(self._path)


class InstanceSockets:
    """The sockets of all instances that this activator leases. Owner: the event loop."""

    def __init__(
        self,
        calls: CallsByFunctions,
        *,
        max_per_tenant: int,
        max_head_bytes: int,
        head_timeout_s: float,
    ) -> None:
        """`max_per_tenant`: connections of all instances of one tenant."""
        self.limits = ConnectionLimits[ClientConnection](
            max_per_address=max_per_tenant,
            max_head_bytes=max_head_bytes,
            head_timeout_s=head_timeout_s,
        )
        self._config = Config(
            calls,
            loop="none",
            http=FunctionConnection.bound_to(self.limits),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        self._config.load()
        self._state = ServerState()
        self._open: dict[str, CallingInstance] = {}

    def __repr__(self) -> str:
        return f"<InstanceSockets {len(self._open)} open, {len(self._state.tasks)} requests>"

    def listen(self, target: CallTarget, instance: Instance) -> None:
        """Serve the calls of an instance until it is gone; no effect for one in a slot without
        access to the platform."""
        where = instance.info.socket
        if (before := self._open.get(instance.id)) is not None:
            before.close()
        own: CallingInstance
        if is_tcp(where):
            own = CallingInstance(self, target, instance, bucket=f"tenant-{target.tenant}")
        elif (Path(where).parent / CALLS_DIRECTORY).is_dir():
            own = in_slot = InstanceSocket(self, target, instance)
            try:
                in_slot.open()
            except OSError as e:
                log.error("instance cannot call functions instance=%s error=%s", instance.id, e)
                return
        else:
            return
        self._open[instance.id] = own
        instance.on_gone = own.close

    def in_pod(self, instance_id: str) -> CallingInstance | None:
        """Return the instance whose pod has opened a connection; None when it takes no calls."""
        return self._open.get(instance_id)

    def forget(self, own: CallingInstance) -> None:
        """Remove a socket that was closed."""
        if self._open.get(own.instance.id) is own:
            del self._open[own.instance.id]

    def connection(
        self, own: CallingInstance, mates: Callable[[], Iterable[str]] = tuple
    ) -> ClientConnection:
        """Return the protocol of a new connection. `mates`: see FunctionConnection."""
        protocol: Any = self._config.http_protocol_class
        connection: FunctionConnection = protocol(
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )
        connection.own, connection.mates = own, mates
        return connection

    async def aclose(self) -> None:
        """Close all sockets and connections. Call after the last call of a function was
        answered."""
        for own in list(self._open.values()):
            own.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FunctionConnection(ClientConnection):
    """One connection of an instance."""

    own: CallingInstance
    mates: Callable[[], Iterable[str]] = tuple
    """Ids of the instances in the pod that connected, which may have several; () = its own."""

    @property
    def instance(self) -> Instance:
        """The instance that connected."""
        return self.own.instance

    @property
    def instances(self) -> Sequence[Instance]:
        """Those of which one connected: in a pod, the processes of all connect alike."""
        return self.own.instances_in_pod(self.mates()) or (self.own.instance,)

    @property
    def target(self) -> CallTarget:
        """Its revision."""
        return self.own.target

    @property
    def caller(self) -> FunctionPrincipal:
        """Its function, as a caller."""
        return self.own.caller

    def counted_as(self) -> str:
        """The tenant: all pods of a node connect from the address of its agent."""
        return self.own.bucket or super().counted_as()

    def admit(self) -> None:
        """Accept a connection of the instance, within its limit."""
        self.own.connections += 1
        if not self.own.is_peer(self.transport):
            log.warning("connection refused: not of the slot instance=%s", self.instance.id)
            self.transport.abort()
        elif self.own.connections > MAX_CONNECTIONS:
            self.limits.refused += 1
            self.refuse(b"503 Service Unavailable", b"too many connections of this instance\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out."""
        self.own.connections -= 1
        super().connection_lost(exc)
