"""The kind of GPU that a pod was granted, from the product label of its node.

A node has GPUs of one product, which its label names (NVIDIA GPU feature discovery:
`nvidia.com/gpu.product`). What a worker says about its GPUs is not used: it runs tenants' code."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from contextlib import aclosing

from activator.knative.pod_watcher import REFUSED_S, Pod, PodListener
from activator.routing.route_table import CallTarget
from pilotlight.kubernetes import kinds
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import WatchChange
from pilotlight.spec.pricing import is_any_gpu
from snapshotter.types import GpuDevice, GpuGrant

log = logging.getLogger(__name__)

_WORD = re.compile(r"[A-Z0-9.]+")


class NodeGpus:
    """The products of the nodes' GPUs. Owner: the event loop; `apply` is synchronous.

    Attributes:
        synced: set once the nodes have been listed."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._label = settings.gpu_label
        self._products = settings.gpu_products
        self._nodes: dict[str, str] = {}
        self.synced = asyncio.Event()

    def __repr__(self) -> str:
        return f"<NodeGpus {len(self._nodes)} nodes>"

    def is_known(self, target: CallTarget, pod: Pod) -> bool:
        """Whether it is known which GPUs the pod was granted."""
        grant = self.grant(target, pod)
        return grant is None or bool(grant.kind)

    def describe(self, pod: Pod) -> str:
        """Why the pod's GPUs are not known."""
        product = self._nodes.get(pod.node)
        if product is None:
            return f"node {pod.node} has no label {self._label}, so the kind of its GPU is unknown"
        return f"node {pod.node} has GPUs of product {product!r}, which the function did not name"

    def grant(self, target: CallTarget, pod: Pod) -> GpuGrant | None:
        """Return the GPUs of a pod, with the kind "" while it is unknown; None without GPUs. Their
        UUIDs are known to the device plugin only.

        The scheduler binds the pods of a function that names one kind to nodes of its product."""
        requested = target.spec.resources.gpu
        if not requested:
            return None
        kind = requested[0]
        if len(requested) > 1 or is_any_gpu(kind):
            kind = self._kind(target, self._nodes.get(pod.node, ""))
        device = GpuDevice(uuid="", kind=kind, model=self._nodes.get(pod.node, ""))
        return GpuGrant(kind=kind, devices=(device,) * max(1, target.spec.resources.gpu_count))

    def _kind(self, target: CallTarget, product: str) -> str:
        """Return the acceptable kind that a product is; "" if it is none."""
        if not product:
            return ""
        requested = target.spec.resources.gpu
        for kind in requested:
            if not is_any_gpu(kind) and self._products.get(kind, kind) == product:
                return kind
        if any(map(is_any_gpu, requested)):
            named = (kind for kind, value in self._products.items() if value == product)
            return next(named, "") or kind_of_product(product, target.rates.gpu_s)
        return ""

    def apply(self, change: WatchChange) -> None:
        """Apply a change of a node."""
        metadata = change.object["metadata"]
        name = str(metadata["name"])
        product = str((metadata.get("labels") or {}).get(self._label) or "")
        if change.type == "DELETED" or not product:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = product

    async def follow(self, cluster: PodListener) -> None:
        """Watch the nodes with GPUs until cancelled. While the API server is unreachable the last
        state stays."""
        while True:
            try:
                async with aclosing(cluster.watch(kinds.NODE, None, self._label)) as changes:
                    async for change in changes:
                        if change.type == "SYNCED":
                            self.synced.set()
                        else:
                            self.apply(change)
            except ClusterError as e:
                log.error("nodes of the cluster cannot be watched error=%s", e)
            await asyncio.sleep(REFUSED_S)


def kind_of_product(product: str, names: Iterable[str]) -> str:
    """Return the name of which all words are in the product, `A100-80GB` for
    `NVIDIA-A100-SXM4-80GB`: that with the most words; the product itself if there is none."""
    words = set(_WORD.findall(product.upper()))
    fitting = [name for name in names if words.issuperset(_WORD.findall(name.upper()))]
    return max(fitting, key=lambda name: (len(_WORD.findall(name.upper())), name), default=product)
