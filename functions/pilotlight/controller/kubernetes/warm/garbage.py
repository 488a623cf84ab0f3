"""Which promoted pods are deleted, and why. Pure.

An activator ends the pods that it claimed. What is left here are pods that can never serve again,
also where no activator knows them: a promoted pod serves one revision in one life of its
container."""

from __future__ import annotations

import datetime as dt

from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.pods import restarts
from pilotlight.controller.kubernetes.warm.choice import annotation, has_ended, is_ready, label
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import names
from pilotlight.kubernetes.watch_events import Object

MARGIN_S = 30.0
"""Beyond a function's startup_timeout; the kubelet reports a pod's state with some delay."""


def reason_to_delete(pod: Object, state: DesiredState, *, now: float) -> str | None:
    """Why a promoted pod has to go; None if it may stay. `now`: wall clock."""
    if has_ended(pod) or restarts(pod):
        return "its container ended"
    tenant = state.tenants.get(label(pod, names.TENANT))
    function, revision = label(pod, names.FUNCTION_ID), label(pod, names.REVISION)
    if tenant is None:
        return "its tenant was deleted"
    if state.is_unreadable(function):
        return None
    route = state.functions.get(function)
    if route is None or route.stopped or route.tenant != tenant.id:
        return "its function was deleted or stopped"
    if revision not in route.revisions:
        return "its revision has no traffic"
    try:
        startup_s = state.spec(route, revision).clocks.startup_s
    except InvalidInput:
        return None  # of another version: what is not understood stays
    if not is_ready(pod) and now - promoted_at(pod) > startup_s + MARGIN_S:
        return f"it is not ready {startup_s:g} s after its promotion"
    return None


def promoted_at(pod: Object) -> float:
    """When it was promoted, seconds since the epoch; 0 if that cannot be read."""
    try:
        return dt.datetime.fromisoformat(annotation(pod, names.PROMOTED_AT)).timestamp()
    except ValueError:
        return 0.0
