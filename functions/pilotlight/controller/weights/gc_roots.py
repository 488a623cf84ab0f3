"""Roots of the garbage collection of a tenant's blobs (mark phase), read from the tables.

Roots are revisions (of functions that exist, and not pruned), names of weights, and copy steps of
built images. A manifest of weights refers to further blobs, its files; manifests are in the blob
store, and `blob_gc` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from pilotlight.controller.database import tables

_AT_ONCE = 200
"""Specs per query: each may have half a megabyte."""


@dataclass(slots=True)
class GcRoots:
    """Roots of one tenant.

    Attributes:
        blobs: digests that are referenced directly: bundles, manifests, archives of copy steps.
        manifests: all manifests that any revision or name refers to, including pruned and removed
            revisions.
        given_up: revisions (function id, name) that cannot serve until they are deployed again →
            the blobs that they refer to.
    """

    blobs: set[str] = field(default_factory=set)
    manifests: set[str] = field(default_factory=set)
    given_up: dict[tuple[str, str], set[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RevisionReferences:
    """Digests that a revision refers to. `manifests` are of weights."""

    bundle: str
    manifests: frozenset[str]

    @classmethod
    def by(cls, spec: str) -> RevisionReferences:
        """Parse a revision's stored spec."""
        body = json.loads(spec)
        return cls(body["bundle"], frozenset(weights["manifest"] for weights in body["weights"]))

    def digests(self) -> set[str]:
        """All referenced digests."""
        return {self.bundle, *self.manifests}


class RevisionReferenceCache:
    """References of revisions by the digest of their spec. Each spec is parsed once, because specs
    may be long. Thread-safe."""

    def __init__(self) -> None:
        self._named: dict[str, RevisionReferences] = {}

    def of(
        self, sql: sa.Connection, function: str, digests: Mapping[str, str]
    ) -> dict[str, RevisionReferences]:
        """Revision → its references; `digests` maps the names of one function's revisions to the
        digests of their specs."""
        table = tables.revisions
        new = [name for name, digest in digests.items() if digest not in self._named]
        for begin in range(0, len(new), _AT_ONCE):
            part = new[begin : begin + _AT_ONCE]
            query = sa.select(table.c.digest, table.c.spec).where(
                table.c.function == function, table.c.name.in_(part)
            )
            for row in sql.execute(query):
                self._named[row.digest] = RevisionReferences.by(row.spec)
        return {name: self._named[digest] for name, digest in digests.items()}


def find_roots(
    sql: sa.Connection, known: RevisionReferenceCache, *, tenant: str, removed_before: float
) -> GcRoots:
    """Find the roots of a tenant. A function removed at `removed_before` or later still counts: it
    may be restored."""
    found = GcRoots()
    functions, revisions, weights, images = (
        tables.functions,
        tables.revisions,
        tables.weights,
        tables.images,
    )
    columns = (
        revisions.c.function,
        revisions.c.name,
        revisions.c.digest,
        revisions.c.pruned_at,
        functions.c.removed_at,
    )
    query = (
        sa.select(*columns)
        .join(functions, functions.c.id == revisions.c.function)
        .where(functions.c.tenant == tenant)
    )
    digests: dict[str, dict[str, str]] = {}
    given_up: set[tuple[str, str]] = set()
    for row in sql.execute(query):
        digests.setdefault(row.function, {})[row.name] = row.digest
        if row.pruned_at is not None or (
            row.removed_at is not None and row.removed_at < removed_before
        ):
            given_up.add((row.function, row.name))
    for function, of_function in digests.items():
        for name, named in known.of(sql, function, of_function).items():
            found.manifests |= named.manifests
            if (function, name) in given_up:
                found.given_up[function, name] = named.digests()
            else:
                found.blobs |= named.digests()
    names = set(
        sql.execute(sa.select(weights.c.manifest).where(weights.c.tenant == tenant)).scalars()
    )
    found.manifests |= names
    found.blobs |= names
    for text in sql.execute(sa.select(images.c.spec).where(images.c.tenant == tenant)).scalars():
        found.blobs |= {
            step["blob"] for step in json.loads(text)["steps"] if step.get("op") == "copy"
        }
    return found
