"""Conditions of Knative's objects, read (knative.dev/pkg/apis/condition_types.go)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHAT_TO_DO: Mapping[str, str] = {
    "RevisionMissing": "Knative has not made the revision yet, or it was deleted: it is made anew.",
    "RevisionNameTaken": "Another object has the revision's name: delete it, or deploy again.",
    "ContainerMissing": "The image cannot be found: look at its reference, and at "
    "cluster.image_pull_secrets.",
    "ImagePullBackOff": "The image cannot be pulled: look at its reference, at "
    "cluster.image_pull_secrets, and at the registry.",
    "ErrImagePull": "The image cannot be pulled: look at its reference, at "
    "cluster.image_pull_secrets, and at the registry.",
    "Unschedulable": "No node has room, or the GPU that is asked for: `kubectl get nodes "
    "--show-labels`, and the tenant's quota.",
    "ProgressDeadlineExceeded": "It did not come up within startup_timeout: `pilotlight app logs "
    "APP` has what it printed.",
    "ExceededQuota": "The namespace's ResourceQuota is used up: raise the tenant's plan.",
    "NoTraffic": "It has no pods, because nobody calls it.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition. `status`: True, False, or None for unknown."""

    type: str
    status: bool | None
    reason: str = ""
    message: str = ""

    @property
    def is_true(self) -> bool:
        """It holds."""
        return self.status is True

    @property
    def hint(self) -> str:
        """What to do about its reason; "" where we do not know."""
        return WHAT_TO_DO.get(self.reason, "")


_STATUS: Mapping[str, bool | None] = {"True": True, "False": False}


def condition(item: Mapping[str, Any], type: str) -> Condition:
    """An object's condition of that type; unknown where it has none, or where its status is about
    an earlier generation."""
    status = item.get("status") or {}
    observed, generation = status.get("observedGeneration"), item["metadata"].get("generation")
    if observed is not None and generation is not None and observed < generation:
        return Condition(
            type=type, status=None, reason="NotObserved", message="Knative has not looked at it yet"
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
        type=type, status=None, reason="NotObserved", message="Knative has not looked at it yet"
    )


def ready_of(item: Mapping[str, Any]) -> Condition:
    """The condition Ready, with the reason of what keeps it down."""
    ready = condition(item, "Ready")
    if ready.status is not False or ready.reason:
        return ready
    for cause in ("ResourcesAvailable", "ContainerHealthy"):
        if (part := condition(item, cause)).status is False:
            return Condition(type="Ready", status=False, reason=part.reason, message=part.message)
    return ready
