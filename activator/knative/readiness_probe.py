"""Probes whether the worker of a pod answers: as soon as the pod has an address, and every 50 ms
from then on, until it does.

Kubernetes would report the same a second or more later: the kubelet's probe, its report, the
endpoints. A life of a pod is probed only while a start of its revision waits here, by one task
each. A positive answer is kept as long as that life lasts."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from activator.knative.pod_watcher import Pod
from activator.worker_client.address import connect, tcp_address
from activator.worker_client.connection import (
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight.core.background_tasks import cancel_all
from pilotlight.protocol import WORKER_END, WORKER_STATUS
from snapshotter.shim.messages import phases_of
from snapshotter.types import StartKind

log = logging.getLogger(__name__)

WORKER_PORT = 8080
PROXY_PORT = 8012
"""Port of Knative's queue-proxy, which is in front of the worker where KPA measures."""
AGAIN_S = 0.05
"""Interval between a negative answer and the next probe."""
AGAIN_PROMOTED_S, AGAIN_SHARE = 0.01, 0.05
"""The same for a promoted pod, of which a restored worker serves within a tenth of a second: the
shortest interval, and its part of the time that the pod was probed already. Ten pods that boot for
a second are so probed 500 times, where every 10 ms were 1,000."""
DEADLINE_S = 2.0
"""Timeout of one probe: well above a slow network's round trip (round trips of 70 ms made a probe
of 300 ms time out)."""
AT_ONCE = 64
"""Maximum number of concurrent probes, so that a burst of a hundred pods does not overload the
node."""
_LAUNCHER_PHASES = frozenset(
    {"agent", "code", "weights", "gpu", "pod", "promote", "resize", "restore"}
)
"""Phases that the launcher of a pod adds to its worker's phases (`pilotlight.launcher`). The pod is
not trusted: other names do not become a metric's label."""
_STATUS = f"GET {WORKER_STATUS} HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n".encode()
_END = f"POST {WORKER_END} HTTP/1.1\r\nhost: worker\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
_PROXY = f"GET {WORKER_STATUS} HTTP/1.1\r\nhost: worker\r\nk-network-probe: queue\r\nconnection: close\r\n\r\n".encode()
"""queue-proxy answers this itself, and does not count it as a request
(knative.dev/networking/pkg/http/header, `K-Network-Probe`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessListener:
    """A worker's report about itself.

    Attributes:
        running: number of calls that run in it.
        at: monotonic time of its answer.
        asks: number of probes it took; 1 = it was ready before."""

    start_kind: StartKind
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    running: int = 0
    at: float = 0.0
    asks: int = 1


class ReadinessProbe:
    """Probes pods. Owner: the event loop."""

    def __init__(self, *, port_of: Callable[[Pod], int], on_ready: Callable[[Pod], None]) -> None:
        """`port_of`: where a pod's calls go; if it is queue-proxy's, queue-proxy is probed too.
        `on_ready`: called when a pod has answered."""
        self._port_of = port_of
        self._on_ready = on_ready
        self._ready: dict[str, ReadinessListener] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, str] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<ReadinessProbe {len(self._ready)} ready, {len(self._probing)} probed>"

    def of(self, life: str) -> ReadinessListener | None:
        """The worker's report; None while there is none."""
        return self._ready.get(life)

    def last_error(self, life: str) -> str:
        """Result of the last failed probe, for error messages; "" when there was none."""
        return self._errors.get(life, "")

    def probe(self, pod: Pod) -> None:
        """Probe a pod until it answers, in one task per life."""
        if pod.life in self._ready or pod.life in self._probing or pod.ip is None:
            return
        task = asyncio.create_task(self._probe(pod), name=f"is {pod.name} ready")
        self._probing[pod.life] = task
        task.add_done_callback(lambda done: self._on_probe_done(pod.life, done))

    def _on_probe_done(self, life: str, task: asyncio.Task[None]) -> None:
        if self._probing.get(life) is task:  # a cancelled task may end after the next one begins
            del self._probing[life]

    def stop(self, life: str) -> None:
        """Stop probing."""
        task = self._probing.pop(life, None)
        if task is not None:
            task.cancel()

    def delete(self, life: str) -> None:
        """Delete the state of a life that is over."""
        self.stop(life)
        self._ready.pop(life, None)
        self._errors.pop(life, None)

    async def _probe(self, pod: Pod) -> None:
        asks, began = 0, time.monotonic()
        while True:
            asks += 1
            async with self._at_once:
                ready = await self._probe_once(pod, asks)
            if ready is not None:
                self._ready[pod.life] = ready
                self._on_ready(pod)
                return
            await asyncio.sleep(pause_s(time.monotonic() - began, is_promoted=pod.is_promoted))

    async def _probe_once(self, pod: Pod, asks: int) -> ReadinessListener | None:
        assert pod.ip is not None
        try:
            async with asyncio.timeout(DEADLINE_S):
                report = last = await exchange(tcp_address(pod.ip, WORKER_PORT), _STATUS)
                if report.status == 200 and (port := self._port_of(pod)) != WORKER_PORT:
                    last = await exchange(tcp_address(pod.ip, port), _PROXY)
        except (OSError, WorkerConnectionLost) as e:  # TimeoutError is an OSError
            self._errors[pod.life] = str(e) or type(e).__name__
            return None
        if last.status == 200:
            return _parsed(report, time.monotonic(), asks)
        self._errors[pod.life] = f"it answered {last.status}"
        return None

    async def running(self, pod: Pod) -> int | None:
        """Number of calls that run in it now; None when it does not answer."""
        if pod.ip is None:
            return None
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await exchange(tcp_address(pod.ip, WORKER_PORT), _STATUS)
        except (OSError, WorkerConnectionLost):
            return None
        return _parsed(answer, time.monotonic(), 1).running if answer.status == 200 else None

    async def end(self, pod: Pod) -> bool:
        """Ask its worker to exit once its calls have ended; whether it will."""
        if pod.ip is None:
            return False
        try:
            async with asyncio.timeout(DEADLINE_S):
                return (await exchange(tcp_address(pod.ip, WORKER_PORT), _END)).status == 200
        except (OSError, WorkerConnectionLost):
            return False

    async def aclose(self) -> None:
        """Stop all probes."""
        await cancel_all(self._probing.values())


