"""What goes wrong outside the store, from the origin's answers to the disk: never wrong bytes,
never a stuck claim, said plainly."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.core.object_store import blob_key, open_store
from tests.fakes.faulty_objects import Fault, FaultyObjects, faulty_objects
from tests.fakes.origins import MemoryOrigin, ZeroOrigin
from tests.fakes.trees import remove_tree
from tests.weight_cache.models import chunked, digest_of, put_model
from weight_cache.errors import ChunkCorrupt, ManifestInvalid, OriginUnavailable, StoreFull
from weight_cache.fetch.origin import ObjectOrigin
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.store.store import Store

REPOSITORY = Path(__file__).parents[3]
CONTENT = chunked(b"a")
WEIGHTS = digest_of(CONTENT)
LARGER = chunked(b"a", b"b")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjects]:
    with faulty_objects() as running:
        for key, value in running.environment.items():
            monkeypatch.setenv(key, value)
        yield running


def upload(server: FaultyObjects) -> str:
    """A model whose weights are two chunks."""
    library = MemoryOrigin()
    name = put_model(library, {"w": CONTENT})
    server.objects.update({blob_key(digest): content for digest, content in library.blobs.items()})
    return name


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


def store_of(root: Path, *, timeout_s: float = 20.0) -> tuple[Store, ObjectOrigin]:
    objects = open_store(
        "s3://bucket", setting="platform.blobs", client="boto3", attempts=1, timeout_s=timeout_s
    )
    origin = ObjectOrigin(objects, attempts=3, timeout_s=timeout_s, pause=no_pause)
    return Store.open(root, origin=origin, max_bytes=10**9, clock=time.time), origin


KEY = blob_key(WEIGHTS)


@pytest.mark.slow  # waits between attempts, as a start does
@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="status", status=503, times=2, key=KEY),
        Fault(kind="status", status=500, key=KEY),
        Fault(kind="reset", key=KEY),
        Fault(kind="cut", key=KEY),
        Fault(kind="short", key=KEY),
        Fault(kind="wrong", key=KEY),
        Fault(kind="slow", key=KEY, pause_s=0.001),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
async def test_what_passes_is_borne(tmp_path: Path, server: FaultyObjects, fault: Fault) -> None:
    name = upload(server)
    server.fail(fault)
    store, origin = store_of(tmp_path / "w")
    _, path = await store.lease(name, holder="s")
    assert (path / "w").read_bytes() == CONTENT
    store.close()
    await origin.aclose()


@pytest.mark.parametrize(
    "fault, error, said",
    [
        (
            Fault(kind="status", status=403, times=99, key=KEY),
            OriginUnavailable,
            "access refused",
        ),
        (Fault(kind="status", status=404, times=99, key=KEY), OriginUnavailable, "missing"),
        (Fault(kind="status", status=503, times=999, key=KEY), OriginUnavailable, "attempts"),
        (Fault(kind="silent", times=999, key=KEY), OriginUnavailable, "attempts"),
        (Fault(kind="wrong", times=999, key=KEY), ChunkCorrupt, "do not match their hash"),
        (
            Fault(kind="replaced", key=KEY, content=b"another" * 10_000_000),
            OriginUnavailable,
            "replaced|ends before",
        ),
    ],
    ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Fault) else "",
)
@pytest.mark.slow  # waits for a server that is silent
async def test_what_does_not_pass_is_named_and_the_next_lease_starts_well(
    tmp_path: Path, server: FaultyObjects, fault: Fault, error: type[Exception], said: str
) -> None:
    name = upload(server)
    server.fail(fault)
    store, origin = store_of(tmp_path / "w", timeout_s=1.5 if fault.kind == "silent" else 20.0)
    with pytest.raises(error, match=said):
        await store.lease(name, holder="s")
    assert (
        store.statistics().arriving,
        store.leases(),
        list((tmp_path / "w" / "tmp").iterdir()),
    ) == (0, [], [])
    server.faults.clear()
    upload(server)
    if fault.kind == "silent":  # on a busy machine a good server may take longer than this limit
        store.close()
        await origin.aclose()
        store, origin = store_of(tmp_path / "w")
    _, path = await store.lease(name, holder="s")
    assert (path / "w").read_bytes() == CONTENT
    store.close()
    await origin.aclose()


@pytest.fixture
def disk() -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="pl"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)
    folder.rmdir()


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="mounts a small disk, or becomes another user"
)


@pytest.mark.root
@needs_root
async def test_disk_that_fills_up_meanwhile_is_said_so_and_the_next_try_goes_on(disk: Path) -> None:
    origin = MemoryOrigin()
    name = put_model(origin, {"w": LARGER})
    store = Store.open(disk / "w", origin=origin, max_bytes=10**9, clock=time.time)
    origin.gates[digest_of(LARGER)] = asyncio.Event()
    ask = asyncio.create_task(store.lease(name, holder="s"))
    async with asyncio.timeout(30):
        while not origin.at_once:
            await asyncio.sleep(0.001)
    (disk / "filler").write_bytes(b"x" * (64 * 1024 * 1024 - CHUNK_BYTES - CHUNK_BYTES // 2))
    origin.gates.pop(digest_of(LARGER)).set()
    with pytest.raises(
        StoreFull, match=rf"has no room for (model {name[:12]}|\d+ bytes: \d+ are free)"
    ):
        await ask  # said by the write that failed, or by the look at the disk before it
    assert (store.statistics().arriving, list((disk / "w" / "tmp").iterdir())) == (0, [])
    half = store.statistics().partial_bytes
    (disk / "filler").unlink()
    before = origin.read_bytes
    assert (await store.lease(name, holder="s"))[1].joinpath("w").read_bytes() == LARGER
    assert origin.read_bytes - before == len(LARGER) - half
    store.close()


@pytest.mark.root
@needs_root
async def test_disk_that_is_full_already_is_said_so_before_anything_is_fetched(disk: Path) -> None:
    origin = MemoryOrigin()
    name = put_model(origin, {"w": LARGER})
    store = Store.open(disk / "w", origin=origin, max_bytes=10**9, clock=time.time)
    (disk / "filler").write_bytes(b"x" * 40 * 1024 * 1024)
    with pytest.raises(StoreFull, match=rf"no room for {len(LARGER)} bytes: \d+ are free"):
        await store.lease(name, holder="s")
    assert origin.reads == 1  # the manifest
    store.close()


_AS_ANOTHER = """
import asyncio, os, sys, time
from pathlib import Path
from tests.fakes.origins import MemoryOrigin
from tests.weight_cache.models import put_model
from weight_cache.errors import WeightCacheError
from weight_cache.store.store import Store

