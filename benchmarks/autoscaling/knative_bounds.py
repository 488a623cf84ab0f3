"""Knative's floor, ceiling, and safe scale to zero, as a pure function. pilotlight's activators
are always in the request path, so that they need neither its grace period nor its probe.

A desired scale is clamped. A zero is applied only when no call can be lost by it: an active
revision first becomes inactive after its stable window; an inactive one goes to zero once the
activator has been in the request path for the grace period and the retention of the last instance
is over; one that never became ready goes to zero after its deadline.

Source: knative/serving pkg/reconciler/autoscaling/kpa/scaler.go (Apache-2.0), semantics
restated."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from activator.autoscaler.kpa import ACTIVATION_BUFFER_S, clamp

UNKNOWN = -1
"""An unknown scale: nothing is applied."""
PROXY_RETRY_S = 3.0


class Activity(enum.StrEnum):
    """ACTIVATING: not ready yet. ACTIVE: receives traffic. INACTIVE: marked for zero."""

    ACTIVATING = "activating"
    ACTIVE = "active"
    INACTIVE = "inactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundsSpec:
    """Settings of one revision.

    Attributes:
        min_instances, max_instances: floor and ceiling; a ceiling of 0 means none.
        initial_scale: floor until it was reached once.
        stable_window_s: minimum time that a revision stays active.
        grace_s: time with the activator in the request path before the last instance is stopped.
        retention_s: additional delay of the last instance.
        progress_deadline_s: maximum time of a start.
        scale_to_zero: False always keeps one instance.
        always_proxied: the activator never leaves the request path, so no probe is needed.
        reachable: if False (no traffic), floor and retention do not apply."""

    min_instances: int = 0
    max_instances: int = 0
    initial_scale: int = 0
    stable_window_s: float = 60.0
    grace_s: float = 30.0
    retention_s: float = 0.0
    progress_deadline_s: float = 600.0
    scale_to_zero: bool = True
    always_proxied: bool = False
    reachable: bool = True

    @property
    def activation_timeout_s(self) -> float:
        """Time from the first start until the revision is given up."""
        return self.progress_deadline_s + ACTIVATION_BUFFER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionStatus:
    """State of a revision.

    Attributes:
        instances: the scale that is applied now.
        activity, for_s: its activity, and for how long.
        proxied_s: how long the activator has been in the request path; None = it is not.
        is_probe_ok: the public address answers as the activator; None = not probed.
        is_initialised: the initial scale was reached once."""

    instances: int
    activity: Activity = Activity.ACTIVE
    for_s: float = 0.0
    proxied_s: float | None = None
    is_probe_ok: bool | None = None
    is_initialised: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedScale:
    """What to do with a desired scale.

    Attributes:
        desired: the scale, UNKNOWN when there is none.
        is_applied: it differs from the current scale and may be applied now.
        look_again_s: when to decide again, None = at the next change.
        needs_probe: probe the public address until the activator answers."""

    desired: int
    is_applied: bool = False
    look_again_s: float | None = None
    needs_probe: bool = False


def bound(desired: int, *, spec: BoundsSpec, standing: RevisionStatus) -> BoundedScale:
    """Clamp `desired` and decide whether a zero may be applied now."""
    if desired < 0 and standing.activity is not Activity.ACTIVATING:
        return BoundedScale(desired=desired)
    floor = spec.min_instances if spec.reachable else 0
    if spec.reachable and not standing.is_initialised:
        floor = max(floor, spec.initial_scale)
    desired = clamp(desired, minimum=floor, maximum=spec.max_instances)
    if desired != 0:
        return _applied(desired, standing)
    if not spec.scale_to_zero:
        return _applied(1, standing)
    return {
        Activity.ACTIVATING: _zero_activating,
        Activity.ACTIVE: _zero_active,
        Activity.INACTIVE: _zero_inactive,
    }[standing.activity](spec, standing)


def _applied(
    desired: int, standing: RevisionStatus, look_again_s: float | None = None
) -> BoundedScale:
    return BoundedScale(
        desired=desired, is_applied=desired != standing.instances, look_again_s=look_again_s
    )


def _zero_activating(spec: BoundsSpec, standing: RevisionStatus) -> BoundedScale:
    if standing.for_s > spec.activation_timeout_s:
        return _applied(0, standing)
    return BoundedScale(desired=UNKNOWN, look_again_s=spec.activation_timeout_s)


def _zero_active(spec: BoundsSpec, standing: RevisionStatus) -> BoundedScale:
    if standing.for_s < spec.stable_window_s:
        return _applied(1, standing, look_again_s=spec.stable_window_s - standing.for_s)
    return BoundedScale(
        desired=0, look_again_s=None if standing.proxied_s is None else PROXY_RETRY_S
    )


def _zero_inactive(spec: BoundsSpec, standing: RevisionStatus) -> BoundedScale:
    if not spec.always_proxied and not standing.is_probe_ok:
        return BoundedScale(desired=0, needs_probe=True)
    retention_s = spec.retention_s if spec.reachable else 0.0
    if standing.for_s >= max(spec.grace_s, retention_s):
        return _applied(0, standing)
    if standing.for_s < retention_s:
        return BoundedScale(desired=0, look_again_s=retention_s - standing.for_s)
    rest_s = spec.grace_s - (standing.proxied_s or 0.0)
    return _applied(0, standing) if rest_s <= 0 else BoundedScale(desired=0, look_again_s=rest_s)
