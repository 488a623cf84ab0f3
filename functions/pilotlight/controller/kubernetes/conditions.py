"""Conditions of Knative objects (knative.dev/pkg/apis/condition_types.go)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHAT_TO_DO: Mapping[str, str] = {
    "RevisionMissing": "Knative has not created the revision yet, it was deleted (it is created "
    "again), or it failed: see `kubectl get revisions`.",
    "RevisionNameTaken": "Another object has the revision's name: delete it, or deploy again.",
    "ContainerMissing": "The image was not found: check its reference and "
    "cluster.image_pull_secrets.",
    "ImagePullBackOff": "The image cannot be pulled: check its reference, "
    "cluster.image_pull_secrets and the registry.",
    "ErrImagePull": "The image cannot be pulled: check its reference, cluster.image_pull_secrets "
    "and the registry.",
    "Unschedulable": "No node has enough resources or the requested GPU: check `kubectl get nodes "
    "--show-labels` and the tenant's quota.",
    "ProgressDeadlineExceeded": "It did not start within startup_timeout: see its output with "
    "`pilotlight logs APP`.",
    "ExceededQuota": "The namespace's ResourceQuota is used up: raise the tenant's plan.",
    "FailedCreate": "The cluster refuses its pods: create what is missing (the RuntimeClass of "
    "functions with a GPU is cluster.gpu_runtime_class; null = none), or raise the quota.",
    "NoTraffic": "It has no pods because it receives no calls.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition. `status`: True, False, or None if unknown."""

    type: str
    status: bool | None
    reason: str = ""
    message: str = ""

    @property
    def is_true(self) -> bool:
        """Whether the status is True."""
        return self.status is True

    @property
    def hint(self) -> str:
        """What to do about the reason; "" if unknown."""
        return WHAT_TO_DO.get(self.reason, "")


_STATUS: Mapping[str, bool | None] = {"True": True, "False": False}


def condition(item: Mapping[str, Any], type: str) -> Condition:
    """Return an object's condition of that type; unknown if it is missing or if the status
    describes an earlier generation."""
    status = item.get("status") or {}
    observed, generation = status.get("observedGeneration"), item["metadata"].get("generation")
    if observed is not None and generation is not None and observed < generation:
        return Condition(
            type=type, status=None, reason="NotObserved", message="Knative has not observed it yet"
        )
    for each in status.get("conditions") or ():
        if each.get("type") == type:
            return Condition(
                type=type,
                status=_STATUS.get(str(each.get("status"))),
                reason=str(each.get("reason") or ""),
                message=str(each.get("message") or ""),
            )
    return Condition(
        type=type, status=None, reason="NotObserved", message="Knative has not observed it yet"
    )


def ready_of(item: Mapping[str, Any]) -> Condition:
    """Return the condition Ready, with the reason of the condition that causes it to be False."""
    ready = condition(item, "Ready")
    if ready.status is not False or ready.reason:
        return ready
    for cause in ("ResourcesAvailable", "ContainerHealthy"):
        if (part := condition(item, cause)).status is False:
            return Condition(type="Ready", status=False, reason=part.reason, message=part.message)
    return ready
