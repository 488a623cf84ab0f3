"""Deployment → ReplicaSets → pods.

Which pods a smaller scale takes: those without a node first, then pending, then not ready, then the
lowest deletion cost, then the newest (Kubernetes' ReplicaSet controller, `ActivePodsWithRanks`).
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
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
from tests.fakes.kubernetes.selectors import labels_match

Json = dict[str, Any]
COST = "controller.kubernetes.io/pod-deletion-cost"
HASH = "pod-template-hash"
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"


class Deployments(Controller):
    """Deployment → one ReplicaSet for each template that it had.

    A template that changes is rolled: the new ReplicaSet grows within `maxSurge`, the old ones
    shrink within `maxUnavailable`, or first to zero with strategy Recreate (Kubernetes'
    pkg/controller/deployment, rolling.go)."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        view.on(DEPLOYMENT, self.enqueue)
        view.on(REPLICA_SET, self.enqueue_owner("Deployment"))

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        deployment = self.view.get(DEPLOYMENT, namespace, name)
        if deployment is None or deployment["metadata"].get("deletionTimestamp"):
            return
        sets = [
            item
            for item in self.view.items(REPLICA_SET, namespace)
            if controlled_by(item, deployment)
        ]
        name_of_new = _set_name(deployment)
        new = next((one for one in sets if one["metadata"]["name"] == name_of_new), None)
        old = [one for one in sets if one["metadata"]["name"] != name_of_new]
        if new is None:
            await self._make(deployment, old)
            self.later((namespace, name), 0.05)
            return
        await self._scale(deployment, new, old)
        await self._report(deployment, new, old)

    async def _make(self, deployment: Json, old: Sequence[Json]) -> None:
        spec, name = deployment["spec"], _set_name(deployment)
        digest = name.rpartition("-")[2]
        template = spec["template"]
        labels = {**(template.get("metadata") or {}).get("labels", {}), HASH: digest}
        body = {
            "replicas": _new_replicas(deployment, 0, old),
            "selector": {
                **spec["selector"],
                "matchLabels": {**(spec["selector"].get("matchLabels") or {}), HASH: digest},
            },
            "template": {
                **template,
                "metadata": {**(template.get("metadata") or {}), "labels": labels},
            },
        }
        head = owned(REPLICA_SET, DEPLOYMENT, deployment, name, labels=labels)
        await self.view.create({**head, "spec": body})

    async def _scale(self, deployment: Json, new: Json, old: Sequence[Json]) -> None:
        """One step: grow the new one, or else shrink the old ones."""
        now = new["spec"]["replicas"]
        wanted = _new_replicas(deployment, now, old)
        if wanted != now:
            await self._set_scale(new, wanted)
            return
        left = _removable(deployment, new, old)
        for item in sorted(old, key=lambda one: float(one["metadata"]["resourceVersion"])):
            there = item["spec"]["replicas"]
            if (going := min(there, left)) > 0:
                await self._set_scale(item, there - going)
                left -= going

    async def _set_scale(self, replica_set: Json, replicas: int) -> None:
        await self.view.patch(REPLICA_SET, replica_set, {"spec": {"replicas": replicas}})

    async def _report(self, deployment: Json, new: Json, old: Sequence[Json]) -> None:
        wanted, sets = deployment["spec"].get("replicas", 1), [new, *old]
        replicas, ready = _total(sets, "replicas"), _total(sets, "readyReplicas")
        updated = _total([new], "replicas")
        least = wanted - _bounds(deployment)[1]
        is_available = ready >= least
        is_complete = updated == replicas == wanted and ready == wanted
        conditions = [
            condition(
                "Available",
                is_available,
                "MinimumReplicasAvailable" if is_available else "MinimumReplicasUnavailable",
            ),
            condition(
                "Progressing",
                True,
                "NewReplicaSetAvailable" if is_complete else "ReplicaSetUpdated",
            ),
        ]
        failures = [one for item in sets if (one := condition_of(item, "ReplicaFailure"))]
        conditions += [
            condition("ReplicaFailure", True, one["reason"], one["message"]) for one in failures[:1]
        ]
        status = {
            "replicas": replicas,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "unavailableReplicas": max(0, max(wanted, replicas) - ready),
            "updatedReplicas": updated,
            "observedGeneration": deployment["metadata"]["generation"],
            "conditions": conditions,
        }
        await self.view.set_status(DEPLOYMENT, deployment, status)


