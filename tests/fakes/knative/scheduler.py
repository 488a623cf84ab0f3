"""The scheduler, as far as needed: node selectors, taints, resources, preferred node affinity; and
what it says when nothing fits."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pilotlight.kubernetes.kinds import NODE, POD
from pilotlight.kubernetes.watch_events import WatchChange
from tests.fakes.knative.controllers import Controller, View, condition, condition_of
from tests.fakes.kubernetes.quotas import amount

Json = dict[str, Any]


class Scheduler(Controller):
    """Binds pods to nodes."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._bound: dict[str, str] = {}
        view.on(POD, self._pod_seen)
        view.on(NODE, lambda _node: self._all())
        view.changes(POD, self._freed)

    def _pod_seen(self, pod: Json) -> None:
        if not pod["spec"].get("nodeName"):
            self.enqueue(pod)

    def _freed(self, change: WatchChange) -> None:
        if change.type == "DELETED":
            self._bound.pop(change.object["metadata"]["uid"], None)
            self._all()

    def _all(self) -> None:
        for pod in self.view.items(POD):
            self._pod_seen(pod)

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        pod = self.view.get(POD, namespace, name)
        if (
            pod is None
            or pod["spec"].get("nodeName")
            or pod["metadata"]["uid"] in self._bound
            or pod["metadata"].get("deletionTimestamp")
        ):
            return
        nodes, reasons = list(self.view.items(NODE)), Counter[str]()
        fitting = []
        for node in nodes:
            problem = self._problem(pod, node)
            if problem is None:
                fitting.append(node)
            else:
                reasons[problem] += 1
        if fitting:
            await self._bind(pod, max(fitting, key=lambda node: _preference(pod, node)))
            return
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        message = (
            f"0/{len(nodes)} nodes are available: {listed}."
            if nodes
            else "no nodes available to schedule pods"
        )
        if condition_of(pod, "PodScheduled").get("message") != message:
            conditions = [
                *(
                    one
                    for one in (pod.get("status") or {}).get("conditions") or ()
                    if one["type"] != "PodScheduled"
                ),
                condition("PodScheduled", False, "Unschedulable", message),
            ]
            await self.view.set_status(POD, pod, {"phase": "Pending", "conditions": conditions})

    async def _bind(self, pod: Json, node: Json) -> None:
        metadata = pod["metadata"]
        self._bound[metadata["uid"]] = node["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node["metadata"]["name"]}
        if not await self.view.bind(metadata["namespace"], metadata["name"], target):
            del self._bound[metadata["uid"]]
            self.later((metadata["namespace"], metadata["name"]), 0.5)

    def _problem(self, pod: Json, node: Json) -> str | None:
        labels = node["metadata"].get("labels") or {}
        if (pod["spec"].get("nodeSelector") or {}).items() - labels.items():
            return "node(s) didn't match Pod's node affinity/selector"
        for taint in node["spec"].get("taints") or ():
            if taint["effect"] != "PreferNoSchedule" and not _tolerates(pod, taint):
                return (
                    f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
                )
        free = {key: amount(value) for key, value in node["status"].get("allocatable", {}).items()}
        for other in self.view.items(POD):
            where = other["spec"].get("nodeName") or self._bound.get(other["metadata"]["uid"])
            if where == node["metadata"]["name"] and (other.get("status") or {}).get(
                "phase"
            ) not in ("Failed", "Succeeded"):
                for key, value in requests_of(other).items():
                    free[key] = free.get(key, 0.0) - value
        lacking = next(
            (key for key, value in sorted(requests_of(pod).items()) if free.get(key, 0.0) < value),
            None,
        )
        return f"Insufficient {lacking}" if lacking else None


def requests_of(pod: Json) -> dict[str, float]:
    """What a pod takes of a node."""
    found: dict[str, float] = {"pods": 1.0}
    for container in pod["spec"]["containers"]:
        for key, value in (container.get("resources") or {}).get("requests", {}).items():
            found[key] = found.get(key, 0.0) + amount(value)
    return found


def _tolerates(pod: Json, taint: Json) -> bool:
    for one in pod["spec"].get("tolerations") or ():
        fits_key = one.get("key") in (None, taint["key"])
        fits_value = one.get("operator") == "Exists" or one.get("value") == taint.get("value")
        if fits_key and fits_value and one.get("effect") in (None, taint["effect"]):
            return True
    return False


def _preference(pod: Json, node: Json) -> int:
    wanted = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "preferredDuringSchedulingIgnoredDuringExecution"
    ) or ()
    labels = node["metadata"].get("labels") or {}
    total = 0
    for term in wanted:
        expressions = term["preference"].get("matchExpressions") or ()
        if all(
            one["operator"] == "In" and labels.get(one["key"]) in one.get("values", ())
            for one in expressions
        ):
            total += term["weight"]
    return total
