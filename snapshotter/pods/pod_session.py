"""The connection of one pod, from its announcement to its end.

    announce → (wait)* → cold → ready → …
                   └→ refused: the connection is closed

Code and weights are held until the connection ends: it also ends when a pod is evicted or killed,
or its node is drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.yield_budget import YieldBudget
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.cuda.memory import MemoryReader
from snapshotter.errors import SnapshotterError, Unsupported
from snapshotter.gpus.view import GpuHolder
from snapshotter.pods import gpus
from snapshotter.pods.entered_worker import Returned
from snapshotter.pods.pod_process import pod_of_peer
from snapshotter.pods.promotions import POD_LABEL, Promotions
from snapshotter.pods.registration import Announcement, NotAdmitted
from snapshotter.pods.restoring import PodRestores
from snapshotter.pods.tenant_mounts import TenantMounts
from snapshotter.types import GpuDevice, GpuGrant, InstanceState, StartKind
from weight_cache.errors import WeightCacheError

_log = logging.getLogger(__name__)
MAX_LINE_BYTES = 1024 * 1024
"""A launch document with its schema has some 100 KiB."""
ANNOUNCE_S = 10.0
"""Timeout of the first message."""
SAY_S = 1.0
"""Minimum interval of `wait` messages that differ only in numbers."""
_MOST_LOGGED = 400
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True)
class PodServices:
    """What the pods of all tenants share.

    Attributes:
        memory: of the node's GPUs.
        restores: None: pods boot cold.
        grants: None: launch documents are not signed.
        promotions: None: no pod is promoted here.
    """

    memory: MemoryReader
    restores: PodRestores | None = None
    grants: LaunchSigner | None = None
    promotions: Promotions | None = None


class PodSession:
    """One pod's connection. Owner: its task.

    Attributes:
        uid: the pod's, as the kernel tells; None while unknown.
        has_ended: the launcher has said that its worker ended without an error, after it served.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        tenant: str,
        holds: TenantMounts,
        services: PodServices,
        own_uid: int,
        line: bytes = b"",
        phases_ms: Mapping[str, float] | None = None,
    ) -> None:
        """`line`: the announcement, if it was read; `phases_ms`: of what was done since."""
        writer.transport.set_write_buffer_limits(0)
        self._services = services
        self._restores = services.restores
        self._reader = reader
        self._writer = writer
        self._tenant = tenant
        self._holds = holds
        self._own_uid = own_uid
        self._line = line
        self._before_ms = dict(phases_ms or {})
        self._last_wait = ("", 0.0)
        self._has_reported = False
        self._provided_at = 0.0
        self._queued_ms = 0.0
        self.announcement: Announcement | None = None
        self.is_ready = False
        self.uid: str | None = None
        self.has_ended = False

    def __repr__(self) -> str:
        pod = self.announcement.pod if self.announcement else "unannounced"
        return f"<PodSession of {self._tenant}/{pod} {'ready' if self.is_ready else 'waiting'}>"

    def gpu_holder(self) -> GpuHolder | None:
        """The GPUs that the pod says it has, by UUID; None without any."""
        announced = self.announcement
        devices = tuple(
            GpuDevice(uuid=uuid, kind="")
            for uuid in (announced.gpus if announced is not None else ())
            if uuid.startswith(("GPU-", "MIG-"))
        )
        if announced is None or not devices:
            return None
        return GpuHolder(
            instance=announced.pod,
            labels=announced.launch.labels,
            state=InstanceState.READY if self.is_ready else InstanceState.STARTING,
            grant=GpuGrant(kind="", devices=devices),
            manifests=tuple(mount.manifest for mount in announced.launch.weights),
        )

    async def run(self) -> None:
        """Serve until the pod exits or is refused."""
        try:
            announced = await self._announced()
            with contextlib.suppress(Unsupported):  # a node agent without hostPID
                self.uid = pod_of_peer(self._writer.get_extra_info("socket"))
            if self._services.promotions is not None:
                self._services.promotions.require(announced, self.uid)
            self.announcement = announced
            _log.info(
                "pods.announced tenant=%s pod=%s revision=%s",
                self._tenant,
                announced.pod,
                announced.launch.revision,
            )
            await self._provide(announced)
        except (SnapshotterError, WeightCacheError) as e:
            await self._refuse(e.code, str(e))
        except ConnectionError as e:
            _log.debug("pods.cut_off tenant=%s error=%s", self._tenant, e)
        except OSError as e:
            await self._refuse(
                "node_failed", f"this node cannot provide the pod's files: {e.strerror or e}"
            )
        except (ValueError, TimeoutError, asyncio.IncompleteReadError) as e:
            _log.warning(
                "pods.not_understood tenant=%s error=%s", self._tenant, e or type(e).__name__
            )
        finally:
            _log.info(
                "pods.gone tenant=%s pod=%s",
                self._tenant,
                self.announcement.pod if self.announcement else "-",
            )
            self._writer.close()

    async def _announced(self) -> Announcement:
        async with asyncio.timeout(ANNOUNCE_S):
            line = self._line or await self._reader.readline()
        return Announcement.of(
            parsed_line(line),
            tenant=self._tenant,
            uid=uid_of_peer(self._writer.get_extra_info("socket")),
            own_uid=self._own_uid,
            grants=self._services.grants,
        )

    async def _provide(self, announced: Announcement) -> None:
        """Provide everything until the connection ends; cancels pending work when the pod exits
        early."""
        self.is_ready = announced.running
        tasks = [
            asyncio.create_task(self._provide_all(announced), name=f"provide {announced.pod}"),
            asyncio.create_task(self._listen(), name=f"listen to {announced.pod}"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel_all(tasks)

    async def _provide_all(self, announced: Announcement) -> None:
        """Provide code, weights and GPUs. Ends only with an error or cancellation."""
        began, phases_ms = time.perf_counter(), self._before_ms
        launch, holds = announced.launch, self._holds
        async with contextlib.AsyncExitStack() as held:
            pending = {
                mount.name: held.enter_async_context(holds.weights(mount.manifest, self._send_wait))
                for mount in launch.weights
            }
            code, *places = await _all(
                [self._timed(held, launch.bundle, phases_ms), *pending.values()]
            )
            if places:
                phases_ms["weights"] = round(max(0.0, _since_ms(began) - phases_ms["code"]), 3)
            weights = dict(zip(pending, places, strict=True))
            if launch.gpu_count and not announced.running:
                began = time.perf_counter()
                await self._wait_gpus(announced)
                phases_ms["gpu"] = round(_since_ms(began), 3)
            self._provided_at = time.perf_counter()
            if not await self._pass_restored(
                announced, code, weights, phases_ms
            ) and not await self._pass_booted(announced, code, weights, phases_ms):
                tree = await self._furnish(announced, code, weights)
                cold = {"op": "cold", "code": code, "weights": weights, "phases_ms": phases_ms}
                self._send({**cold, "tree": tree} if tree is not None else cold)
            await asyncio.Event().wait()

    async def _pass_restored(
        self,
        announced: Announcement,
        code: str,
        weights: Mapping[str, str],
        phases_ms: Mapping[str, float],
    ) -> bool:
        """Whether the pod has received a restored worker."""
        if self._restores is None or announced.running:
            return False
        root = self._holds.directory
        with self._peer() as peer:
            places = {name: root / place for name, place in weights.items()}
            async with self._restores.restored(
                announced.launch, peer, code=root / code, weights=places, gpus=announced.gpus
            ) as found:
                if found is None:
                    return False
                await self._pass_on("restored", peer, found, phases_ms)
                self._queued_ms = found.phases_ms.get("queue", 0.0)
        return True

    async def _pass_booted(
        self,
        announced: Announcement,
        code: str,
        weights: Mapping[str, str],
        phases_ms: Mapping[str, float],
    ) -> bool:
        """Whether the pod has received a worker that was booted in its function's own image, which
        a promoted pod does not have. Raises Unsupported, BundleUnavailable, OSError."""
        launch, root = announced.launch, self._holds.directory
        if not _needs_environment(announced) or self._restores is None:
            return False
        if not self._restores.has_root(launch):
            return False
        if not announced.receives_booted:
            raise Unsupported("the pod's launcher is too old: update cluster.runtime_image")
        with self._peer() as peer:
            places = {name: root / place for name, place in weights.items()}
            async with self._restores.boots.booted(
                launch, peer, code=root / code, weights=places, gpus=announced.gpus
            ) as found:
                await self._pass_on("booted", peer, found, phases_ms)
        return True

    async def _pass_on(
        self, op: str, peer: socket.socket, found: Returned, phases_ms: Mapping[str, float]
    ) -> None:
        message = {"op": op, "pid": found.pid, "phases_ms": {**phases_ms, **found.phases_ms}}
        await self._writer.drain()  # nothing is buffered before it: the limits are 0
        socket.send_fds(peer, [json.dumps(message).encode() + b"\n"], [found.control.fileno()])
        found.kept = True

    async def _furnish(
        self, announced: Announcement, code: str, weights: Mapping[str, str]
    ) -> Mapping[str, Any] | None:
        """For a promoted pod, the environment of its function, if that is not the pod's own image:
        an engine's, or a built image's. Raises Unsupported, BundleUnavailable, OSError."""
        launch, root = announced.launch, self._holds.directory
        if not _needs_environment(announced):
            return None
        if self._restores is None:
            raise Unsupported("this node shows pods no environments: set restore_into_pods")
        with self._peer() as peer:
            places = {name: root / place for name, place in weights.items()}
            boots = self._restores.boots
            return await boots.furnish(launch, peer, code=root / code, weights=places)

    def _peer(self) -> socket.socket:
        """A copy of the connection's socket, which the caller closes."""
        return socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno()))

    async def _timed(
        self, held: contextlib.AsyncExitStack, digest: str, phases_ms: dict[str, float]
    ) -> str:
        began = time.perf_counter()
        place = await held.enter_async_context(self._holds.code(digest, self._send_wait))
        phases_ms["code"] = round(_since_ms(began), 3)
        return place

    async def _wait_gpus(self, announced: Announcement) -> None:
        launch = announced.launch
        within_s = launch.startup_timeout_s * gpus.PART_OF_CLOCK
        left = await gpus.wait_free(
            self._services.memory,
            wanted=announced.gpus,
            count=launch.gpu_count,
            within_s=within_s,
            report=self._send_wait,
        )
        if left:
            _log.warning("pods.gpu_not_free tenant=%s pod=%s %s", self._tenant, announced.pod, left)
            self._send_wait(f"continuing although {left}")

    async def _listen(self) -> None:
        turns = YieldBudget()
        while line := await self._reader.readline():
            await turns.handled(line)
            message = parsed_line(line)
            if message.get("op") == "ended":
                self.has_ended = True
            # only once: each message makes a log line
            if message.get("op") == "ready" and not self._has_reported:
                self.is_ready = self._has_reported = True
                self._took(str(message.get("start_kind")))
                _log.info(
                    "pods.ready tenant=%s %r phases_ms=%s",
                    self._tenant,
                    self,
                    json.dumps(message.get("phases_ms", {}))[:_MOST_LOGGED],
                )

    def _took(self, kind: str) -> None:
        """Record the start of a pod that did not run before, as long as we saw it take."""
        announced = self.announcement
        if self._restores is None or announced is None or announced.running:
            return
        if kind in (StartKind.COLD, StartKind.RESTORE) and self._provided_at:
            took_ms = max(0.0, _since_ms(self._provided_at) - self._queued_ms)
            self._restores.took(announced.launch, StartKind(kind), took_ms)

    def _send_wait(self, why: str) -> None:
        """Send the reason of a wait; rate-limited if only numbers have changed."""
        words, now = why.partition(":")[0], time.monotonic()
        if words != self._last_wait[0] or now - self._last_wait[1] >= SAY_S:
            self._last_wait = (words, now)
            self._send({"op": "wait", "why": why})

    def _send(self, message: Mapping[str, Any]) -> None:
        send(self._writer, message)

    async def _refuse(self, code: str, message: str) -> None:
        await refuse(self._writer, self._tenant, code, message)