async def main():
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    origin = MemoryOrigin()
    name = put_model(origin, {"w": b"x" * 100, "c": b"{}"})
    store = Store.open(Path(sys.argv[1]), origin=origin, max_bytes=10**6, clock=time.time)
    folder = Path(sys.argv[1]) / sys.argv[2]
    folder.chmod(0o500)
    try:
        await store.lease(name, holder="s")
    except WeightCacheError as e:
        print(type(e).__name__, e)
    folder.chmod(0o700)
    await store.lease(name, holder="s")
    print(sorted(p.name for p in (Path(sys.argv[1]) / "tmp").iterdir()), store.statistics().arriving)

asyncio.run(main())
"""


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("folder", ["partial", "files", "models", "manifests", "tmp"])
def test_folder_that_may_not_be_written_is_named_and_works_again_when_it_may(folder: str) -> None:
    root = Path(tempfile.mkdtemp(prefix="pl"))
    try:
        root.chmod(0o711)
        home = root / "w"
        home.mkdir()
        os.chown(home, 65534, 65534)
        command = [sys.executable, "-c", _AS_ANOTHER, str(home), folder]
        told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr
        said, after = told.stdout.splitlines()
        assert said.startswith("StoreFailed the disk below")
        assert "Permission denied" in said
        assert after == "[] 0"
    finally:
        remove_tree(root)


async def test_clock_that_jumps_neither_loses_nor_favours_anybody(tmp_path: Path) -> None:
    origin, now = MemoryOrigin(), 1_700_000_000.0
    names = [put_model(origin, {"w": bytes([i]) * 4000}) for i in range(3)]
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=9_000, clock=lambda: now)
    lease, path = await store.lease(names[0], holder="s")
    now -= 10_000_000
    await store.prefetch(names[1])
    now += 20_000_000_000  # beyond what 32 bits hold
    await store.prefetch(names[2])
    assert path.exists()
    assert store.leases() == [lease]
    assert await store.release(lease.id)
    now = -5.0
    await store.prefetch(names[1])
    assert store.statistics().used_bytes <= 9_000
    store.close()


@pytest.mark.slow  # a quarter of a gigabyte
async def test_large_sparse_model_streams_through_little_memory(tmp_path: Path) -> None:
    """Twice what may be in flight, of zeros: memory is bounded by the turns, not by the model."""
    origin = ZeroOrigin()
    name, size = origin.put_model(16 * CHUNK_BYTES + 5)
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=2 * size, clock=time.time)
    _, path = await store.lease(name, holder="s")
    assert (path / "zeros").stat().st_size == size
    assert origin.most_at_once <= 8
    store.close()


async def test_model_of_terabytes_is_refused_by_its_number(tmp_path: Path) -> None:
    origin = ZeroOrigin()
    name, size = origin.put_model(2 * 1024**4)
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=1024**4, clock=time.time)
    with pytest.raises(
        StoreFull,
        match=f"weights of {size} bytes are larger than the store's budget of {1024**4} bytes",
    ):
        await store.lease(name, holder="s")
    assert origin.most_at_once == 1
    store.close()


@pytest.mark.parametrize("how", ["truncated", "grown", "gone", "bit flipped", "writable"])
async def test_file_that_changed_on_the_disk_is_never_served(tmp_path: Path, how: str) -> None:
    origin = MemoryOrigin()
    name = put_model(origin, {"w": CONTENT, "c": b"{}"})
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=10**9, clock=time.time)
    lease, _ = await store.lease(name, holder="s")
    victim = tmp_path / "w" / "files" / WEIGHTS
    sealed = victim.stat()
    victim.chmod(0o644)
    if how == "gone":
        victim.unlink()
    elif how in ("truncated", "grown"):
        os.truncate(victim, len(CONTENT) + (1 if how == "grown" else -1))
        victim.chmod(0o444)
        os.utime(victim, ns=(sealed.st_atime_ns, sealed.st_mtime_ns))
    elif how == "bit flipped":
        with victim.open("r+b") as stream:
            stream.seek(CHUNK_BYTES)
            stream.write(b"c")
        victim.chmod(0o444)
    reads = origin.reads
    again, path = await store.lease(name, holder="s")
    assert (path / "w").read_bytes() == CONTENT
    assert again == lease
    assert origin.reads - reads == (0 if how == "writable" else 2)  # its chunks, and nothing else
    assert store.statistics().quarantined_files == (how != "writable")
    store.close()


def lying(how: str) -> tuple[MemoryOrigin, str]:
    """A model whose manifest says what is not true."""
    origin = MemoryOrigin()
    name = put_model(origin, {"w": b"x" * 1000})
    raw = origin.blobs[name]
    lies = {
        "escapes": raw.replace(b'"path":"w"', b'"path":"../../w"'),
        "absolute": raw.replace(b'"path":"w"', b'"path":"/etc/w"'),
        "smaller": raw.replace(b'"size_bytes":1000', b'"size_bytes":10'),
        "larger": raw.replace(b'"size_bytes":1000', b'"size_bytes":9000'),
        "chunks missing": raw.replace(b'"size_bytes":1000', b'"size_bytes":99000000'),
        "negative": raw.replace(b'"size_bytes":1000', b'"size_bytes":-1'),
        "another version": raw.replace(b'"version":2', b'"version":1'),
        "not canonical": raw.replace(b'"version":2', b'"version": 2'),
    }
    return origin, origin.put(lies[how])


@pytest.mark.parametrize(
    "how", ["escapes", "absolute", "chunks missing", "negative", "another version", "not canonical"]
)
async def test_manifest_that_breaks_a_bound_is_refused(tmp_path: Path, how: str) -> None:
    origin, name = lying(how)
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=10**9, clock=time.time)
    with pytest.raises(ManifestInvalid):
        await store.lease(name, holder="s")
    assert origin.reads == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock"] == []
    store.close()


@pytest.mark.parametrize("how", ["smaller", "larger"])
async def test_manifest_that_lies_about_a_size_names_a_file_that_nobody_has(
    tmp_path: Path, how: str
) -> None:
    origin, name = lying(how)
    store = Store.open(tmp_path / "w", origin=origin, max_bytes=10**9, clock=time.time)
    with pytest.raises(OriginUnavailable):
        await store.lease(name, holder="s")
    assert list((tmp_path / "w" / "files").iterdir()) == []
    store.close()
