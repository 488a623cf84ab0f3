"""Pods' logs: what the node's kubelet serves, or what a test put here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from tests.fakes.kubernetes.http import Answer
from tests.fakes.kubernetes.problems import Refused

Json = dict[str, Any]
_PASSED_ON = (
    "follow",
    "tailLines",
    "previous",
    "timestamps",
    "sinceSeconds",
    "sinceTime",
    "limitBytes",
)


class Logs:
    """Reads logs. `texts`: by (namespace, pod, container), for pods without a kubelet.
    `node(name)`: the node's object."""

    def __init__(self, node: Callable[[str], Json | None]) -> None:
        self.texts: dict[tuple[str, str, str], str] = {}
        self._node = node

    async def read(self, pod: Json, query: Mapping[str, str]) -> Answer:
        """GET pods/…/log. Raises Refused 400 where there is no such container, or none that
        runs."""
        metadata, containers = (
            pod["metadata"],
            [container["name"] for container in pod["spec"]["containers"]],
        )
        container = query.get("container") or containers[0]
        if container not in containers:
            raise Refused(400, f"container {container} is not valid for pod {metadata['name']}")
        text = self.texts.get((metadata["namespace"], metadata["name"], container))
        if text is not None:
            return Answer(body=_tail(text, query).encode(), content_type="text/plain")
        kubelet = self._kubelet(pod)
        if kubelet is None:
            phase = pod.get("status", {}).get("phase")
            raise Refused(
                400,
                f'container "{container}" in pod "{metadata["name"]}" is waiting to start: {phase}',
            )
        passed = urlencode({key: query[key] for key in _PASSED_ON if key in query})
        path = f"/containerLogs/{metadata['namespace']}/{metadata['name']}/{container}?{passed}"
        return await _relayed(*kubelet, path)

    def _kubelet(self, pod: Json) -> tuple[str, int] | None:
        node = self._node(pod["spec"].get("nodeName") or "")
        status = (node or {}).get("status", {})
        port = status.get("daemonEndpoints", {}).get("kubeletEndpoint", {}).get("Port")
        address = next(
            (
                one["address"]
                for one in status.get("addresses") or ()
                if one["type"] == "InternalIP"
            ),
            None,
        )
        return (address, port) if address and port else None


def _tail(text: str, query: Mapping[str, str]) -> str:
    count = query.get("tailLines")
    return (
        "".join(text.splitlines(keepends=True)[-int(count) :]) if count and int(count) > 0 else text
    )


async def _relayed(host: str, port: int, path: str) -> Answer:
    """What a kubelet answers, passed on as it comes; HTTP/1.0, so that the end of the connection is
    the end of the text."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as e:
        raise Refused(500, f"Get https://{host}:{port}{path}: {e}") from e
    writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if head.split(b" ", 2)[1] != b"200":
        text = (await reader.read()).decode(errors="replace")
        writer.close()
        raise Refused(400, text or "the kubelet refused")

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while piece := await reader.read(65536):
                yield piece
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return Answer(stream=pieces(), content_type="text/plain", on_close=writer.close)
