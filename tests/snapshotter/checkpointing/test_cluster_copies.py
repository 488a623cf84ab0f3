"""Copies of snapshots on a cluster: made on one node, recorded by the controller, received by
others of the same kind; and what may happen to them on the way. Nodes have homes of their own,
one store, and the real register."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.node_snapshots.register import SnapshotRegister
from pilotlight.core.background_tasks import BackgroundTasks, cancel_all
from pilotlight.core.object_store import DirectoryStore, ObjectStore, open_store
from pilotlight.core.object_store.errors import ObjectStoreError
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.checkpointing.uploads import SnapshotUploads
from snapshotter.events import Events
from snapshotter.metrics import Metrics
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.snapshots.catalog import Catalog, Snapshot
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.fetches import SnapshotFetches
from snapshotter.snapshots.identity import NodeIdentity
from snapshotter.snapshots.manifest import sealed
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.remote_copies import ORPHANED_S, RemoteCopies, RemoteError
from snapshotter.snapshots.selector import SnapshotSelector
from tests.fakes.clock import ManualClock
from tests.fakes.cluster_snapshots import Pods, ReportingNode
from tests.fakes.databases import empty_sqlite
from tests.fakes.waiting import until
from tests.snapshotter.snapshots.shapes import FILES, KEY, NO_BINDS, identity, ready

CHUNK_BYTES, NOW = 4096, 1000.0
LABELS = {"tenant": "t-1", "environment": "main", "app": "demo", "function": "f"}
KIND = NodeIdentity(runtime="r", kernel="6.1", machine="m", cpu="c", criu="4", driver="", gpus="")


@dataclass(kw_only=True)
class Node:
    """One node."""

    reporting: ReportingNode
    copies: RemoteCopies
    uploads: SnapshotUploads
    selector: SnapshotSelector

    @property
    def catalog(self) -> Catalog:
        return self.copies.catalog

    @property
    def ids(self) -> list[str]:
        return [snapshot.id for snapshot in self.catalog]

    async def tell(self, now: float = NOW) -> None:
        """Report, and do what the answer says."""
        await self.reporting.tell(now=now)
        await until(lambda: "0 running" in repr(self.reporting.orders))

    async def make(self, **changes: Any) -> Snapshot:
        """A proven snapshot, uploaded and recorded."""
        made = await ready(self.catalog, labels=LABELS, now=NOW, **changes)
        await self.tell()
        self.uploads.want(made.id)
        await until(lambda: self.catalog.get(made.id).remote)
        await self.tell()
        return made

    async def fetch(self, **changes: Any) -> Snapshot | None:
        """What a start gets."""
        fetches = SnapshotFetches(self.copies)
        try:
            return await fetches.fetch(
                identity(), NO_BINDS, **{"tenant": "t-1", "cold_ms": None, **changes}
            )
        finally:
            await fetches.aclose()

    def left_behind(self) -> set[str]:
        """What is in its directory beside snapshots."""
        return {path.name for path in self.catalog.directory.iterdir()} - {".lock", *self.ids}


class Cluster:
    """Nodes of one kind, with one store and one register."""

    def __init__(self, root: Path, store: ObjectStore) -> None:
        self._root = root
        self._held = contextlib.AsyncExitStack()
        self.database = Store(empty_sqlite(root / "controller.db"), clock=lambda: NOW)
        self.store = store
        self.pods = Pods(*((f"fn-{n}", name) for n in (1, 2) for name in "ab"))
        self.reports = NodeReports()
        self.register = SnapshotRegister(
            self.database, self.reports, self.pods.has, max_bytes=10_000_000
        )

    async def node(self, name: str, *, max_bytes: int = 10_000_000, **given: Any) -> Node:
        """A node; again, after `leave`, with what is on its disk."""
        catalogue = Catalog(self._root / name, key=KEY, max_bytes=max_bytes)
        self._held.push_async_callback(catalogue.aclose)
        copies = RemoteCopies(
            given.pop("store", self.store), catalogue, chunk_bytes=CHUNK_BYTES, approved={}
        )
        nothing = cast(Any, None)
        stock = SnapshotComponents(
            catalogue=catalogue,
            criu=nothing,
            kit=nothing,
            kdat=None,
            images=nothing,
            node=KIND,
            remote=copies,
        )
        metrics, tasks = Metrics(), BackgroundTasks()
        selector = SnapshotSelector(
            stock, None, events=Events(), metrics=metrics, predictions=Predictions()
        )
        snapshots = SnapshotApi(
            stock=stock,
            checkpoints=None,
            selector=selector,
            background_tasks=tasks,
            metrics=metrics,
            builder=BackgroundBuilder(None, background_tasks=tasks, per_hour=0),
        )
        uploads = SnapshotUploads(copies, **{"again_first_s": 0.01, **given})
        running = asyncio.create_task(uploads.run())
        node = Node(
            reporting=ReportingNode.of(
                name, snapshots, self.reports, self.register, tenants=("t-1",)
            ),
            copies=copies,
            uploads=uploads,
            selector=selector,
        )
        self._held.push_async_callback(snapshots.aclose)
        self._held.push_async_callback(node.reporting.orders.aclose)
        self._held.push_async_callback(cancel_all, [running])
        return node

    async def aclose(self) -> None:
        await self._held.aclose()
        self.database.close()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, DirectoryStore(tmp_path / "store"))
    yield cluster
    await cluster.aclose()


# an S3 server that is slow
@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow)])
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    where = (
        str(tmp_path / "store")
        if request.param == "directory"
        else f"s3://{request.getfixturevalue('s3_bucket')}/blobs"
    )
    store = open_store(where, setting="snapshot_store")
    cluster = Cluster(tmp_path, store)
    yield cluster
    await cluster.aclose()
    await store.aclose()


# -- the story -------------------------------------------------------------------------------------
async def test_made_on_one_node_it_is_received_by_another_and_deleted_on_both(
    shared: Cluster,
) -> None:
    a, b = await shared.node("a"), await shared.node("b")
    made = await a.make()
    assert await b.fetch() is None, "the controller has not told of it yet"
    b.reporting.tenants = ()
    await b.tell()
    found = await b.fetch()
    assert found is not None
    assert (found.id, found.remote, found.manifest) == (made.id, True, made.manifest)
    assert (found.images / "pages-1.img").read_bytes() == FILES["pages-1.img"]
    await b.tell()
    listed = [(i.id, i.node, i.where) for i in await shared.register.infos(LABELS, now=NOW)]
    assert listed == [(made.id, "a", "disk, store"), (made.id, "b", "disk, store")]

    await shared.register.delete(function="fn-1", now=NOW)
    await b.tell()
    await a.tell()
    assert (a.ids, b.ids, await shared.store.keys("")) == ([], [], [])
    assert await b.fetch() is None
    assert await shared.register.infos({}, now=NOW) == []


async def test_the_store_reads_no_memory_and_tenants_share_no_chunk(cluster: Cluster) -> None:
    a = await cluster.node("a")
    await a.make()
    other = {**LABELS, "tenant": "t-2"}
    await a.copies.push(await ready(a.catalog, labels=other, identity=identity(revision="fn-2@r1")))
    keys = await cluster.store.keys("chunks/")
    one, two = ([k for k in keys if k.startswith(f"chunks/{t}/")] for t in ("t-1", "t-2"))
    assert len(one) == len(two) == len(keys) / 2
    assert not {k.rpartition("/")[2] for k in one} & {k.rpartition("/")[2] for k in two}
    for key in keys:
        assert b"core" not in await cluster.store.get(key, max_bytes=CHUNK_BYTES * 2)


async def test_hot_copies_are_received_before_a_start_needs_them_if_they_fit(
    cluster: Cluster,
) -> None:
    a, b = await cluster.node("a"), await cluster.node("b")
    small = await cluster.node("small", max_bytes=5000)
    made = await a.make()
    await b.tell()
    await small.tell()
    assert (b.ids, small.ids) == ([made.id], [])


async def test_quarantined_on_one_node_it_is_restored_on_no_other(cluster: Cluster) -> None:
    a, b = await cluster.node("a"), await cluster.node("b")
    made = await a.make()
    await b.tell()
    await b.catalog.quarantine(made.id, "three restores failed", now=NOW)
    await b.tell()
    await a.tell()
    assert (a.ids, b.ids) == ([], [])
    (record,) = a.catalog.quarantined
    assert "three restores failed" in record.reason
    await a.tell()
    assert await cluster.store.keys("") == []
    c = await cluster.node("c")
    await c.tell()
    assert await c.fetch() is None


# -- what nobody may plant -------------------------------------------------------------------------
async def test_a_record_that_another_node_put_in_its_place_is_not_fetched(
    cluster: Cluster,
) -> None:
    a, b, evil = [await cluster.node(name) for name in ("a", "b", "evil")]
    b.reporting.tenants = ()
    await a.make()
    await b.tell()
    (key,) = await cluster.store.keys("snapshots/")
    body = json.loads(await cluster.store.get(key, max_bytes=100_000))
    del body["signature"]
    body["manifest"]["pages"] = "lazy"  # signed with the key that all nodes have
    await cluster.store.put(key, sealed(body, KEY))
    with pytest.raises(RemoteError, match="not the copy that the controller recorded"):
        await b.copies.find(identity(), tenant="t-1")
    assert await b.fetch() is None

    planted = await ready(evil.catalog, labels=LABELS, created_at=5000.0)
    await evil.copies.push(planted)
    await evil.tell()
    assert await b.fetch() is None, "no pod of the function is there"
    assert await cluster.register.infos({}, now=NOW) != []


async def test_a_tenant_gets_no_copy_of_another(cluster: Cluster) -> None:
    a, b = await cluster.node("a"), await cluster.node("b")
    b.reporting.tenants = ()
    await a.make()
    await b.tell()
    assert await b.fetch(tenant="t-2") is None


# -- what may happen on the way --------------------------------------------------------------------
@pytest.mark.parametrize("harm", ["byte", "truncated", "missing"])
async def test_a_damaged_copy_ends_in_a_cold_start_and_leaves_nothing(
    cluster: Cluster, harm: str
) -> None:
    a, b = await cluster.node("a"), await cluster.node("b")
    b.reporting.tenants = ()
    await a.make()
    await b.tell()
    key = (await cluster.store.keys("chunks/"))[0]
    data = await cluster.store.get(key, max_bytes=CHUNK_BYTES * 2)
    if harm == "missing":
        await cluster.store.delete(key)
    else:
        cut = data[:-1]
        await cluster.store.put(key, cut if harm == "truncated" else cut + bytes([data[-1] ^ 1]))
    assert await b.fetch() is None
    assert (b.ids, b.left_behind()) == ([], set())


@pytest.mark.root
async def test_a_full_disk_ends_in_a_cold_start_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    a = await cluster.node("a")
    await a.make()
    (tmp_path / "b").mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path / "b")]
    await asyncio.to_thread(subprocess.run, mounting, check=True)
    try:
        b = await cluster.node("b")
        b.reporting.tenants = ()
        await b.tell()
        assert await b.fetch() is None
        assert (b.ids, b.left_behind()) == ([], set())
        assert a.ids, "where it was made it stays"
    finally:
        unmounting = ["umount", "-l", str(tmp_path / "b")]
        await asyncio.to_thread(subprocess.run, unmounting, check=True)


class Refusing(DirectoryStore):
    """Refuses so many puts."""

    refusals = 0

    async def put(self, key: str, data: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ObjectStoreError("the network is gone")
        await super().put(key, data)


async def test_an_upload_that_fails_is_repeated_and_keeps_no_other_waiting(
    cluster: Cluster, tmp_path: Path
) -> None:
    store = Refusing(tmp_path / "store")
    store.refusals = 2
    a = await cluster.node("a", store=store)
    made = [
        await ready(a.catalog, labels=LABELS, identity=identity(revision=f"fn-{n}@r1"))
        for n in (1, 2)
    ]
    for snapshot in made:
        a.uploads.want(snapshot.id)
    await until(lambda: all(a.catalog.get(snapshot.id).remote for snapshot in made))
    assert len(await store.keys("snapshots/")) == 2


async def test_a_snapshot_that_goes_during_its_upload_leaves_no_copy(
    cluster: Cluster, tmp_path: Path
) -> None:
    a = await cluster.node("a")
    made = await ready(a.catalog, labels=LABELS)
    a.uploads.want(made.id)
    while not await cluster.store.keys("chunks/"):
        await asyncio.sleep(0)
    await a.catalog.delete(made.id)
    store = tmp_path / "store"
    await until(lambda: not [path for path in store.rglob("*") if path.is_file()])


_DIES = """
import asyncio, os, signal, sys
from pathlib import Path
from pilotlight.core.object_store import DirectoryStore
from snapshotter.snapshots.catalog import Catalog
from snapshotter.snapshots.remote_copies import RemoteCopies
from tests.snapshotter.snapshots.shapes import KEY, identity, ready

