"""The next step of a function's Service, as a pure function of desired and live objects.

    a revision is missing → add it with 0 % and a tag (the Service has its template meanwhile)
    all exist, one that should receive traffic is not ready → wait, or report why it will not be
    all are ready → set the desired traffic

A template only serves to create a revision: once all revisions exist, the Service keeps its
template, whichever it is. So changed platform settings create no new revision, and a revision that
someone deleted is created again under its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.kubernetes.conditions import Condition, ready_of
from pilotlight.kubernetes import names
from pilotlight.kubernetes.manifests import knative_service, revisions, traffic
from pilotlight.kubernetes.manifests.labels import Manifest, with_hash
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy
from pilotlight.kubernetes.watch_events import Object
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.traffic import WHOLE

PREVIOUS = "previous"
"""Tag of the previous revision while it is kept for a rollback."""
KEPT: str = f"{names.DOMAIN}/kept"
"""Annotation of a Service: `<revision's name in the cluster> <epoch seconds>`: until when the
revision stays reachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStep:
    """The next action.

    Attributes:
        service: the Service to apply; None = no change.
        waits_for: name in the cluster of the revision waited for; "" = the traffic is as desired.
        condition: of the revision waited for.
        again_s: look again after this time even if nothing changes; None = only after a change.
    """

    service: Manifest | None
    waits_for: str = ""
    condition: Condition | None = None
    again_s: float | None = None


def next_step(
    route: FunctionRoute,
    tenancy: Tenancy,
    *,
    named: Collection[RevisionOf],
    live: Object | None,
    there: Mapping[str, Object],
    now: float,
) -> ServiceStep:
    """Return the next step. `named`: the required revisions; `live`: the Service; `there`: the
    function's Revisions by name in the cluster. Raises InvalidInput."""
    wanted = {made.name: made for made in named}
    # The newest last: its template is the one that remains.
    by_age = sorted(named, key=lambda made: revisions.age(made.revision))
    missing = [made for made in by_age if made.name not in there]
    if missing:
        return _add_template(route, tenancy, missing[0], live)
    if live is None:  # someone deleted only the Service: Knative deletes its revisions too
        return _add_template(route, tenancy, by_age[-1], None)
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
    kept = _previous_kept(route, live, by_age[-1].spec, serving=serving, there=there, now=now)
    made = knative_service.service(
        route,
        tenancy,
        template=_without_nulls(live["spec"]["template"]),
        listed=[*final, *_previous_target(kept, named=wanted)],
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


def _add_template(
    route: FunctionRoute, tenancy: Tenancy, made: RevisionOf, live: Object | None
) -> ServiceStep:
    """Return the Service with the missing revision's template; nothing to write if it has it
    already and Knative is creating the revision."""
    name, template = made.name, revisions.template(made)
    if live is None:
        whole: traffic.Target = {"revisionName": name, "latestRevision": False, "percent": WHOLE}
        return ServiceStep(
            service=knative_service.service(route, tenancy, template=template, listed=[whole]),
            waits_for=name,
        )
    listed: list[traffic.Target] = [_entry(target) for target in live["spec"].get("traffic") or []]
    if not any(target["revisionName"] == name for target in listed):
        listed.append(traffic.target(made.service, made.revision, 0))
    if live["spec"]["template"]["metadata"].get("name") == name:
        return ServiceStep(service=None, waits_for=name)
    return ServiceStep(
        service=knative_service.service(route, tenancy, template=template, listed=listed),
        waits_for=name,
    )


def _without_nulls(value: Any) -> Any:
    """Remove what Knative's encoder writes as null (`creationTimestamp`): we must not own it."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _entry(target: Mapping[str, Any]) -> traffic.Target:
    """Return a traffic entry with only the fields that we write."""
    out: traffic.Target = {
        key: target[key]
        for key in ("revisionName", "latestRevision", "percent", "tag")
        if key in target
    }
    return {"latestRevision": False, "percent": 0, **out}


def _previous_kept(
    route: FunctionRoute,
    live: Object,
    newest: FunctionSpec,
    *,
    serving: Mapping[str, int],
    there: Mapping[str, Object],
    now: float,
) -> tuple[str, float] | None:
    """Return the previous revision and until when it is kept, if the newest one's settings say so;
    None otherwise."""
    keep_s = newest.rollout.keep_previous_s
    weighted = {
        names.revision_name(names.service_name(route.app, route.function), revision)
        for revision in traffic.document_of(route).weights
    }
    leaving = {
        name: percent for name, percent in serving.items() if name not in weighted and name in there
    }
    if leaving and keep_s > 0:
        return max(leaving, key=lambda name: (leaving[name], name)), now + keep_s
    name, _, until = (live["metadata"].get("annotations") or {}).get(KEPT, "").partition(" ")
    if name in there and name not in weighted and until.isdigit() and float(until) > now:
        return name, float(until)
    return None


def _previous_target(
    kept: tuple[str, float] | None, *, named: Collection[str]
) -> Sequence[traffic.Target]:
    """Return the entry that keeps the previous revision, unless the traffic names it itself."""
    return (
        [{"revisionName": kept[0], "latestRevision": False, "percent": 0, "tag": PREVIOUS}]
        if kept is not None and kept[0] not in named
        else []
    )
