"""`metadata.managedFields`: kept up to date for each write, and what server-side apply does with
them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fakes.kubernetes import fields
from tests.fakes.kubernetes.fields import FieldSet
from tests.fakes.kubernetes.problems import Refused
from tests.fakes.kubernetes.schema import Schema

Json = dict[str, Any]
_UNTRACKED: FieldSet = {
    "f:name": {},
    "f:namespace": {},
    "f:uid": {},
    "f:creationTimestamp": {},
    "f:resourceVersion": {},
    "f:generation": {},
    "f:managedFields": {},
    "f:selfLink": {},
    "f:deletionTimestamp": {},
    "f:deletionGracePeriodSeconds": {},
    "f:generateName": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """Who writes: `operation` is Apply or Update."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""

    def is_of(self, entry: Json) -> bool:
        """Whether an entry is this manager's."""
        return (entry["manager"], entry["operation"], entry.get("subresource", "")) == (
            self.name,
            self.operation,
            self.subresource,
        )

    def entry(self, owned: FieldSet, time: str) -> Json:
        """The manager's own entry."""
        found: Json = {
            "manager": self.name,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": time,
        }
        found |= {"fieldsType": "FieldsV1", "fieldsV1": owned}
        return found | ({"subresource": self.subresource} if self.subresource else {})


def tracked(found: FieldSet | None) -> FieldSet:
    """A set without what nobody owns: names, versions, times."""
    kept = {
        key: below for key, below in (found or {}).items() if key not in ("f:apiVersion", "f:kind")
    }
    if "f:metadata" in kept:
        rest = fields.minus(kept["f:metadata"], _UNTRACKED) if kept["f:metadata"] else None
        kept = {key: below for key, below in kept.items() if key != "f:metadata"} | (
            {"f:metadata": rest} if rest else {}
        )
    return kept


def after_update(
    before: Json | None, now: Json, schema: Schema, manager: Manager, time: str
) -> list[Json]:
    """Entries after a create, replace or plain patch turned `before` into `now`: the writer owns
    what differs."""
    entries: list[Json] = (before or {}).get("metadata", {}).get("managedFields") or []
    entries = now["metadata"].get("managedFields", entries) or entries
    difference = tracked(fields.changed(_bare(before), _bare(now), schema))
    if not difference:
        return entries
    there = fields.field_set(_bare(now), schema)
    own: FieldSet = {}
    others = []
    for entry in entries:
        if manager.is_of(entry):
            own = entry["fieldsV1"]
        elif rest := fields.minus(entry["fieldsV1"], difference):
            others.append(entry if rest == entry["fieldsV1"] else {**entry, "fieldsV1": rest})
    owned = (
        fields.common(fields.union(own, difference), there)
        if own
        else fields.common(difference, there)
    )
    return [*others, manager.entry(_marked(owned), time)] if owned else others


def _bare(body: Json | None) -> Json:
    if body is None:
        return {}
    metadata = {
        key: value for key, value in body.get("metadata", {}).items() if key != "managedFields"
    }
    return {**body, "metadata": metadata}


def _marked(owned: FieldSet) -> FieldSet:
    """The set with `.` beside each list item's parts."""
    result = {}
    for key, below in owned.items():
        inner = _marked(below)
        result[key] = {".": {}, **inner} if key.startswith("k:") and inner else inner
    return result


def apply(
    live: Json | None, config: Json, schema: Schema, manager: Manager, time: str, *, force: bool
) -> Json:
    """Server-side apply of `config`: the new object. Raises Refused 409 where another manager's
    field would change without `force`."""
    entries: Sequence[Json] = (live or {}).get("metadata", {}).get("managedFields") or []
    start = _bare(live)
    wanted = tracked(fields.field_set(config, schema))
    together = fields.merged(start, config, schema)
    difference = tracked(fields.changed(start, together, schema))
    last = next((entry for entry in entries if manager.is_of(entry)), None)
    others = [entry for entry in entries if not manager.is_of(entry)]
    others = _without_conflicts(others, difference, manager, force=force)
    gone = fields.minus(last["fieldsV1"], wanted) if last else None
    for entry in others:
        gone = fields.minus(gone, entry["fieldsV1"]) if gone else None
    if gone:
        together = fields.without(together, gone, schema)
    own = last if last is not None and last["fieldsV1"] == wanted else manager.entry(wanted, time)
    return {**together, "metadata": {**together["metadata"], "managedFields": [*others, own]}}


def is_same(one: Json, other: Json) -> bool:
    """Whether two states of an object differ in nothing but the times of their managers."""
    if _bare(one) != _bare(other):
        return False
    return _timeless(one) == _timeless(other)


def _timeless(body: Json) -> list[Json]:
    entries = [{**entry, "time": None} for entry in body["metadata"].get("managedFields") or ()]
    return sorted(
        entries,
        key=lambda entry: (entry["manager"], entry["operation"], entry.get("subresource", "")),
    )


def _without_conflicts(
    others: Sequence[Json], difference: FieldSet, manager: Manager, *, force: bool
) -> list[Json]:
    kept, conflicts = [], []
    for entry in others:
        shared = fields.common(entry["fieldsV1"], difference) if difference else None
        if not shared:
            kept.append(entry)
        elif not force:
            conflicts += [(entry, path) for path in fields.paths(shared)]
        elif rest := fields.minus(entry["fieldsV1"], shared):
            kept.append({**entry, "fieldsV1": rest})
    if conflicts:
        raise _conflict(conflicts)
    return kept


def _how(entry: Json) -> str:
    """What is said of a manager that wrote without apply."""
    if entry["operation"] == "Apply":
        return ""
    return f" using {entry['apiVersion']}" + (f" at {entry['time']}" if "time" in entry else "")


def _conflict(conflicts: Sequence[tuple[Json, str]]) -> Refused:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{entry["manager"]}"{_how(entry)}',
            "field": path,
        }
        for entry, path in conflicts
    ]
    count = len(conflicts)
    head = f"Apply failed with {count} conflict{'s' if count > 1 else ''}: "
    if count == 1:
        text = f"{causes[0]['message']}: {causes[0]['field']}"
    else:
        text = "conflicts with " + "; ".join(
            f"{cause['message'].removeprefix('conflict with ')}: {cause['field']}"
            for cause in causes
        )
    return Refused(409, head + text, details={"causes": causes})
