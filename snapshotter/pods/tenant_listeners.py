"""The directories of tenants on this node, each with a socket on which the tenant's pods announce
themselves, and one by which their functions call others (`pod_calls`).

The kubelet creates a directory for the first pod of a tenant; inotify reports it. After a restart
of the agent the sockets are created again, and pods announce themselves again and keep what they
hold; code and weights that no pod announced are removed after a delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from pilotlight.core.background_tasks import BackgroundTasks, cancel_all
from pilotlight.core.transport.calls_socket import AGENT_SOCKET, POD_CALLS_SOCKET
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.cuda.memory import MemoryReader
from snapshotter.linux.inotify import DirectoryWatch, watching
from snapshotter.pods.entry.processes import PodMounts
from snapshotter.pods.pod_calls import CallsListener, PodCalls
from snapshotter.pods.pod_process import end_proxy, present_pods
from snapshotter.pods.pod_session import MAX_LINE_BYTES, PodServices, PodSession
from snapshotter.pods.promotions import Promotions
from snapshotter.pods.restoring import PodRestores
from snapshotter.pods.tenant_mounts import HOLDER_PREFIX, WEIGHTS, PodWeights, TenantMounts
from snapshotter.pods.warm_pods import WARM, WarmListener
from snapshotter.slots.launch_plan import BundleStore
from snapshotter.types import LaunchSpec
from weight_cache.errors import WeightCacheError

_log = logging.getLogger(__name__)
MAX_PODS = 256
"""Connections of one tenant at a time; a node has 110 pods by default, 250 at most."""
SETTLE_S = 30.0
"""Delay after our start before unannounced code and weights are removed: launchers reconnect within
2 s."""
SWEEP_S = 600.0
LOOK_AGAIN_S = 60.0
"""Interval of directory scans without events: inotify drops events when too many arrive at once
(inotify(7), IN_Q_OVERFLOW)."""
ENDS_S = 10.0
"""Minimum interval of looking for queue-proxy in one pod: it costs a walk of all processes, and a
pod may say as often as it likes that its worker has ended."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


class Tenants:
    """Listeners of all tenants on this node. Owner: the event loop."""

    def __init__(
        self,
        root: Path,
        *,
        bundles: BundleStore,
        weights: PodWeights,
        services: PodServices,
        calls: PodCalls | None = None,
    ) -> None:
        """`root`: `snapshotter.pods`. `calls` None: functions in pods need a key to call others."""
        self._calls = calls
        self._services = services
        self._root = root
        self._bundles = bundles
        self._weights = weights
        self._background_tasks = BackgroundTasks()
        self._listeners: dict[str, TenantListener] = {}
        self._refreshing = asyncio.Lock()

    def __repr__(self) -> str:
        return (
            f"<Tenants {self._root} {len(self._listeners)} directories {len(self.sessions())} pods>"
        )

    def sessions(self) -> list[PodSession]:
        """Connections of all tenants' pods."""
        return [session for listener in self._listeners.values() for session in listener.sessions]

    def launches(self) -> list[LaunchSpec]:
        """What the pods have announced."""
        announced = (session.announcement for session in self.sessions())
        return [one.launch for one in announced if one is not None]

    async def listener(self, tenant: str) -> TenantListener:
        """The listener of a tenant, whose directory is made if this is its first pod here. Raises
        OSError."""
        found = self._listeners.get(tenant)
        if found is not None and found.is_current():
            return found
        directory = self._root / tenant
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
        await self.refresh()
        if (found := self._listeners.get(tenant)) is None:
            raise OSError(f"no socket can be made in {directory}")
        return found

    def tenants(self) -> tuple[str, ...]:
        """Ids of the tenants that have a directory on this node."""
        return tuple(sorted(self._listeners))

    async def refresh(self) -> None:
        """Open a listener for every tenant directory; close those whose directory was deleted or
        replaced."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        found = {
            entry.name: entry
            for entry in self._root.iterdir()
            if _TENANT.match(entry.name) and entry.name != WARM and entry.is_dir()
        }
        for name, listener in list(self._listeners.items()):
            if name not in found or not listener.is_current():
                del self._listeners[name]
                await listener.close()
        for name, directory in found.items():
            if name not in self._listeners:
                holds = TenantMounts(
                    directory,
                    bundles=self._bundles,
                    weights=self._weights,
                    background_tasks=self._background_tasks,
                )
                try:
                    self._listeners[name] = await TenantListener.open(
                        directory, holds, self._services, calls=self._calls
                    )
                except OSError as e:
                    _log.error("pods.no_door directory=%s error=%s", directory, e)

    async def follow(self, watch: DirectoryWatch) -> None:
        """Scan whenever a directory appears, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await watch.wait_changed()
            try:
                await self.refresh()
            except OSError as e:
                _log.error("pods.not_looked directory=%s error=%s", self._root, e)

    async def sweep(self) -> int:
        """Remove what no pod holds: files in directories, and leases of an earlier agent. Returns
        the count."""
        swept = 0
        for listener in list(self._listeners.values()):
            try:
                swept += await listener.holds.sweep()
            except OSError as e:
                _log.warning("pods.not_swept %r error=%s", listener, e)
        try:
            for lease in await self._weights.leases():
                tenant = lease.holder.removeprefix(HOLDER_PREFIX)
                owner = self._listeners.get(tenant)
                if tenant != lease.holder and (
                    owner is None or not owner.holds.is_held(WEIGHTS, lease.manifest)
                ):
                    await self._weights.close(lease.id)
                    swept += 1
        except WeightCacheError as e:
            _log.warning("pods.leases_not_swept error=%s", e)
        if (promotions := self._services.promotions) is not None:
            present = await asyncio.to_thread(present_pods)
            await asyncio.to_thread(promotions.sweep, present)
        if swept:
            _log.info("pods.swept things=%d", swept)
        return swept

    async def sweep_for_ever(self) -> None:
        """Sweep periodically, first after the pods of an earlier agent had time to reconnect."""
        await asyncio.sleep(SETTLE_S)
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_S)

    async def aclose(self) -> None:
        """Close the sockets. Pods continue, and what they hold remains."""
        for listener in self._listeners.values():
            listener.holds.detach()
        for listener in self._listeners.values():
            await listener.close()
        self._listeners.clear()
        await self._background_tasks.aclose()


