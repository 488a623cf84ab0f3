"""Names of weights: the manifest that a name refers to in an environment. The bytes are blobs; the
node's cache holds the models in use.

A name is set by a push, or by a deploy that declares weights. A push always sets the name; a deploy
sets it unless a push set it to another manifest, because `Weights.named(…)` must keep referring to
what was pushed. A pin belongs to the manifest: a name that is set to another manifest loses its
pin. The rows define what is pinned, and the node follows them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.tenants import require_environment
from pilotlight.controller.registry.app_ref import AppRef, EnvironmentRef
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.identifiers import require_name
from weight_cache.manifest import Manifest

MAX_SOURCE_LENGTH = 2000
_SHOWN = (
    "name",
    "manifest",
    "size_bytes",
    "files",
    "source",
    "app",
    "is_pinned",
    "created_at",
    "updated_at",
)
_TABLE = tables.weights
_USER = re.compile(r"(?<!\bhf)://[^/]*@")  # hf://org@revision contains no user
_QUERY = re.compile(r"(://[^?#\s]*)[?#]\S*?(?=,?(?:\s|\Z))")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeights:
    """The target of a name: the manifest's digest (hex), total size and number of files."""

    manifest: str
    size_bytes: int
    files: int

    @classmethod
    def of(cls, digest: str, manifest: Manifest) -> Self:
        """Summarize a manifest."""
        return cls(manifest=digest, size_bytes=manifest.size_bytes, files=len(manifest.files))


def put(
    write: Write, holder: EnvironmentRef, *, name: str, model: NamedWeights, source: str
) -> str | None:
    """Set `name` to `model`. Returns the manifest that the name pinned before and does not pin now,
    if any. Raises InvalidInput, NotFound."""
    _check(name, source)
    require_environment(write.sql, tenant=holder.tenant, name=holder.environment)
    before = _find(write.sql, holder, name)
    _upsert(write, holder, name=name, model=model, source=redact_source(source), app=None)
    was = None if before is None else {"manifest": before.manifest}
    _audit(write, holder, "weights.put", name, before=was, after={"manifest": model.manifest})
    return _released(before, model)


def record_deployed(
    write: Write,
    place: AppRef,
    *,
    specs: Sequence[FunctionSpec],
    manifests: Mapping[str, Manifest],
    is_bound: bool = False,
) -> list[str]:
    """Record the weights of a deploy; `manifests` are by digest. Returns the digests that lost
    their pins, as `put` does.

    `is_bound`: the deploy's key is limited to this app, so names that another app's deploy set
    stay unchanged."""
    holder = EnvironmentRef(
        tenant=place.tenant, environment=place.environment, actor=place.actor, request=place.request
    )
    released: list[str] = []
    for name, digest in {w.name: w.manifest for spec in specs for w in spec.weights}.items():
        before = _find(write.sql, holder, name)
        if before is not None and (
            before.app is None
            or before.manifest == digest
            or (is_bound and before.app != place.app)
        ):
            continue
        model = NamedWeights.of(digest, manifests[digest])
        _upsert(
            write, holder, name=name, model=model, source=f"deploy of {place.app}", app=place.app
        )
        released += [gone] if (gone := _released(before, model)) is not None else []
    return released


def delete(write: Write, holder: EnvironmentRef, *, name: str) -> str:
    """Delete a name; returns the manifest that it referred to. Raises NotFound, or Conflict while
    it is pinned or in use."""
    row = find(write.sql, holder, name=name)
    if row["is_pinned"]:
        raise Conflict(
            f"weights {name!r} are pinned: unpin them first",
            hint=f"pilotlight weights unpin {name}",
        )
    used = functions_using(write.sql, holder, manifest=row["manifest"])
    others = sa.select(_TABLE.c.name).where(
        *_of(holder), _TABLE.c.manifest == row["manifest"], _TABLE.c.name != name
    )
    if used and write.sql.execute(others).first() is None:
        raise Conflict(
            f"weights {name!r} are used by {', '.join(used)}: deploy without them first",
            functions=used,
        )
    write.sql.execute(sa.delete(_TABLE).where(*_is(holder, name)))
    _audit(write, holder, "weights.delete", name, before={"manifest": row["manifest"]})
    return str(row["manifest"])


def pin(write: Write, holder: EnvironmentRef, *, name: str, pinned: bool) -> str:
    """Set whether the node keeps the manifest of `name`; returns the manifest. Raises NotFound."""
    row = find(write.sql, holder, name=name)
    if row["is_pinned"] != pinned:
        write.sql.execute(
            sa.update(_TABLE)
            .where(*_is(holder, name))
            .values(is_pinned=pinned, updated_at=write.now)
        )
        _audit(
            write,
            holder,
            "weights.pin" if pinned else "weights.unpin",
            name,
            after={"manifest": row["manifest"]},
        )
    return str(row["manifest"])


def listing(sql: sa.Connection, holder: EnvironmentRef) -> list[dict[str, Any]]:
    """The environment's weights, by name."""
    query = (
        sa.select(*(_TABLE.c[column] for column in _SHOWN))
        .where(*_of(holder))
        .order_by(_TABLE.c.name)
    )
    return [dict(row) for row in sql.execute(query).mappings()]


