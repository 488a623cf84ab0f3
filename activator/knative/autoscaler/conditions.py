"""The status of a PodAutoscaler for Knative, as a pure function of the desired scale, the current
state, and the previous status.

Conditions and reasons are those of knative/serving (pkg/apis/autoscaling/v1alpha1/pa_lifecycle.go,
pkg/reconciler/autoscaling/kpa/kpa.go): a Revision becomes Ready by ScaleTargetInitialized, and
copies Active. Times change only with their state, so that an unchanged status is not written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from activator.knative.autoscaler.podautoscalers import Scalable

Object = Mapping[str, Any]
_WORDS = {True: "True", False: "False", None: "Unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The input of a status.

    Attributes:
        wanted, ready: number of pods.
        has_timed_out: it was given up, because no pod became ready within its deadline.
        not_owned: a ServerlessService of its name belongs to another object."""

    wanted: int
    ready: int
    has_timed_out: bool = False
    not_owned: bool = False


def status_of(
    scalable: Scalable, item: Object, sks: Object | None, seen: Seen, *, now: str
) -> dict[str, Any]:
    """The complete status of PodAutoscaler `item`. `now`: RFC 3339."""
    old, of_sks = item.get("status") or {}, (sks or {}).get("status") or {}
    service, is_sks_ready = str(of_sks.get("serviceName") or ""), _status(of_sks, "Ready") == "True"
    is_initialised = scalable.is_initialised or (
        bool(service) and seen.ready >= scalable.ready_from
    )
    dependents = [
        _active(scalable, seen),
        _condition("SKSReady", True)
        if is_sks_ready
        else _condition("SKSReady", None, "NotReady", _message(of_sks, "Ready")),
        _condition("ScaleTargetInitialized", True if is_initialised else None),
    ]
    conditions = sorted([*dependents, _summary(dependents)], key=lambda one: str(one["type"]))
    return {
        **({"serviceName": service} if service else {}),
        **(
            {"metricsServiceName": str(of_sks["privateServiceName"])}
            if of_sks.get("privateServiceName")
            else {}
        ),
        "desiredScale": seen.wanted,
        "actualScale": seen.ready,
        "observedGeneration": item["metadata"].get("generation", 1),
        "conditions": _dated(old.get("conditions") or (), conditions, now),
    }


def _active(scalable: Scalable, seen: Seen) -> dict[str, Any]:
    if seen.not_owned:
        return _condition(
            "Active",
            False,
            "NotOwned",
            f"The ServerlessService {scalable.name!r} does not belong to this revision.",
        )
    if seen.has_timed_out:
        return _condition(
            "Active", False, "TimedOut", "No pod became ready within the progress deadline."
        )
    if seen.wanted == 0:
        return _condition("Active", False, "NoTraffic", "There are no calls.")
    if seen.ready < max(1, scalable.ready_from):
        return _condition("Active", None, "Queued", "Calls wait while its pods start.")
    return _condition("Active", True)


def _summary(dependents: Sequence[Object]) -> dict[str, Any]:
    """Ready: False where a condition is, otherwise Unknown where one is, with the reason of the
    first such condition."""
    for status in ("False", "Unknown"):
        for one in dependents:
            if one["status"] == status:
                return {**one, "type": "Ready"}
    return _condition("Ready", True)


def _condition(
    kind: str, status: bool | None, reason: str = "", message: str = ""
) -> dict[str, Any]:
    words = {name: text for name, text in (("reason", reason), ("message", message)) if text}
    return {"type": kind, "status": _WORDS[status], **words}


def _dated(old: Sequence[Object], new: Sequence[dict[str, Any]], now: str) -> list[dict[str, Any]]:
    known = {str(one.get("type")): one for one in old}
    dated = []
    for one in new:
        before = known.get(str(one["type"]), {})
        since = (
            before.get("lastTransitionTime", now) if before.get("status") == one["status"] else now
        )
        dated.append({**one, "lastTransitionTime": since})
    return dated


def _status(status: Object, kind: str) -> str:
    return str(
        next(
            (
                one.get("status")
                for one in status.get("conditions") or ()
                if one.get("type") == kind
            ),
            "",
        )
    )


def _message(status: Object, kind: str) -> str:
    return str(
        next(
            (
                one.get("message") or one.get("reason") or ""
                for one in status.get("conditions") or ()
                if one.get("type") == kind
            ),
            "",
        )
    )