class Dying(DirectoryStore):
    calls = 0

    async def _count(self):
        Dying.calls += 1
        if Dying.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    async def put(self, key, data):
        await self._count()
        await super().put(key, data)

    async def get(self, key, *, max_bytes):
        await self._count()
        return await super().get(key, max_bytes=max_bytes)

async def main(home, store, what):
    catalogue = Catalog(Path(home), key=KEY, max_bytes=None)
    remote = RemoteCopies(Dying(Path(store)), catalogue, chunk_bytes=4096, at_once=1)
    if what == "upload":
        await remote.push(await ready(catalogue, labels={"tenant": "t-1"}))
    else:
        await remote.fetch(identity(), tenant="t-1")

asyncio.run(main(*sys.argv[1:]))
"""


def killed(home: Path, store: Path, what: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", _DIES, str(home), str(store), what],
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert child.returncode == -signal.SIGKILL


@pytest.mark.slow  # processes that import the catalogue
async def test_killed_while_it_uploads_the_next_agent_goes_on_and_nobody_sees_a_half(
    cluster: Cluster, tmp_path: Path
) -> None:
    await asyncio.to_thread(killed, tmp_path / "a", tmp_path / "store", "upload")
    sent = len(await cluster.store.keys("chunks/"))
    assert sent == 2
    assert await cluster.store.keys("snapshots/") == []
    a = await cluster.node("a")  # the next agent uploads what it finds
    (found,) = a.ids
    await until(lambda: a.catalog.get(found).remote)
    assert len(await cluster.store.keys("snapshots/")) == 1


@pytest.mark.slow  # processes that import the catalogue
async def test_killed_while_it_fetches_nothing_of_it_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    a = await cluster.node("a")
    await a.make()
    await asyncio.to_thread(killed, tmp_path / "b", tmp_path / "store", "fetch")
    assert list((tmp_path / "b").glob(".tmp-*"))
    b = await cluster.node("b")
    assert (b.ids, b.left_behind()) == ([], set())
    await b.tell()
    assert b.ids == a.ids


async def test_chunks_of_an_upload_that_was_never_finished_go_after_a_while(
    cluster: Cluster,
) -> None:
    clock = ManualClock()
    a = await cluster.node("a")
    await a.make()
    named = await cluster.store.keys("chunks/")
    await cluster.store.put(f"chunks/t-1/ab/{'ab' * 32}", b"of an agent that died")
    assert await a.copies.sweep(now=clock()) == 0
    assert await a.copies.sweep(now=clock() + ORPHANED_S) == 1
    assert await cluster.store.keys("chunks/") == named


# -- what a start waits for ------------------------------------------------------------------------
class Slow(DirectoryStore):
    """Chunks come when `open` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.open = asyncio.Event()

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        if key.startswith("chunks/"):
            await self.open.wait()
        return await super().get(key, max_bytes=max_bytes)


