"""Models come in whole and verified, stay while they are held, and survive whatever happens to the
process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.clock import ManualClock
from tests.fakes.origins import FolderOrigin, MemoryOrigin
from tests.fakes.trees import remove_tree
from tests.weight_cache.models import chunked, digest_of, manifest_of, put_model
from weight_cache.errors import (
    ChunkCorrupt,
    ManifestInvalid,
    OriginUnavailable,
    StoreFailed,
    StoreFull,
    StoreOwned,
)
from weight_cache.leases.holders import LeaseHolder
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.store.scrubber import ScrubRate
from weight_cache.store.store import Store
from weight_cache.types import Lease, LoadProgress

REPOSITORY = Path(__file__).parents[3]
MODEL = {"config.json": b"{}", "sub/weights.bin": b"w" * 1000}


@pytest.fixture
def origin() -> MemoryOrigin:
    return MemoryOrigin()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000.0)


@pytest.fixture
def store(tmp_path: Path, origin: MemoryOrigin, clock: ManualClock) -> Iterator[Store]:
    opened = Store.open(tmp_path / "w", origin=origin, max_bytes=10_000, clock=clock)
    yield opened
    opened.close()


def listing(root: Path) -> dict[str, list[str]]:
    return {
        name: sorted(p.name for p in (root / name).iterdir())
        for name in ("files", "models", "tmp", "quarantine")
    }


def read(directory: Path) -> dict[str, bytes]:
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file()
    }


async def test_lease_gives_a_read_only_directory_with_the_bytes(
    store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    seen: list[LoadProgress] = []
    lease, path = await store.lease(name, holder="slot-1", on_progress=seen.append)
    assert read(path) == MODEL
    assert {p.stat().st_mode & 0o777 for p in path.rglob("*") if p.is_file()} == {0o444}
    assert {p.stat().st_mode & 0o777 for p in [path, *path.rglob("*")] if p.is_dir()} == {0o555}
    assert (seen[0], seen[-1]) == (
        LoadProgress(done_bytes=0, total_bytes=1002),
        LoadProgress(done_bytes=1002, total_bytes=1002),
    )
    assert [held.id for held in store.leases()] == [lease.id]
    assert (
        store.statistics().hits,
        store.statistics().misses,
        store.statistics().fetched_bytes,
    ) == (0, 1, 1002)


async def test_asking_again_is_the_same_lease_and_reads_nothing(
    store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    first = await store.lease(name, holder="slot-1")
    reads = origin.reads
    assert (await store.lease(name, holder="slot-1"))[0].id == first[0].id
    assert (await store.lease(name, holder="slot-2"))[0].id != first[0].id
    assert origin.reads == reads
    assert await store.release(first[0].id) is True
    assert await store.release(first[0].id) is False
    assert [m.leases for m in store.models()] == [1]


async def test_callers_at_once_fetch_once_and_models_share_files(
    store: Store, origin: MemoryOrigin
) -> None:
    name, other = put_model(origin, MODEL), put_model(origin, {"same": MODEL["sub/weights.bin"]})
    origin.gate = asyncio.Event()
    asks = [
        asyncio.create_task(store.lease(m, holder=f"s{i}")) for i in range(5) for m in (name, other)
    ]
    await asyncio.sleep(0)
    origin.gate.set()
    paths = {path for _, path in await asyncio.gather(*asks)}
    assert len(paths) == 2
    assert origin.reads == 2 + 2  # two manifests, two distinct files
    assert store.statistics().used_bytes == 1002


async def test_last_caller_to_leave_ends_the_fetching_and_leaves_nothing(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    origin.gate = asyncio.Event()
    asks = [asyncio.create_task(store.lease(name, holder=f"s{i}")) for i in range(2)]
    for ask in asks:
        await asyncio.sleep(0.01)
        ask.cancel()
        await asyncio.wait([ask])
    assert store.statistics().arriving == 0
    assert listing(tmp_path / "w") == {"files": [], "models": [], "tmp": [], "quarantine": []}
    origin.gate.set()
    assert read((await store.lease(name, holder="s"))[1]) == MODEL


async def test_damaged_transfer_is_repeated_and_a_damaged_blob_refused(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    weights = manifest_of(MODEL).files[1].digest
    origin.damaged[weights] = 2
    with pytest.raises(ChunkCorrupt, match=r"sub/weights\.bin: bytes from 0"):
        await store.lease(name, holder="s")
    assert listing(tmp_path / "w")["models"] == []
    assert listing(tmp_path / "w")["tmp"] == []
    origin.damaged[weights] = 1
    assert read((await store.lease(name, holder="s"))[1]) == MODEL


async def test_chunks_of_another_file_are_another_file(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    good, evil = (manifest_of({"f": content}).files[0] for content in (b"good", b"evil"))
    raw = (
        manifest_of({"f": b"good"})
        .to_bytes()
        .replace(good.chunk_sha256s[0].encode(), evil.chunk_sha256s[0].encode())
    )
    origin.blobs[good.digest] = b"evil"
    with pytest.raises(OriginUnavailable):
        await store.lease(origin.put(raw), holder="s")
    assert listing(tmp_path / "w")["files"] == []


async def test_what_the_origin_lacks_or_garbles_is_named(
    store: Store, origin: MemoryOrigin
) -> None:
    with pytest.raises(OriginUnavailable):
        await store.lease("0" * 64, holder="s")
    with pytest.raises(ManifestInvalid):
        await store.lease(origin.put(b"no manifest"), holder="s")
    name = put_model(origin, MODEL)
    origin.damaged[name] = 1
    with pytest.raises(ChunkCorrupt, match="manifest"):
        await store.lease(name, holder="s")
    origin.blobs[manifest_of(MODEL).files[1].digest] = b"w"
    with pytest.raises(OriginUnavailable, match="ends before"):
        await store.lease(name, holder="s")


async def test_room_is_made_by_the_least_recently_used_and_never_by_a_held_one(
    store: Store, origin: MemoryOrigin, clock: ManualClock
) -> None:
    names = [put_model(origin, {"w": bytes([i]) * 4000}) for i in range(4)]
    held, path = await store.lease(names[0], holder="s")
    clock.now += 1
    await store.prefetch(names[1])
    clock.now += 1
    await store.prefetch(names[2])
    assert [m.manifest for m in store.models()] == [names[0], names[2]]
    await store.lease(names[2], holder="s")
    with pytest.raises(StoreFull, match="do not fit"):
        await store.lease(names[3], holder="s")
    assert read(path) == {"w": b"\0" * 4000}
    await store.release(held.id)
    await store.lease(names[3], holder="s")
    assert store.statistics().evicted_models == 2
    assert not path.exists()


async def test_file_that_somebody_wrote_to_is_quarantined_and_fetched_again(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    lease, path = await store.lease(name, holder="s")
    victim = path / "sub" / "weights.bin"
    victim.chmod(0o644)
    victim.write_bytes(b"x" * 1000)
    again, path = await store.lease(name, holder="s")
    assert again.id == lease.id
    assert read(path) == MODEL
    assert listing(tmp_path / "w")["quarantine"] == [manifest_of(MODEL).files[1].digest]
    assert [m.leases for m in store.models()] == [1]


async def test_touched_but_intact_file_is_read_once_and_kept(
    store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    _, path = await store.lease(name, holder="s")
    os.utime(path / "config.json")
    reads = origin.reads
    await store.lease(name, holder="s")
    assert origin.reads == reads
    assert store.statistics().quarantined_files == 0


async def test_silent_rot_is_found_by_verify(store: Store, origin: MemoryOrigin) -> None:
    name = put_model(origin, MODEL)
    _, path = await store.lease(name, holder="s")
    victim = path / "config.json"
    before = victim.stat()
    victim.chmod(0o644)
    victim.write_bytes(b"[]")
    victim.chmod(0o444)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await store.verify(name) == [manifest_of(MODEL).files[0].digest]
    assert await store.verify(name) == []
    assert read((await store.lease(name, holder="s"))[1]) == MODEL


async def test_restart_finds_models_leases_and_order_again(
    tmp_path: Path, store: Store, origin: MemoryOrigin, clock: ManualClock
) -> None:
    old, held = put_model(origin, {"w": b"1" * 4000}), put_model(origin, {"w": b"2" * 4000})
    lease, path = await store.lease(held, holder="s")
    clock.now += 5
    leased = await store.lease(old, holder="t")
    await store.release(leased[0].id)
    store.close()
    (tmp_path / "w" / "tmp" / "half").write_bytes(b"x")
    (tmp_path / "w" / "leases" / "broken").write_text("{")
    again = Store.open(tmp_path / "w", origin=origin, max_bytes=10_000, clock=clock)
    try:
        assert again.leases() == [lease]
        await again.prefetch(put_model(origin, {"w": b"3" * 4000}))
        assert path.exists()
        assert listing(tmp_path / "w")["tmp"] == []
        assert next(m.manifest for m in again.models()) == held
    finally:
        again.close()


async def test_second_owner_is_refused_and_told_who_the_first_is(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    with pytest.raises(StoreOwned, match=f"is in use by process {os.getpid()}"):
        Store.open(tmp_path / "w", origin=origin, max_bytes=None, clock=time.time)


async def test_lease_remembers_the_process_that_ends_it_and_takes_over_a_new_one(
    tmp_path: Path, store: Store, origin: MemoryOrigin, clock: ManualClock
) -> None:
    name = put_model(origin, MODEL)
    first, _ = await store.lease(name, holder="s", pid=7, pid_started=70)
    assert (first.id, first.pid, first.pid_started) == (Lease.id_of(name, "s"), 7, 70)
    clock.now += 1
    assert (await store.lease(name, holder="s"))[0] == first
    assert (await store.lease(name, holder="s", pid=7, pid_started=70))[0] == first
    second, _ = await store.lease(name, holder="s", pid=8, pid_started=80)
    store.close()
    again = Store.open(tmp_path / "w", origin=origin, max_bytes=10_000, clock=clock)
    assert [(held.id, held.pid) for held in again.leases()] == [(first.id, 8)]
    assert again.leases() == [second]
    again.close()


async def test_pinned_model_stays_over_restarts_until_it_is_unpinned(
    tmp_path: Path, store: Store, origin: MemoryOrigin, clock: ManualClock
) -> None:
    names = [put_model(origin, {"w": bytes([i]) * 4000}) for i in range(4)]
    await store.pin(names[0])
    await store.pin(names[0])
    store.close()
    again = Store.open(tmp_path / "w", origin=origin, max_bytes=10_000, clock=clock)
    for name in names[1:]:
        clock.now += 1
        await again.prefetch(name)
    assert [(m.manifest, m.is_pinned) for m in again.models()] == [
        (names[0], True),
        (names[3], False),
    ]
    assert again.statistics().pinned_bytes == 4000
    assert await again.drop(names[0]) is False
    assert await again.unpin(names[0]) is True
    assert await again.unpin(names[0]) is False
    assert await again.drop(names[0]) is True
    again.close()
    again = Store.open(tmp_path / "w", origin=origin, max_bytes=10_000, clock=clock)
    assert [(m.manifest, m.is_pinned) for m in again.models()] == [(names[3], False)]
    again.close()


@pytest.mark.parametrize("name", ["../lock", "", "x" * 64, "0" * 63, "A" * 64])
async def test_what_is_no_name_of_a_manifest_touches_nothing(
    tmp_path: Path, store: Store, origin: MemoryOrigin, name: str
) -> None:
    for ask in (store.lease(name, holder="s"), store.prefetch(name), store.pin(name)):
        with pytest.raises(ManifestInvalid, match="64 hex digits"):
            await ask
    assert await store.unpin(name) is False
    assert await store.drop(name) is False
    assert await store.verify(name) == []
    assert store.missing_bytes(name) is None
    assert (tmp_path / "w" / "lock").exists()
    assert origin.reads == 0


async def test_last_word_about_a_pin_is_written_down(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    await store.prefetch(name)
    await asyncio.gather(*(store.pin(name) if turn % 2 else store.unpin(name) for turn in range(9)))
    assert [p.name for p in (tmp_path / "w" / "pins").iterdir()] == [
        m.manifest for m in store.models() if m.is_pinned
    ]


async def test_pin_that_cannot_be_brought_is_no_pin(store: Store, origin: MemoryOrigin) -> None:
    with pytest.raises(StoreFull):
        await store.pin(put_model(origin, {"w": b"x" * 20_000}))
    assert store.statistics().pinned_bytes == 0


async def test_dropped_by_hand_unless_held_and_shared_files_stay(
    tmp_path: Path, store: Store, origin: MemoryOrigin
) -> None:
    name, other = put_model(origin, MODEL), put_model(origin, {"same": MODEL["sub/weights.bin"]})
    lease, path = await store.lease(name, holder="s")
    await store.prefetch(other)
    assert {p.read_bytes() for p in store.files(name)} == set(MODEL.values())
    assert (store.is_here(name), store.path(name), store.missing_bytes(name)) == (True, path, 0)
    assert await store.drop(name) is False
    await store.release(lease.id)
    assert await store.drop(name) is True
    assert await store.drop(name) is False
    assert (store.is_here(name), store.files(name), store.missing_bytes(name)) == (False, [], 2)
    assert read(store.path(other)) == {"same": MODEL["sub/weights.bin"]}
    assert listing(tmp_path / "w")["tmp"] == []
    assert len(listing(tmp_path / "w")["files"]) == 1


async def test_half_of_a_model_can_be_dropped_and_goes_first_when_room_is_needed(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    content = chunked(b"a", b"b")
    half, small = put_model(origin, {"w": content}), put_model(origin, MODEL)
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=len(content) + 500, clock=time.time)
    for _ in range(2):
        origin.lost = {(digest_of(content), 2 * CHUNK_BYTES)}
        with pytest.raises(OriginUnavailable):
            await store.lease(half, holder="s")
        assert store.statistics().partial_bytes > 0
        if store.is_here(small):
            break
        assert await store.drop(half) is True
        assert (store.statistics().partial_bytes, await store.drop(half)) == (0, False)
        await store.prefetch(small)
    large = put_model(origin, {"v": chunked(b"c", tail=b"x")})
    await store.prefetch(large)
    assert store.statistics().partial_bytes == 0
    assert sorted(m.manifest for m in store.models()) == sorted([large]) or store.is_here(small)
    assert list((tmp_path / "w" / "partial").iterdir()) == []
    store.close()


async def test_two_models_larger_than_the_budget_together_take_turns_under_a_storm(
    tmp_path: Path, origin: MemoryOrigin
) -> None:
    """Ten rounds of callers for both: one is held while the other is refused, in the end everybody
    was served; nothing is left over."""
    names = [put_model(origin, {"w": bytes([i]) * 7000, "c": b"{}"}) for i in range(2)]
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=10_000, clock=time.time)
    served = [0, 0]

    async def caller(index: int) -> None:
        while True:
            try:
                lease, path = await store.lease(
                    names[index], holder=f"s{id(asyncio.current_task())}"
                )
            except StoreFull:
                await asyncio.sleep(0.001)
                continue
            assert read(path)["w"] == bytes([index]) * 7000
            served[index] += 1
            await store.release(lease.id)
            return

    async with asyncio.timeout(20):
        await asyncio.gather(*(caller(i % 2) for i in range(20)))
    assert served == [10, 10]
    assert store.statistics().used_bytes <= 10_000
    assert listing(tmp_path / "w")["tmp"] == []
    assert store.leases() == []
    store.close()


async def test_home_of_an_earlier_version_opens_and_its_models_are_fetched_again(
    tmp_path: Path, origin: MemoryOrigin, clock: ManualClock
) -> None:
    root = tmp_path / "w"
    store = Store.open(root, origin=origin, max_bytes=10_000, clock=clock)
    name = put_model(origin, MODEL)
    await store.lease(name, holder="s")
    store.close()
    old = b'{"chunk_bytes":16777216,"files":[],"version":1}'
    for folder in ("partial", "pins"):
        (root / folder).rmdir()
    (root / "manifests" / name).rename(root / "manifests" / hashlib.sha256(old).hexdigest())
    (root / "manifests" / hashlib.sha256(old).hexdigest()).write_bytes(old)
    store = Store.open(root, origin=origin, max_bytes=10_000, clock=clock)
    assert (store.models(), store.leases(), store.missing_bytes(name)) == ([], [], None)
    assert read((await store.lease(name, holder="s"))[1]) == MODEL
    store.close()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    disk = Path(tempfile.mkdtemp(prefix="pl"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)
    disk.rmdir()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
async def test_full_disk_is_reported_and_leaves_the_store_usable(
    small_disk: Path, origin: MemoryOrigin, clock: ManualClock
) -> None:
    small, large = put_model(origin, MODEL), put_model(origin, {"w": b"x" * 1_000_000})
    tiny = Store.open(small_disk / "w", origin=origin, max_bytes=10**9, clock=clock)
    with pytest.raises(StoreFull, match="no room for 1000000 bytes"):
        await tiny.lease(large, holder="s")
    assert listing(small_disk / "w")["tmp"] == []
    assert read((await tiny.lease(small, holder="s"))[1]) == MODEL
    tiny.close()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["lease", "release", "both"])), max_size=25
    ),
    st.integers(0, 1000),
)
def test_any_interleaving_keeps_what_is_held_on_the_disk(
    steps: list[tuple[int, str]], seed: int
) -> None:
    """Models share files by chance; asks run at once and some are cancelled. What is held is whole
    at every moment."""

    async def story(root: Path) -> None:
        chance, origin, held = (
            random.Random(seed),
            MemoryOrigin(),
            dict[str, tuple[Path, dict[str, bytes]]](),
        )
        pool = [bytes([i]) * (500 + i) for i in range(6)]
        contents = [
            {f"f{j}": blob for j, blob in enumerate(chance.sample(pool, chance.randint(1, 3)))}
            for _ in range(6)
        ]
        names = [put_model(origin, files) for files in contents]
        store = Store.open(root, origin=origin, max_bytes=2_500, clock=time.time)

        async def lease(index: int) -> None:
            with contextlib.suppress(StoreFull):
                lease, path = await store.lease(names[index], holder="s")
                held[lease.id] = (path, contents[index])

        tasks: list[asyncio.Task[None]] = []
        for index, action in steps:
            if action in ("lease", "both"):
                tasks.append(asyncio.create_task(lease(index)))
                await asyncio.sleep(chance.choice([0, 0, 0.001]))
            if action == "both" and chance.random() < 0.5:
                tasks[-1].cancel()
            if action == "release" and held:
                gone = chance.choice(sorted(held))
                del held[gone]
                await store.release(gone)
            assert all(read(path) == files for path, files in held.values())
            assert store.statistics().used_bytes <= 2_500
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(not t.cancelled() or t.cancelling() for t in tasks)
        assert all(t.cancelled() or t.exception() is None for t in tasks)
        assert all(read(path) == files for path, files in held.values())
        on_disk = {p.name: p.stat().st_size for p in (root / "files").iterdir()}
        assert sum(on_disk.values()) == store.statistics().used_bytes <= 2_500
        while listing(root)["tmp"]:  # what nobody waits for any more is still being cleaned up
            await asyncio.sleep(0.001)
        store.close()

    root = Path(tempfile.mkdtemp(prefix="pl"))
    try:
        asyncio.run(story(root))
    finally:
        remove_tree(root)


_CHILD = """
import asyncio, sys, time
from tests.fakes.origins import FolderOrigin
from pathlib import Path
from weight_cache.store.store import Store

