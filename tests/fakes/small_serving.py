"""As much of Knative Serving as a reconciler needs to see: a Service's template becomes a Revision,
and both say whether they are ready.

In the API server's own event loop, behind the clients' backs, so that its writes are not counted.
Pods are none of its business."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any, Self

from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.kubernetes.store import Event

Json = dict[str, Any]
SERVING = "serving.knative.dev/v1"
_SERVICES, _REVISIONS = ("serving.knative.dev", "services"), ("serving.knative.dev", "revisions")


class SmallServing:
    """A context manager. Owner: the server's event loop.

    Attributes:
        failing: name of a revision → (reason, message) of why it will not be ready.
        held: names of revisions that are neither ready nor failed yet.
        is_away: it does nothing.
    """

    def __init__(self, server: ApiServer) -> None:
        self.failing: dict[str, tuple[str, str]] = {}
        self.held: set[str] = set()
        self.is_away = False
        self.made: list[str] = []
        self._server = server
        self._stop: list[Any] = []

    def __enter__(self) -> Self:
        for key in (_SERVICES, _REVISIONS):
            self._stop.append(self._server.store.listen(key, self._seen))
        return self

    def __exit__(self, *failure: object) -> None:
        for stop in self._stop:
            stop()

    def look(self) -> None:
        """Look at every Service again: something of `failing` or `held` has changed."""
        for service in self._server.list(SERVING, "Service"):
            self._soon(service["metadata"]["namespace"], service["metadata"]["name"])

    def _seen(self, event: Event) -> None:
        owner = event.now.body["metadata"].get("labels", {}).get("serving.knative.dev/service")
        namespace, name = event.place
        if owner is None or event.kind == "DELETED":
            self._soon(namespace, owner or name)

    def _soon(self, namespace: str, name: str) -> None:
        asyncio.get_running_loop().call_soon(self._reconcile, namespace, name)

    def _reconcile(self, namespace: str, name: str) -> None:
        service = self._server.get(SERVING, "Service", name, namespace)
        if service is None or service["metadata"].get("deletionTimestamp") or self.is_away:
            return
        template = service["spec"]["template"]
        if self._server.get(SERVING, "Revision", template["metadata"]["name"], namespace) is None:
            self._make(service, template)
        for target in service["spec"].get("traffic", []):
            self._tell_revision(target["revisionName"], namespace)
        self._tell_revision(template["metadata"]["name"], namespace)
        self._tell_service(service)

    def _make(self, service: Json, template: Json) -> None:
        metadata = service["metadata"]
        owner = {
            "apiVersion": SERVING,
            "kind": "Service",
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        labels = {
            **template["metadata"].get("labels", {}),
            "serving.knative.dev/service": metadata["name"],
        }
        name = template["metadata"]["name"]
        self.made.append(name)
        self._server.put(
            {
                "apiVersion": SERVING,
                "kind": "Revision",
                "metadata": {
                    "name": name,
                    "namespace": metadata["namespace"],
                    "labels": labels,
                    "annotations": template["metadata"].get("annotations", {}),
                    "ownerReferences": [owner],
                },
                "spec": copy.deepcopy(template["spec"]),
            }
        )

    def _tell_revision(self, name: str, namespace: str) -> None:
        revision = self._server.get(SERVING, "Revision", name, namespace)
        if revision is not None:
            self._tell(
                revision,
                "Unknown" if name in self.held else "False" if name in self.failing else "True",
                self.failing.get(name),
            )

    def _tell_service(self, service: Json) -> None:
        namespace = service["metadata"]["namespace"]
        named = [target["revisionName"] for target in service["spec"].get("traffic", [])]
        lost = [
            name for name in named if self._server.get(SERVING, "Revision", name, namespace) is None
        ]
        down = [name for name in named if name in self.failing]
        if lost:
            self._tell(
                service,
                "False",
                ("RevisionMissing", f'Revision "{lost[0]}" referenced in traffic not found.'),
            )
        elif down:
            # as its Route says it (route_lifecycle.go, MarkRevisionFailed): without the reason
            why = ("RevisionMissing", f'Revision "{down[0]}" failed to become ready.')
            self._tell(service, "False", why)
        else:
            self._tell(service, "Unknown" if self.held & set(named) else "True", None)

    def _tell(self, item: Json, status: str, why: tuple[str, str] | None) -> None:
        condition: Json = {"type": "Ready", "status": status}
        if why is not None and status == "False":
            condition |= {"reason": why[0], "message": why[1]}
        wanted = {
            "observedGeneration": item["metadata"].get("generation", 1),
            "conditions": [condition],
        }
        if not _has(item.get("status") or {}, wanted):
            self._server.put({**item, "status": {**(item.get("status") or {}), **wanted}})


def _has(status: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(status.get(key) == value for key, value in wanted.items())
