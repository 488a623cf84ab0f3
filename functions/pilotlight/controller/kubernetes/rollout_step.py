"""The next step of a function's Service, as a pure function of what is wanted and what is there.

    a revision is missing → bring it in with 0 % and a tag (its template is the Service's for that
    time) all are there, one that shall take traffic is not ready → wait, or tell why it will not be
    all are ready → the traffic as wanted

A template is only the way to create a revision: once all revisions are there, whatever template
stands in the Service stays. So other settings of the platform make no other revision, and a
revision that was deleted behind our back comes back under its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.kubernetes.conditions import Condition, ready_of
from pilotlight.controller.kubernetes.desired_state import spec_of
from pilotlight.kubernetes import names
from pilotlight.kubernetes.manifests import knative_service, revisions, traffic
from pilotlight.kubernetes.manifests.labels import Manifest, with_hash
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.kubernetes.watch_events import Object
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.traffic import WHOLE

PREVIOUS = "previous"
"""Tag of the revision before, while it is kept for the way back."""
KEPT: str = f"{names.DOMAIN}/kept"
"""Annotation of a Service: `<revision's name in the cluster> <epoch seconds>`: it stays reachable
so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStep:
    """What to do now.

    Attributes:
        service: to be brought to this; None = it stays as it is. waits_for: name in the cluster of
        the revision that is waited for; "" = the traffic is as wanted. condition: of what is waited
        for. again_s: look again after so long even if nothing changes; None = not by itself.
    """

    service: Manifest | None
    waits_for: str = ""
    condition: Condition | None = None
    again_s: float | None = None


def next_step(
    route: FunctionRoute,
    tenancy: Tenancy,
    *,
    live: Object | None,
    there: Mapping[str, Object],
    now: float,
) -> ServiceStep:
    """`live`: the Service; `there`: the function's Revisions by name in the cluster. Raises
    InvalidInput."""
    service = names.service_name(route.app, route.function)
    wanted = {
        names.revision_name(service, name): name for name in knative_service.revision_names(route)
    }
    # The newest last: its template is the one that stays.
    missing = sorted(
        (name for name in wanted if name not in there), key=lambda name: revisions.age(wanted[name])
    )
    if missing:
        return _bring_in(route, tenancy, missing[0], wanted[missing[0]], live)
    if live is None:  # somebody deleted the Service alone: Knative takes its revisions with it
        newest = max(wanted, key=lambda name: revisions.age(wanted[name]))
        return _bring_in(route, tenancy, newest, wanted[newest], None)
    final = traffic.targets(route)
    serving = traffic.percents(live["spec"].get("traffic") or [])
    for target in final:
        name = str(target["revisionName"])
        if (
            target["percent"]
            and name not in serving
            and not (condition := ready_of(there[name])).is_true
        ):
            return ServiceStep(service=None, waits_for=name, condition=condition)
    kept = _kept(route, live, serving=serving, wanted=wanted, there=there, now=now)
    made = knative_service.service(
        route,
        tenancy,
        template=_without_nulls(live["spec"]["template"]),
        listed=[*final, *_listed(kept)],
    )
    if kept is None:
        return ServiceStep(service=made)
    name, until = kept
    metadata = made["metadata"]
    annotations = {**metadata["annotations"], KEPT: f"{name} {until:.0f}"}
    return ServiceStep(
        service=with_hash({**made, "metadata": {**metadata, "annotations": annotations}}),
        again_s=max(0.0, until - now),
    )


def _bring_in(
    route: FunctionRoute, tenancy: Tenancy, name: str, revision: str, live: Object | None
) -> ServiceStep:
    """The Service whose template is the missing revision's; nothing to write where it is so
    already, and Knative is at work."""
    template = revisions.template(RevisionOf.of(route, tenancy, revision))
    if live is None:
        whole: traffic.Target = {"revisionName": name, "latestRevision": False, "percent": WHOLE}
        return ServiceStep(
            service=knative_service.service(route, tenancy, template=template, listed=[whole]),
            waits_for=name,
        )
    listed: list[traffic.Target] = [_entry(target) for target in live["spec"].get("traffic") or []]
    if not any(target["revisionName"] == name for target in listed):
        listed.append(traffic.target(names.service_name(route.app, route.function), revision, 0))
    if live["spec"]["template"]["metadata"].get("name") == name:
        return ServiceStep(service=None, waits_for=name)
    return ServiceStep(
        service=knative_service.service(route, tenancy, template=template, listed=listed),
        waits_for=name,
    )


def _without_nulls(value: Any) -> Any:
    """What Knative's own encoder writes as null (`creationTimestamp`) is nothing that we would want
    to own."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _entry(target: Mapping[str, Any]) -> traffic.Target:
    """An entry as we write it: without what Knative added."""
    out: traffic.Target = {
        key: target[key]
        for key in ("revisionName", "latestRevision", "percent", "tag")
        if key in target
    }
    return {"latestRevision": False, "percent": 0, **out}


def _kept(
    route: FunctionRoute,
    live: Object,
    *,
    serving: Mapping[str, int],
    wanted: Mapping[str, str],
    there: Mapping[str, Object],
    now: float,
) -> tuple[str, float] | None:
    """The revision before and until when it is kept, where the newest one's terms say so; None =
    none is."""
    keep_s = spec_of(route, revisions.newest(list(wanted.values()))).rollout.keep_previous_s
    leaving = {
        name: percent for name, percent in serving.items() if name not in wanted and name in there
    }
    if leaving and keep_s > 0:
        return max(leaving, key=lambda name: (leaving[name], name)), now + keep_s
    name, _, until = (live["metadata"].get("annotations") or {}).get(KEPT, "").partition(" ")
    if name in there and name not in wanted and until.isdigit() and float(until) > now:
        return name, float(until)
    return None


def _listed(kept: tuple[str, float] | None) -> Sequence[traffic.Target]:
    return (
        [{"revisionName": kept[0], "latestRevision": False, "percent": 0, "tag": PREVIOUS}]
        if kept is not None
        else []
    )
