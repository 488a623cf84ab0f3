"""Revisions of functions: immutable, named by their ordinal and the hash of their spec, and kept so
that any of them can serve again.

The blobs of a revision are kept until its app is deleted or it is pruned (`app prune`); then it
cannot serve until it is deployed again. Its row is kept until its tenant has more revisions than
its plan allows (`database/retention.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import Conflict, NotFound
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import canonical_json, from_json, to_json

DIGEST_HEX = 6
"""Hex digits of the content hash in a revision's name; the ordinal already makes it unique within
its function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionMetadata:
    """Metadata of a revision that is not part of its spec.

    Attributes:
        lineage: its origin, such as {"git.commit": "…", "dataset": "sha256:…"}.
        evaluation: metrics of its offline evaluation.
        author: the key that created it; "" = the deploying key.
    """

    lineage: Mapping[str, str] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    author: str = ""


def get_or_create(
    write: Write, function_id: str, spec: FunctionSpec, *, metadata: RevisionMetadata
) -> tuple[str, bool]:
    """Get or create the revision of a spec; returns its name and whether it is new. The metadata of
    an existing one is updated by `set_metadata`."""
    table, functions, digest = tables.revisions, tables.functions, spec.digest()
    known = write.sql.execute(
        sa.select(table).where(table.c.function == function_id, table.c.digest == digest)
    ).first()
    if known is not None:
        write.sql.execute(
            sa.update(table)
            .where(table.c.function == function_id, table.c.name == known.name)
            .values(pruned_at=None)
        )
        set_metadata(write, function_id, str(known.name), metadata=metadata)
        return str(known.name), False
    count = (
        sa.update(functions)
        .where(functions.c.id == function_id)
        .values(revisions=functions.c.revisions + 1)
    )
    ordinal = write.sql.execute(count.returning(functions.c.revisions)).scalar_one()
    name = f"v{ordinal}-{digest[:DIGEST_HEX]}"
    row = {
        "function": function_id,
        "name": name,
        "digest": digest,
        "ordinal": ordinal,
        "created_at": write.now,
    }
    texts = {
        "spec": _text(to_json(spec)),
        "lineage": _text(metadata.lineage),
        "evaluation": _text(metadata.evaluation),
    }
    write.sql.execute(
        sa.insert(table).values(
            **row, **texts, created_by=metadata.author, has_tags=bool(spec.tags)
        )
    )
    return name, True


def set_metadata(
    write: Write, function_id: str, revision: str, *, metadata: RevisionMetadata
) -> None:
    """Add to a revision's metadata: new lineage keys are added, existing ones keep their values;
    newer evaluation metrics replace older ones."""
    table, known = tables.revisions, get_row(write.sql, function_id=function_id, revision=revision)
    lineage = {**metadata.lineage, **json.loads(known.lineage)}
    evaluation = {**json.loads(known.evaluation), **metadata.evaluation}
    update = sa.update(table).where(table.c.function == function_id, table.c.name == revision)
    write.sql.execute(update.values(lineage=_text(lineage), evaluation=_text(evaluation)))


def spec_of(sql: sa.Connection, *, function_id: str, revision: str) -> FunctionSpec:
    """The spec of a revision. Raises NotFound."""
    return from_json(
        FunctionSpec, json.loads(get_row(sql, function_id=function_id, revision=revision).spec)
    )


def get_row(sql: sa.Connection, *, function_id: str, revision: str) -> sa.Row[Any]:
    """A revision's row. Raises NotFound."""
    table = tables.revisions
    found = sql.execute(
        sa.select(table).where(table.c.function == function_id, table.c.name == revision)
    ).first()
    if found is None:
        raise NotFound(f"there is no revision {revision!r}", revision=revision)
    return found


def require_blobs(found: sa.Row[*tuple[Any, ...]]) -> None:
    """Raise Conflict for a pruned revision, whose bundle and weights may be deleted."""
    if found.pruned_at is not None:
        text = f"revision {found.name} was pruned: its bundle and weights were deleted"
        raise Conflict(
            text,
            revision=found.name,
            hint="Deploy the same code again: it gets the same revision.",
        )


def metadata_of(found: sa.Row[Any]) -> dict[str, Any]:
    """Lineage and evaluation from a revision's row."""
    return {"lineage": json.loads(found.lineage), "evaluation": json.loads(found.evaluation)}


def newest_revision(sql: sa.Connection, *, function_id: str, names: list[str]) -> str:
    """The most recently created of these revisions."""
    table = tables.revisions
    query = (
        sa.select(table.c.name)
        .where(table.c.function == function_id, table.c.name.in_(names))
        .order_by(table.c.ordinal.desc())
    )
    return str(sql.execute(query.limit(1)).scalar_one())


def _text(value: Any) -> str:
    return canonical_json(dict(value)).decode()
