"""Volumes of an environment, and their manifests: one row for each path.

A commit changes rows and the version in one transaction, so that a manifest is the one before it or
the one after it. It names what changed, and is applied to the newest manifest: of two writers the
last one wins, file by file."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.tenants import require_environment
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.volumes import manifest_rows
from pilotlight.controller.volumes.manifest_rows import entries_below
from pilotlight.core.volumes.entries import Entry, EntryInvalid, EntryKind, check_path
from pilotlight.errors import Conflict, InvalidInput, NotFound, StorageQuotaExceeded
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.quotas import Plan

MAX_VOLUMES = 1000
"""Volumes of a tenant, in all environments."""
MAX_FILES = 200_000
"""Files, directories and links of a volume, whatever the plan: a mover keeps all in memory."""
MAX_BYTES = 8 * 1024**4
"""Size of a volume's files. A manifest names each chunk of them, also where equal ones are stored
once: a sparse file costs nothing else."""
MAX_FILES_OF_TENANT = 1_000_000
"""Entries of all volumes of a tenant, whatever the plan: each is a row of the database."""
MAX_BYTES_OF_TENANT = 8 * MAX_BYTES
MAX_LISTED = 1000
_ALL = "all volumes of this tenant"
_COLUMNS = (
    "id",
    "tenant",
    "environment",
    "name",
    "version",
    "entries",
    "size_bytes",
    "created_at",
    "updated_at",
)
_VOLUMES, _ENTRIES = tables.volumes, tables.volume_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A volume and its newest manifest's version, entries and size in bytes."""

    id: str
    tenant: str
    environment: str
    name: str
    version: int
    entries: int
    size_bytes: int
    created_at: float
    updated_at: float


def create(write: Write, scope: EnvironmentRef, *, name: str) -> Volume:
    """Create an empty volume unless there is one of that name. Raises InvalidInput, NotFound,
    Conflict."""
    require_name("volume", name, parameter="name")
    require_environment(write.sql, tenant=scope.tenant, name=scope.environment)
    found = _find(write.sql, scope, name)
    if found is not None:
        return found
    count = sa.select(sa.func.count()).where(_VOLUMES.c.tenant == scope.tenant)
    if write.sql.execute(count).scalar_one() >= MAX_VOLUMES:
        raise Conflict(
            f"this tenant has {MAX_VOLUMES} volumes, which is the maximum: delete some",
            hint="pilotlight volume delete NAME",
        )
    made = Volume(
        id=f"vol-{secrets.token_hex(8)}",
        tenant=scope.tenant,
        environment=scope.environment,
        name=name,
        version=0,
        entries=0,
        size_bytes=0,
        created_at=write.now,
        updated_at=write.now,
    )
    values = {column: getattr(made, column) for column in _COLUMNS}
    write.sql.execute(sa.insert(_VOLUMES).values(**values))
    _audit(write, scope, "volume.create", name)
    return made


def delete(write: Write, scope: EnvironmentRef, *, name: str) -> Volume:
    """Delete a volume and its manifest; functions that mount it keep their local files until they
    end. Raises NotFound."""
    found = find(write.sql, scope, name=name)
    write.sql.execute(sa.delete(_ENTRIES).where(_ENTRIES.c.volume == found.id))
    write.sql.execute(sa.delete(_VOLUMES).where(_VOLUMES.c.id == found.id))
    _audit(write, scope, "volume.delete", name, before={"size_bytes": found.size_bytes})
    return found


def find(sql: sa.Connection, scope: EnvironmentRef, *, name: str) -> Volume:
    """Return a volume of the environment. Raises NotFound."""
    found = _find(sql, scope, name)
    if found is None:
        raise NotFound(
            f"there is no volume {name[:80]!r} in environment {scope.environment!r}",
            name=name[:80],
            hint=f"`pilotlight volume create {name[:80]}` creates it; `volume list` lists them",
        )
    return found


def listing(sql: sa.Connection, scope: EnvironmentRef) -> list[Volume]:
    """The environment's volumes, by name."""
    query = sa.select(_VOLUMES).where(
        _VOLUMES.c.tenant == scope.tenant, _VOLUMES.c.environment == scope.environment
    )
    return [Volume(**row) for row in sql.execute(query.order_by(_VOLUMES.c.name)).mappings()]


