"""Manifests of volumes, on SQLite and on PostgreSQL."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.identity import tenants
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.volumes import chunks, manifest_rows, volumes
from pilotlight.core.volumes.entries import Entry, EntryKind
from pilotlight.errors import NotFound, StorageQuotaExceeded
from pilotlight.spec.quotas import Plan

DIGEST = "ab" * 32


def file(path: str, *digests: str) -> Entry:
    return Entry(path=path, kind=EntryKind.FILE, size_bytes=len(digests), chunks=digests)


def unused(write: Write, tenant: str) -> list[str]:
    """Mark all chunks to which nothing refers."""
    referenced = volumes.chunks_of_tenant(write.sql, tenant=tenant)
    return chunks.mark_unused(write, tenant=tenant, before=float("inf"), referenced=referenced)


def folder(path: str) -> Entry:
    return Entry(path=path, kind=EntryKind.DIRECTORY, mode=0o755)


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
        assert unused(write, tenant) == []
    with store.read() as sql:
        now = volumes.find(sql, scope, name="data")
        assert (now.version, now.entries, now.size_bytes) == (2, 5, 1)
        listed = volumes.entries(sql, now, below="a", after="", recursive=False)
        assert [entry.path for entry in listed] == ["a/ü%"]
    with store.write() as write:
        assert volumes.commit(write, made, Plan(), put=[], remove=[], remove_trees=["a"]) == 3
        volumes.delete(write, scope, name="data")
        assert unused(write, tenant) == [DIGEST]
        chunks.forget(write, tenant=tenant, digests=[DIGEST])
        with pytest.raises(NotFound, match="was deleted"):
            volumes.commit(write, made, Plan(), put=[], remove=[])


def _volume(write: Write) -> volumes.Volume:
    tenant = tenants.create(write, name="one", uid_base=20_000, actor="k").id
    scope = EnvironmentRef(tenant=tenant, environment="main")
    return volumes.create(write, scope, name="data")


@pytest.mark.parametrize("few", [0, 1000])
def test_many_directories_are_changed_as_few_are(
    store: Store, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`few`: up to how many are looked for by a query each."""
    monkeypatch.setattr(manifest_rows, "_FEW", few)
    with store.write() as write:
        made = _volume(write)
        put = [file("a/b/c/d"), file("a/b0"), file("ab/c"), file("f/g"), folder("e/e/e")]
        volumes.commit(write, made, Plan(), put=[*put, folder("g")], remove=[])
        # a directory that is not empty stays, and all above it; an empty one goes with those above
        gone = ["a", "a/b", "a/b/c", "e", "e/e", "e/e/e", "ab"]
        volumes.commit(write, made, Plan(), put=[], remove=gone)
        left = "a a/b a/b/c a/b/c/d a/b0 ab ab/c f f/g g"
        assert _paths(write, made) == left.split()
        volumes.commit(write, made, Plan(), put=[], remove=[], remove_trees=["a/b", "g"])
        assert _paths(write, made) == ["a", "a/b0", "ab", "ab/c", "f", "f/g"]
        volumes.commit(write, made, Plan(), put=[file("a"), file("f")], remove=[])
        assert _paths(write, made) == ["a", "ab", "ab/c", "f"]


def _paths(write: Write, volume: volumes.Volume) -> list[str]:
    found = volumes.entries(write.sql, volume, below="", after="", recursive=True)
    return [entry.path for entry in found]


def test_a_commit_asks_the_database_a_bounded_number_of_questions(store: Store) -> None:
    """One for each directory would each read all of the volume's entries, and hold the only
    writer for hours."""
    many = [folder(f"d{number}") for number in range(300)]
    asked: list[str] = []

    def count(*args: object) -> None:
        asked.append(str(args[2]))

    with store.write() as write:
        made = _volume(write)
        volumes.commit(write, made, Plan(), put=[*many, file("x")], remove=[])
        sa.event.listen(store.engine, "before_cursor_execute", count)
        sizes = {f"{number:064x}": 1 for number in range(300)}
        assert len(chunks.reserve(write, Plan(), tenant=made.tenant, sizes=sizes)) == 300
        volumes.commit(write, made, Plan(), put=[], remove=[one.path for one in many])
        volumes.commit(write, made, Plan(), put=[file(f"{one.path}/f") for one in many], remove=[])
        volumes.commit(write, made, Plan(), put=[file(one.path) for one in many], remove=[])
        sa.event.remove(store.engine, "before_cursor_execute", count)
        assert len(_paths(write, made)) == 301
    assert len(asked) < 50


def test_pages_of_a_listing_are_by_code_point(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "MAX_LISTED", 2)
    names = sorted(["B", "a", "a-b", "a/x", "a.b", "é", "z"])
    with store.write() as write:
        made = _volume(write)
        put = [file(name) for name in names if name != "a"]
        volumes.commit(write, made, Plan(), put=put, remove=[])
        found: list[str] = []
        while page := volumes.entries(
            write.sql, made, below="", after=found[-1] if found else "", recursive=True
        ):
            found += [entry.path for entry in page]
            assert len(page) <= 2
        assert found == names
        (inside,) = volumes.entries(write.sql, made, below="a", after="", recursive=False)
        assert inside.path == "a/x"


@pytest.mark.parametrize(
    "limit,message",
    [
        ("MAX_BYTES", "volume 'data' would have size_bytes = 5"),
        ("MAX_BYTES_OF_TENANT", "all volumes of this tenant would have size_bytes = 7"),
        ("MAX_FILES_OF_TENANT", "all volumes of this tenant would have entries = 4"),
    ],
)
def test_what_all_manifests_of_a_tenant_have_is_bounded(
    store: Store, limit: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal chunks are stored once, and directories are no bytes: `stored_bytes` bounds neither."""
    with store.write() as write:
        made = _volume(write)
        scope = EnvironmentRef(tenant=made.tenant, environment="main")
        other = volumes.create(write, scope, name="other")
        volumes.commit(write, other, Plan(), put=[_sized("a", 2)], remove=[])
    put = [_sized("a", 5), file("b"), file("c")]
    with monkeypatch.context() as patch:
        patch.setattr(volumes, limit, 3)
        with pytest.raises(StorageQuotaExceeded, match=message), store.write() as write:
            volumes.commit(write, made, Plan(), put=put, remove=[])
    with store.write() as write:
        volumes.commit(write, made, Plan(), put=put, remove=[])
        grown = volumes.find(write.sql, scope, name="data")
    monkeypatch.setattr(volumes, limit, 3)
    with store.write() as write:  # what is over the bound may become less
        volumes.commit(write, grown, Plan(), put=[_sized("a", 4)], remove=["c"])


def _sized(path: str, size_bytes: int) -> Entry:
    return Entry(path=path, kind=EntryKind.FILE, size_bytes=size_bytes, chunks=(DIGEST,))