def pause_s(probed_s: float, *, is_promoted: bool) -> float:
    """The time until the next probe of a pod that was probed for so long."""
    if not is_promoted:
        return AGAIN_S
    return min(AGAIN_S, max(AGAIN_PROMOTED_S, probed_s * AGAIN_SHARE))


async def status_at(pod: Pod, port: int, *, within_s: float) -> ReadinessListener | None:
    """The report of the instance at that port, for which connections wait there until it serves;
    None when it has ended. Raises TimeoutError."""
    assert pod.ip is not None
    try:
        async with asyncio.timeout(within_s):
            answer = await exchange(tcp_address(pod.ip, port), _STATUS)
    except TimeoutError:
        raise
    except (OSError, WorkerConnectionLost):
        return None
    return _parsed(answer, time.monotonic(), 1) if answer.status == 200 else None


async def exchange(where: str, request: bytes) -> WorkerResponse:
    """Send one request on its own connection. A short answer has its body. Raises OSError,
    WorkerConnectionLost."""
    loop = asyncio.get_running_loop()
    connection = await connect(loop, WorkerConnection, where)
    try:
        return await connection.request(request, loop=loop)
    finally:
        connection.close()


def _parsed(answer: WorkerResponse, now: float, asks: int) -> ReadinessListener:
    """Parse a report. Missing or invalid fields are left out: the worker answered, and that is what
    counts."""
    try:
        body: Any = json.loads(answer.body or b"{}")
        kind = StartKind(body.get("start_kind", StartKind.COLD))
        phases = phases_of(body.get("phases_ms"), also=_LAUNCHER_PHASES)
        return ReadinessListener(
            start_kind=kind,
            phases_ms=phases,
            running=int(body.get("running") or 0),
            at=now,
            asks=asks,
        )
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as e:
        log.warning("invalid readiness report of a worker: %s", e)
        return ReadinessListener(start_kind=StartKind.COLD, at=now, asks=asks)