class TenantListener:
    """One tenant's directory and socket. Owner: the event loop."""

    def __init__(
        self,
        directory: Path,
        holds: TenantMounts,
        services: PodServices,
    ) -> None:
        self._services = services
        self._directory = directory
        self._identity = _identity(directory)
        self._tasks: dict[asyncio.Task[None], PodSession] = {}
        self._server: asyncio.Server | None = None
        self._calls: CallsListener | None = None
        self._ended_at: dict[str, float] = {}
        self._looking = asyncio.Lock()
        self.holds = holds

    def __repr__(self) -> str:
        return f"<TenantListener {self._directory} {len(self._tasks)} pods>"

    @classmethod
    async def open(
        cls,
        directory: Path,
        holds: TenantMounts,
        services: PodServices,
        *,
        calls: PodCalls | None,
    ) -> TenantListener:
        """Listen in the directory, replacing the sockets of an earlier agent. Raises OSError."""
        listener = cls(directory, holds, services)
        if calls is not None:  # before a pod can announce itself, and serve
            listener._calls = calls.listen(directory / POD_CALLS_SOCKET, directory.name)
        path = directory / AGENT_SOCKET
        path.unlink(missing_ok=True)
        listener._server = await asyncio.start_unix_server(
            listener.serve, path, limit=MAX_LINE_BYTES
        )
        # the kernel identifies the peer, and only the tenant's pods see the directory
        path.chmod(0o666)
        return listener

    @property
    def directory(self) -> Path:
        """The tenant's directory."""
        return self._directory

    @property
    def sessions(self) -> list[PodSession]:
        """Connections of the tenant's pods."""
        return list(self._tasks.values())

    def is_current(self) -> bool:
        """Whether directory and socket are still the ones that were opened."""
        try:
            return (
                _identity(self._directory) == self._identity
                and (self._directory / AGENT_SOCKET).is_socket()
            )
        except FileNotFoundError:
            return False

    async def close(self) -> None:
        """Close the pods' connections, and stop listening. Calls of functions go on."""
        for server in (self._server, self._calls):
            if server is not None:
                server.close()
        await cancel_all(self._tasks)
        if self.is_current():
            (self._directory / AGENT_SOCKET).unlink(missing_ok=True)
            (self._directory / POD_CALLS_SOCKET).unlink(missing_ok=True)

    async def serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: bytes = b"",
        phases_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Serve a connection to its end. `line`, `phases_ms`: of a pod that was promoted."""
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= MAX_PODS:
            _log.warning("pods.too_many %r bound=%d", self, MAX_PODS)
            writer.close()
            return
        session = PodSession(
            reader,
            writer,
            tenant=self._directory.name,
            holds=self.holds,
            services=self._services,
            own_uid=os.geteuid(),
            line=line,
            phases_ms=phases_ms,
        )
        self._tasks[task] = session
        try:
            await session.run()
            if session.has_ended and session.uid is not None:
                await self._end_proxy(session.uid)
        except asyncio.CancelledError:
            return  # shutdown; the task of the stream would log it
        finally:
            del self._tasks[task]

    async def _end_proxy(self, pod: str) -> None:
        """End Knative's queue-proxy in a pod whose worker has ended: it would hold the pod, and its
        GPUs, for 30 s, if the pod is being deleted; else the kubelet starts both again. One pod of
        the tenant at a time."""
        now = time.monotonic()
        self._ended_at = {uid: at for uid, at in self._ended_at.items() if now - at < ENDS_S}
        if pod in self._ended_at:
            return
        self._ended_at[pod] = now
        async with self._looking:
            count = await asyncio.to_thread(end_proxy, pod)
        _log.info("pods.proxy_ended tenant=%s pod=%s count=%d", self._directory.name, pod, count)


@contextlib.asynccontextmanager
async def open_tenants(
    root: Path,
    *,
    bundles: BundleStore,
    weights: PodWeights,
    memory: MemoryReader,
    restores: PodRestores | None = None,
    grants: LaunchSigner | None = None,
    calls: PodCalls | None = None,
    promotions: Promotions | None = None,
    mounts: PodMounts | None = None,
) -> AsyncIterator[Tenants]:
    """Serve while the context lasts. Without `promotions` and `mounts`, or if documents are not
    signed, there are no warm pods. Raises OSError when `root` cannot be created or watched."""
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o755)
    services = PodServices(memory=memory, restores=restores, grants=grants, promotions=promotions)
    tenants = Tenants(root, bundles=bundles, weights=weights, services=services, calls=calls)
    warm: WarmListener | None = None
    with watching(root) as watch:
        await tenants.refresh()
        if promotions is not None and grants is not None and mounts is not None:
            warm = WarmListener(root / WARM, tenants, promotions, grants, show=mounts.show)
            await warm.open()
        tasks = [
            asyncio.create_task(tenants.follow(watch), name="follow tenants' directories"),
            asyncio.create_task(tenants.sweep_for_ever(), name="sweep tenants' directories"),
        ]
        try:
            yield tenants
        finally:
            await cancel_all(tasks)
            if warm is not None:
                await warm.close()
            await tenants.aclose()


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino
