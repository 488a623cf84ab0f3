"""A revision of class `pilotlight.dev` in the API server of the tests: what Knative and Kubernetes
would do, step by step."""

from __future__ import annotations

import json
from typing import Any

from pilotlight.kubernetes import names
from tests.fakes.kubernetes.server import ApiServer

Json = dict[str, Any]
NAMESPACE = "fn-acme"
AUTOSCALING = "autoscaling.internal.knative.dev/v1alpha1"
NETWORKING = "networking.internal.knative.dev/v1alpha1"


class ScaledRevision:
    """One. Owner: a test."""

    def __init__(
        self,
        server: ApiServer,
        name: str = "search-embed-v1-aaaaaa",
        *,
        key: str = "f-1@v1-aaaaaa",
        **annotations: str,
    ) -> None:
        """`annotations`: of the autoscaler, `min_scale="1"`."""
        self.server = server
        self.name, self.key = name, key
        given = {
            f"autoscaling.knative.dev/{word.replace('_', '-')}": value
            for word, value in annotations.items()
        }
        self._annotations = {
            "autoscaling.knative.dev/class": "pilotlight.dev",
            "autoscaling.knative.dev/initial-scale": "0",
            "autoscaling.knative.dev/max-scale": "8",
            names.KEY: key,
            **given,
        }
        self._labels = {
            names.MANAGED_BY: "pilotlight",
            names.FUNCTION_ID: key.partition("@")[0],
            names.TENANT: "t-acme",
        }

    def annotate(self, key: str, value: str) -> None:
        """Before it is made."""
        self._annotations[key] = value

    def made(
        self, *, replicas: int = 0, reachability: str = "Reachable", status: Json | None = None
    ) -> ScaledRevision:
        """Knative made its Deployment and its PodAutoscaler."""
        self.deployment(replicas=replicas)
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{self.name}-deployment"}
        spec = {
            "scaleTargetRef": target,
            "protocolType": "http1",
            "reachability": reachability,
            "containerConcurrency": 1,
        }
        body = {
            "apiVersion": AUTOSCALING,
            "kind": "PodAutoscaler",
            "metadata": self._metadata(self.name),
            "spec": spec,
        }
        self.server.put({**body, **({"status": status} if status is not None else {})})
        return self

    def deployment(self, *, replicas: int | None = None, ready: int = 0) -> None:
        """The Deployment, with so many ready pods; `replicas`: None = as it is."""
        now = self.server.get("apps/v1", "Deployment", f"{self.name}-deployment", NAMESPACE)
        count = replicas if replicas is not None else self.replicas
        uid = self._revision()["metadata"]["uid"]
        owner = {
            "apiVersion": "serving.knative.dev/v1",
            "kind": "Revision",
            "name": self.name,
            "uid": uid,
            "controller": True,
        }
        metadata = {**self._metadata(f"{self.name}-deployment"), "ownerReferences": [owner]}
        template = {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "user", "image": "registry.example/fn"}]},
        }
        spec = (
            now["spec"]
            if now is not None
            else {"selector": {"matchLabels": {"a": "b"}}, "template": template}
        )
        status = {"replicas": count, "readyReplicas": ready, "availableReplicas": ready}
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {**spec, "replicas": count},
            "status": status,
        }
        self.server.put(json.loads(json.dumps(body)))

    def _revision(self) -> Json:
        found = self.server.get("serving.knative.dev/v1", "Revision", self.name, NAMESPACE)
        spec = {"containers": [{"name": "user", "image": "registry.example/fn@sha256:" + "0" * 64}]}
        body = {
            "apiVersion": "serving.knative.dev/v1",
            "kind": "Revision",
            "metadata": {"name": self.name, "namespace": NAMESPACE},
        }
        return found or self.server.put({**body, "spec": spec})

    def served(self, *, is_ready: bool = True) -> None:
        """Knative made the Services of its ServerlessService, and says whether they lead
        anywhere."""
        sks = self.sks
        assert sks is not None
        ready = {
            "type": "Ready",
            "status": "True" if is_ready else "Unknown",
            "message": "" if is_ready else "no endpoints",
        }
        status = {
            "serviceName": self.name,
            "privateServiceName": f"{self.name}-private",
            "conditions": [ready],
        }
        self.server.put({**json.loads(json.dumps(sks)), "status": status})

    def reachability(self, word: str) -> None:
        """A route began or ceased to name it."""
        now = json.loads(json.dumps(self.autoscaler))
        now["spec"]["reachability"] = word
        self.server.put(now)

    # -- what is there -----------------------------------------------------------------------------
    @property
    def replicas(self) -> int:
        """The Deployment's scale."""
        found = self.server.get("apps/v1", "Deployment", f"{self.name}-deployment", NAMESPACE)
        assert found is not None
        return int(found["spec"]["replicas"])

    @property
    def autoscaler(self) -> Json:
        """The PodAutoscaler."""
        found = self.server.get(AUTOSCALING, "PodAutoscaler", self.name, NAMESPACE)
        assert found is not None
        return found

    @property
    def sks(self) -> Json | None:
        """The ServerlessService."""
        return self.server.get(NETWORKING, "ServerlessService", self.name, NAMESPACE)

    def condition(self, kind: str) -> Json:
        """One of the PodAutoscaler's conditions; empty while it has none."""
        conditions = (self.autoscaler.get("status") or {}).get("conditions") or []
        return next((one for one in conditions if one["type"] == kind), {})

    def _metadata(self, name: str) -> Json:
        return {
            "name": name,
            "namespace": NAMESPACE,
            "labels": dict(self._labels),
            "annotations": dict(self._annotations),
        }