class ReplicaSets(Controller):
    """ReplicaSet → pods.

    A pod that lost a label of the selector is released: its owner reference is removed, and another
    one is made in its place. One that has the labels and no controller is adopted (Kubernetes'
    pkg/controller/controller_ref_manager.go, ClaimObject)."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._made: dict[str, set[str]] = {}
        self._taken: set[str] = set()
        view.on(REPLICA_SET, self.enqueue)
        self._owners: dict[str, str] = {}
        view.on(POD, self.enqueue_owner("ReplicaSet"))
        view.on(POD, self._orphan_seen)
        view.on(POD, self._left)

    def _left(self, pod: Json) -> None:
        """Look at the owner that a pod had, too (replica_set.go, updatePod)."""
        metadata = pod["metadata"]
        owners = [one for one in metadata.get("ownerReferences") or () if one.get("controller")]
        now = owners[0]["name"] if owners else ""
        before = self._owners.get(metadata["uid"], "")
        self._owners[metadata["uid"]] = now
        if before not in ("", now):
            self.look_at((metadata["namespace"], before))

    def _orphan_seen(self, pod: Json) -> None:
        if not _has_controller(pod):
            for item in self.view.items(REPLICA_SET, pod["metadata"]["namespace"]):
                if _selects(item, pod):
                    self.enqueue(item)

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        replica_set = self.view.get(REPLICA_SET, namespace, name)
        if replica_set is None or replica_set["metadata"].get("deletionTimestamp"):
            return
        pods = self.view.items(POD, namespace)
        mine = [pod for pod in pods if self._is_alive(pod) and await self._claims(replica_set, pod)]
        unseen = self._made.setdefault(replica_set["metadata"]["uid"], set())
        unseen -= {pod["metadata"]["uid"] for pod in pods}
        failure = None
        missing = replica_set["spec"]["replicas"] - len(mine) - len(unseen)
        if missing > 0:
            failure = await self._add(replica_set, missing)
        elif missing < 0 and not unseen:
            await self._remove(sorted(mine, key=_rank)[:-missing])
        if failure is not None:
            self.later((namespace, name), 0.5)
        await self._report(replica_set, mine, failure)

    def _is_alive(self, pod: Json) -> bool:
        metadata = pod["metadata"]
        is_over = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
        return (
            not metadata.get("deletionTimestamp")
            and metadata["uid"] not in self._taken
            and not is_over
        )

    async def _claims(self, replica_set: Json, pod: Json) -> bool:
        """Whether it is one of its pods, after adopting or releasing it."""
        is_selected, references = (
            _selects(replica_set, pod),
            pod["metadata"].get("ownerReferences") or [],
        )
        if controlled_by(pod, replica_set):
            if not is_selected:
                rest = [one for one in references if one["uid"] != replica_set["metadata"]["uid"]]
                await self._set_owners(pod, rest)
            return is_selected
        if is_selected and not _has_controller(pod):
            own = owned(POD, REPLICA_SET, replica_set, "")["metadata"]["ownerReferences"]
            await self._set_owners(pod, [*references, *own])
            return True
        return False

    async def _set_owners(self, pod: Json, references: list[Json]) -> None:
        body = {"uid": pod["metadata"]["uid"], "ownerReferences": references or None}
        await self.view.patch(POD, pod, {"metadata": body})

    async def _add(self, replica_set: Json, count: int) -> ClusterError | None:
        template, name = replica_set["spec"]["template"], replica_set["metadata"]["name"]
        metadata = template["metadata"]
        for _ in range(count):
            suffix = "".join(secrets.choice(_SUFFIX) for _ in range(5))
            head = owned(
                POD,
                REPLICA_SET,
                replica_set,
                f"{name[: 63 - 6]}-{suffix}",
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
        self, replica_set: Json, mine: list[Json], failure: ClusterError | None
    ) -> None:
        ready = sum(condition_of(pod, "Ready").get("status") == "True" for pod in mine)
        conditions = (
            [condition("ReplicaFailure", True, "FailedCreate", str(failure))]
            if failure is not None
            else []
        )
        status = {
            "replicas": len(mine),
            "fullyLabeledReplicas": len(mine),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "observedGeneration": replica_set["metadata"]["generation"],
            "conditions": conditions,
        }
        await self.view.set_status(REPLICA_SET, replica_set, status)


def _set_name(deployment: Json) -> str:
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return f"{deployment['metadata']['name']}-{hashlib.sha256(text.encode()).hexdigest()[:9]}"


def _bounds(deployment: Json) -> tuple[int, int]:
    """`maxSurge` and `maxUnavailable` as numbers of pods (ResolveFenceposts)."""
    spec = deployment["spec"]
    wanted, strategy = spec.get("replicas", 1), spec.get("strategy") or {}
    if strategy.get("type") == "Recreate":
        return 0, wanted
    rolling = strategy.get("rollingUpdate") or {}
    surge = _share(rolling.get("maxSurge", "25%"), wanted, rounds_up=True)
    unavailable = _share(rolling.get("maxUnavailable", "25%"), wanted, rounds_up=False)
    return surge, unavailable if surge or unavailable else 1


def _share(value: int | str, of: int, *, rounds_up: bool) -> int:
    if isinstance(value, int):
        return value
    exact = of * int(value.removesuffix("%")) / 100
    return math.ceil(exact) if rounds_up else math.floor(exact)


def _new_replicas(deployment: Json, now: int, old: Sequence[Json]) -> int:
    """Replicas of the newest ReplicaSet (NewRSNewReplicas)."""
    wanted = int(deployment["spec"].get("replicas", 1))
    of_old = sum(one["spec"]["replicas"] for one in old)
    if now >= wanted:
        return wanted
    if (deployment["spec"].get("strategy") or {}).get("type") == "Recreate":
        return now if of_old or _total(old, "replicas") else wanted
    room = int(wanted + _bounds(deployment)[0] - now - of_old)
    return min(wanted, now + max(0, room))


def _removable(deployment: Json, new: Json, old: Sequence[Json]) -> int:
    """How many pods of old templates may go now (reconcileOldReplicaSets): those that are not
    available, and the surplus of those that are."""
    of_old, of_new = sum(one["spec"]["replicas"] for one in old), new["spec"]["replicas"]
    if (deployment["spec"].get("strategy") or {}).get("type") == "Recreate":
        return int(of_old)
    least = deployment["spec"].get("replicas", 1) - _bounds(deployment)[1]
    most = of_old + of_new - least - (of_new - _total([new], "availableReplicas"))
    if most <= 0:
        return 0
    unhealthy = max(0, of_old - _total(old, "availableReplicas"))
    surplus = max(0, _total([new, *old], "availableReplicas") - least)
    return int(min(most, unhealthy) + surplus)


def _total(sets: Sequence[Json], field: str) -> int:
    return sum(int((one.get("status") or {}).get(field) or 0) for one in sets)


def _has_controller(pod: Json) -> bool:
    return any(one.get("controller") for one in pod["metadata"].get("ownerReferences") or ())


def _selects(replica_set: Json, pod: Json) -> bool:
    return labels_match(replica_set["spec"]["selector"], pod["metadata"].get("labels") or {})


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
