"""A whole cluster with Knative Serving, in one event loop: API server, controllers, autoscaler,
activator, nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pilotlight.kubernetes import kinds
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.knative.activator import Activator
from tests.fakes.knative.autoscaler import Autoscaler
from tests.fakes.knative.controllers import Controller, View, condition_of
from tests.fakes.knative.deployments import Deployments, ReplicaSets
from tests.fakes.knative.kubelet import Kubelet
from tests.fakes.knative.networking import EndpointSlices, ServerlessServices
from tests.fakes.knative.queue_proxy import QueueProxy
from tests.fakes.knative.revisions import Revisions
from tests.fakes.knative.scheduler import Scheduler
from tests.fakes.knative.serving import Configurations, Routes, Services
from tests.fakes.kubernetes.raw import RawClient
from tests.fakes.kubernetes.server import ApiServer

Json = dict[str, Any]
log = logging.getLogger(__name__)
PLATFORM = "pilotlight"
"""The namespace into which the platform itself would be installed."""
DRAIN_S = 30.0
"""How long queue-proxy holds the end of a pod after its last request (knative/serving
pkg/queue/sharedmain, drainSleepDuration)."""
_KINDS = (
    kinds.SERVICE,
    kinds.CONFIGURATION,
    kinds.REVISION,
    kinds.ROUTE,
    kinds.POD_AUTOSCALER,
    kinds.SERVERLESS_SERVICE,
    kinds.DEPLOYMENT,
    kinds.REPLICA_SET,
    kinds.POD,
    kinds.CORE_SERVICE,
    kinds.ENDPOINT_SLICE,
    kinds.NODE,
)


class FakeKnative:
    """Owner: the event loop that entered it. Needs root where pods are to run.

    Attributes:
        api: the API server: faults, counts, objects.
        kubelets: the nodes.
        activator: Knative's, at `wake_url`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 1,
        labels: Mapping[str, str] | None = None,
        capacity: Mapping[str, str] | None = None,
        speed: float = 1.0,
        grace_s: float = 30.0,
        quiet_s: float = DRAIN_S,
        port: int = 0,
    ) -> None:
        """`directory`: of the pods' files, with a path that every uid may enter; `speed`,
        `grace_s`: see Autoscaler; `quiet_s`: see PodRunner; `labels`, `capacity`: of each node."""
        self.directory = directory
        self.api = ApiServer(port=port)
        self.kubelets: list[Kubelet] = []
        self._nodes = nodes
        self._labels, self._capacity = dict(labels or {}), dict(capacity or {})
        self._speed, self._grace_s, self._quiet_s = speed, grace_s, quiet_s
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<FakeKnative {self.api!r} {self.kubelets}>"

    @property
    def kubeconfig(self) -> Path:
        """The file."""
        return self.directory / "kubeconfig"

    @property
    def wake_url(self) -> str:
        """For `cluster.wake_url`."""
        return self.activator.url

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.api)
        self.api.add_namespace(PLATFORM)
        self.api.write_kubeconfig(self.kubeconfig)
        settings = ClusterSettings(kubeconfig=str(self.kubeconfig), field_manager="knative")
        cluster = await self._stack.enter_async_context(await Cluster.connect(settings))
        raw = await self._stack.enter_async_context(RawClient(self.kubeconfig))
        self.view = await self._stack.enter_async_context(View(cluster, raw, _KINDS))
        self._stack.push_async_callback(self._end)
        self.autoscaler = Autoscaler(
            self.view, proxies=self._proxies, speed=self._speed, grace_s=self._grace_s
        )
        self.activator = Activator(self.view, ready_pod=self._ready_pod, poke=self.autoscaler.poke)
        self.autoscaler.activator = self.activator
        await self.activator.start()
        self._stack.push_async_callback(self.activator.stop)
        for controller in (*self._controllers(), self.autoscaler):
            task = asyncio.create_task(controller.run(), name=type(controller).__name__)
            task.add_done_callback(_say_death)
            self._tasks.append(task)
        for index in range(self._nodes):
            await self._add_node(f"node-{index}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def _controllers(self) -> Sequence[Controller]:
        made = (
            Services,
            Configurations,
            Routes,
            Revisions,
            ServerlessServices,
            EndpointSlices,
            Deployments,
            ReplicaSets,
            Scheduler,
        )
        return [make(self.view) for make in made]

    async def _add_node(self, name: str) -> None:
        directory = self.directory / name
        directory.mkdir(mode=0o755)
        kubelet = Kubelet(
            self.view,
            name=name,
            directory=directory,
            labels=self._labels,
            capacity=self._capacity,
            quiet_s=self._quiet_s / self._speed,
        )
        await kubelet.start()
        self.kubelets.append(kubelet)

    async def _end(self) -> None:
        """Nodes first: nothing that a controller does may keep a container alive."""
        for kubelet in self.kubelets:
            await kubelet.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _proxies(self, namespace: str, revision: str) -> list[QueueProxy]:
        """Of the revision's pods that are ready."""
        found = []
        for kubelet in self.kubelets:
            for runner in kubelet.pods.values():
                metadata = runner.pod["metadata"]
                is_its = (metadata.get("labels") or {}).get(
                    "serving.knative.dev/revision"
                ) == revision
                if is_its and metadata["namespace"] == namespace and runner.is_ready:
                    found.append(runner.proxy)
        return found

    def _ready_pod(self, namespace: str, revision: str) -> str | None:
        proxies = [proxy for proxy in self._proxies(namespace, revision) if not proxy.is_full()]
        free = [
            proxy
            for proxy in proxies
            if not proxy.concurrency or proxy.load.inside < proxy.concurrency
        ]
        return min(free, key=lambda proxy: proxy.load.inside).address if free else None

    def pods(self, namespace: str | None = None, *, ready: bool = False) -> list[Json]:
        """Pods as the API server has them."""
        found = self.api.list("v1", "Pod", namespace)
        return [
            pod for pod in found if not ready or condition_of(pod, "Ready").get("status") == "True"
        ]


def _say_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a controller died: %s", task.get_name(), exc_info=error)
