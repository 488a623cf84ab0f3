"""Deployment → ReplicaSet → pods, and the scheduler that gives them a node.

Which pods a smaller scale takes: those without a node first, then pending, then not ready, then the
lowest deletion cost, then the newest (Kubernetes' ReplicaSet controller, `ActivePodsWithRanks`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from pilotlight.kubernetes.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    QuotaExceeded,
)
from pilotlight.kubernetes.kinds import DEPLOYMENT, POD, REPLICA_SET
from tests.fakes.knative.controllers import (
    Controller,
    View,
    condition,
    condition_of,
    controlled_by,
    owned,
)

Json = dict[str, Any]
COST = "controller.kubernetes.io/pod-deletion-cost"
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"


class Deployments(Controller):
    """Deployment → ReplicaSet → pods, in one. Templates that change are not rolled: Knative's never
    do."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._made: dict[str, set[str]] = {}
        self._taken: set[str] = set()
        view.on(DEPLOYMENT, self.enqueue)
        view.on(REPLICA_SET, self.enqueue_owner("Deployment"))
        view.on(POD, self._pod_seen)

    def _pod_seen(self, pod: Json) -> None:
        for owner in pod["metadata"].get("ownerReferences") or ():
            if owner["kind"] == "ReplicaSet":
                self.look_at((pod["metadata"]["namespace"], owner["name"].rpartition("-")[0]))

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        deployment = self.view.get(DEPLOYMENT, namespace, name)
        if deployment is None or deployment["metadata"].get("deletionTimestamp"):
            return
        replica_set = await self._replica_set(deployment)
        if replica_set is None:
            self.later((namespace, name), 0.05)
            return
        wanted = deployment["spec"].get("replicas", 1)
        if replica_set["spec"]["replicas"] != wanted:
            await self.view.patch(REPLICA_SET, replica_set, {"spec": {"replicas": wanted}})
        pods = [pod for pod in self.view.items(POD, namespace) if controlled_by(pod, replica_set)]
        alive = [pod for pod in pods if self._is_alive(pod)]
        unseen = self._made.setdefault(replica_set["metadata"]["uid"], set())
        unseen -= {pod["metadata"]["uid"] for pod in pods}
        failure = None
        missing = wanted - len(alive) - len(unseen)
        if missing > 0:
            failure = await self._add(deployment, replica_set, missing)
        elif missing < 0 and not unseen:
            await self._remove(sorted(alive, key=_rank)[:-missing])
        if failure is not None:
            self.later((namespace, name), 0.5)
        await self._report(deployment, replica_set, alive, failure)

    def _is_alive(self, pod: Json) -> bool:
        metadata = pod["metadata"]
        is_over = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
        return (
            not metadata.get("deletionTimestamp")
            and metadata["uid"] not in self._taken
            and not is_over
        )

    async def _replica_set(self, deployment: Json) -> Json | None:
        spec, metadata = deployment["spec"], deployment["metadata"]
        digest = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[
            :9
        ]
        name = f"{metadata['name']}-{digest}"
        known = self.view.get(REPLICA_SET, metadata["namespace"], name)
        if known is not None:
            return known
        labels = {**(metadata.get("labels") or {}), "pod-template-hash": digest}
        template = {
            **spec["template"],
            "metadata": {
                **spec["template"]["metadata"],
                "labels": {**labels, **spec["selector"]["matchLabels"]},
            },
        }
        body = {
            "replicas": spec.get("replicas", 1),
            "selector": {
                "matchLabels": {**spec["selector"]["matchLabels"], "pod-template-hash": digest}
            },
        }
        return await self.view.create(
            {
                **owned(REPLICA_SET, DEPLOYMENT, deployment, name, labels=labels),
                "spec": {**body, "template": template},
            }
        )

    async def _add(self, deployment: Json, replica_set: Json, count: int) -> ClusterError | None:
        template, name = replica_set["spec"]["template"], replica_set["metadata"]["name"]
        for _ in range(count):
            suffix = "".join(secrets.choice(_SUFFIX) for _ in range(5))
            metadata = template["metadata"]
            base = name[: 63 - 6] if len(name) > 57 else name
            head = owned(
                POD,
                REPLICA_SET,
                replica_set,
                f"{base}-{suffix}",
                labels=metadata["labels"],
                annotations=metadata.get("annotations") or {},
            )
            try:
                made = await self.view.create({**head, "spec": template["spec"]})
            except (Forbidden, QuotaExceeded, Invalid) as e:
                return e
            if made is not None:
                self._made[replica_set["metadata"]["uid"]].add(made["metadata"]["uid"])
        return None

    async def _remove(self, pods: list[Json]) -> None:
        for pod in pods:
            metadata = pod["metadata"]
            try:
                await self.view.cluster.delete(
                    POD, metadata["name"], metadata["namespace"], uid=metadata["uid"]
                )
            except (Conflict, NotFound):
                pass
            self._taken.add(metadata["uid"])

    async def _report(
        self, deployment: Json, replica_set: Json, alive: list[Json], failure: ClusterError | None
    ) -> None:
        ready = sum(condition_of(pod, "Ready").get("status") == "True" for pod in alive)
        wanted = deployment["spec"].get("replicas", 1)
        conditions = [
            condition(
                "Available",
                ready >= wanted,
                "MinimumReplicasAvailable" if ready >= wanted else "MinimumReplicasUnavailable",
            )
        ]
        conditions.append(condition("Progressing", True, "NewReplicaSetAvailable"))
        if failure is not None:
            conditions.append(condition("ReplicaFailure", True, "FailedCreate", str(failure)))
        counts = {"replicas": len(alive), "readyReplicas": ready, "availableReplicas": ready}
        status = {
            **counts,
            "observedGeneration": deployment["metadata"]["generation"],
            "conditions": conditions,
        }
        status |= {"unavailableReplicas": max(0, wanted - ready), "updatedReplicas": len(alive)}
        await self.view.set_status(DEPLOYMENT, deployment, status)
        of_set = {
            **counts,
            "observedGeneration": replica_set["metadata"]["generation"],
            "conditions": [],
        }
        await self.view.set_status(REPLICA_SET, replica_set, of_set)


def _rank(pod: Json) -> tuple[bool, bool, bool, int, float]:
    """Sorted, those that go first."""
    metadata = pod["metadata"]
    is_ready = condition_of(pod, "Ready").get("status") == "True"
    is_running = (pod.get("status") or {}).get("phase") == "Running"
    cost = int((metadata.get("annotations") or {}).get(COST, "0"))
    return (
        bool(pod["spec"].get("nodeName")),
        is_running,
        is_ready,
        cost,
        -float(metadata["resourceVersion"]),
    )
