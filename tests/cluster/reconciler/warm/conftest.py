"""The pool of warm pods, with a reconciler, against the API server of the tests. Pods come from the
tests, one at a time, as a ReplicaSet and a kubelet would make them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pilotlight.controller.kubernetes.function_status import FunctionStatuses
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.kubernetes.warm.pool import WarmPool
from pilotlight.controller.kubernetes.warm.status import PromotedPod, PromotionRequest, WarmPods
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.manifests.warm_pods import deployment
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import TenantRecord
from pilotlight.spec.function import GIB, FunctionSpec
from pilotlight.spec.warm_shape import WarmShape
from tests.cluster.reconciler.conftest import RUNTIME, Bench
from tests.fakes.fed_platform import ACME, spec

NAMESPACE = "default-warm"
SMALL = WarmShape(name="small", cpu=1, memory_bytes=GIB, min_pods=1, max_pods=8)
LARGE = WarmShape(name="large", cpu=4, memory_bytes=8 * GIB, min_pods=0, max_pods=4)
H100 = WarmShape(name="h100", cpu=4, memory_bytes=32 * GIB, gpu="H100", gpu_count=1, max_pods=2)
SHAPES = (SMALL, LARGE, H100)
Json = dict[str, Any]


@dataclass(kw_only=True)
class PoolBench:
    """A pool beside the reconciler of a bench."""

    bench: Bench
    namespace: str = NAMESPACE
    shapes: Sequence[WarmShape] = SHAPES
    nodes: NodeReports = field(default_factory=NodeReports)
    pool: WarmPods = field(default_factory=WarmPods)
    warm: WarmPool | None = None
    resizes: Counter[str] = field(default_factory=Counter)
    _functions: set[str] = field(default_factory=set)

    @property
    def settings(self) -> ClusterSettings:
        """With the shapes."""
        return replace(self.bench.settings, warm_pods=list(self.shapes))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[WarmPool]:
        """A leader, for the time of a block, once its pool is there."""
        self.bench.settings = self.settings
        async with (
            self.bench.running() as reconciler,
            await Cluster.connect(self.settings) as cluster,
        ):
            self.warm = WarmPool(
                cluster,
                reconciler,
                nodes=self.nodes,
                pool=self.pool,
                may_write=lambda: self.bench.may_write,
                on_resize=lambda outcome: self.resizes.update([outcome]),
                wall=lambda: self.bench.wall_s,
            )
            task = asyncio.create_task(self.warm.run())
            try:
                await self.bench.until(lambda: len(self.pool.shapes) == len(self.shapes), "no pool")
                await self.bench.until_quiet()
                yield self.warm
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def deployed(self) -> dict[str, int]:
        """Shape → replicas of its Deployment."""
        found = self.bench.server.list("apps/v1", "Deployment", self.namespace)
        return {one["metadata"]["name"]: one["spec"]["replicas"] for one in found}

    def add_pod(
        self,
        name: str,
        shape: WarmShape = SMALL,
        *,
        node: str = "node-1",
        ready: bool = True,
        beside: Sequence[Json] = (),
    ) -> Json:
        """A pod of a shape's ReplicaSet, on a node. `beside`: containers that a webhook added."""
        made = deployment(
            shape, self.settings, platform=self.bench.platform.identity().id, replicas=1
        )
        template = made["spec"]["template"]
        template["spec"]["containers"][:0] = beside
        return self.bench.server.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    **template["metadata"],
                    "ownerReferences": [self._owner(shape, template)],
                },
                "spec": {**template["spec"], "nodeName": node},
                "status": {
                    "phase": "Running",
                    "podIP": "10.1.0.7",
                    "conditions": [{"type": "Ready", "status": str(ready)}],
                },
            }
        )

    def _owner(self, shape: WarmShape, template: Json) -> Json:
        kind = {"apiVersion": "apps/v1", "kind": "ReplicaSet"}
        found = self.bench.server.get("apps/v1", "ReplicaSet", shape.name, self.namespace)
        if found is None:
            selector = {"matchLabels": {names.WARM_SHAPE: shape.name}}
            metadata = {"name": shape.name, "namespace": self.namespace}
            found = self.bench.server.put(
                {**kind, "metadata": metadata, "spec": {"selector": selector, "template": template}}
            )
        uid = found["metadata"]["uid"]
        return {**kind, "name": shape.name, "uid": uid, "controller": True}

    def set_status(self, name: str, **changed: Any) -> None:
        """The kubelet reports something of a pod."""
        pod = self.pod(name)
        self.bench.server.put({**pod, "status": {**pod["status"], **changed}})

    def resources(self, name: str) -> Json:
        """What a pod's container asks for now."""
        return dict(self.pod(name)["spec"]["containers"][0]["resources"])

    def allocate(self, name: str) -> None:
        """The kubelet sets aside what a pod asks for."""
        requests = self.resources(name)["requests"]
        self.set_status(name, containerStatuses=[{"name": "user", "allocatedResources": requests}])

    def refuse(self, name: str, reason: str) -> None:
        """The kubelet has no room for what a pod asks for."""
        self.set_status(
            name,
            conditions=[
                {"type": "Ready", "status": "True"},
                {"type": "PodResizePending", "status": "True", "reason": reason},
            ],
        )

    def pod(self, name: str) -> Json:
        """A pod as it is stored."""
        found = self.bench.server.get("v1", "Pod", name, self.namespace)
        assert found is not None, name
        return found

    def pods(self) -> list[str]:
        """Names of the pods that are not being deleted."""
        return sorted(
            one["metadata"]["name"]
            for one in self.bench.server.list("v1", "Pod", self.namespace)
            if not one["metadata"].get("deletionTimestamp")
        )

    async def until_known(self, *names_of: str) -> None:
        """Wait until the leader has seen these pods, and the last function."""
        warm, reconciler = self.warm, self.bench.reconciler
        assert warm is not None
        assert reconciler is not None
        await self.bench.until(lambda: reconciler.state.functions.keys() >= self._functions)
        await self.bench.until(
            lambda: {one["metadata"]["name"] for one in warm.cache.pods()} >= set(names_of)
        )

    def uid_of(self, name: str) -> str:
        """A pod's uid."""
        return str(self.pod(name)["metadata"]["uid"])

    def own_pod(self, namespace: str) -> None:
        """A pod of acme's own in its namespace."""
        labels = {names.MANAGED_BY: names.manager_of(self.settings), names.TENANT: ACME.id}
        self.bench.server.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "own", "namespace": namespace, "labels": labels},
                "spec": {"containers": [{"name": "user", "image": RUNTIME}]},
            }
        )

    def twin(self) -> PoolBench:
        """Another controller of the same platform and cluster."""
        return PoolBench(bench=replace(self.bench, statuses=FunctionStatuses()), shapes=self.shapes)

    def function(self, made: FunctionSpec | None = None, *, tenant: TenantRecord = ACME) -> str:
        """A function of a tenant; returns its revision's key."""
        self.bench.platform.tenant(tenant)
        function = self.bench.platform.function(made or spec(), tenant=tenant)
        self._functions.add(function)
        return f"{function}@v1-000001"

    async def promote(
        self,
        key: str,
        attempt: str = "i-1",
        *,
        exclude: tuple[str, ...] = (),
        tenant: str = ACME.id,
        claimed_only: bool = False,
    ) -> PromotedPod:
        """As an activator asks."""
        return await self.pool.require_claimer().promote(
            PromotionRequest(
                tenant=tenant,
                revision=key,
                attempt=attempt,
                member="a-0",
                exclude=exclude,
                claimed_only=claimed_only,
            )
        )


@pytest.fixture
def site(bench: Bench) -> PoolBench:
    """A pool that is not there yet."""
    return PoolBench(bench=bench)


def labels_of(pod: Json) -> dict[str, str]:
    """Our labels, without their domain."""
    return {
        key.removeprefix(f"{names.DOMAIN}/"): value
        for key, value in pod["metadata"]["labels"].items()
        if key.startswith(names.DOMAIN)
    }
