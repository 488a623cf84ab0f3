"""What tenants store: counting, releasing and deleting, on SQLite and on PostgreSQL, also when the
sweep is killed."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.controller.collections import collections
from pilotlight.controller.collections.collections import CollectionScope
from pilotlight.controller.database import retention, tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.deployments import app_registry, dependency_checks
from pilotlight.controller.identity import api_keys, tenants
from pilotlight.controller.registry import images
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.volumes import chunks
from pilotlight.controller.weights import blobs
from pilotlight.controller.weights.blob_gc import BlobCollector, collect_garbage
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.object_store import DirectoryStore, blob_key
from pilotlight.errors import InvalidInput, StorageQuotaExceeded
from pilotlight.spec.collection import CollectionKind
from pilotlight.spec.function import FunctionSpec, ImageSpec
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.quotas import Plan
from pilotlight.spec.record_json import from_json
from tests.fakes.databases import empty_sqlite, without_customers
from tests.fakes.killed_sweep import AFTER, BEFORE, NEVER
from tests.fakes.stored_bytes import checked_usage
from tests.functions.controller.parts import ManualClock, spec
from tests.hypothesis_profiles import examples

ROOT = Path(__file__).parents[2]


def data_of(number: int) -> bytes:
    return b"blob %d " % number * (number + 1)


def digest_of(number: int) -> str:
    return hashlib.sha256(data_of(number)).hexdigest()


class Platform:
    """A store, a directory of blobs and two tenants."""

    def __init__(self, store: Store, root: Path) -> None:
        self.store = store
        self.root = root
        self.files = BlobStore(
            objects=DirectoryStore(root), incoming=root / "incoming", limit_bytes=1 << 30
        )
        self.collector = BlobCollector(self.files, store)
        with store.write() as write:
            self.tenants = [
                tenants.create(write, name=name, uid_base=20_000, actor="k").id
                for name in ("one", "two")
            ]

    async def upload(self, whose: int, number: int, *, plan: Plan | None = None) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield data_of(number)

        await blobs.store_blob(
            self.files,
            self.store,
            tenant=self.tenants[whose],
            digest=digest_of(number),
            pieces=pieces(),
            announced_bytes=len(data_of(number)),
            actor="k",
            plan=plan or Plan(),
        )

    def deploy(self, whose: int, *numbers: int, app: str = "app") -> None:
        """One app with a function for each blob. Raises InvalidInput."""
        specs = [from_json(FunctionSpec, spec(f"f{n}", bundle=digest_of(n))) for n in numbers]
        place = AppRef(tenant=self.tenants[whose], uid=None, environment="main", app=app, actor="k")
        with self.store.write() as write:
            dependency_checks.check_dependencies(
                write.sql,
                tenant=place.tenant,
                environment="main",
                specs=specs,
                manifests={},
                bundle_max_bytes=1 << 20,
            )
            app_registry.deploy(write, place, specs=specs)

    def owned(self, whose: int) -> set[str]:
        table = tables.blob_owners
        with self.store.read() as sql:
            return set(
                sql.execute(
                    sa.select(table.c.digest).where(table.c.tenant == self.tenants[whose])
                ).scalars()
            )

    def stored(self, whose: int) -> int:
        with self.store.read() as sql:
            return checked_usage(sql, self.tenants[whose]).total_bytes

    def rows(self) -> dict[str, float | None]:
        """Digest → `deleting_at`."""
        table = tables.blobs
        with self.store.read() as sql:
            return {
                row.digest: row.deleting_at
                for row in sql.execute(sa.select(table.c.digest, table.c.deleting_at))
            }

    async def there(self) -> set[str]:
        """Digests of the objects in the blob store."""
        return {
            key.rpartition("/")[2]
            for key in await self.files.objects.keys("")
            if not key.startswith("incoming/")
        }


@pytest.fixture
def platform(store: Store, tmp_path: Path) -> Platform:
    return Platform(store, tmp_path / "blobs")


async def test_sweep_keeps_what_revisions_name_and_what_is_new(
    platform: Platform, clock: ManualClock
) -> None:
    for number in range(4):
        await platform.upload(0, number)
    platform.deploy(0, 0, 1)
    clock.now += 1000
    await platform.upload(0, 4)
    collected, deleted = await collect_garbage(
        platform.collector, platform.store, unused_since=clock.now - 500
    )
    assert set(collected.digests) == {digest_of(2), digest_of(3)}
    assert (deleted.blobs, deleted.size_bytes) == (2, len(data_of(2)) + len(data_of(3)))
    assert (
        platform.owned(0)
        == await platform.there()
        == platform.rows().keys()
        == {digest_of(n) for n in (0, 1, 4)}
    )


async def test_bound_is_exact_and_released_bytes_can_be_used_again(platform: Platform) -> None:
    plan = Plan(stored_bytes=len(data_of(5)) + len(data_of(6)))
    await platform.upload(0, 5, plan=plan)
    await platform.upload(0, 6, plan=plan)
    with pytest.raises(StorageQuotaExceeded, match=f"stores {plan.stored_bytes} bytes"):
        await platform.upload(0, 0, plan=plan)
    await platform.upload(1, 0, plan=plan)
    tenant = platform.tenants[0]
    await platform.collector.give_up(tenant=tenant, digests=[digest_of(5)], actor="k", request="")
    await platform.upload(0, 0, plan=plan)
    assert platform.stored(0) == len(data_of(6)) + len(data_of(0))


@pytest.mark.parametrize("point, number", [(BEFORE, 1), (AFTER, 1), (BEFORE, 3), (AFTER, 3)])
@pytest.mark.slow  # hundreds of uploads and sweeps, processes that are killed
async def test_sweep_killed_in_the_middle_loses_nothing_that_is_needed(
    platform: Platform, migrated_url: str, point: str, number: int
) -> None:
    for n in range(8):
        await platform.upload(0, n)
    platform.deploy(0, 0, 1)
    needed = {digest_of(0), digest_of(1)}
    killed = await asyncio.to_thread(_run, migrated_url, platform.root, point, number)
    assert killed == -signal.SIGKILL
    assert needed <= await platform.there(), "what a revision names is there after the kill"
    assert platform.owned(0) == needed
    left = {digest for digest, deleting_at in platform.rows().items() if deleting_at is not None}
    assert await platform.there() <= needed | left, "every object that is left is known, and marked"

    await platform.upload(0, 2)
    platform.deploy(0, 2, app="later")
    assert await asyncio.to_thread(_run, migrated_url, platform.root, NEVER, 0) == 0
    assert (
        platform.owned(0)
        == await platform.there()
        == platform.rows().keys()
        == {*needed, digest_of(2)}
    )
    assert await platform.files.objects.get(blob_key(digest_of(2)), max_bytes=1000) == data_of(2)


def _run(database: str, blobs_at: Path, point: str, number: int) -> int:
    command = [
        sys.executable,
        "-m",
        "tests.fakes.killed_sweep",
        database,
        str(blobs_at),
        point,
        str(number),
    ]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, cwd=ROOT, timeout=50, check=False).returncode


@pytest.mark.timeout(120)
@pytest.mark.slow  # hundreds of uploads and sweeps, processes that are killed
async def test_deploys_during_sweeps_have_their_blobs_or_fail(platform: Platform) -> None:
    """Sweeps without any grace beside deploys: a deploy that succeeded has its bundle, at every
    moment and at the end."""
    done = asyncio.Event()
    outcomes = {"deployed": 0, "refused": 0}

    async def deployer(first: int) -> None:
        for number in range(first, first + 15):
            while True:
                await platform.upload(0, number)
                try:
                    await asyncio.to_thread(platform.deploy, 0, number, app=f"app-{number}")
                except InvalidInput:
                    outcomes["refused"] += 1
                    continue
                outcomes["deployed"] += 1
                assert digest_of(number) in await platform.there()
                break

    async def sweeper() -> None:
        while not done.is_set():
            await collect_garbage(platform.collector, platform.store, unused_since=float("inf"))
            await asyncio.sleep(0.003)

    sweeping = asyncio.create_task(sweeper())
    await asyncio.gather(deployer(0), deployer(100))
    done.set()
    await sweeping
    needed = {digest_of(n) for n in (*range(15), *range(100, 115))}
    assert outcomes["deployed"] == 30
    assert needed <= await platform.there()
    assert platform.owned(0) == needed


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["upload", "deploy", "delete", "collect"]),
        st.integers(0, 1),
        st.integers(0, 4),
    ),
    max_size=25,
)


@settings(max_examples=examples(25), deadline=None)
@given(STEPS)
@pytest.mark.slow  # hundreds of uploads and sweeps, processes that are killed
def test_whatever_happens_the_count_is_what_is_owned_and_needed_blobs_are_there(
    steps: list[tuple[str, int, int]],
) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        store = Store(empty_sqlite(root / "controller.db"), clock=ManualClock())
        platform = Platform(store, root / "blobs")
        needed: list[dict[str, int]] = [{}, {}]  # app → blob
        owned: list[set[int]] = [set(), set()]
        try:
            for verb, whose, number in steps:
                app = f"app-{number}"
                if verb == "upload":
                    await platform.upload(whose, number)
                    owned[whose].add(number)
                elif verb == "deploy" and number in owned[whose]:
                    platform.deploy(whose, number, app=app)
                    needed[whose][app] = number
                elif verb == "deploy":
                    with pytest.raises(InvalidInput):
                        platform.deploy(whose, number, app=app)
                elif verb == "delete" and app in needed[whose]:
                    place = AppRef(
                        tenant=platform.tenants[whose],
                        uid=None,
                        environment="main",
                        app=app,
                        actor="k",
                    )
                    with store.write() as write:
                        app_registry.delete(write, place)
                    del needed[whose][app]
                elif verb == "collect":
                    await collect_garbage(platform.collector, store, unused_since=float("inf"))
                    owned = [set(one.values()) for one in needed]
                for one in (0, 1):
                    assert platform.owned(one) == {digest_of(n) for n in owned[one]}
                    assert platform.stored(one) == sum(len(data_of(n)) for n in owned[one])
                assert {digest_of(n) for one in owned for n in one} == await platform.there()
        finally:
            store.close()


def test_an_upgrade_counts_what_is_stored(platform: Platform, store: Store) -> None:
    one, other = platform.tenants
    scope = CollectionScope(tenant=one, environment="main", kind=CollectionKind.DICT, name="d")
    with store.write() as write:
        blobs.register(write, tenant=one, digest=digest_of(1), size_bytes=1)
        images.register(write, tenant=one, spec=ImageSpec(python="3.11"), digest="i", size_bytes=2)
        chunks.reserve(write, Plan(), tenant=one, sizes={"c": 4})
        collections.put(write, collections.create(write, scope), Plan(), {"k": b"1234567"})
        for change in (
            "ALTER TABLE tenants DROP COLUMN stored_bytes",
            "ALTER TABLE tenants DROP COLUMN collection_bytes",
            "DROP TABLE prediction_files",
            *(f"DROP TABLE drift_{name}" for name in ("sketches", "scores", "references")),
            "DROP TABLE drift_reports",
            "DROP INDEX ix_feedback_at",
            "DROP TABLE collection_operations",
            *(f"DROP TABLE {name}" for name in ("batch_files", "batches", "batch_lines")),
            "DROP INDEX ix_due_calls_cancel",
            "ALTER TABLE due_calls DROP COLUMN cancel_at",
            "UPDATE alembic_version SET version_num = '0021'",
        ):
            write.sql.execute(sa.text(change))
        without_customers(write.sql)
    store.migrate()
    with store.write() as write:
        usage = checked_usage(write.sql, one)
        assert (usage.total_bytes, usage.collection_bytes) == (15, 8)
        assert checked_usage(write.sql, other).total_bytes == 0
        images.register(write, tenant=one, spec=ImageSpec(python="3.11"), digest="i", size_bytes=16)
        assert checked_usage(write.sql, one).total_bytes == 29
        images.delete(write, tenant=one, digest="i")
        collections.delete(write, scope)
        assert checked_usage(write.sql, one).total_bytes == 5


async def test_sweep_reads_each_spec_once(platform: Platform, store: Store) -> None:
    """Specs are long and sweeps are many: one that finds nothing new reads no spec and does not
    take the write lock."""
    for number in range(3):
        await platform.upload(0, number)
    platform.deploy(0, 0, 1, 2)
    await collect_garbage(platform.collector, store, unused_since=float("inf"))
    statements: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    sa.event.listen(store.engine, "before_cursor_execute", note)
    await collect_garbage(platform.collector, store, unused_since=float("inf"))
    assert [
        s
        for s in statements
        if "revisions.spec" in s or s.startswith(("UPDATE", "DELETE", "INSERT"))
    ] == []
    assert any("blob_owners" in s for s in statements)


async def test_the_oldest_that_was_given_up_goes_with_what_belongs_to_it(
    platform: Platform, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEPT_PER_FUNCTION", 2)
    tenant = platform.tenants[0]
    for number in range(5):
        await platform.upload(0, number)
    place = AppRef(tenant=tenant, uid=None, environment="main", app="gone", actor="k")
    for numbers in ((0, 1), (2,)):
        clock.now += 1
        platform.deploy(0, *numbers, app="gone")
    with platform.store.write() as write:
        app_registry.delete(write, place)
    platform.deploy(0, 3, app="here")
    with platform.store.write() as write:
        retention.enforce_retention(write, Plan(functions=1), tenant=tenant, before=0)
        assert retention.count_revisions(write.sql, tenant=tenant) == 1
        assert write.sql.execute(sa.select(tables.functions.c.app)).scalars().all() == ["here"]
        assert write.sql.execute(sa.select(tables.apps.c.name)).scalars().all() == ["here"]
        assert write.sql.execute(sa.select(tables.deployments.c.app)).scalars().all() == ["here"]
    platform.deploy(0, 3, 4, app="here")
    with (
        pytest.raises(StorageQuotaExceeded, match="this tenant would have 2 revisions"),
        platform.store.write() as write,
    ):
        retention.enforce_retention(write, Plan(functions=0), tenant=tenant, before=1)


def test_keys_that_ended_go_and_those_in_force_stay(
    platform: Platform, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "MAX_ENDED", 1)
    for expires_in_s in (5, 6, None):
        with platform.store.write() as write:
            api_keys.create(
                write,
                tenant=platform.tenants[0],
                scope=Scope.INVOKE,
                actor="k",
                expires_in_s=expires_in_s,
            )
    clock.now += 10
    with platform.store.write() as write:
        api_keys.create(write, tenant=platform.tenants[0], scope=Scope.INVOKE, actor="k")
        ends = [
            one["expires_at"] for one in api_keys.listing(write.sql, tenant=platform.tenants[0])
        ]
    assert ends == [None, None], "with the oldest go some more, for the next to have room"