def names(sql: sa.Connection, *, tenant: str, environment: str) -> set[str]:
    """Names of the environment's volumes."""
    scope = EnvironmentRef(tenant=tenant, environment=environment)
    return {volume.name for volume in listing(sql, scope)}


def manifest(sql: sa.Connection, volume: Volume) -> list[str]:
    """The entries of a volume's manifest, each as JSON."""
    query = sa.select(_ENTRIES.c.entry).where(_ENTRIES.c.volume == volume.id)
    return list(sql.execute(query).scalars())


def entries(
    sql: sa.Connection, volume: Volume, *, below: str, after: str, recursive: bool
) -> list[Entry]:
    """At most MAX_LISTED entries below the directory `below` ("" = all), by path from `after` on.
    Raises InvalidInput, NotFound."""
    below = _path(below) if below.strip("/") else ""
    query = sa.select(_ENTRIES.c.entry).where(_ENTRIES.c.volume == volume.id)
    if below:
        found = entry(sql, volume, below, missing_ok=True)
        if found is not None and found.kind is not EntryKind.DIRECTORY:
            return [found]
        query = query.where(*entries_below(volume.id, below))
    if not recursive:
        rest = sa.func.substr(_ENTRIES.c.path, len(below) + 2 if below else 1)
        query = query.where(~rest.contains("/"))
    # by code point, as pages are, whatever the database's locale is
    order = sa.collate(_ENTRIES.c.path, "C" if sql.dialect.name == "postgresql" else "BINARY")
    query = query.where(order > after).order_by(order).limit(MAX_LISTED)
    rows = list(sql.execute(query).scalars())
    if below and not rows and not after and entry(sql, volume, below, missing_ok=True) is None:
        raise NotFound(f"volume {volume.name!r} has no {below!r}")
    return [_entry(row) for row in rows]


def entry(
    sql: sa.Connection, volume: Volume, path: str, *, missing_ok: bool = False
) -> Entry | None:
    """The entry of a path. Raises InvalidInput, NotFound."""
    at = _path(path)
    query = sa.select(_ENTRIES.c.entry).where(_ENTRIES.c.volume == volume.id, _ENTRIES.c.path == at)
    text = sql.execute(query).scalar()
    if text is None and not missing_ok:
        raise NotFound(f"volume {volume.name!r} has no {at!r}")
    return None if text is None else _entry(text)


def commit(
    write: Write,
    volume: Volume,
    plan: Plan,
    *,
    put: Sequence[Entry],
    remove: Collection[str],
    remove_trees: Collection[str] = (),
) -> int:
    """Apply a commit to the newest manifest; returns its version, the same one if nothing changed.
    Raises NotFound (deleted meanwhile), StorageQuotaExceeded."""
    row = write.sql.execute(sa.select(_VOLUMES.c.version).where(_VOLUMES.c.id == volume.id)).first()
    if row is None:
        raise NotFound(
            f"volume {volume.name!r} was deleted: nothing was committed; deploy again with a "
            f"volume that exists"
        )
    if not put and not remove and not remove_trees:
        return int(row.version)
    manifest_rows.apply(write, volume.id, put=put, remove=remove, remove_trees=remove_trees)
    counts = sa.select(
        sa.func.count(), sa.func.coalesce(sa.func.sum(_ENTRIES.c.size_bytes), 0)
    ).where(_ENTRIES.c.volume == volume.id)
    count, size_bytes = write.sql.execute(counts).one()
    limit = max_files(plan)
    if count > limit:
        raise StorageQuotaExceeded(
            f"volume {volume.name!r} would have {count} files, directories and links, and at most "
            f"{limit} are allowed (volume_files); nothing was committed",
            quota="volume_files",
            limit=limit,
            used=volume.entries,
            hint="Remove files, or pack small ones into archives.",
        )
    _require_bounds(write.sql, volume, entries=int(count), size_bytes=int(size_bytes))
    values = {
        "version": int(row.version) + 1,
        "entries": int(count),
        "size_bytes": int(size_bytes),
        "updated_at": write.now,
    }
    write.sql.execute(sa.update(_VOLUMES).where(_VOLUMES.c.id == volume.id).values(**values))
    return int(row.version) + 1


