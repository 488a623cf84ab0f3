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
from pilotlight.core.volumes.entries import Entry, EntryInvalid, EntryKind, check_path
from pilotlight.errors import Conflict, InvalidInput, NotFound, StorageQuotaExceeded
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.quotas import Plan

MAX_VOLUMES = 1000
"""Volumes of a tenant, in all environments."""
MAX_FILES = 200_000
"""Files, directories and links of a volume, whatever the plan: a mover keeps all in memory."""
MAX_LISTED = 1000
_AT_ONCE = 400
_DIRECTORY_MODE = 0o755
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
    query = sa.select(_ENTRIES.c.path, _ENTRIES.c.entry).where(_ENTRIES.c.volume == volume.id)
    below = _path(below) if below.strip("/") else ""
    if below:
        found = entry(sql, volume, below, missing_ok=True)
        if found is not None and found.kind is not EntryKind.DIRECTORY:
            return [found]
        prefix = f"{below}/"
        query = query.where(*_below(volume, below))
    else:
        prefix = ""
    rows = [
        row
        for row in sql.execute(query)
        if row.path > after and (recursive or "/" not in row.path[len(prefix) :])
    ]
    if below and not rows and not after and entry(sql, volume, below, missing_ok=True) is None:
        raise NotFound(f"volume {volume.name!r} has no {below!r}")
    rows.sort(key=lambda row: str(row.path))
    return [_entry(row.entry) for row in rows[:MAX_LISTED]]


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
    for path in remove_trees:
        _remove_below(write.sql, volume, path)
    _remove_paths(write.sql, volume, [*remove, *remove_trees])
    _make_way(write.sql, volume, put)
    _put(write, volume, [*_absent_directories(write.sql, volume, put), *put])
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
    values = {
        "version": int(row.version) + 1,
        "entries": int(count),
        "size_bytes": int(size_bytes),
        "updated_at": write.now,
    }
    write.sql.execute(sa.update(_VOLUMES).where(_VOLUMES.c.id == volume.id).values(**values))
    return int(row.version) + 1


def max_files(plan: Plan) -> int:
    """Most entries of a volume under this plan."""
    return MAX_FILES if plan.volume_files is None else min(MAX_FILES, plan.volume_files)


def record_commit(write: Write, scope: EnvironmentRef, name: str, version: int) -> None:
    """Record a client's commit in the audit log."""
    _audit(write, scope, "volume.commit", name, after={"version": version})


def chunks_of_tenant(sql: sa.Connection, *, tenant: str) -> set[str]:
    """Digests that manifests of the tenant refer to."""
    query = sa.select(_ENTRIES.c.entry).join(_VOLUMES, _VOLUMES.c.id == _ENTRIES.c.volume)
    texts = sql.execute(query.where(_VOLUMES.c.tenant == tenant, _ENTRIES.c.size_bytes > 0))
    return {digest for text in texts.scalars() for digest in json.loads(text)["chunks"]}


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


def _put(write: Write, volume: Volume, put: Sequence[Entry]) -> None:
    rows = [
        {
            "volume": volume.id,
            "path": one.path,
            "size_bytes": one.size_bytes,
            "entry": json.dumps(one.to_json(), separators=(",", ":")),
        }
        for one in put
    ]
    insert = write.insert(_ENTRIES)
    insert = insert.on_conflict_do_update(
        index_elements=["volume", "path"],
        set_={"size_bytes": insert.excluded.size_bytes, "entry": insert.excluded.entry},
    )
    for begin in range(0, len(rows), _AT_ONCE):
        write.sql.execute(insert, rows[begin : begin + _AT_ONCE])


def _make_way(sql: sa.Connection, volume: Volume, put: Sequence[Entry]) -> None:
    """Remove what cannot be beside the entries: what is below a file, and files that are above."""
    above = {p for one in put for p in _parents(one.path)} - {one.path for one in put}
    _remove(sql, volume, [p for p, is_directory in _kinds(sql, volume, above) if not is_directory])
    replaced = [one.path for one in put if one.kind is not EntryKind.DIRECTORY]
    for path, is_directory in _kinds(sql, volume, replaced):
        if is_directory:
            _remove_below(sql, volume, path)


def _absent_directories(sql: sa.Connection, volume: Volume, put: Sequence[Entry]) -> list[Entry]:
    """The directories above the entries that have no entry: each one has, so that it is listed,
    and found when a file takes its place."""
    above = {p for one in put for p in _parents(one.path)} - {one.path for one in put}
    there = {path for path, _ in _kinds(sql, volume, above)}
    return [
        Entry(path=path, kind=EntryKind.DIRECTORY, mode=_DIRECTORY_MODE)
        for path in sorted(above - there)
    ]


def _remove_paths(sql: sa.Connection, volume: Volume, paths: Collection[str]) -> None:
    """Remove paths, and of directories those that are empty then: another writer may have put
    files there."""
    kinds = dict(_kinds(sql, volume, paths))
    _remove(sql, volume, [path for path, is_directory in kinds.items() if not is_directory])
    for path in sorted((p for p, is_directory in kinds.items() if is_directory), reverse=True):
        query = sa.select(_ENTRIES.c.path).where(*_below(volume, path)).limit(1)
        if sql.execute(query).first() is None:
            _remove(sql, volume, [path])


def _kinds(
    sql: sa.Connection, volume: Volume, paths: Collection[str]
) -> Iterable[tuple[str, bool]]:
    """Those of the paths that have an entry, and whether each is a directory."""
    found: list[tuple[str, bool]] = []
    for part in _parts(sorted(paths)):
        query = sa.select(_ENTRIES.c.path, _ENTRIES.c.entry).where(
            _ENTRIES.c.volume == volume.id, _ENTRIES.c.path.in_(list(part))
        )
        found += [
            (row.path, json.loads(row.entry)["kind"] == EntryKind.DIRECTORY)
            for row in sql.execute(query)
        ]
    return found


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _parts(paths: Sequence[str]) -> Iterable[Sequence[str]]:
    return (paths[begin : begin + _AT_ONCE] for begin in range(0, len(paths), _AT_ONCE))


def _remove(sql: sa.Connection, volume: Volume, paths: Collection[str]) -> None:
    for part in _parts(sorted(paths)):
        sql.execute(
            sa.delete(_ENTRIES).where(
                _ENTRIES.c.volume == volume.id, _ENTRIES.c.path.in_(list(part))
            )
        )


def _remove_below(sql: sa.Connection, volume: Volume, path: str) -> None:
    sql.execute(sa.delete(_ENTRIES).where(*_below(volume, path)))


def _below(volume: Volume, path: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Which entries are below a directory. Not LIKE, which ignores case on SQLite."""
    prefix = f"{path}/"
    begins = sa.func.substr(_ENTRIES.c.path, 1, len(prefix)) == prefix
    return _ENTRIES.c.volume == volume.id, begins


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
