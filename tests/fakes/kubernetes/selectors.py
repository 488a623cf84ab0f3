"""Label and field selectors of lists and watches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.fakes.kubernetes.problems import Refused

Json = dict[str, Any]
Match = Callable[[Json], bool]
_SET = re.compile(r"(?P<key>[^\s!=,()]+)\s+(?P<how>in|notin)\s*\((?P<values>[^)]*)\)\Z")
_PAIR = re.compile(r"(?P<key>[^\s!=,()]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s,()]*)\Z")
_NAME = re.compile(r"(?P<no>!?)\s*(?P<key>[^\s!=,()]+)\Z")
_SELECTABLE = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.serviceAccountName",
        "spec.schedulerName",
        "status.phase",
        "status.podIP",
    ),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
    "nodes": ("spec.unschedulable",),
    "events": (
        "involvedObject.kind",
        "involvedObject.name",
        "involvedObject.namespace",
        "involvedObject.uid",
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    "jobs": ("status.successful",),
}


def label_match(selector: str) -> Match | None:
    """A test of an object's labels; None = everything matches. Raises Refused 400."""
    tests = [
        _requirement(part.strip()) for part in re.split(r",(?![^(]*\))", selector) if part.strip()
    ]
    if not tests:
        return None

    def matches(target: Json) -> bool:
        labels = target["metadata"].get("labels") or {}
        return all(test(labels) for test in tests)

    return matches


def _requirement(part: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.match(part):
        key, values = found["key"], {value.strip() for value in found["values"].split(",")}
        if found["how"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _PAIR.match(part):
        key, value = found["key"], found["value"]
        if found["how"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _NAME.match(part):
        key, absent = found["key"], bool(found["no"])
        return lambda labels: (key in labels) is not absent
    raise Refused(400, f"unable to parse requirement: found '{part}'")


def labels_match(selector: Json | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector document (matchLabels, matchExpressions) against labels; None matches
    nothing."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_expression(one, labels) for one in selector.get("matchExpressions") or ())


def _expression(one: Json, labels: Mapping[str, str]) -> bool:
    key, how, values = one["key"], one["operator"], one.get("values") or []
    if how == "Exists":
        return key in labels
    if how == "DoesNotExist":
        return key not in labels
    return (labels.get(key) in values) if how == "In" else (labels.get(key) not in values)


def field_match(selector: str, plural: str) -> Match | None:
    """A test of an object's fields; None = everything matches. Raises Refused 400 for a field that
    cannot be selected by."""
    tests: list[tuple[list[str], bool, str]] = []
    for part in filter(None, selector.split(",")):
        found = _PAIR.match(part.strip())
        if found is None:
            raise Refused(400, f"invalid selector: '{part}'; can't understand '{part}'")
        key = found["key"]
        if key not in ("metadata.name", "metadata.namespace", *_SELECTABLE.get(plural, ())):
            raise Refused(400, f"field label not supported: {key}")
        tests.append((key.split("."), found["how"] == "!=", found["value"]))
    if not tests:
        return None
    return lambda target: all(
        (_at(target, path) == value) is not negated for path, negated, value in tests
    )


def _at(target: Any, path: list[str]) -> str:
    for key in path:
        target = target.get(key, "") if isinstance(target, dict) else ""
    return str(target) if not isinstance(target, bool) else str(target).lower()


def both(one: Match | None, other: Match | None) -> Match | None:
    """Both tests at once."""
    if one is None or other is None:
        return one or other
    return lambda target: one(target) and other(target)