def find(sql: sa.Connection, holder: EnvironmentRef, *, name: str) -> dict[str, Any]:
    """One weights entry of the environment. Raises NotFound."""
    row = _find(sql, holder, name)
    if row is None:
        raise NotFound(
            f"there are no weights {name!r} in environment {holder.environment!r}",
            name=name,
            hint="List them with `pilotlight weights list`.",
        )
    return {column: getattr(row, column) for column in _SHOWN}


def functions_using(sql: sa.Connection, holder: EnvironmentRef, *, manifest: str) -> list[str]:
    """Functions (`app/function`, sorted) of the environment with a revision in traffic that uses
    the manifest."""
    functions, traffic, revisions = tables.functions, tables.traffic, tables.revisions
    query = (
        sa.select(functions.c.app, functions.c.name, revisions.c.spec)
        .join(traffic, traffic.c.function == functions.c.id)
        .join(
            revisions,
            (revisions.c.function == traffic.c.function) & (revisions.c.name == traffic.c.revision),
        )
        .where(
            functions.c.tenant == holder.tenant,
            functions.c.environment == holder.environment,
            functions.c.removed_at.is_(None),
        )
        # a prefilter in the database; the next statement decides
        .where(revisions.c.spec.contains(f'"{manifest}"', autoescape=True))
    )
    return sorted(
        {f"{row.app}/{row.name}" for row in sql.execute(query) if manifest in _manifests(row.spec)}
    )


def instances_of(sql: sa.Connection, revisions: Mapping[str, int]) -> dict[str, int]:
    """Manifest → number of these instances that map it; `revisions` maps revision keys (`<function
    id>@<revision>`) to numbers of instances."""
    out: dict[str, int] = {}
    table = tables.revisions
    for key, count in revisions.items():
        function, _, name = key.partition("@")
        spec = sql.execute(
            sa.select(table.c.spec).where(table.c.function == function, table.c.name == name)
        ).scalar()
        for manifest in _manifests(spec) if spec is not None else ():
            out[manifest] = out.get(manifest, 0) + count
    return out


def pinned(sql: sa.Connection) -> set[str]:
    """Manifests that are pinned by a name of any tenant."""
    return set(sql.execute(sa.select(_TABLE.c.manifest).where(_TABLE.c.is_pinned)).scalars())


def is_named(sql: sa.Connection, *, manifest: str) -> bool:
    """Whether a name of any tenant refers to the manifest."""
    return (
        sql.execute(sa.select(_TABLE.c.name).where(_TABLE.c.manifest == manifest).limit(1)).first()
        is not None
    )


def redact_source(source: str) -> str:
    """Remove possible secrets from the URLs of a source: user, password, query (signatures),
    fragment. When in doubt, it removes more."""
    return _QUERY.sub(r"\1", _USER.sub("://", source))


def _upsert(
    write: Write,
    holder: EnvironmentRef,
    *,
    name: str,
    model: NamedWeights,
    source: str,
    app: str | None,
) -> None:
    changes = {
        "manifest": model.manifest,
        "size_bytes": model.size_bytes,
        "files": model.files,
        "source": source,
        "app": app,
    }
    kept = sa.case((_TABLE.c.manifest == model.manifest, _TABLE.c.is_pinned), else_=sa.false())
    key = {"tenant": holder.tenant, "environment": holder.environment, "name": name}
    insert = write.insert(_TABLE).values(
        **key, **changes, is_pinned=False, created_at=write.now, updated_at=write.now
    )
    write.sql.execute(
        insert.on_conflict_do_update(
            index_elements=list(key), set_={**changes, "is_pinned": kept, "updated_at": write.now}
        )
    )


def _released(before: sa.Row[Any] | None, model: NamedWeights) -> str | None:
    return (
        str(before.manifest)
        if before is not None and before.is_pinned and before.manifest != model.manifest
        else None
    )


def _manifests(spec: str) -> set[str]:
    return {w["manifest"] for w in json.loads(spec)["weights"]}


def record_node_request(write: Write, holder: EnvironmentRef, verb: str, name: str) -> None:
    """Record in the audit log an operation on the node that changes no row."""
    _audit(write, holder, f"weights.{verb}", name)


def _find(sql: sa.Connection, holder: EnvironmentRef, name: str) -> sa.Row[Any] | None:
    return sql.execute(sa.select(_TABLE).where(*_is(holder, name))).first()


def _of(holder: EnvironmentRef) -> tuple[sa.ColumnElement[bool], ...]:
    return (_TABLE.c.tenant == holder.tenant, _TABLE.c.environment == holder.environment)


def _is(holder: EnvironmentRef, name: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (*_of(holder), _TABLE.c.name == name)


def _audit(
    write: Write,
    holder: EnvironmentRef,
    action: str,
    name: str,
    *,
    before: Any = None,
    after: Any = None,
) -> None:
    subject = f"{holder.environment}/{name}"
    audit_trail.record(
        write,
        tenant=holder.tenant,
        actor=holder.actor,
        action=action,
        subject=subject,
        before=before,
        after=after,
        request=holder.request,
    )


def _check(name: str, source: str) -> None:
    require_name("weights", name, parameter="name")
    if len(source) > MAX_SOURCE_LENGTH:
        raise InvalidInput(
            f"source has {len(source)} characters: give at most {MAX_SOURCE_LENGTH}",
            parameter="source",
        )
