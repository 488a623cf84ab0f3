"""Images that a tenant has built. The node agent builds; this remembers that it succeeded, for whom."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.store import Write
from pilotlight.spec import ImageSpec, canonical_json, to_json


def register(write: Write, *, tenant: str, spec: ImageSpec, digest: str) -> None:
    """Note that the image is built. Idempotent."""
    row = {"tenant": tenant, "digest": digest, "spec": canonical_json(to_json(spec)).decode(), "created_at": write.now}
    write.sql.execute(write.insert(tables.images).values(**row).on_conflict_do_nothing())


def built(sql: sa.Connection, *, tenant: str, digests: Collection[str]) -> set[str]:
    """Those of `digests` that `tenant` has built."""
    table = tables.images
    return set(sql.execute(sa.select(table.c.digest).where(table.c.tenant == tenant, table.c.digest.in_(digests))).scalars())


def blobs_of(spec: ImageSpec) -> Iterator[str]:
    """Digests of the blobs that its copy steps name."""
    for step in spec.steps:
        if step.get("op") == "copy":
            yield str(step.get("blob", ""))
