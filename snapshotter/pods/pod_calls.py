"""Passes calls of functions in pods to the activator that claimed the pod, over mutual TLS.

All pods of a tenant connect to one socket, `calls.sock` in the tenant's directory of the node. The
kernel says which pod a peer is in (`pod_process.pod_of_peer`). The agent states it to the
activators until one answers that it has claimed the pod, and then passes bytes on in both
directions. It neither parses nor keeps them.

A pod costs the agent a bounded share: connections, connections that are being opened, and bytes
between the two ends. An end that does not read stops the other."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.background_tasks import BackgroundTasks
from pilotlight.core.transport.pod_calls import PodStatement
from snapshotter.errors import Unsupported
from snapshotter.pods.activator_search import WAY_OUT, ActivatorSearch, NotConnected
from snapshotter.pods.call_ends import PodEnd
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
LOG_S = 1.0
"""Interval of the log's lines about refusals of one tenant."""
ACCEPTED_PER_S = 1000
"""Connections of one tenant's pods that are accepted in a second, on average; MAX_OF_TENANT at
once."""
_BURST_S = MAX_OF_TENANT / ACCEPTED_PER_S
_BACKLOG = 2 * MAX_OF_TENANT
"""More than may be open, so that none is turned away unanswered."""


@dataclass(eq=False, slots=True)
class _Share:
    """What one pod, or one tenant's pods, have open."""

    opening: asyncio.Semaphore
    connections: int = 0


class PodCalls:
    """Connections of all pods of this node to their activators. Owner: the event loop."""

    def __init__(
        self,
        search: ActivatorSearch,
        *,
        identify: Callable[[socket.socket], str] = pod_of_peer,
    ) -> None:
        self._search = search
        self._identify = identify
        self._pods: dict[str, _Share] = {}
        self._tenants: dict[str, _Share] = {}
        self._opening = asyncio.Semaphore(OPENED_AT_ONCE)
        self._logged_at: dict[str, float] = {}
        self._tasks = BackgroundTasks()

    def __repr__(self) -> str:
        return (
            f"<PodCalls {self._search!r}: "
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

    def begin(self, end: PodEnd) -> None:
        """Pass a new connection on, or answer why not."""
        try:
            uid = self._identify(end.socket)
            self._count(end, uid)
        except Unsupported as e:
            self._log_refusal(end, str(e))
            end.refuse(403, f"{e}; {WAY_OUT}")
        except NotConnected as e:
            self._log_refusal(end, e.detail or str(e))
            end.refuse(e.status, str(e))
        else:
            self._tasks.run(self._connect(end, uid), name=f"calls of {uid}")

    def _count(self, end: PodEnd, uid: str) -> None:
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

    def end(self, end: PodEnd) -> None:
        """Count a connection out."""
        if end.pod is None:
            return
        for shares, key in ((self._pods, end.pod), (self._tenants, end.tenant)):
            shares[key].connections -= 1
            if not shares[key].connections:
                del shares[key]

    async def _connect(self, end: PodEnd, uid: str) -> None:
        try:
            async with self._turn(self._pods[uid], self._tenants[end.tenant]):
                if not end.is_closed:
                    end.join(await self._search.find(PodStatement(end.tenant, uid)))
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

    def _log_refusal(self, end: PodEnd, why: str) -> None:
        """Log at most one refusal of a tenant in LOG_S: pods cause them as often as they like."""
        now = time.monotonic()
        if now - self._logged_at.get(end.tenant, -LOG_S) >= LOG_S:
            self._logged_at[end.tenant] = now
            _log.warning(
                "pods.calls_refused tenant=%s pod=%s why=%s", end.tenant, end.pod or "-", why
            )

    async def aclose(self) -> None:
        """End all connections."""
        await self._tasks.cancel()
        await self._search.aclose()


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
                    lambda: PodEnd(self._calls, self._tenant), connection
                )
            except OSError as e:  # too many open files, for example
                _log.error("pods.calls_not_accepted tenant=%s error=%s", self._tenant, e)
                await asyncio.sleep(1)

    def close(self) -> None:
        """Stop accepting. Connections go on."""
        self._task.cancel()
        self._listener.close()
