"""Knative's rules for a Service's traffic."""

from __future__ import annotations

import re
from typing import Any

Json = dict[str, Any]
_TAG = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")


def traffic_faults(traffic: list[Json]) -> list[str]:
    """What is wrong with `spec.traffic`."""
    found: list[str] = []
    tags: dict[str, int] = {}
    for index, target in enumerate(traffic):
        found += _target_faults(target, f"spec.traffic[{index}]")
        tag = target.get("tag")
        if tag and tag in tags:
            found.append(
                f"Multiple definitions for {tag}: spec.traffic[{tags[tag]}].tag, "
                f"spec.traffic[{index}].tag"
            )
        elif tag:
            tags[tag] = index
    total = sum(target.get("percent", 0) for target in traffic)
    if traffic and total != 100:
        found.append(f"Traffic targets sum to {total}, want 100: spec.traffic")
    return found


def _target_faults(target: Json, path: str) -> list[str]:
    found = []
    if "configurationName" in target:
        found.append(f"must not set the field(s): {path}.configurationName")
    if target.get("url"):
        found.append(f"must not set the field(s): {path}.url")
    percent = target.get("percent", 0)
    if not 0 <= percent <= 100:
        found.append(f"expected 0 <= {percent} <= 100: {path}.percent")
    if bool(target.get("revisionName")) == bool(target.get("latestRevision")):
        found.append(
            f"invalid value: {str(target.get('latestRevision', False)).lower()}: "
            f"{path}.latestRevision"
        )
    tag = target.get("tag")
    if tag and (not _TAG.match(tag) or len(tag) > 63):
        found.append(f"invalid value: {tag}: {path}.tag\nnot a DNS 1035 label")
    return found
