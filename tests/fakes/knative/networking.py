"""ServerlessService → the public and the private Service of a revision, and the EndpointSlices of
Services with a selector.

Source of behaviour: knative/serving pkg/reconciler/serverlessservice; Kubernetes' EndpointSlice
controller."""

from __future__ import annotations

from typing import Any

from pilotlight.kubernetes.kinds import (
    CORE_SERVICE,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    POD,
    SERVERLESS_SERVICE,
)
from tests.fakes.knative.controllers import Controller, View, condition, condition_of, owned

Json = dict[str, Any]
_P = "networking.internal.knative.dev"
_NAME = "kubernetes.io/service-name"


class ServerlessServices(Controller):
    """SKS → two Services."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        view.on(SERVERLESS_SERVICE, self.enqueue)
        view.on(CORE_SERVICE, self.enqueue_owner("ServerlessService"))
        view.on(ENDPOINT_SLICE, self._slice_seen)

    def _slice_seen(self, item: Json) -> None:
        name = (item["metadata"].get("labels") or {}).get(f"{_P}/serverlessservice")
        if name:
            self.look_at((item["metadata"]["namespace"], name))

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        sks = self.view.get(SERVERLESS_SERVICE, namespace, name)
        if sks is None or sks["metadata"].get("deletionTimestamp"):
            return
        private = f"{name}-private"
        target = self.view.get(DEPLOYMENT, namespace, sks["spec"]["objectRef"]["name"])
        if target is None:
            self.later((namespace, name), 0.1)
            return
        if self.view.get(CORE_SERVICE, namespace, private) is None:
            selector = target["spec"]["selector"]["matchLabels"]
            ports = [
                _port("http", 80, 8012),
                _port("queue-port", 8012, 8012),
                _port("http-autometric", 9090, 9090),
            ]
            await self.view.create(
                _service(sks, private, "Private", {"selector": selector, "ports": ports})
            )
        if self.view.get(CORE_SERVICE, namespace, name) is None:
            await self.view.create(
                _service(sks, name, "Public", {"ports": [_port("http", 80, 8012)]})
            )
        ready = self._ready_addresses(namespace, private)
        populated = condition(
            "EndpointsPopulated",
            bool(ready) or sks["spec"].get("mode") == "Proxy" or None,
            "" if ready else "NoHealthyBackends",
        )
        status = {
            "observedGeneration": sks["metadata"]["generation"],
            "serviceName": name,
            "privateServiceName": private,
            "conditions": [
                condition("ActivatorEndpointsPopulated", sks["spec"].get("mode") == "Proxy"),
                populated,
                {**populated, "type": "Ready"},
            ],
        }
        await self.view.set_status(SERVERLESS_SERVICE, sks, status)

    def _ready_addresses(self, namespace: str, service: str) -> list[str]:
        found = []
        for item in self.view.items(ENDPOINT_SLICE, namespace):
            if (item["metadata"].get("labels") or {}).get(_NAME) == service:
                found += [
                    one["addresses"][0]
                    for one in item.get("endpoints") or ()
                    if one["conditions"]["ready"]
                ]
        return found


def _port(name: str, port: int, target: int) -> Json:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}


def _service(sks: Json, name: str, kind: str, spec: Json) -> Json:
    metadata = sks["metadata"]
    labels = {
        **(metadata.get("labels") or {}),
        f"{_P}/serverlessservice": metadata["name"],
        f"{_P}/serviceType": kind,
    }
    return {**owned(CORE_SERVICE, SERVERLESS_SERVICE, sks, name, labels=labels), "spec": spec}


class EndpointSlices(Controller):
    """One slice for each Service with a selector (a hundred endpoints and more fit the tests)."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        view.on(CORE_SERVICE, self.enqueue)
        view.on(POD, self._pod_seen)

    def _pod_seen(self, pod: Json) -> None:
        labels = pod["metadata"].get("labels") or {}
        for service in self.view.items(CORE_SERVICE, pod["metadata"]["namespace"]):
            selector = service["spec"].get("selector")
            if selector and selector.items() <= labels.items():
                self.enqueue(service)

    async def reconcile(self, namespace: str, name: str) -> None:
        """See the class."""
        service = self.view.get(CORE_SERVICE, namespace, name)
        if (
            service is None
            or service["metadata"].get("deletionTimestamp")
            or not service["spec"].get("selector")
        ):
            return
        selector = service["spec"]["selector"]
        pods = [
            p
            for p in self.view.items(POD, namespace)
            if selector.items() <= (p["metadata"].get("labels") or {}).items()
        ]
        endpoints = [one for pod in pods if (one := _endpoint(pod)) is not None]
        ports = [
            {"name": one.get("name", ""), "port": one["targetPort"], "protocol": "TCP"}
            for one in service["spec"]["ports"]
        ]
        known = self.view.get(ENDPOINT_SLICE, namespace, f"{name}-slice")
        if known is None:
            labels = {**(service["metadata"].get("labels") or {}), _NAME: name}
            labels["endpointslice.kubernetes.io/managed-by"] = "endpointslice-controller.k8s.io"
            head = owned(ENDPOINT_SLICE, CORE_SERVICE, service, f"{name}-slice", labels=labels)
            await self.view.create(
                {**head, "addressType": "IPv4", "endpoints": endpoints, "ports": ports}
            )
        elif (known.get("endpoints") or []) != endpoints:
            await self.view.patch(ENDPOINT_SLICE, known, {"endpoints": endpoints})


def _endpoint(pod: Json) -> Json | None:
    status, metadata = pod.get("status") or {}, pod["metadata"]
    address = status.get("podIP")
    if not address or status.get("phase") in ("Failed", "Succeeded"):
        return None
    is_ready, is_ending = (
        condition_of(pod, "Ready").get("status") == "True",
        bool(metadata.get("deletionTimestamp")),
    )
    return {
        "addresses": [address],
        "conditions": {
            "ready": is_ready and not is_ending,
            "serving": is_ready,
            "terminating": is_ending,
        },
        "nodeName": pod["spec"].get("nodeName", ""),
        "targetRef": {
            "kind": "Pod",
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
