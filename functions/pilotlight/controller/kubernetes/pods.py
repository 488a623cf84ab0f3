"""Conversion of a function's pod to an instance: pure functions of the pod object."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from pilotlight.kubernetes import names
from pilotlight.kubernetes.settings import ClusterSettings
from snapshotter.types import (
    GpuGrant,
    InstanceId,
    InstanceInfo,
    InstanceState,
    RevisionKey,
    StartKind,
)

CONTAINER = "user"
_LABELS = {
    "tenant": names.TENANT,
    "environment": names.ENVIRONMENT,
    "app": names.APP,
    "function": names.FUNCTION,
    "revision": names.REVISION,
}
_UNITS = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
}
_STEPS = (
    ("schedule", "", "PodScheduled"),
    ("containers", "PodScheduled", "Initialized"),
    ("boot", "Initialized", "Ready"),
)
"""Phases between the pod's conditions: scheduling, containers, boot until ready (which Knative's
queue-proxy probes in our worker)."""


def pod_to_instance(pod: Mapping[str, Any], settings: ClusterSettings) -> InstanceInfo | None:
    """Return the instance in a pod; None if the pod has ended or is not ours. The cluster's times
    have a resolution of seconds."""
    meta, status = pod["metadata"], pod.get("status") or {}
    key = (meta.get("annotations") or {}).get(names.KEY)
    if key is None or status.get("phase") in ("Succeeded", "Failed"):
        return None
    resources = _resources(pod)
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    return InstanceInfo(
        id=InstanceId(str(meta["name"])),
        revision=RevisionKey(str(key)),
        state=_state(pod),
        socket=str(status.get("podIP") or ""),
        start_kind=StartKind.COLD,
        phases_ms=_phases(pod),
        lessee=None,
        started_at=_seconds(str(status.get("startTime") or meta.get("creationTimestamp") or ""))
        or 0.0,
        pid=0,
        memory_bytes=round(quantity(str(limits.get("memory") or requests.get("memory") or "0"))),
        cpu=quantity(str(requests.get("cpu") or limits.get("cpu") or "0")),
        labels=labels_of(pod),
        gpus=GpuGrant.unidentified(
            (), round(quantity(str(limits.get(settings.gpu_resource) or "0")))
        ),
    )


def labels_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the platform's labels under their short names."""
    found = pod["metadata"].get("labels") or {}
    return {short: str(found[name]) for short, name in _LABELS.items() if name in found}


def has_started(pod: Mapping[str, Any]) -> bool:
    """Whether the worker's container has ever run, so that there may be a log."""
    return any("running" in (one.get("state") or {}) or _ended(one) for one in _containers(pod))


def restarts(pod: Mapping[str, Any]) -> int:
    """Return how often the container was restarted."""
    return sum(int(one.get("restartCount") or 0) for one in _containers(pod))


def quantity(text: str) -> float:
    """Parse `500m`, `2Gi` or `4` to a number; 0 if invalid."""
    for suffix, factor in _UNITS.items():
        if text.endswith(suffix):
            return _number(text.removesuffix(suffix)) * factor
    return _number(text.removesuffix("m")) / 1000 if text.endswith("m") else _number(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _state(pod: Mapping[str, Any]) -> InstanceState:
    if pod["metadata"].get("deletionTimestamp"):
        return InstanceState.DRAINING
    return InstanceState.READY if _since(pod, "Ready") is not None else InstanceState.STARTING


def _phases(pod: Mapping[str, Any]) -> dict[str, float]:
    began = _seconds(str(pod["metadata"].get("creationTimestamp") or ""))
    phases: dict[str, float] = {}
    for name, before, after in _STEPS:
        start, end = (_since(pod, before) if before else began), _since(pod, after)
        if start is not None and end is not None:
            phases[name] = max(0.0, (end - start) * 1000)
    return phases


def _since(pod: Mapping[str, Any], condition: str) -> float | None:
    """Return since when a condition is true (seconds since the epoch); None if it is not."""
    for one in (pod.get("status") or {}).get("conditions") or ():
        if one.get("type") == condition and one.get("status") == "True":
            return _seconds(str(one.get("lastTransitionTime") or ""))
    return None


def _seconds(text: str) -> float | None:
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _resources(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (pod.get("spec") or {}).get("containers") or ()
    return next(
        (one.get("resources") or {} for one in containers if one.get("name") == CONTAINER), {}
    )


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        one
        for one in (pod.get("status") or {}).get("containerStatuses") or ()
        if one.get("name") == CONTAINER
    ]


def _ended(container: Mapping[str, Any]) -> bool:
    return any("terminated" in (container.get(state) or {}) for state in ("state", "lastState"))
