"""Parses PodAutoscalers of our class. Keys: knative/serving pkg/apis/autoscaling (register.go,
v1alpha1)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.kubernetes import names

log = logging.getLogger(__name__)

CLASS = "pilotlight.dev"
_P = "autoscaling.knative.dev"
CLASS_KEY = f"{_P}/class"
_PROGRESS = "serving.knative.dev/progress-deadline"
PROGRESS_DEADLINE_S = 600.0
"""Knative's default (config-deployment)."""
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_DURATION = re.compile(r"(\d+(\.\d+)?(h|ms|m|s))+\Z")

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalable:
    """One revision to scale.

    Attributes:
        key: the platform's key, `<function id>@<revision>`; "" where its object has none.
        tenant: id, for its function's spec.
        target: name of its Deployment.
        max_scale: 0 = none.
        initial_scale: floor until it was reached once.
        reachable: False when no route names it: it need not be kept.
        is_initialised: the initial scale was reached once."""

    namespace: str
    name: str
    uid: str
    key: str
    tenant: str
    target: str
    concurrency: int = 0
    min_scale: int = 0
    max_scale: int = 0
    initial_scale: int = 1
    scale_down_delay_s: float = 0.0
    progress_deadline_s: float = PROGRESS_DEADLINE_S
    reachable: bool = True
    is_initialised: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def floor(self) -> int:
        """Minimum number of pods."""
        if not self.reachable:
            return 0
        return self.min_scale if self.is_initialised else max(self.min_scale, self.initial_scale)

    @property
    def ready_from(self) -> int:
        """Number of ready pods from which it is active: 0 if it may be initialised without any."""
        return max(self.min_scale, 1 if self.is_initialised else self.initial_scale)


def is_ours(item: Object) -> bool:
    """Whether it has our class and is not being deleted."""
    metadata = item["metadata"]
    return (metadata.get("annotations") or {}).get(CLASS_KEY) == CLASS and not metadata.get(
        "deletionTimestamp"
    )


def parsed(item: Object) -> Scalable:
    """Parse a PodAutoscaler. Invalid numbers count as missing: Knative's webhook rejects them."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    said = (item.get("status") or {}).get("conditions") or ()
    return Scalable(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        key=str(annotations.get(names.KEY) or ""),
        tenant=str(labels.get(names.TENANT) or ""),
        target=str(
            (spec.get("scaleTargetRef") or {}).get("name") or f"{metadata['name']}-deployment"
        ),
        concurrency=int(spec.get("containerConcurrency") or 0),
        min_scale=_whole(annotations, "min-scale", "minScale", 0),
        max_scale=_whole(annotations, "max-scale", "maxScale", 0),
        initial_scale=_whole(annotations, "initial-scale", "initialScale", 1),
        scale_down_delay_s=seconds(annotations.get(f"{_P}/scale-down-delay"), 0.0),
        progress_deadline_s=seconds(annotations.get(_PROGRESS), PROGRESS_DEADLINE_S),
        reachable=spec.get("reachability") != "Unreachable",
        is_initialised=any(
            one.get("type") == "ScaleTargetInitialized" and one.get("status") == "True"
            for one in said
        ),
    )


def seconds(text: Any, default_s: float) -> float:
    """Parse a duration in Go's format, such as `90s` or `1m30s`. The default if it is invalid."""
    if not isinstance(text, str) or not _DURATION.match(text):
        return default_s
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def _whole(annotations: Mapping[str, Any], name: str, other: str, default: int) -> int:
    text = annotations.get(f"{_P}/{name}", annotations.get(f"{_P}/{other}"))
    if text is None:
        return default
    try:
        return max(0, int(text))
    except ValueError:
        log.warning("annotation is not a number name=%s value=%r", name, text)
        return default
