"""Converts a function's traffic document to a Service's `spec.traffic`: explicit revisions, whole
percents, and tags for revisions without a share.

It does not route calls (activators choose the revision and send calls to its pods) but determines
which revisions are reachable. An unreachable revision loses its pods, whatever its own minimum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import names
from pilotlight.protocol import FunctionRoute
from pilotlight.spec import traffic
from pilotlight.spec.traffic import WHOLE, TrafficDocument

Target = dict[str, Any]


def document_of(route: FunctionRoute) -> TrafficDocument:
    """The traffic document, or only the weights if the route has none. Raises InvalidInput."""
    if not route.document:
        return TrafficDocument(weights=dict(route.traffic))
    try:
        return traffic.from_json(route.document)
    except (KeyError, TypeError, ValueError) as e:
        raise InvalidInput(f"{route.app}/{route.function}: its traffic cannot be read: {e}") from e


def targets(route: FunctionRoute) -> list[Target]:
    """`spec.traffic`: by weight, largest first, then those with only a tag. Raises InvalidInput if
    percents do not add up to 100."""
    document = document_of(route)
    if (total := sum(document.weights.values())) != WHOLE:
        raise InvalidInput(
            f"{route.app}/{route.function}: the weights add up to {total}, must be exactly 100",
            parameter="weights",
        )
    rest = sorted((document.kept() & set(route.revisions)) - set(document.weights))
    by_weight = sorted(document.weights.items(), key=lambda item: (-item[1], item[0]))
    service = names.service_name(route.app, route.function)
    return [target(service, name, weight) for name, weight in by_weight] + [
        target(service, name, 0) for name in rest
    ]


def target(service: str, revision: str, percent: int) -> Target:
    """One entry; without a share it has its name as a tag, which keeps it reachable."""
    out: Target = {
        "revisionName": names.revision_name(service, revision),
        "latestRevision": False,
        "percent": percent,
    }
    return out if percent else {**out, "tag": names.revision_tag(revision)}


def percents(listed: list[Mapping[str, Any]]) -> dict[str, int]:
    """Revision's name in the cluster → percent, from a `spec.traffic`; omits those without a
    share."""
    return {
        str(entry["revisionName"]): int(entry["percent"])
        for entry in listed
        if entry.get("revisionName") and entry.get("percent")
    }
