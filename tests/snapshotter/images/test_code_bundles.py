"""Source archives become read-only directories, whole or not at all, and nothing in them is
believed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import io
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.object_store import ObjectStore, blob_key, open_store
from snapshotter.errors import BundleUnavailable
from snapshotter.images.code_bundles import KEPT_BYTES, KEPT_ENTRIES, Bundles
from snapshotter.linux.atomic_directory import delete_atomically

REPOSITORY = Path(__file__).parents[3]


def entry(
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    mode: int = 0o644,
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname, info.mode = len(content), kind, link, mode
    return info, content


def put(home: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> str:
    return put_bytes(home, packed(*entries)[1])


def put_bytes(home: Path, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    blob = home / "blobs" / digest[:2] / digest
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    return digest


async def test_bundle_becomes_a_read_only_world_readable_directory(tmp_path: Path) -> None:
    digest = put(
        tmp_path,
        entry("app.py", b"x = 1"),
        entry("pkg/run.sh", b"#!", mode=0o700),
        entry("pkg/same", kind=tarfile.SYMTYPE, link="../app.py"),
    )
    code = await Bundles(tmp_path).ensure(digest)
    assert code == tmp_path / "node" / "code" / digest
    assert (code / "pkg" / "same").read_bytes() == b"x = 1"
    modes = {
        p.relative_to(code).as_posix(): p.stat().st_mode & 0o7777 for p in [code, *code.rglob("*")]
    }
    assert modes == {
        ".": 0o555,
        "app.py": 0o444,
        "pkg": 0o555,
        "pkg/run.sh": 0o555,
        "pkg/same": 0o444,
    }


async def test_callers_at_once_share_one_unpacking(tmp_path: Path) -> None:
    digest = put(tmp_path, entry("app.py", b"x = 1"))
    bundles = Bundles(tmp_path)
    asks = [asyncio.create_task(bundles.ensure(digest)) for _ in range(20)]
    await asyncio.sleep(0)
    assert repr(bundles).endswith("unpacking=1>")
    asks[0].cancel()
    await asyncio.wait(asks)
    assert {task.result() for task in asks[1:]} == {tmp_path / "node" / "code" / digest}


@pytest.mark.parametrize(
    "entries,said",
    [
        ([entry("/etc/passwd", b"x")], "leads outside"),
        ([entry("a/../../x", b"x")], "leads outside"),
        ([entry("l", kind=tarfile.SYMTYPE, link="/etc/passwd")], "leads outside"),
        ([entry("l", kind=tarfile.SYMTYPE, link="../../x")], "leads outside"),
        (
            [
                entry("a/b/f", b""),
                entry("a/b/up", kind=tarfile.SYMTYPE, link=".."),
                entry("l", kind=tarfile.SYMTYPE, link="a/b/up/../../.."),
            ],
            "leads outside",
        ),
        ([entry("d", kind=tarfile.SYMTYPE, link="."), entry("d/x", b"x")], "not a directory"),
        ([entry("h", kind=tarfile.LNKTYPE, link="/etc/passwd")], "leads outside"),
        ([entry("h", kind=tarfile.LNKTYPE, link="later")], "not a file before it"),
        ([entry("null", kind=tarfile.CHRTYPE)], "device"),
        ([entry("pipe", kind=tarfile.FIFOTYPE)], "device"),
        ([entry("x", b"1"), entry("x", b"2")], "twice"),
        # Python 3.13 refuses it itself
        (
            [entry("x" * 300, kind=tarfile.XHDTYPE, content=b"y" * 2**21)],
            "headers of an entry|invalid header",
        ),
        ([entry("big", b"x" * 2000)], "more than 1000 bytes"),
    ],
)
async def test_hostile_archive_is_refused_and_leaves_nothing(
    tmp_path: Path, entries: list[tuple[tarfile.TarInfo, bytes]], said: str
) -> None:
    digest = put(tmp_path, *entries)
    with pytest.raises(BundleUnavailable, match=said):
        await Bundles(tmp_path, max_bytes=1000).ensure(digest)
    assert list((tmp_path / "node" / "code").iterdir()) == []


async def test_missing_blob_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleUnavailable, match="not in the blob store"):
        await Bundles(tmp_path).ensure("0" * 64)
    with pytest.raises(BundleUnavailable, match="does not name a bundle"):
        await Bundles(tmp_path).ensure("../" * 21 + "x")


async def test_corrupt_blob_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    digest = put(tmp_path, entry("app.py", b"x = 1"))
    (tmp_path / "blobs" / digest[:2] / digest).write_bytes(b"other bytes")
    with pytest.raises(BundleUnavailable, match="corrupt"):
        await Bundles(tmp_path).ensure(digest)


@given(content=st.binary(max_size=300))
def test_any_bytes_are_unpacked_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    home = tmp_path_factory.mktemp("h")
    digest = put_bytes(home, content)
    with pytest.raises(BundleUnavailable):
        asyncio.run(Bundles(home).ensure(digest))


class Room:
    """Bundles of one file each on a disk with so much free, one of them needed; each was asked for
    a second after the last."""

    def __init__(self, home: Path, **options: Any) -> None:
        self.home = home
        self.free = 10_000
        self.now = 0.0
        floor = DiskFloor(home, 1000, free=lambda _: self.free, inodes=lambda _: (0, 0))
        self.bundles = Bundles(home, floor=floor, clock=lambda: self.now, **options)
        self.needed: set[str] = set()

    async def unpack(self, *contents: bytes) -> list[str]:
        digests = []
        for content in contents:
            self.now += 1
            digests.append(put(self.home, entry("a", content)))
            await self.bundles.ensure(digests[-1])
        return digests

    def here(self) -> set[str]:
        return {d.name for d in (self.home / "node" / "code").iterdir()}


async def test_below_the_floor_bundles_go_that_nothing_needs_and_nobody_asked_for_lately(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    needed, old, young = await room.unpack(b"1", b"2", b"3")
    room.free, room.now = 0, 1000.0
    assert await room.bundles.make_room() == 0, "before it is said what is needed"
    room.bundles.needed_by(lambda: {needed})
    await room.bundles.ensure(young)
    assert await room.bundles.make_room() == 1
    assert room.here() == {needed, young}
    room.now += 61
    assert await room.bundles.make_room() == 1
    assert room.here() == {needed}
    room.free = 10_000
    await room.bundles.ensure(old)
    assert room.here() == {needed, old}


async def test_the_bundle_goes_first_that_was_asked_for_longest_ago(tmp_path: Path) -> None:
    room = Room(tmp_path, kept_entries=2)
    first, _, third = await room.unpack(b"1", b"2", b"3")
    await room.bundles.ensure(first)
    room.bundles.needed_by(set)
    room.now += 100
    assert await room.bundles.make_room() == 1
    assert room.here() == {first, third}
    again = Bundles(tmp_path, kept_bytes=5000)
    again.needed_by(set)
    assert await again.make_room() == 1, "sizes of what an earlier agent unpacked are measured"
    assert (KEPT_BYTES, KEPT_ENTRIES) == (8 * 1024**3, 500_000), "where nothing else is said"


async def test_a_bundle_is_not_unpacked_into_the_floor(tmp_path: Path) -> None:
    room = Room(tmp_path)
    (idle,) = await room.unpack(b"1")
    room.bundles.needed_by(set)
    room.now += 100
    room.free = 999
    with pytest.raises(BundleUnavailable, match="disk_floor_bytes keeps 1000 for the journals"):
        await room.unpack(b"2")
    assert room.here() == set(), f"{idle} made room, and it was not enough"


async def test_a_bundle_that_nothing_needs_makes_room_for_one_that_is_half_unpacked(
    tmp_path: Path,
) -> None:
    idle = await Bundles(tmp_path).ensure(put(tmp_path, entry("a", b"1")))
    looks = iter([10_000])
    floor = DiskFloor(
        tmp_path,
        1000,
        free=lambda _: next(looks, 999) if idle.exists() else 10_000,
        inodes=lambda _: (0, 0),
    )
    bundles = Bundles(tmp_path, floor=floor)
    bundles.needed_by(set)
    assert (await bundles.ensure(put(tmp_path, entry("a", b"2")))).exists()
    assert not idle.exists()


async def test_bundles_beyond_the_bound_go_before_another_one_is_unpacked(tmp_path: Path) -> None:
    room = Room(tmp_path, kept_entries=1)
    room.bundles.needed_by(set)
    digests: list[str] = []
    for content in (b"1", b"2", b"3"):
        room.now += 100
        digests += await room.unpack(content)
    assert room.here() == set(digests[1:])


async def test_the_disk_is_looked_at_while_a_bundle_is_unpacked(tmp_path: Path) -> None:
    looks = iter([10_000] * 3)
    floor = DiskFloor(tmp_path, 1000, free=lambda _: next(looks, 0), inodes=lambda _: (0, 0))
    digest = put(tmp_path, *[entry(f"f{n}") for n in range(300)])
    with pytest.raises(BundleUnavailable, match="the disk has no room"):
        await Bundles(tmp_path, floor=floor).ensure(digest)
    assert list((tmp_path / "node" / "code").iterdir()) == []


async def test_a_bundle_becomes_not_many_times_what_its_archive_has(tmp_path: Path) -> None:
    info = tarfile.TarInfo("zeros")
    info.size = 64 * 1024**2 + 1
    digest = put_bytes(tmp_path, gzip.compress(info.tobuf()))
    with pytest.raises(BundleUnavailable, match="unpacks to more than 67108864 bytes"):
        await Bundles(tmp_path).ensure(digest)


_CHILD = """
import asyncio, sys
from pathlib import Path
from snapshotter.images.code_bundles import Bundles
print("up", flush=True)
asyncio.run(Bundles(Path(sys.argv[1])).ensure(sys.argv[2]))
"""


@pytest.mark.slow  # unpacks 3,000 files, and is killed
def test_killed_unpacking_leaves_no_half_bundle(tmp_path: Path) -> None:
    digest = put(tmp_path, *[entry(f"d{i % 50}/f{i}", b"x" * 200) for i in range(3000)])
    code = tmp_path / "node" / "code"
    for delay_s in (0.0, 0.03, 0.06, 0.1, 0.2):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path), digest],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        if (code / digest).exists():
            assert sum(1 for f in (code / digest).rglob("f*")) == 3000
            delete_atomically(code / digest)
    done = asyncio.run(Bundles(tmp_path).ensure(digest))
    assert [d.name for d in code.iterdir()] == [digest]
    assert sum(1 for f in done.rglob("f*")) == 3000


# -- from a store that is no directory -------------------------------------------------------------
@pytest.fixture
async def bucket(s3_bucket: str) -> AsyncIterator[ObjectStore]:
    store = open_store(f"s3://{s3_bucket}/blobs", setting="platform.blobs")
    yield store
    await store.aclose()


def packed(*entries: tuple[tarfile.TarInfo, bytes]) -> tuple[str, bytes]:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return hashlib.sha256(raw.getvalue()).hexdigest(), raw.getvalue()


async def test_a_bundle_is_fetched_from_a_bucket_once(tmp_path: Path, bucket: ObjectStore) -> None:
    digest, raw = packed(entry("app.py", b"x = 1"))
    await bucket.put(blob_key(digest), raw)
    bundles = Bundles(tmp_path, blobs=bucket)
    codes = await asyncio.gather(*(bundles.ensure(digest) for _ in range(3)))
    assert {(code / "app.py").read_bytes() for code in codes} == {b"x = 1"}
    assert [p.name for p in (tmp_path / "node" / "code").iterdir()] == [digest]
    assert not (tmp_path / "blobs").exists()


async def test_a_bundle_is_not_fetched_into_the_floor(tmp_path: Path, bucket: ObjectStore) -> None:
    floor = DiskFloor(tmp_path, 1000, free=lambda _: 999, inodes=lambda _: (0, 0))
    with pytest.raises(BundleUnavailable, match="the disk has no room"):
        # which the bucket lacks: it is not asked
        await Bundles(tmp_path, blobs=bucket, floor=floor).ensure("0" * 64)
    assert list((tmp_path / "node" / "code").iterdir()) == []


async def test_what_a_bucket_lacks_or_has_wrong_is_said_and_leaves_nothing(
    tmp_path: Path, bucket: ObjectStore
) -> None:
    digest, raw = packed(entry("app.py", b"x = 1"))
    bundles = Bundles(tmp_path, blobs=bucket)
    with pytest.raises(
        BundleUnavailable, match=r"is not in the blob store \(<S3Store s3://.*deploy again"
    ):
        await bundles.ensure(digest)
    await bucket.put(blob_key(digest), raw + b"!")
    with pytest.raises(BundleUnavailable, match=f"{digest} of <S3Store s3://.* is corrupt"):
        await bundles.ensure(digest)
    assert list((tmp_path / "node" / "code").iterdir()) == []
    await bucket.put(blob_key(digest), raw)
    assert (await bundles.ensure(digest)).is_dir()


async def test_a_bucket_that_does_not_answer_is_said(
    tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    async with contextlib.aclosing(
        open_store(f"s3://{s3_bucket}", setting="platform.blobs", attempts=1)
    ) as store:
        with pytest.raises(BundleUnavailable, match=r"cannot fetch bundle .*: s3://"):
            await Bundles(tmp_path, blobs=store).ensure("0" * 64)
    assert list((tmp_path / "node" / "code").iterdir()) == []