async def main():
    store = Store.open(Path(sys.argv[1]) / "w", origin=FolderOrigin(Path(sys.argv[1]) / "blobs"), max_bytes=40_000_000, clock=time.time)
    names = sys.argv[2:]
    print("up", flush=True)
    while True:
        for name in names:
            lease, path = await store.lease(name, holder="child")
            print(lease.id, name, flush=True)
            await store.release(lease.id)

asyncio.run(main())
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_store_is_whole_again(tmp_path: Path) -> None:
    """Three models of 17 MB in a budget for two: every turn evicts and fetches. After each kill all
    that is here is right."""
    seed = random.Random(7)
    memory = MemoryOrigin()
    contents = [
        {"w": seed.randbytes(CHUNK_BYTES + 1000), "c": b"{}", f"only{i}": b"x"} for i in range(3)
    ]
    names = [put_model(memory, files) for files in contents]
    for digest, blob in memory.blobs.items():
        (tmp_path / "blobs").mkdir(exist_ok=True)
        (tmp_path / "blobs" / digest).write_bytes(blob)
    by_name = dict(zip(names, contents, strict=True))
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path), *names],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        time.sleep(seed.uniform(0, 0.25))  # anywhere in a turn of some 0.1 s
        child.send_signal(signal.SIGKILL)
        child.communicate()
        store = Store.open(
            tmp_path / "w",
            origin=FolderOrigin(tmp_path / "blobs"),
            max_bytes=40_000_000,
            clock=time.time,
        )
        assert listing(tmp_path / "w")["tmp"] == []
        for model in store.models():
            assert read(tmp_path / "w" / "models" / model.manifest) == by_name[model.manifest]
            assert asyncio.run(store.verify(model.manifest)) == []
        assert store.statistics().used_bytes <= 40_000_000
        assert {lease.holder for lease in store.leases()} <= {"child"}
        assert all(
            lease.manifest in {m.manifest for m in store.models()} for lease in store.leases()
        )
        store.close()


