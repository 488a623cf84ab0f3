"""Knative's activator: holds requests for revisions that have no pod, tells the autoscaler at once,
and forwards to a pod that is ready.

Source of behaviour: knative/serving pkg/activator. Answers: 404 for a revision that is not there,
504 when the revision's time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pilotlight.kubernetes.kinds import POD, REVISION
from tests.fakes.knative.controllers import View
from tests.fakes.knative.queue_proxy import PORT, Load
from tests.fakes.kubernetes.http import Answer, Connection, Request

Json = dict[str, Any]
Key = tuple[str, str]
_HOP = ("connection", "keep-alive", "transfer-encoding", "upgrade", "content-length", "host")


class Activator:
    """Owner: the event loop. `poke(namespace, revision)` is called with each request; `ready_pod`
    finds an address, or None."""

    def __init__(
        self,
        view: View,
        *,
        ready_pod: Callable[[str, str], str | None],
        poke: Callable[[str, str], None],
    ) -> None:
        self._view = view
        self._ready_pod = ready_pod
        self._poke = poke
        self._loads: dict[Key, Load] = {}
        self._changed: dict[Key, asyncio.Event] = {}
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        view.on(POD, self._pod_seen)

    @property
    def url(self) -> str:
        """What `cluster.wake_url` must be."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def take_average(self, namespace: str, revision: str) -> float:
        """Requests held or forwarded, averaged since the last take."""
        load = self._loads.get((namespace, revision))
        return load.take_average() if load is not None else 0.0

    def inside(self, namespace: str, revision: str) -> int:
        """Requests held or forwarded now."""
        load = self._loads.get((namespace, revision))
        return load.inside if load is not None else 0

    def ring(self, namespace: str, revision: str) -> None:
        """A pod may have become ready."""
        event = self._changed.pop((namespace, revision), None)
        if event is not None:
            event.set()

    def _pod_seen(self, pod: Json) -> None:
        self.ring(
            pod["metadata"]["namespace"],
            (pod["metadata"].get("labels") or {}).get("serving.knative.dev/revision", ""),
        )

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._handle, self._connections, lambda: 0.0), "127.0.0.1", 0
        )

    async def stop(self) -> None:
        """Cut everything."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort()
            await self._server.wait_closed()

    async def _handle(self, request: Request) -> Answer:
        namespace = request.headers.get("knative-serving-namespace", "")
        name = request.headers.get("knative-serving-revision", "")
        revision = self._view.get(REVISION, namespace, name)
        if revision is None:
            return Answer(status=404, body=b"revision not found", content_type="text/plain")
        load = self._loads.setdefault((namespace, name), Load())
        load.add(1)
        self._poke(namespace, name)
        try:
            async with asyncio.timeout(revision["spec"].get("timeoutSeconds", 300)):
                address = await self._wait(namespace, name)
                return await _forwarded(address, request)
        except TimeoutError:
            return Answer(status=504, body=b"activator request timeout", content_type="text/plain")
        except OSError as e:
            return Answer(status=502, body=str(e).encode(), content_type="text/plain")
        finally:
            load.add(-1)
            self.ring(namespace, name)  # a slot may be free

    async def _wait(self, namespace: str, name: str) -> str:
        while True:
            event = self._changed.setdefault((namespace, name), asyncio.Event())
            address = self._ready_pod(namespace, name)
            if address is not None:
                return address
            await event.wait()


async def _forwarded(address: str, request: Request) -> Answer:
    """Small requests and answers only: what wakes a revision. Raises OSError."""
    reader, writer = await asyncio.open_connection(address, PORT)
    try:
        headers = [
            f"{name}: {value}" for name, value in request.headers.items() if name not in _HOP
        ]
        lines = [
            f"{request.method} {request.target} HTTP/1.1",
            f"host: {address}",
            "k-proxy-request: activator",
            "connection: close",
        ]
        writer.write(
            "\r\n".join([*lines, *headers, f"content-length: {len(request.body)}", "", ""]).encode()
            + request.body
        )
        whole = await reader.read()
    finally:
        writer.close()
    head, _, body = whole.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionResetError("the pod closed the connection")
    return Answer(
        status=int(head.split(b" ", 2)[1]),
        body=body if b"chunked" not in head else b"",
        content_type="application/json",
    )