def _require_bounds(sql: sa.Connection, volume: Volume, *, entries: int, size_bytes: int) -> None:
    """Raise StorageQuotaExceeded where a volume grows, and its manifest, or those of all volumes of
    its tenant, would be too large."""
    others = sa.select(
        sa.func.coalesce(sa.func.sum(_VOLUMES.c.entries), 0),
        sa.func.coalesce(sa.func.sum(_VOLUMES.c.size_bytes), 0),
    ).where(_VOLUMES.c.tenant == volume.tenant, _VOLUMES.c.id != volume.id)
    other_entries, other_bytes = map(int, sql.execute(others).one())
    more_entries, more_bytes = entries > volume.entries, size_bytes > volume.size_bytes
    if more_bytes:
        require_size(volume, size_bytes)
        _require(_ALL, "size_bytes", size_bytes + other_bytes, limit=MAX_BYTES_OF_TENANT)
    if more_entries:
        _require(_ALL, "entries", entries + other_entries, limit=MAX_FILES_OF_TENANT)


def require_size(volume: Volume, size_bytes: int) -> None:
    """Raise StorageQuotaExceeded where a volume would have files of more than MAX_BYTES."""
    _require(f"volume {volume.name!r}", "size_bytes", size_bytes, limit=MAX_BYTES)


def _require(what: str, quota: str, used: int, *, limit: int) -> None:
    if used > limit:
        raise StorageQuotaExceeded(
            f"{what} would have {quota} = {used}, and at most {limit} are allowed; nothing was "
            f"committed",
            quota=quota,
            limit=limit,
            used=used,
            hint="Remove files or volumes that are not needed.",
        )


def max_files(plan: Plan) -> int:
    """Most entries of a volume under this plan."""
    return MAX_FILES if plan.volume_files is None else min(MAX_FILES, plan.volume_files)


def record_commit(write: Write, scope: EnvironmentRef, name: str, version: int) -> None:
    """Record a client's commit in the audit log."""
    _audit(write, scope, "volume.commit", name, after={"version": version})


def chunks_of_tenant(sql: sa.Connection, *, tenant: str) -> set[str]:
    """Digests that manifests of the tenant refer to."""
    query = sa.select(_ENTRIES.c.entry).join(_VOLUMES, _VOLUMES.c.id == _ENTRIES.c.volume)
    return _chunks(sql, query.where(_VOLUMES.c.tenant == tenant))


def chunks_of_volume(sql: sa.Connection, volume: Volume) -> set[str]:
    """Digests that the manifest of a volume refers to."""
    return _chunks(sql, sa.select(_ENTRIES.c.entry).where(_ENTRIES.c.volume == volume.id))


def _chunks(sql: sa.Connection, query: sa.Select[str]) -> set[str]:
    texts = sql.execute(query.where(_ENTRIES.c.size_bytes > 0)).scalars()
    return {digest for text in texts for digest in json.loads(text)["chunks"]}


def parse_entries(body: Iterable[Any]) -> list[Entry]:
    """Parse entries of a request. Raises InvalidInput."""
    try:
        found = [Entry.from_json(one) for one in body]
    except EntryInvalid as e:
        raise InvalidInput(str(e), parameter="put") from e
    if len({one.path for one in found}) != len(found):
        raise InvalidInput("put names a path twice", parameter="put")
    return found


def parse_paths(body: Iterable[str]) -> list[str]:
    """Parse paths of a request. Raises InvalidInput."""
    return [_path(path) for path in body]


def _find(sql: sa.Connection, scope: EnvironmentRef, name: str) -> Volume | None:
    query = sa.select(_VOLUMES).where(
        _VOLUMES.c.tenant == scope.tenant,
        _VOLUMES.c.environment == scope.environment,
        _VOLUMES.c.name == name,
    )
    row = sql.execute(query).mappings().first()
    return None if row is None else Volume(**row)


def _entry(text: str) -> Entry:
    return Entry.from_json(json.loads(text))


def _path(path: str) -> str:
    try:
        return check_path(path.strip("/"))
    except EntryInvalid as e:
        raise InvalidInput(str(e), parameter="path") from e


def _audit(
    write: Write,
    scope: EnvironmentRef,
    action: str,
    name: str,
    *,
    before: Any = None,
    after: Any = None,
) -> None:
    audit_trail.record(
        write,
        tenant=scope.tenant,
        actor=scope.actor,
        action=action,
        subject=f"{scope.environment}/{name}",
        before=before,
        after=after,
        request=scope.request,
    )
