"""The shelf: what is published is whole, what is damaged is never served, what is unused goes
first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.core.disk_floor import DiskFloor
from snapshotter.errors import SnapshotUnknown
from snapshotter.snapshots.catalog import (
    Catalog,
    CatalogLocked,
    DiskBudgetExceeded,
    LibraryChanged,
    SnapshotCorrupt,
)
from snapshotter.snapshots.hash_cache import HashCache
from snapshotter.snapshots.manifest import SnapshotInvalid
from snapshotter.snapshots.mapped_files import BindMounts, record
from snapshotter.types import SnapshotState
from tests.snapshotter.snapshots import shapes
from tests.snapshotter.snapshots.shapes import KEY, NO_BINDS, identity, publish, ready


@contextlib.asynccontextmanager
async def reopened(catalogue: Catalog, key: bytes = KEY) -> AsyncIterator[Catalog]:
    """The next agent's, after this one has ended."""
    await catalogue.aclose()
    again = Catalog(catalogue.directory, key=key, max_bytes=10_000_000)
    yield again
    await again.aclose()


async def test_published_but_unproven_is_no_candidate(catalogue: Catalog) -> None:
    snapshot = await publish(catalogue)
    assert snapshot.state is SnapshotState.PROVING
    assert catalogue.candidate(identity()) is None
    assert catalogue.missed(identity()) is None


