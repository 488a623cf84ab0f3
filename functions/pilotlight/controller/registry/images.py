"""Records of the images that tenants have built. The node agent builds them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import stored_bytes
from pilotlight.core import image_steps
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.function import ImageSpec
from pilotlight.spec.record_json import canonical_json, to_json


def register(
    write: Write, *, tenant: str, spec: ImageSpec, digest: str, size_bytes: int = 0, cpu_ns: int = 0
) -> None:
    """Record a built image, its size, and the CPU time of its build (0: it existed already).
    Idempotent."""
    counted_bytes = recorded_bytes(write.sql, tenant=tenant, digest=digest) or 0
    stored_bytes.count(write, tenant=tenant, more_bytes=size_bytes - counted_bytes)
    row = {
        "tenant": tenant,
        "digest": digest,
        "spec": canonical_json(to_json(spec)).decode(),
        "created_at": write.now,
    }
    insert = write.insert(tables.images).values(**row, size_bytes=size_bytes, build_cpu_ns=cpu_ns)
    changes = {"size_bytes": size_bytes, **({"build_cpu_ns": cpu_ns} if cpu_ns else {})}
    write.sql.execute(
        insert.on_conflict_do_update(index_elements=["tenant", "digest"], set_=changes)
    )


def recorded_bytes(sql: sa.Connection, *, tenant: str, digest: str) -> int | None:
    """Return an image's recorded size; None: the tenant has not built it."""
    table = tables.images
    return sql.execute(
        sa.select(table.c.size_bytes).where(table.c.tenant == tenant, table.c.digest == digest)
    ).scalar()


def listing(sql: sa.Connection, *, tenant: str) -> list[dict[str, Any]]:
    """Return the tenant's images, newest first, with the functions (`environment/app/function`)
    whose revisions use them."""
    table = tables.images
    rows = sql.execute(
        sa.select(table)
        .where(table.c.tenant == tenant)
        .order_by(table.c.created_at.desc(), table.c.digest)
    ).all()
    used_by = users(sql, tenant=tenant)
    return [
        {
            "digest": row.digest,
            "size_bytes": row.size_bytes,
            "build_cpu_s": row.build_cpu_ns / 1e9,
            "steps": len(json.loads(row.spec)["steps"]),
            "created_at": row.created_at,
            "functions": sorted(used_by.get(row.digest, ())),
        }
        for row in rows
    ]


def delete(write: Write, *, tenant: str, digest: str) -> tuple[set[str], bool]:
    """Delete an image's record. Returns the blobs that its steps copied, and whether no tenant has
    the image now.

    Raises NotFound, or Conflict while a revision that can serve uses it.
    """
    table = tables.images
    mine = (table.c.tenant == tenant, table.c.digest == digest)
    row = write.sql.execute(sa.select(table.c.spec, table.c.size_bytes).where(*mine)).first()
    if row is None:
        raise NotFound(
            f"there is no image {digest}", hint="`pilotlight image list` shows all images."
        )
    if used := sorted(users(write.sql, tenant=tenant).get(digest, ())):
        how = (
            "Delete the app, or deploy it without the image and delete its old revisions: "
            "`pilotlight app prune APP`."
        )
        raise Conflict(
            f"image {digest[:12]} is used by {', '.join(used[:10])}", functions=used[:100], hint=how
        )
    write.sql.execute(sa.delete(table).where(*mine))
    stored_bytes.count(write, tenant=tenant, more_bytes=-row.size_bytes)
    pushed = tables.container_images
    write.sql.execute(sa.delete(pushed).where(pushed.c.tenant == tenant, pushed.c.digest == digest))
    left = write.sql.execute(
        sa.select(table.c.tenant).where(table.c.digest == digest).limit(1)
    ).first()
    return {
        step["blob"] for step in json.loads(row.spec)["steps"] if step.get("op") == "copy"
    }, left is None


def users(sql: sa.Connection, *, tenant: str) -> dict[str, set[str]]:
    """Return the functions with a revision that uses each image, by digest."""
    functions, revisions = tables.functions, tables.revisions
    columns = (functions.c.environment, functions.c.app, functions.c.name, revisions.c.spec)
    query = sa.select(*columns).join(revisions, revisions.c.function == functions.c.id)
    query = query.where(
        functions.c.tenant == tenant,
        functions.c.removed_at.is_(None),
        revisions.c.pruned_at.is_(None),
    )
    found: dict[str, set[str]] = {}
    for row in sql.execute(query):
        if (image := json.loads(row.spec)["image"]) is not None:
            found.setdefault(image, set()).add(f"{row.environment}/{row.app}/{row.name}")
    return found


def built(sql: sa.Connection, *, tenant: str, digests: Collection[str]) -> set[str]:
    """Return those of `digests` that `tenant` has built."""
    table = tables.images
    return set(
        sql.execute(
            sa.select(table.c.digest).where(table.c.tenant == tenant, table.c.digest.in_(digests))
        ).scalars()
    )


def check_packages(spec: ImageSpec) -> None:
    """Check that the apt steps name only Debian packages, not other arguments that apt-get accepts.
    Raises InvalidInput."""
    try:
        image_steps.apt_packages(spec.steps)
    except ValueError as e:
        raise InvalidInput(f"apt_install: {e}", parameter="packages") from e


def blobs_of(spec: ImageSpec) -> Iterator[str]:
    """Yield the digests of the blobs that the copy steps name."""
    for step in spec.steps:
        if step.get("op") == "copy":
            yield str(step.get("blob", ""))


def is_known(sql: sa.Connection, *, digest: str) -> bool:
    """Whether any tenant has the image."""
    table = tables.images
    return (
        sql.execute(sa.select(table.c.tenant).where(table.c.digest == digest).limit(1)).first()
        is not None
    )
