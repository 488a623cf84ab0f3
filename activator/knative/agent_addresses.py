"""The node agents' pods: which addresses an agent of a node has. The activators' part of the proof
that an agent speaks for pods of its own node only."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from activator.knative.pod_status import addresses_of, canonical
from activator.knative.pod_watcher import REFUSED_S, Pod, PodListener
from pilotlight.kubernetes import kinds
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.watch_events import WatchChange

log = logging.getLogger(__name__)

SELECTOR = "app.kubernetes.io/component=node,app.kubernetes.io/part-of=pilotlight"
"""Labels of the node agents' pods (deploy/kubernetes/chart)."""


class AgentAddresses:
    """Addresses of the node agents, by node. Owner: the event loop; `apply` is synchronous.

    All agents have the same certificate, so it does not say on which node one runs. Its address
    does: that of its pod, or, for an agent in the node's network, the node's own."""

    def __init__(self, namespace: str) -> None:
        """`namespace`: the platform's."""
        self._namespace = namespace
        self._pods: dict[str, tuple[str, frozenset[str]]] = {}

    def __repr__(self) -> str:
        return f"<AgentAddresses {len(self._pods)} agents>"

    def is_agent_of(self, address: str, pod: Pod) -> bool:
        """Whether `address` is one of a node agent on the node of `pod`."""
        found = canonical(address)
        if not pod.node:
            return False
        return found in pod.node_addresses or any(
            node == pod.node and found in addresses for node, addresses in self._pods.values()
        )

    def apply(self, change: WatchChange) -> None:
        """Apply a change of a pod of the platform's namespace."""
        uid = str(change.object["metadata"]["uid"])
        status = change.object.get("status") or {}
        addresses = addresses_of(status, "podIP")
        node = str((change.object.get("spec") or {}).get("nodeName") or "")
        is_over = change.type == "DELETED" or status.get("phase") in ("Failed", "Succeeded")
        if is_over or not node or not addresses:
            self._pods.pop(uid, None)
        else:
            self._pods[uid] = (node, addresses)

    async def follow(self, cluster: PodListener) -> None:
        """Watch the agents' pods until cancelled. While the API server is unreachable the last
        state stays."""
        while True:
            try:
                async with aclosing(cluster.watch(kinds.POD, self._namespace, SELECTOR)) as changes:
                    async for change in changes:
                        if change.type != "SYNCED":
                            self.apply(change)
            except ClusterError as e:
                log.error("node agents of the cluster cannot be watched error=%s", e)
            await asyncio.sleep(REFUSED_S)
