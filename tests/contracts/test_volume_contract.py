"""Manifests of volumes, on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest

from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.volumes import chunks, volumes
from pilotlight.core.volumes.entries import Entry, EntryKind
from pilotlight.errors import NotFound
from pilotlight.spec.quotas import Plan

DIGEST = "ab" * 32


def file(path: str, *digests: str) -> Entry:
    return Entry(path=path, kind=EntryKind.FILE, size_bytes=len(digests), chunks=digests)


def test_a_commit_changes_a_manifest_and_a_deleted_volume_has_none(store: Store) -> None:
    with store.write() as write:
        tenant = tenants.create(write, name="one", uid_base=20_000, actor="k").id
        scope = EnvironmentRef(tenant=tenant, environment="main")
        made = volumes.create(write, scope, name="data")
        assert volumes.create(write, scope, name="data") == made
        put = [file("a/ü%", DIGEST), file("A/x"), file("b\\c")]
        assert volumes.commit(write, made, Plan(), put=put, remove=[]) == 1
        assert chunks.reserve(write, Plan(), tenant=tenant, sizes={DIGEST: 1}) == [DIGEST]
        chunks.mark_stored(write, tenant=tenant, digests=[DIGEST])
    with store.write() as write:
        again = [file("a/ü%", DIGEST), file("new")]
        assert volumes.commit(write, made, Plan(), put=again, remove=["b\\c"]) == 2
        assert volumes.commit(write, made, Plan(), put=[], remove=[]) == 2
        assert chunks.mark_unused(write, tenant=tenant, before=float("inf")) == []
    with store.read() as sql:
        now = volumes.find(sql, scope, name="data")
        assert (now.version, now.entries, now.size_bytes) == (2, 5, 1)
        listed = volumes.entries(sql, now, below="a", after="", recursive=False)
        assert [entry.path for entry in listed] == ["a/ü%"]
    with store.write() as write:
        assert volumes.commit(write, made, Plan(), put=[], remove=[], remove_trees=["a"]) == 3
        volumes.delete(write, scope, name="data")
        assert chunks.mark_unused(write, tenant=tenant, before=float("inf")) == [DIGEST]
        chunks.forget(write, tenant=tenant, digests=[DIGEST])
        with pytest.raises(NotFound, match="was deleted"):
            volumes.commit(write, made, Plan(), put=[], remove=[])
