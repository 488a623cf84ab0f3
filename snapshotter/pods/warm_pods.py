"""Warm pods of this node: the directory `warm`, its socket, and promotion.

    <node_path>/warm/agent.sock      all that a warm pod sees of its node

    warm pod: announce (warm) → warm … announce (launch document) → promotion:
        document verified → marker written (`promotions`) → the tenant's directory mounted over
        the warm one, inside the pod (`entry.processes`) → from then on a pod of that tenant

No tenant's code runs in a pod before its promotion, and afterwards the pod sees its tenant's
directory and socket. Whatever connects to this socket all the same is a pod that the kernel
identifies, and gets the one document that it was promoted to."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from socket import socket
from typing import Any, Protocol

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.transport.calls_socket import AGENT_SOCKET
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.errors import SnapshotterError
from snapshotter.pods.pod_process import peer_pidfd, pod_of_peer, require_own_namespaces
from snapshotter.pods.pod_session import (
    ANNOUNCE_S,
    MAX_LINE_BYTES,
    parsed_line,
    refuse,
    send,
    uid_of_peer,
)
from snapshotter.pods.promotions import Promotions
from snapshotter.pods.registration import Announcement, NotAdmitted
from snapshotter.types import TENANT_LABEL

_log = logging.getLogger(__name__)
WARM = "warm"
"""Name of the directory, beside those of tenants; ids of tenants begin with `t-`."""
MAX_PODS = 256
"""Connections at a time; a node has 110 pods by default, 250 at most."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


class TenantConnections(Protocol):
    """The attributes of `tenant_listeners.TenantListener` that are used."""

    @property
    def directory(self) -> Path: ...

    async def serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: bytes = b"",
        phases_ms: Mapping[str, float] | None = None,
    ) -> None: ...


class TenantDirectories(Protocol):
    """The method of `tenant_listeners.Tenants` that is used."""

    async def listener(self, tenant: str) -> TenantConnections: ...


Show = Callable[[int, Path, Path], Awaitable[None]]


class WarmListener:
    """The warm directory's socket. Owner: the event loop."""

    def __init__(
        self,
        directory: Path,
        tenants: TenantDirectories,
        promotions: Promotions,
        grants: LaunchSigner,
        *,
        show: Show,
        identify: Callable[[socket], str] = pod_of_peer,
    ) -> None:
        """`show`: `entry.processes.PodMounts.show`."""
        self._directory = directory
        self._tenants = tenants
        self._promotions = promotions
        self._grants = grants
        self._identify = identify
        self._show = show
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._warm = 0

    def __repr__(self) -> str:
        return f"<WarmListener {self._directory} {self._warm} warm>"

    async def open(self) -> None:
        """Listen, replacing the socket of an earlier agent. Raises OSError."""
        self._directory.mkdir(exist_ok=True)
        self._directory.chmod(0o755)
        path = self._directory / AGENT_SOCKET
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._on_pod, path, limit=MAX_LINE_BYTES)
        path.chmod(0o666)  # the kernel identifies the peer

    async def close(self) -> None:
        """Stop listening, and close all connections, those of promoted pods included: they
        reconnect to their tenant's socket."""
        if self._server is not None:
            self._server.close()
        await cancel_all(self._tasks)
        (self._directory / AGENT_SOCKET).unlink(missing_ok=True)

    async def _on_pod(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= MAX_PODS:
            _log.warning("pods.too_many %r bound=%d", self, MAX_PODS)
            writer.close()
            return
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except SnapshotterError as e:
            await refuse(writer, WARM, e.code, str(e))
        except ConnectionError as e:
            _log.debug("pods.cut_off tenant=%s error=%s", WARM, e)
        except OSError as e:  # TimeoutError is one
            await refuse(writer, WARM, "node_failed", f"this pod cannot be promoted: {e}")
        except (ValueError, asyncio.IncompleteReadError) as e:
            _log.warning("pods.not_understood tenant=%s error=%s", WARM, e)
        except asyncio.CancelledError:
            return  # shutdown; the task of the stream would log it
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pod = self._identify(writer.get_extra_info("socket"))
        async with asyncio.timeout(ANNOUNCE_S):
            line = await reader.readline()
        if "launch" not in parsed_line(line):
            line = await self._wait(pod, reader, writer)
        if not line:
            return
        began = time.perf_counter()
        tenant_pods = await self._promote(pod, line, writer)
        phases_ms = {"promote": round((time.perf_counter() - began) * 1000, 3)}
        await tenant_pods.serve(reader, writer, line, phases_ms)

    async def _wait(
        self, pod: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """The line that follows while the pod is warm; b"" when it has ended. Raises
        NotAdmitted."""
        if self._promotions.is_promoted(pod):
            raise NotAdmitted(
                f"pod {pod} was promoted before, and its container has started again: it never "
                f"gets another launch document"
            )
        self._warm += 1
        _log.info("pods.warm pod=%s", pod)
        send(writer, {"op": "warm"})
        try:
            return await reader.readline()
        finally:
            self._warm -= 1

    async def _promote(
        self, pod: str, line: bytes, writer: asyncio.StreamWriter
    ) -> TenantConnections:
        """Make the pod one of the document's tenant. Raises NotAdmitted, Unsupported, OSError."""
        message = parsed_line(line)
        connection = writer.get_extra_info("socket")
        announced = Announcement.of(
            message,
            tenant=_tenant_of(message),
            uid=uid_of_peer(connection),
            own_uid=os.geteuid(),
            grants=self._grants,
        )
        pidfd = peer_pidfd(connection)
        try:
            require_own_namespaces(pidfd)
            await asyncio.to_thread(self._promotions.record, announced, pod)
            found = await self._tenants.listener(announced.launch.labels[TENANT_LABEL])
            await self._show(pidfd, self._directory, found.directory)
        finally:
            os.close(pidfd)
        _log.info("pods.promoted pod=%s revision=%s", pod, announced.launch.revision)
        return found


def _tenant_of(message: Mapping[str, Any]) -> str:
    """The tenant that a document names, which becomes part of a path once its signature was
    verified. Raises NotAdmitted."""
    try:
        tenant = message["launch"]["labels"][TENANT_LABEL]
    except (KeyError, TypeError):
        tenant = None
    if not isinstance(tenant, str) or not _TENANT.match(tenant) or tenant == WARM:
        raise NotAdmitted("the launch document names no tenant")
    return tenant