async def test_proven_is_served(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    assert snapshot.id.startswith("sn-")
    assert snapshot.directory.stat().st_mode & 0o777 == 0o700
    assert await catalogue.usable(identity(), NO_BINDS) == snapshot
    assert catalogue.is_fresh(snapshot, NO_BINDS)
    assert snapshot.info().phases_ms == {"prove": 300.0}
    assert snapshot.info().restore_ms == 150.0


@pytest.mark.parametrize("field", ["kernel", "criu", "env", "cpu", "runtime", "python", "weights"])
async def test_another_identity_is_no_candidate_and_the_field_is_named(
    catalogue: Catalog, field: str
) -> None:
    await ready(catalogue)
    other = identity(**{field: "another"})
    assert catalogue.candidate(other) is None
    assert catalogue.missed(other) == field


async def test_a_rebuilt_snapshot_replaces_the_older_one(catalogue: Catalog) -> None:
    old = await ready(catalogue)
    new = await ready(catalogue, created_at=2000.0)
    assert [s.id for s in catalogue] == [new.id]
    assert not old.directory.exists()


async def test_survives_a_restart(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    async with reopened(catalogue) as again:
        (found,) = again
        assert again.is_fresh(found, NO_BINDS) is False  # its manifest was not read yet
        assert await again.usable(identity(), NO_BINDS) == found
        assert found.manifest == snapshot.manifest


async def test_a_second_agent_is_refused(catalogue: Catalog) -> None:
    with pytest.raises(CatalogLocked, match="another running agent"):
        Catalog(catalogue.directory, key=KEY, max_bytes=None)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x20
    path.write_bytes(content)


PLACES = [
    *(
        (f"images/{name}", at)
        for name, content in shapes.FILES.items()
        for at in (0, len(content) // 2, -1)
    ),
    *(("files.tar", at) for at in (0, 1, -1)),
    *(("manifest.json", at) for at in (0, 30, 200, 700, -1)),
]


@pytest.mark.parametrize("name, position", PLACES)
@pytest.mark.parametrize("when", ["while_running", "before_start"])
async def test_a_flipped_byte_is_never_served(
    catalogue: Catalog, name: str, position: int, when: str
) -> None:
    snapshot = await ready(catalogue)
    if when == "while_running":
        flip(snapshot.directory / name, position)
        await never_served(catalogue, snapshot.id)
        return
    flip(snapshot.directory / name, position)
    async with reopened(catalogue) as again:
        await never_served(again, snapshot.id)


async def never_served(catalogue: Catalog, snapshot_id: str) -> None:
    assert await catalogue.usable(identity(), NO_BINDS) is None
    assert catalogue.candidate(identity()) is None
    (info,) = catalogue.infos({})
    assert (info.id, info.state) == (snapshot_id, SnapshotState.QUARANTINED)
    assert info.reason
    assert (catalogue.directory / "quarantine").is_dir()


async def test_a_flipped_signature_is_never_served(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    path = snapshot.directory / "manifest.json"
    content = path.read_bytes()
    position = content.index(b'"signature":"') + 20
    path.write_bytes(
        content[:position]
        + (b"0" if content[position : position + 1] != b"0" else b"1")
        + content[position + 1 :]
    )
    await never_served(catalogue, snapshot.id)
    assert "signature" in catalogue.infos({})[0].reason


async def test_truncated_missing_extra_and_linked_files_are_never_served(
    catalogue: Catalog, tmp_path: Path
) -> None:
    async def damaged(harm: str) -> str:
        snapshot = await ready(catalogue, created_at=time.time())
        pages = snapshot.images / "pages-1.img"
        match harm:
            case "truncated":
                os.truncate(pages, 100)
            case "missing":
                pages.unlink()
            case "extra":
                (snapshot.images / "netns-1.img").write_bytes(b"planted")
            case "linked":
                pages.rename(tmp_path / "elsewhere")
                pages.symlink_to(tmp_path / "elsewhere")
        assert await catalogue.usable(identity(), NO_BINDS) is None
        return catalogue.quarantined[-1].reason

    assert "pages-1.img has 100 bytes" in await damaged("truncated")
    assert "more or fewer files" in await damaged("missing")
    assert "more or fewer files" in await damaged("extra")
    assert "elsewhere" in await damaged("linked") or catalogue.quarantined[-1].reason


async def test_a_snapshot_of_another_platform_is_never_served(catalogue: Catalog) -> None:
    await ready(catalogue)
    async with reopened(catalogue, key=b"another key" * 3) as again:
        assert list(again) == []
        assert "signature" in again.infos({})[0].reason
        assert again.infos({})[0].revision == ""


async def test_one_snapshot_in_the_place_of_another_is_never_served(catalogue: Catalog) -> None:
    one = await ready(catalogue)
    two = await ready(catalogue, identity=identity(revision="fn-1@r2"))
    for name in ("manifest.json", "images/core-1.img"):
        (two.directory / name).write_bytes((one.directory / name).read_bytes())
    async with reopened(catalogue) as again:
        assert [s.id for s in again] == [one.id]
        assert "contains the manifest of" in again.quarantined[0].reason


async def test_touched_but_equal_files_are_read_again_and_served(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    os.utime(snapshot.images / "pages-1.img")
    assert not catalogue.is_fresh(snapshot, NO_BINDS)
    assert await catalogue.usable(identity(), NO_BINDS) == snapshot
    await asyncio.sleep(0)


async def test_a_changed_library_is_named_and_the_snapshot_stays(
    catalogue: Catalog, tmp_path: Path
) -> None:
    library = tmp_path / "libm.so"
    library.write_bytes(b"one version")
    binds = BindMounts(((str(tmp_path), "python/lib"),))
    marks = await record(["/run/pilotlight/slot/python/lib/libm.so"], binds, catalogue.memory)
    snapshot = await ready(catalogue, mapped=marks)
    assert await catalogue.usable(identity(), binds) == snapshot
    library.write_bytes(b"two version")
    with pytest.raises(LibraryChanged) as raised:
        await catalogue.usable(identity(), binds)
    assert raised.value.field == "file:/run/pilotlight/slot/python/lib/libm.so"
    library.write_bytes(b"one version")
    assert await catalogue.usable(identity(), binds) == snapshot
    library.unlink()
    with pytest.raises(LibraryChanged):
        await catalogue.usable(identity(), binds)


async def test_verified_on_request(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    await catalogue.verify(snapshot, None)
    flip(snapshot.files_tar, 0)
    with pytest.raises(SnapshotCorrupt, match=r"files\.tar does not have the content"):
        await catalogue.verify(snapshot, None)
    with pytest.raises(SnapshotUnknown):
        await catalogue.verify(snapshot, None)


async def test_the_least_recently_used_goes_first_and_leased_ones_stay(tmp_path: Path) -> None:
    catalogue = Catalog(tmp_path / "s", key=KEY, max_bytes=35_000)
    old, middle = [
        await ready(catalogue, identity=identity(revision=f"fn@r{i}"), now=float(i))
        for i in range(2)
    ]
    catalogue.used(old.id, now=10.0)
    new = await ready(catalogue, identity=identity(revision="fn@r3"), now=11.0)
    assert {s.id for s in catalogue} == {old.id, new.id}
    with catalogue.lease(old.id):
        newest = await ready(catalogue, identity=identity(revision="fn@r4"), now=12.0)
        assert {s.id for s in catalogue} == {old.id, newest.id}
    assert not middle.directory.exists()
    await catalogue.aclose()


async def test_quarantined_ones_go_before_any_other(tmp_path: Path) -> None:
    catalogue = Catalog(tmp_path / "s", key=KEY, max_bytes=35_000)
    bad = await ready(catalogue, identity=identity(revision="fn@bad"), now=50.0)
    good = await ready(catalogue, identity=identity(revision="fn@good"), now=1.0)
    await catalogue.quarantine(bad.id, "failed three times")
    await catalogue.quarantine(bad.id, "once more")
    assert [q.reason for q in catalogue.quarantined] == ["failed three times"]
    await ready(catalogue, identity=identity(revision="fn@new"))
    assert not catalogue.quarantined
    assert good.id in {s.id for s in catalogue}
    assert list((catalogue.directory / "quarantine").iterdir()) == []
    await catalogue.aclose()


async def test_what_never_fits_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    catalogue = Catalog(tmp_path / "s", key=KEY, max_bytes=20_000)
    kept = await ready(catalogue)
    with pytest.raises(DiskBudgetExceeded, match="20000 bytes"):
        await publish(
            catalogue, images={"pages-1.img": b"x" * 30_000}, identity=identity(revision="big")
        )
    assert [s.id for s in catalogue] == [kept.id]
    assert not list(catalogue.directory.glob(".tmp-*"))
    await catalogue.aclose()


async def test_below_the_floor_of_inodes_snapshots_go_too(tmp_path: Path) -> None:
    inodes = 500_000
    floor = DiskFloor(tmp_path, 1, inodes=lambda _: (inodes, 1_000_000))
    catalogue = Catalog(tmp_path / "s", key=KEY, max_bytes=10_000_000, floor=floor)
    await ready(catalogue, identity=identity(revision="fn@old"), now=1.0)
    inodes = 1000
    with pytest.raises(DiskBudgetExceeded, match="only 1000 of 1000000 inodes are free"):
        await publish(catalogue, identity=identity(revision="fn@new"))
    assert not list(catalogue)
    await catalogue.aclose()


async def test_below_the_floor_the_least_recently_used_go_and_then_nothing_is_kept(
    tmp_path: Path,
) -> None:
    free = 1_000_000
    floor = DiskFloor(tmp_path, 500_000, free=lambda _: free)
    catalogue = Catalog(tmp_path / "s", key=KEY, max_bytes=10_000_000, floor=floor)
    old = await ready(catalogue, identity=identity(revision="fn@old"), now=1.0)
    used = await ready(catalogue, identity=identity(revision="fn@used"), now=2.0)
    with catalogue.lease(used.id):
        free = 100_000
        with pytest.raises(DiskBudgetExceeded, match="disk_floor_bytes"):
            await publish(catalogue, identity=identity(revision="fn@new"))
        assert [s.id for s in catalogue] == [used.id], "what serves stays"
    assert old.id not in {s.id for s in catalogue}
    assert not list(catalogue.directory.glob(".tmp-*"))
    free = 1_000_000
    await publish(catalogue, identity=identity(revision="fn@new"))
    await catalogue.aclose()


async def test_deleted_while_leased_keeps_its_files_until_the_lease_ends(
    catalogue: Catalog,
) -> None:
    snapshot = await ready(catalogue)
    with catalogue.lease(snapshot.id):
        images = os.open(snapshot.images, os.O_RDONLY)
        assert await catalogue.delete(snapshot.id)
        assert catalogue.candidate(identity()) is None
        assert "pages-1.img" in os.listdir(images)
        os.close(images)
    await catalogue.aclose()
    assert sorted(p.name for p in catalogue.directory.iterdir()) == [".lock", "hashes.json"]


async def test_deleted_by_revision_and_by_function(catalogue: Catalog) -> None:
    for revision in ("a@1", "a@2", "ab@1", "b@1"):
        await ready(catalogue, identity=identity(revision=revision))
    quarantined = await ready(catalogue, identity=identity(revision="a@3"))
    await catalogue.quarantine(quarantined.id, "why not")
    assert await catalogue.delete_of(revision="b@1") == 1
    assert await catalogue.delete_of(function="a") == 3
    assert [s.manifest.revision for s in catalogue] == ["ab@1"]
    assert await catalogue.delete_of(function="a") == 0
    assert not await catalogue.delete("sn-0")


async def test_infos_by_labels(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    assert [i.id for i in catalogue.infos({"app": "demo"})] == [snapshot.id]
    assert catalogue.infos({"app": "other"}) == []


async def test_failures_in_a_row_are_counted_until_it_works(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    assert [catalogue.failed(snapshot.id) for _ in range(2)] == [1, 2]
    catalogue.used(snapshot.id, now=5.0)
    assert catalogue.failed(snapshot.id) == 1
    assert catalogue.get(snapshot.id).restores == 1
    assert catalogue.get(snapshot.id).last_used_at == 5.0


async def test_the_order_of_use_survives_a_restart(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    catalogue.used(snapshot.id, now=123456.0)
    async with reopened(catalogue) as again:
        assert again.get(snapshot.id).last_used_at == 123456.0


async def test_leaving_the_stage_without_publishing_leaves_nothing(catalogue: Catalog) -> None:
    async with catalogue.stage() as stage:
        (stage.images / "pages-1.img").write_bytes(b"half")
    assert sorted(p.name for p in catalogue.directory.iterdir()) == [".lock"]


async def test_publishing_a_pipe_is_refused(catalogue: Catalog) -> None:
    async with catalogue.stage() as stage:
        os.mkfifo(stage.images / "pages-1.img")
        with pytest.raises(SnapshotInvalid, match="not a regular file"):
            await catalogue.publish(stage, shapes.draft(), now=0.0)
    assert list(catalogue) == []


async def test_hashes_that_somebody_altered_are_not_believed(catalogue: Catalog) -> None:
    snapshot = await ready(catalogue)
    await catalogue.aclose()
    path = catalogue.directory / "hashes.json"
    path.write_bytes(path.read_bytes().replace(b'"boot"', b'"BOOT"'))
    async with reopened(catalogue) as again:
        assert repr(again.memory) == "<HashCache 0 files>"
        assert (await again.usable(identity(), NO_BINDS) or snapshot).id == snapshot.id


async def test_the_hot_path_only_stats_and_takes_less_than_a_millisecond(
    catalogue: Catalog,
) -> None:
    images = {f"image-{i}.img": bytes([i]) * 1000 for i in range(30)}
    snapshot = await ready(catalogue, images=images)
    wanted, laps = identity(), []
    for _ in range(50):
        began = time.thread_time()  # of the processor: others on the machine take none of it
        found = catalogue.candidate(wanted)
        assert found is not None
        assert catalogue.is_fresh(found, NO_BINDS)
        laps.append(time.thread_time() - began)
    assert found == snapshot
    assert sorted(laps)[len(laps) // 2] < 0.001


async def test_hashing_does_not_block_the_loop(tmp_path: Path) -> None:
    big = tmp_path / "pages-1.img"
    with big.open("wb") as f:
        f.truncate(300_000_000)
    memory, turns = HashCache(), 0
    hashing = asyncio.create_task(memory.marks([big]))
    while not hashing.done():
        await asyncio.sleep(0)
        turns += 1
    assert (await hashing)[big].bytes == 300_000_000
    assert turns > 100  # one that was blocked would turn a handful of times