async def test_models_that_are_verified_leave_threads_to_those_that_arrive(
    store: Store, origin: MemoryOrigin, tmp_path: Path
) -> None:
    names = []
    for n in range((os.cpu_count() or 1) + 3):
        names.append(put_model(origin, {"w": f"{n}".encode()}))
        await store.prefetch(names[-1])
        slow = store.files(names[-1])[0]
        slow.unlink()
        os.mkfifo(slow)  # whoever reads it waits for somebody who writes
    checks = [asyncio.create_task(store.verify(name)) for name in names]
    await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await store.lease(put_model(origin, {"w": b"new"}), holder="s")
    for path in [file for name in names for file in store.files(name)]:
        await asyncio.to_thread(path.write_bytes, b"x")
    assert [len(corrupt) for corrupt in await asyncio.gather(*checks)] == [1] * len(names)


async def test_a_process_without_descriptors_condemns_no_file(
    store: Store, origin: MemoryOrigin
) -> None:
    name = put_model(origin, MODEL)
    await store.lease(name, holder="s")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(StoreFailed, match="Too many open files"):
            await store.verify(name)
        assert await store.scrubber(ScrubRate(10**9)).check(digest_of(b"{}"))
        with pytest.raises(StoreFailed, match="LimitNOFILE"):
            LeaseHolder.find(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await store.verify(name) == []
    assert store.statistics().quarantined_files == 0