@pytest.mark.parametrize("why", ["cold is faster", "it takes longer than expected"])
async def test_a_start_that_would_be_slower_goes_on_and_the_transfer_ends_behind_it(
    cluster: Cluster, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotter.snapshots.fetches.PATIENCE_S", 0.05)
    a = await cluster.node("a")
    made = await a.make()
    slow = Slow(tmp_path / "store")
    b = await cluster.node("b", store=slow)
    b.reporting.tenants = ()
    await b.tell()
    fetches = SnapshotFetches(b.copies)
    cold_ms = 20.0 if why == "cold is faster" else 200.0

    async def start(*, waits: bool = False) -> Snapshot | None:
        return await fetches.fetch(identity(), NO_BINDS, tenant="t-1", cold_ms=cold_ms, waits=waits)

    assert await start() is None
    assert "1 running" in repr(fetches)
    making = asyncio.create_task(start(waits=True))  # to make another one would take longer still
    await asyncio.sleep(0)
    slow.open.set()
    found = await making
    assert found is not None
    assert (found.id, b.ids) == (made.id, [made.id])
    assert "0 running" in repr(fetches)
    await fetches.aclose()


async def test_a_transfer_that_is_under_way_when_the_agent_ends_leaves_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    a = await cluster.node("a")
    await a.make()
    b = await cluster.node("b", store=Slow(tmp_path / "store"))
    b.reporting.tenants = ()
    await b.tell()
    fetches = SnapshotFetches(b.copies)
    assert await fetches.fetch(identity(), NO_BINDS, tenant="t-1", cold_ms=1.0) is None
    await asyncio.sleep(0.01)
    await fetches.aclose()
    assert (b.ids, b.left_behind()) == ([], set())
