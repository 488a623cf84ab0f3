"""Knative's Revision: its Deployment (user container and queue-proxy) and PodAutoscaler, and what
becomes of them.

Source of behaviour: knative/serving pkg/reconciler/revision.
"""

from __future__ import annotations

import json
from typing import Any

from pilotlight.kubernetes.kinds import DEPLOYMENT, POD, POD_AUTOSCALER, REVISION
from tests.fakes.knative.controllers import Controller, View, condition, condition_of, owned
from tests.fakes.knative.serving import summary

Json = dict[str, Any]
_P = "serving.knative.dev"
QUEUE_PROXY = "queue-proxy"
_POD_FIELDS = (
    "affinity",
    "automountServiceAccountToken",
    "containers",
    "dnsConfig",
    "dnsPolicy",
    "enableServiceLinks",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
)


class Revisions(Controller):
    """Revision → Deployment and PodAutoscaler."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        view.on(REVISION, self.enqueue)
        for kind in (DEPLOYMENT, POD_AUTOSCALER):
            view.on(kind, self.enqueue_owner("Revision"))
        view.on(POD, self._pod_seen)

    def _pod_seen(self, pod: Json) -> None:
        revision = (pod["metadata"].get("labels") or {}).get(f"{_P}/revision")
        if revision:
            self.look_at((pod["metadata"]["namespace"], revision))

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        revision = self.view.get(REVISION, namespace, name)
        if revision is None or revision["metadata"].get("deletionTimestamp"):
            return
        deployment = self.view.get(DEPLOYMENT, namespace, f"{name}-deployment")
        if deployment is None:
            deployment = await self.view.create(_deployment(revision))
        scaler = self.view.get(POD_AUTOSCALER, namespace, name)
        if scaler is None:
            scaler = await self.view.create(_autoscaler(revision))
        elif changes := _differences(scaler, revision):
            await self.view.patch(POD_AUTOSCALER, scaler, changes)
        await self._report(revision, deployment or {}, scaler or {})

    async def _report(self, revision: Json, deployment: Json, scaler: Json) -> None:
        available, healthy = self._health(revision, deployment, scaler)
        active = condition_of(scaler, "Active")
        said = {
            key: value for key, value in active.items() if key != "lastTransitionTime"
        } or condition("Active", None)
        scaled = scaler.get("status") or {}
        images = [
            {"name": c["name"], "imageDigest": c["image"]} for c in revision["spec"]["containers"]
        ]
        status = {
            "observedGeneration": revision["metadata"]["generation"],
            "conditions": [
                {**said, "severity": "Info"},
                available,
                healthy,
                summary([available, healthy]),
            ],
            "containerStatuses": images,
            "actualReplicas": scaled.get("actualScale") or 0,
            "desiredReplicas": max(0, scaled.get("desiredScale") or 0),
        }
        await self.view.set_status(REVISION, revision, status)

    def _health(self, revision: Json, deployment: Json, scaler: Json) -> tuple[Json, Json]:
        """ResourcesAvailable and ContainerHealthy."""
        was = condition_of(revision, "Ready").get("status") == "True"
        if condition_of(scaler, "ScaleTargetInitialized").get("status") == "True" or was:
            return condition("ResourcesAvailable", True), condition("ContainerHealthy", True)
        failure = condition_of(deployment, "ReplicaFailure")
        if failure.get("status") == "True":
            return condition(
                "ResourcesAvailable", False, failure["reason"], failure["message"]
            ), condition("ContainerHealthy", None)
        for pod in self.view.items(POD, revision["metadata"]["namespace"]):
            if (pod["metadata"].get("labels") or {}).get(f"{_P}/revision") != revision["metadata"][
                "name"
            ]:
                continue
            scheduled = condition_of(pod, "PodScheduled")
            if scheduled.get("status") == "False":
                reason, message = scheduled.get("reason", ""), scheduled.get("message", "")
                return condition("ResourcesAvailable", False, reason, message), condition(
                    "ContainerHealthy", None
                )
            for one in (pod.get("status") or {}).get("containerStatuses") or ():
                waiting = (one.get("state") or {}).get("waiting") or {}
                if one["name"] != QUEUE_PROXY and waiting.get("reason") in (
                    "ErrImagePull",
                    "ImagePullBackOff",
                ):
                    return condition(
                        "ResourcesAvailable", False, waiting["reason"], waiting["message"]
                    ), condition("ContainerHealthy", None)
                ended = (one.get("lastState") or {}).get("terminated") or {}
                if one["name"] != QUEUE_PROXY and ended:
                    text = f"Container failed with: {ended.get('message') or ended.get('reason')}"
                    code = f"ExitCode{ended['exitCode']}"
                    return condition("ResourcesAvailable", True), condition(
                        "ContainerHealthy", False, code, text
                    )
        return condition("ResourcesAvailable", None, "Deploying"), condition(
            "ContainerHealthy", None, "Deploying"
        )


def reachability(revision: Json) -> str:
    """Of its PodAutoscaler, from the label that the Route keeps."""
    state = (revision["metadata"].get("labels") or {}).get(f"{_P}/routingState")
    return {"active": "Reachable", "reserve": "Unreachable"}.get(str(state), "Unknown")


_DEFAULTED = ("autoscaling.knative.dev/class", "autoscaling.knative.dev/metric")


def _differences(scaler: Json, revision: Json) -> Json:
    """What the PodAutoscaler must get to be as its revision says: also annotations that were changed
    on it, or that the revision does not have (reconcilePA, syncAnnotationsForKPA)."""
    changes: Json = {}
    if scaler["spec"].get("reachability") != reachability(revision):
        changes["spec"] = {"reachability": reachability(revision)}
    there, wanted = scaler["metadata"].get("annotations") or {}, _annotations(revision)
    different: Json = {key: value for key, value in wanted.items() if there.get(key) != value}
    different |= {
        key: None
        for key in there.keys() - wanted.keys()
        if key.startswith("autoscaling.knative.dev/") and key not in _DEFAULTED
    }
    if different:
        changes["metadata"] = {"annotations": different}
    return changes


def _labels(revision: Json) -> Json:
    metadata = revision["metadata"]
    labels = {
        key: value
        for key, value in (metadata.get("labels") or {}).items()
        if key != f"{_P}/routingState"
    }
    return {
        **labels,
        f"{_P}/revision": metadata["name"],
        f"{_P}/revisionUID": metadata["uid"],
        "app": metadata["name"],
    }


def _annotations(revision: Json) -> Json:
    return dict(revision["metadata"].get("annotations") or {})


def _autoscaler(revision: Json) -> Json:
    name = revision["metadata"]["name"]
    head = owned(
        POD_AUTOSCALER,
        REVISION,
        revision,
        name,
        labels=_labels(revision),
        annotations=_annotations(revision),
    )
    spec = {
        "containerConcurrency": revision["spec"].get("containerConcurrency", 0),
        "protocolType": "http1",
        "reachability": reachability(revision),
        "scaleTargetRef": {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": f"{name}-deployment",
        },
    }
    return {**head, "spec": spec}


def _deployment(revision: Json) -> Json:
    name, labels, annotations = (
        revision["metadata"]["name"],
        _labels(revision),
        _annotations(revision),
    )
    initial = int(annotations.get("autoscaling.knative.dev/initial-scale", "1"))
    head = owned(
        DEPLOYMENT, REVISION, revision, f"{name}-deployment", labels=labels, annotations=annotations
    )
    spec = {
        "replicas": initial,
        "selector": {"matchLabels": {f"{_P}/revisionUID": revision["metadata"]["uid"]}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}},
        "template": {
            "metadata": {"labels": labels, "annotations": annotations},
            "spec": pod_spec(revision),
        },
    }
    return {**head, "spec": spec}


def pod_spec(revision: Json) -> Json:
    """User container as given (its readiness is asked by queue-proxy), queue-proxy beside it."""
    given = revision["spec"]
    spec = {field: given[field] for field in _POD_FIELDS if field in given}
    containers = []
    for container in given["containers"]:
        port = ((container.get("ports") or [{}])[0]).get("containerPort", 8080)
        given_env = [
            *(container.get("env") or ()),
            {"name": "PORT", "value": str(port)},
            *_names(revision),
        ]
        containers.append(
            {
                **{key: value for key, value in container.items() if key != "readinessProbe"},
                "env": given_env,
            }
        )
    env = [
        {"name": "CONTAINER_CONCURRENCY", "value": str(given.get("containerConcurrency", 0))},
        {"name": "REVISION_TIMEOUT_SECONDS", "value": str(given.get("timeoutSeconds", 300))},
        {"name": "SERVING_REVISION", "value": revision["metadata"]["name"]},
        {
            "name": "SERVING_READINESS_PROBE",
            "value": json.dumps(given["containers"][0].get("readinessProbe") or {}),
        },
    ]
    proxy: Json = {
        "name": QUEUE_PROXY,
        "image": "registry.example/knative/queue",
        "env": env,
        "ports": [
            {"name": "queue-port", "containerPort": 8012},
            {"name": "http-autometric", "containerPort": 9090},
        ],
        "resources": {"requests": _queue_resources(revision)},
        "readinessProbe": {
            "httpGet": {
                "port": 8012,
                "httpHeaders": [{"name": "K-Network-Probe", "value": "queue"}],
            }
        },
    }
    return {
        **spec,
        "containers": [*containers, proxy],
        "terminationGracePeriodSeconds": given.get("timeoutSeconds", 300),
    }


def _names(revision: Json) -> list[Json]:
    labels = revision["metadata"].get("labels") or {}
    return [
        {"name": "K_REVISION", "value": revision["metadata"]["name"]},
        {"name": "K_CONFIGURATION", "value": labels.get(f"{_P}/configuration", "")},
        {"name": "K_SERVICE", "value": labels.get(f"{_P}/service", "")},
    ]


def _queue_resources(revision: Json) -> Json:
    found = {"cpu": "25m"}
    for name in ("cpu", "memory"):
        given = _annotations(revision).get(
            f"queue.sidecar.serving.knative.dev/{name}-resource-request"
        )
        found |= {name: given} if given else {}
    return found
