"""Subresources that are not just a part of the object: scale, binding, eviction, finalize."""

from __future__ import annotations

import json
from typing import Any

from tests.fakes.kubernetes.deleting import Deleter
from tests.fakes.kubernetes.kinds import Resource, Target
from tests.fakes.kubernetes.patches import json_patch, merge_patch
from tests.fakes.kubernetes.problems import Refused, details_of
from tests.fakes.kubernetes.reading import Reader
from tests.fakes.kubernetes.selectors import labels_match
from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.writing import APPLY, Options, Writer

Json = dict[str, Any]


class Subresources:
    """Owner: the server's event loop."""

    def __init__(self, store: Store, reader: Reader, writer: Writer, deleter: Deleter) -> None:
        self._store = store
        self._reader = reader
        self._writer = writer
        self._deleter = deleter

    def scale(self, resource: Resource, namespace: str, name: str) -> Json:
        """GET …/scale."""
        body = self._reader.get(resource, namespace, name).body
        metadata = {
            key: body["metadata"].get(key)
            for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        }
        selector = body["spec"].get("selector", {}).get("matchLabels") or {}
        status = {"replicas": body.get("status", {}).get("replicas", 0)}
        status["selector"] = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
        spec = {"replicas": body["spec"].get("replicas", 0)}
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": metadata,
            "spec": spec,
            "status": status,
        }

    def set_scale(self, target: Target, how: str | None, body: Any, options: Options) -> Json:
        """PUT (`how` None) or PATCH …/scale."""
        resource, name = target.resource, target.name
        now = self.scale(resource, target.namespace, name)
        if how is None:
            wanted = body
        elif how == "application/json-patch+json":
            wanted = json_patch(now, body)
        else:
            wanted = merge_patch(now, body)
        replicas = wanted.get("spec", {}).get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            raise Refused(
                422,
                f'Scale.autoscaling "{name}" is invalid: spec.replicas: Invalid value: '
                f"{replicas}: must be non-negative",
            )
        patch: Json = {"spec": {"replicas": replicas}}
        version = (
            (body.get("metadata") or {}).get("resourceVersion") if isinstance(body, dict) else None
        )
        if version:
            patch["metadata"] = {"resourceVersion": version}
        if how == APPLY:
            patch |= {"apiVersion": resource.api_version, "kind": resource.kind}
        self._writer.patch(
            target, how if how == APPLY else "application/merge-patch+json", patch, options
        )
        return self.scale(resource, target.namespace, name)

    def bind(
        self, resource: Resource, namespace: str, name: str, body: Json, options: Options
    ) -> Json:
        """POST …/binding: the scheduler's choice of a node. Raises Refused 409 for a pod that has
        one."""
        live = self._reader.get(resource, namespace, name)
        if live.body["spec"].get("nodeName"):
            text = (
                f'Operation cannot be fulfilled on pods/binding "{name}": pod {name} is '
                f"already assigned to node"
            )
            raise Refused(409, text, details=details_of("", "pods", name))
        body = {**live.body, "spec": {**live.body["spec"], "nodeName": body["target"]["name"]}}
        status = dict(body.get("status", {}))
        kept = [one for one in status.get("conditions", ()) if one["type"] != "PodScheduled"]
        status["conditions"] = [
            *kept,
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._writer.now()},
        ]
        body |= {"metadata": dict(body["metadata"]), "status": status}
        if not options.dry_run:
            self._store.put(resource.key, (namespace, name), body)
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Success",
            "code": 201,
        }

    def evict(
        self, resource: Resource, namespace: str, name: str, body: Json, options: Options
    ) -> Json:
        """POST …/eviction: a deletion that disruption budgets may refuse. Raises Refused 429."""
        pod = self._reader.get(resource, namespace, name).body
        for _, stored in self._store.all(("policy", "poddisruptionbudgets"), namespace):
            budget = stored.body
            if labels_match(
                budget["spec"].get("selector"), pod["metadata"].get("labels") or {}
            ) and not self._may_lose(budget, namespace):
                cause = {
                    "reason": "DisruptionBudget",
                    "message": f"The disruption budget {budget['metadata']['name']} needs its pods",
                }
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise Refused(429, text, details={"causes": [cause]})
        if not options.dry_run:
            self._mark_evicted(resource, pod)
        self._deleter.delete(
            resource, namespace, name, body.get("deleteOptions") or {}, dry_run=options.dry_run
        )
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Success",
            "code": 201,
        }

    def _mark_evicted(self, resource: Resource, pod: Json) -> None:
        status = dict(pod.get("status") or {})
        said = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
        status["conditions"] = [
            *(status.get("conditions") or ()),
            {**said, "lastTransitionTime": self._writer.now()},
        ]
        metadata = dict(pod["metadata"])
        self._store.put(
            resource.key,
            (metadata["namespace"], metadata["name"]),
            {**pod, "metadata": metadata, "status": status},
        )

    def _may_lose(self, budget: Json, namespace: str) -> bool:
        selector, spec = budget["spec"].get("selector"), budget["spec"]
        pods = [stored.body for _, stored in self._store.all(("", "pods"), namespace)]
        chosen = [
            pod for pod in pods if labels_match(selector, pod["metadata"].get("labels") or {})
        ]
        ready = sum(_is_ready(pod) for pod in chosen)
        if "minAvailable" in spec:
            return ready - 1 >= _share(spec["minAvailable"], len(chosen))
        return len(chosen) - ready + 1 <= _share(spec.get("maxUnavailable", 1), len(chosen))

    def finalize(self, resource: Resource, name: str, body: Json) -> bytes:
        """PUT namespaces/…/finalize: the only way to change its spec.finalizers."""
        live = self._reader.get(resource, "", name).body
        changed = {
            **live,
            "metadata": dict(live["metadata"]),
            "spec": {"finalizers": body.get("spec", {}).get("finalizers") or []},
        }
        return self._store.put(resource.key, ("", name), changed).data

    def review(self, resource: Resource, body: Json, allowed: bool) -> bytes:
        """The answer to an access review."""
        status = {"allowed": allowed} | ({} if allowed else {"reason": "the right is denied"})
        return json.dumps(
            {**body, "apiVersion": resource.api_version, "kind": resource.kind, "status": status}
        ).encode()


def _is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return not pod["metadata"].get("deletionTimestamp") and any(
        c["type"] == "Ready" and c["status"] == "True" for c in conditions
    )


def _share(value: int | str, count: int) -> int:
    if isinstance(value, int):
        return value
    return -(-count * int(value.rstrip("%")) // 100) if value.endswith("%") else int(value)