def _needs_environment(announced: Announcement) -> bool:
    """Whether it is a promoted pod, whose own image is not that of its function."""
    launch = announced.launch
    is_promoted = POD_LABEL in launch.labels and not announced.running
    return is_promoted and (launch.image is not None or launch.engine is not None)


def send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Send a message to a pod, unless its connection is closed."""
    if not writer.is_closing():
        writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


async def refuse(writer: asyncio.StreamWriter, tenant: str, code: str, message: str) -> None:
    """Log and send the last message to a pod, which ends then."""
    _log.warning("pods.refused tenant=%s code=%s message=%s", tenant, code, message)
    send(writer, {"op": "refused", "code": code, "message": message})
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANNOUNCE_S):
            await writer.drain()


async def _all(pending: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
    """The results of all; when one fails, the others are cancelled before the error is raised."""
    tasks = [asyncio.create_task(one) for one in pending]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel_all(tasks)
        raise


def _since_ms(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def parsed_line(line: bytes) -> dict[str, Any]:
    """A message of a pod. Raises NotAdmitted, ValueError."""
    message = json.loads(line) if line else None
    if not isinstance(message, dict):
        raise NotAdmitted("a pod must send JSON objects, one per line")
    return message


def uid_of_peer(connection: socket.socket) -> int:
    """The uid that the peer process had when it connected (unix(7), SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid
