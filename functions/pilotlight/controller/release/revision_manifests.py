"""A revision's manifest: everything that it pins, and all metadata recorded since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.registry import revisions
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import aliases, approvals, compatibility, traffic
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.policies import parse_gate
from pilotlight.spec.record_json import canonical_json, from_json, to_json

MAX_CHANGES = 500
"""Changes per comparison: revisions that differ more are better inspected separately."""
MAX_LISTED = 1000


def listing(
    sql: sa.Connection, place: AppRef, function: str, *, limit: int = MAX_LISTED
) -> list[dict[str, Any]]:
    """Return summaries of a function's revisions, newest first. Raises NotFound."""
    document = traffic.find(sql, place, function)
    function_id, table = place.function_id(function), tables.revisions
    named = _names(sql, function_id, dict(document.tags))
    rows = sql.execute(
        sa.select(table)
        .where(table.c.function == function_id)
        .order_by(table.c.ordinal.desc())
        .limit(limit)
    )
    return [
        {
            **_identity(row),
            "weight": document.weights.get(row.name, 0),
            **named.get(row.name, _UNNAMED),
            "lineage": json.loads(row.lineage),
            "evaluation": json.loads(row.evaluation),
            "approvals": _approvals(sql, place, function, row.name),
        }
        for row in rows
    ]


def revision_manifest(
    sql: sa.Connection, place: AppRef, function: str, revision: str
) -> dict[str, Any]:
    """Return the manifest of a revision, by its exact name. Raises NotFound."""
    document = traffic.find(sql, place, function)
    function_id = place.function_id(function)
    row = revisions.get_row(sql, function_id=function_id, revision=revision)
    spec = from_json(FunctionSpec, json.loads(row.spec))
    evaluation: dict[str, float] = json.loads(row.evaluation)
    return {
        "environment": place.environment,
        "app": place.app,
        "function": function,
        **_identity(row),
        "weight": document.weights.get(revision, 0),
        **_names(sql, function_id, dict(document.tags)).get(revision, _UNNAMED),
        "code": {
            "bundle": spec.bundle,
            "module": spec.module,
            "qualname": spec.qualname,
            "pickled": spec.pickled,
        },
        "lock": _lock(sql, place, spec),
        "environment_digest": environment_digest(spec),
        "weights": to_json(spec.weights),
        "card": to_json(spec.card),
        "schemas": [_schemas(method) for method in to_json(spec.methods)],
        "resources": to_json(spec.resources),
        "requires": [
            _gate(metric, text, spec.name, evaluation) for metric, text in spec.require.items()
        ],
        "lineage": json.loads(row.lineage),
        "evaluation": evaluation,
        "approvals": _approvals(sql, place, function, revision),
        "rollout": _rollout(sql, function_id, revision),
        "spec": json.loads(row.spec),
    }


def diff(
    sql: sa.Connection, place: AppRef, function: str, *, before: str, after: str
) -> dict[str, Any]:
    """Compare two revisions, by exact names: `{"from", "to", "changes": [{"what", "from", "to"}],
    "breaks"}`."""
    function_id = place.function_id(function)
    rows = [
        revisions.get_row(sql, function_id=function_id, revision=name) for name in (before, after)
    ]
    documents = [
        {
            **json.loads(row.spec),
            "lineage": json.loads(row.lineage),
            "evaluation": json.loads(row.evaluation),
        }
        for row in rows
    ]
    old, new = (dict(_flatten(one, "")) for one in documents)
    changed = [name for name in {**old, **new} if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    changes = [
        {"what": name, "from": old.get(name), "to": new.get(name)}
        for name in sorted(changed)[:MAX_CHANGES]
    ]
    specs = [from_json(FunctionSpec, json.loads(row.spec)) for row in rows]
    return {
        "from": before,
        "to": after,
        "changes": changes,
        "breaks": compatibility.breaking_changes(*specs),
    }


def environment_digest(spec: FunctionSpec) -> str:
    """Return the sha256 (hex) of the environment of a revision's code: its image, its plain
    variables, and the names of its secrets."""
    environment = {
        "image": spec.image,
        "container_image": spec.container_image,
        "env": dict(spec.env),
        "secrets": sorted(spec.secrets),
    }
    return hashlib.sha256(canonical_json(environment)).hexdigest()


_ABSENT = object()
_UNNAMED: Mapping[str, list[str]] = {"aliases": [], "tags": []}


def _identity(row: sa.Row[Any]) -> dict[str, Any]:
    return {
        "revision": row.name,
        "ordinal": row.ordinal,
        "digest": row.digest,
        "created_at": row.created_at,
        "created_by": row.created_by,
        "served_at": row.served_at,
    }


def _names(
    sql: sa.Connection, function_id: str, tags: Mapping[str, str]
) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for kind, names in (("aliases", aliases.aliases_for(sql, function_id)), ("tags", tags)):
        for name, revision in sorted(names.items()):
            found.setdefault(revision, {"aliases": [], "tags": []})[kind].append(name)
    return found


def _lock(sql: sa.Connection, place: AppRef, spec: FunctionSpec) -> dict[str, Any]:
    """Return the image's digest and build steps. Without an image, the platform's interpreter runs
    the code."""
    if spec.image is None:
        return {"image": None, "container_image": None, "steps": []}
    table = tables.images
    text = sql.execute(
        sa.select(table.c.spec).where(table.c.tenant == place.tenant, table.c.digest == spec.image)
    ).scalar()
    description = json.loads(text) if text else {"steps": []}
    return {"image": spec.image, "container_image": spec.container_image, **description}


def _schemas(method: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "method": method["name"],
        "arguments": method["schema"],
        "returns": method["returns"],
        "is_generator": method["is_generator"],
        "example": method["example"],
        "has_check": method["has_check"],
    }


def _gate(metric: str, text: str, function: str, evaluation: Mapping[str, float]) -> dict[str, Any]:
    gate, value = (
        parse_gate(metric, text),
        evaluation.get(f"{function}.{metric}", evaluation.get(metric)),
    )
    return {"gate": str(gate), "value": value, "passes": value is not None and gate.passes(value)}


def _approvals(sql: sa.Connection, place: AppRef, function: str, revision: str) -> dict[str, Any]:
    given = approvals.approvals_of(sql, function_id=place.function_id(function), revision=revision)
    return {
        "missing": approvals.missing_approvals(sql, place, function=function, revision=revision),
        "given": given,
    }


def _rollout(sql: sa.Connection, function_id: str, revision: str) -> dict[str, Any] | None:
    """Return the newest rollout whose candidate is the revision."""
    table = tables.rollouts
    query = (
        sa.select(table)
        .where(table.c.function == function_id, table.c.candidate == revision)
        .order_by(table.c.created_at.desc())
    )
    row = sql.execute(query.limit(1)).first()
    return (
        None
        if row is None
        else {
            "id": row.id,
            "state": row.state,
            "step": row.step,
            "stable": row.stable,
            "reason": row.reason,
        }
    )


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield leaves by their path; an empty list is a leaf, an empty object yields nothing."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    elif (
        isinstance(value, list)
        and value
        and any(isinstance(inner, Mapping | list) for inner in value)
    ):
        for number, inner in enumerate(value):
            yield from _flatten(
                inner,
                f"{path}[{inner['name'] if isinstance(inner, Mapping) and inner.get('name') else number}]",
            )
    else:
        yield path, value
