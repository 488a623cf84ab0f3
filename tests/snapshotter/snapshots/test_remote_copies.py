"""Copies for other nodes: the same stories over a directory and over S3's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.core.object_store import DirectoryStore, ObjectStore, open_store
from pilotlight.core.object_store.errors import ObjectStoreError
from snapshotter.snapshots.catalog import (
    Catalog,
    DiskBudgetExceeded,
    LibraryChanged,
    SnapshotCorrupt,
)
from snapshotter.snapshots.manifest import sealed
from snapshotter.snapshots.mapped_files import BindMounts, record
from snapshotter.snapshots.remote_copies import RemoteCopies, RemoteError
from snapshotter.types import SnapshotState
from tests.snapshotter.snapshots.shapes import FILES, KEY, NO_BINDS, identity, publish, ready

CHUNK_BYTES = 4096


@pytest.fixture(params=["directory", "s3"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    where = (
        str(tmp_path / "store")
        if request.param == "directory"
        else f"s3://{request.getfixturevalue('s3_bucket')}/some/prefix"
    )
    store = open_store(where, setting="snapshot_store")
    yield store
    await store.aclose()


@contextlib.asynccontextmanager
async def node(
    directory: Path,
    store: ObjectStore,
    *,
    key: bytes = KEY,
    max_bytes: int = 10_000_000,
    at_once: int = 4,
) -> AsyncIterator[RemoteCopies]:
    catalogue = Catalog(directory, key=key, max_bytes=max_bytes)
    yield RemoteCopies(store, catalogue, chunk_bytes=CHUNK_BYTES, at_once=at_once)
    await catalogue.aclose()


@pytest.fixture
async def here(tmp_path: Path, store: ObjectStore) -> AsyncIterator[RemoteCopies]:
    async with node(tmp_path / "here", store) as remote:
        yield remote


@pytest.fixture
async def there(tmp_path: Path, store: ObjectStore) -> AsyncIterator[RemoteCopies]:
    async with node(tmp_path / "there", store) as remote:
        yield remote


# -- copies ----------------------------------------------------------------------------------------
async def test_another_node_fetches_what_was_pushed(
    here: RemoteCopies, there: RemoteCopies
) -> None:
    snapshot = await ready(here.catalog)
    pushed = await here.push(snapshot)
    assert pushed.sent > 3  # of two equal chunks the second may find the first
    assert here.catalog.get(snapshot.id).remote
    found = await there.fetch(identity())
    assert found is not None
    assert (found.manifest, found.state, found.remote) == (
        snapshot.manifest,
        SnapshotState.READY,
        True,
    )
    assert found.directory != snapshot.directory
    assert (found.images / "pages-1.img").read_bytes() == FILES["pages-1.img"]
    assert await there.catalog.usable(identity(), NO_BINDS) == found
    assert await there.fetch(identity()) is not None  # once more


async def test_nothing_is_there_for_another_identity(
    here: RemoteCopies, there: RemoteCopies
) -> None:
    await here.push(await ready(here.catalog))
    assert await there.fetch(identity(kernel="6.99")) is None


async def test_what_is_there_is_not_sent_again(here: RemoteCopies, store: ObjectStore) -> None:
    snapshot = await ready(here.catalog)
    first = await here.push(snapshot)
    chunks = await store.keys("chunks/")
    await store.delete(chunks[0])
    await store.put(chunks[1], b"truncated")
    again = await here.push(snapshot)
    assert first.sent == len(chunks)  # equal chunks once
    assert (again.sent, again.reused) == (2, first.sent + first.reused - 2)
    assert (await here.push(snapshot)).sent == 0


class LosingStore(DirectoryStore):
    """Refuses everything after so many puts."""

    puts_left = 0

    async def put(self, key: str, data: bytes) -> None:
        if self.puts_left == 0:
            raise ObjectStoreError("the network is gone")
        self.puts_left -= 1
        await super().put(key, data)


async def test_a_push_that_was_cut_off_goes_on_from_there_and_leaves_no_record(
    tmp_path: Path,
) -> None:
    store = LosingStore(tmp_path / "store")
    store.puts_left = 3
    async with node(tmp_path / "here", store, at_once=1) as here:
        snapshot = await ready(here.catalog)
        with pytest.raises(RemoteError, match="the network is gone"):
            await here.push(snapshot)
        assert await store.keys("snapshots/") == []
        store.puts_left = 100
        assert (await here.push(snapshot)).sent == 2  # of five different pieces


async def test_a_missing_chunk_is_refused(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    await here.push(await ready(here.catalog))
    await store.delete((await store.keys("chunks/"))[0])
    await refused(there, "missing")


@pytest.mark.parametrize("harm", ["truncated", "longer", "altered", "swapped"])
async def test_a_damaged_chunk_is_refused(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore, harm: str
) -> None:
    await here.push(await ready(here.catalog))
    key, other = (await store.keys("chunks/"))[:2]
    data = await store.get(key, max_bytes=CHUNK_BYTES)
    match harm:
        case "truncated":
            data = data[:-1]
        case "longer":
            data += b"x"
        case "altered":
            data = data[:-1] + bytes([data[-1] ^ 1])
        case "swapped":
            data = await store.get(other, max_bytes=CHUNK_BYTES)
    await store.put(key, data)
    await refused(there, "bytes|does not match")


async def refused(there: RemoteCopies, reason: str) -> None:
    with pytest.raises(RemoteError, match=reason):
        await there.fetch(identity())
    assert list(there.catalog) == []
    assert not list(there.catalog.directory.glob(".tmp-*"))


async def test_a_record_of_another_platform_is_refused(
    here: RemoteCopies, store: ObjectStore, tmp_path: Path
) -> None:
    await here.push(await ready(here.catalog))
    async with node(tmp_path / "other", store, key=b"o" * 32) as other:
        await refused(other, "signature")


async def test_an_altered_record_is_refused(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    await here.push(await ready(here.catalog))
    (key,) = await store.keys("snapshots/")
    data = await store.get(key, max_bytes=100_000)
    await store.put(key, data.replace(b'"pages":"eager"', b'"pages":"lazy"'))
    await refused(there, "is invalid")


async def test_a_record_under_another_name_is_refused(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    snapshot = await ready(here.catalog, identity=identity(kernel="5.4"))
    await here.push(snapshot)
    (key,) = await store.keys("snapshots/")
    data = await store.get(key, max_bytes=100_000)
    await store.put(f"snapshots/none/{identity().digest()}/{snapshot.id}.json", data)
    await refused(there, "another identity: kernel differs")


async def test_a_signed_record_whose_pieces_do_not_fit_is_refused(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    await here.push(await ready(here.catalog))
    (key,) = await store.keys("snapshots/")
    body = json.loads(await store.get(key, max_bytes=100_000))
    del body["signature"]
    body["chunks"]["files.tar"] = body["chunks"]["files.tar"] * 2
    await store.put(key, sealed(body, KEY))
    await refused(there, "its chunks")
    body["chunks"]["files.tar"] = body["chunks"]["../files.tar"] = body["chunks"]["files.tar"][:1]
    await store.put(key, sealed(body, KEY))
    await refused(there, "its chunks")


async def test_pieces_in_another_order_are_refused(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    images = {"pages-1.img": os.urandom(CHUNK_BYTES * 2)}
    await here.push(await ready(here.catalog, images=images))
    (key,) = await store.keys("snapshots/")
    body = json.loads(await store.get(key, max_bytes=100_000))
    del body["signature"]
    body["chunks"]["images/pages-1.img"].reverse()
    await store.put(key, sealed(body, KEY))
    await refused(there, "does not match")


async def test_one_bad_record_does_not_hide_a_good_one(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    snapshot = await ready(here.catalog)
    await here.push(snapshot)
    await store.put(f"snapshots/none/{identity().digest()}/sn-0000000000000000.json", b"{}")
    found = await there.fetch(identity())
    assert found is not None
    assert found.id == snapshot.id


async def test_an_unproven_copy_is_not_fetched(here: RemoteCopies, there: RemoteCopies) -> None:
    await here.push(await publish(here.catalog))
    assert await there.fetch(identity()) is None


@pytest.mark.slow  # an S3 server that is slow
async def test_a_copy_that_was_quarantined_here_is_not_fetched_again(
    here: RemoteCopies, there: RemoteCopies
) -> None:
    await here.push(await ready(here.catalog))
    found = await there.fetch(identity())
    assert found is not None
    await there.catalog.quarantine(found.id, "it failed three times")
    assert await there.fetch(identity()) is None


async def test_a_copy_whose_libraries_differ_here_is_not_transferred(
    here: RemoteCopies, there: RemoteCopies, tmp_path: Path
) -> None:
    library = tmp_path / "libm.so"
    library.write_bytes(b"one version")
    binds = BindMounts(((str(tmp_path), "python"),))
    marks = await record(["/run/pilotlight/slot/python/libm.so"], binds, here.catalog.memory)
    await here.push(await ready(here.catalog, mapped=marks))
    library.write_bytes(b"two version")
    with pytest.raises(LibraryChanged):
        await there.fetch(identity(), binds)
    assert list(there.catalog) == []
    library.write_bytes(b"one version")
    assert await there.fetch(identity(), binds) is not None


async def test_a_copy_that_does_not_fit_is_not_transferred(
    here: RemoteCopies, store: ObjectStore, tmp_path: Path
) -> None:
    await here.push(await ready(here.catalog))
    async with node(tmp_path / "small", store, max_bytes=1000) as small:
        with pytest.raises(DiskBudgetExceeded):
            await small.fetch(identity())


async def test_a_rebuilt_snapshot_replaces_its_copy_and_shared_pieces_stay(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    await here.push(await ready(here.catalog))
    before = await store.keys("chunks/")
    new = await ready(here.catalog, created_at=2000.0, images={**FILES, "core-1.img": b"other"})
    pushed = await here.push(new)
    assert (pushed.sent, pushed.reused) == (1, 5)  # of six pieces, two of which are equal
    assert len(await store.keys("snapshots/")) == 1
    assert len(await store.keys("chunks/")) == len(before)
    found = await there.fetch(identity())
    assert found is not None
    assert found.id == new.id


async def test_forgetting_removes_what_no_other_copy_names(
    here: RemoteCopies, there: RemoteCopies, store: ObjectStore
) -> None:
    one = await ready(here.catalog)
    two = await ready(
        here.catalog,
        identity=identity(revision="fn-2@r1"),
        images={**FILES, "core-1.img": b"other"},
    )
    await here.push(one)
    await here.push(two)
    both = len(await store.keys("chunks/"))
    await here.forget(two.manifest)
    await here.forget(two.manifest)
    assert len(await store.keys("chunks/")) == both - 1
    assert await there.fetch(identity()) is not None
    assert await here.forget_of(function="fn-2") == 0
    assert await here.forget_of(function="fn-1") == 1
    assert await store.keys("") == []


async def test_a_damaged_snapshot_is_not_pushed(here: RemoteCopies, store: ObjectStore) -> None:
    snapshot = await ready(here.catalog)
    (snapshot.images / "pages-1.img").write_bytes(b"damaged")
    with pytest.raises(SnapshotCorrupt):
        await here.push(snapshot)
    assert await store.keys("") == []
    assert here.catalog.quarantined


@pytest.mark.slow  # an S3 server that is slow
async def test_a_fetch_that_is_cancelled_leaves_nothing(
    here: RemoteCopies, there: RemoteCopies
) -> None:
    await here.push(await ready(here.catalog))
    fetching = asyncio.create_task(there.fetch(identity()))
    await asyncio.sleep(0.01)
    fetching.cancel()
    await asyncio.wait([fetching])
    assert not list(there.catalog.directory.glob(".tmp-*"))
    assert await there.fetch(identity()) is not None
