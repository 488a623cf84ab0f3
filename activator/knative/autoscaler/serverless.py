"""The ServerlessService of a revision: Knative creates the public and the private Service from it,
and routes the public one.

Mode Serve routes to the pods, Proxy to Knative's own activator. Calls of the platform use neither;
the mode is still correct for clients that reach the revision through Knative. Fields:
knative/networking pkg/apis/networking/v1alpha1 (ServerlessServiceSpec)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from activator.autoscaler.kpa import MIN_ACTIVATORS
from activator.knative.autoscaler.podautoscalers import Scalable
from pilotlight.kubernetes.kinds import POD_AUTOSCALER, SERVERLESS_SERVICE

Object = Mapping[str, Any]
_NOT_COPIED = "autoscaling.knative.dev/metric"


def spec_of(item: Object, scalable: Scalable, *, is_served: bool) -> dict[str, Any]:
    """The spec for PodAutoscaler `item`. `is_served`: pods are desired and ready."""
    spec = item.get("spec") or {}
    target = spec.get("scaleTargetRef") or {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": scalable.target,
    }
    return {
        "mode": "Serve" if is_served else "Proxy",
        "objectRef": {key: target[key] for key in ("apiVersion", "kind", "name")},
        "protocolType": spec.get("protocolType") or "http1",
        "numActivators": MIN_ACTIVATORS,
    }


def manifest_of(item: Object, scalable: Scalable, *, is_served: bool) -> dict[str, Any]:
    """The manifest of a new one, owned by its PodAutoscaler."""
    metadata = item["metadata"]
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key != _NOT_COPIED
    }
    owner = {
        "apiVersion": POD_AUTOSCALER.api_version,
        "kind": POD_AUTOSCALER.kind,
        "name": scalable.name,
        "uid": scalable.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": SERVERLESS_SERVICE.api_version,
        "kind": SERVERLESS_SERVICE.kind,
        "metadata": {
            "name": scalable.name,
            "namespace": scalable.namespace,
            "labels": dict(metadata.get("labels") or {}),
            "annotations": annotations,
            "ownerReferences": [owner],
        },
        "spec": spec_of(item, scalable, is_served=is_served),
    }


def is_of(sks: Object, scalable: Scalable) -> bool:
    """Whether it belongs to that PodAutoscaler, in this incarnation."""
    return any(
        owner.get("uid") == scalable.uid for owner in sks["metadata"].get("ownerReferences") or ()
    )


def difference(sks: Object, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of its spec that differ from `wanted`."""
    there = sks.get("spec") or {}
    return {key: value for key, value in wanted.items() if there.get(key) != value}
