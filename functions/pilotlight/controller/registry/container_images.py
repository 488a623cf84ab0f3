"""Records of the container images that users pushed to the registry of a cluster.

The platform never contacts the registry: it records a name with a digest, and the cluster's nodes
pull it. A row belongs to one app of one environment, so that a key which is bound to one cannot
choose what the functions of another consist of; all temporary deployments of an app share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.core.oci.image_reference import Repository, parse_reference
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.identifiers import without_run

MAX_CONTAINER_IMAGES = 10_000
"""Rows of a tenant, the newest; revisions have references of their own."""


def require_registry(repository: Repository | None) -> Repository:
    """Return the tenant's repository. Raises InvalidInput without one."""
    if repository is None:
        raise InvalidInput(
            "this platform has no registry for images of functions",
            hint="Functions without an Image of their own need none. The operator sets "
            "cluster.registry of platform.yaml, such as registry.example/functions.",
            parameter="image",
        )
    return repository


def reference_of(
    sql: sa.Connection, place: AppRef, *, digest: str, repository: Repository
) -> str | None:
    """Return what the app's next revisions with the image `digest` consist of; None if it is not in
    the tenant's repository."""
    table = tables.container_images
    found = sql.execute(
        sa.select(table.c.reference).where(*_of_app(place), table.c.digest == digest)
    ).scalar()
    return found if found is not None and repository.holds(parse_reference(found)[0]) else None


def record(
    write: Write, place: AppRef, *, digest: str, reference: str, repository: Repository
) -> None:
    """Record that the image `digest` was pushed as `reference`. Raises InvalidInput for a reference
    outside the tenant's repository."""
    try:
        where, _ = parse_reference(reference)
    except ValueError as e:
        raise InvalidInput(str(e), parameter="reference") from e
    if not repository.holds(where):
        raise InvalidInput(
            f"{where} is not a repository of this tenant, whose images are in {repository}",
            hint=f"Push the image to {repository}; `pilotlight deploy` does.",
            parameter="reference",
        )
    before = reference_of(write.sql, place, digest=digest, repository=repository)
    row = {"reference": reference, "pushed_at": write.now, "pushed_by": place.actor}
    table = tables.container_images
    insert = write.insert(table).values(
        tenant=place.tenant,
        environment=place.environment,
        app=without_run(place.app),
        digest=digest,
        **row,
    )
    keys = ["tenant", "environment", "app", "digest"]
    write.sql.execute(insert.on_conflict_do_update(index_elements=keys, set_=row))
    _delete_oldest(write, place.tenant)
    audit_trail.record(
        write,
        tenant=place.tenant,
        actor=place.actor,
        action="image.push",
        subject=f"{place.environment}/{place.app}/{digest}",
        before=before,
        after=reference,
        request=place.request,
    )


def with_references(
    sql: sa.Connection,
    place: AppRef,
    specs: Sequence[FunctionSpec],
    *,
    repository: Repository | None,
) -> list[FunctionSpec]:
    """Return `specs` with the references of their images. Raises InvalidInput for an image that was
    not pushed."""
    return [
        spec
        if spec.image is None
        else replace(spec, container_image=_required(sql, place, spec, repository))
        for spec in specs
    ]


def _required(
    sql: sa.Connection, place: AppRef, spec: FunctionSpec, repository: Repository | None
) -> str:
    digest = str(spec.image)
    found = reference_of(
        sql, place, digest=digest, repository=(within := require_registry(repository))
    )
    if found is None:
        raise InvalidInput(
            f"function {spec.name!r}: image {digest} was not pushed to {within}",
            function=spec.name,
            missing={"image": digest},
        )
    return found


def _delete_oldest(write: Write, tenant: str) -> None:
    table = tables.container_images
    newest = (
        sa.select(table.c.pushed_at)
        .where(table.c.tenant == tenant)
        .order_by(table.c.pushed_at.desc())
        .offset(MAX_CONTAINER_IMAGES - 1)
        .limit(1)
        .scalar_subquery()
    )
    write.sql.execute(sa.delete(table).where(table.c.tenant == tenant, table.c.pushed_at < newest))


def _of_app(place: AppRef) -> tuple[sa.ColumnElement[bool], ...]:
    table = tables.container_images
    return (
        table.c.tenant == place.tenant,
        table.c.environment == place.environment,
        table.c.app == without_run(place.app),
    )
