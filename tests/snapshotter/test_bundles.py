"""Source archives become read-only directories, whole or not at all, and nothing in them is believed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.bundles import Bundles
from snapshotter.errors import BundleUnavailable
from weight_cache.objects import ObjectStore, blob_key, open_store

REPOSITORY = Path(__file__).parents[2]


def entry(
    name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
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
    modes = {p.relative_to(code).as_posix(): p.stat().st_mode & 0o7777 for p in [code, *code.rglob("*")]}
    assert modes == {".": 0o555, "app.py": 0o444, "pkg": 0o555, "pkg/run.sh": 0o555, "pkg/same": 0o444}


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
        ([entry("h", kind=tarfile.LNKTYPE, link="later")], "no file before it"),
        ([entry("null", kind=tarfile.CHRTYPE)], "device"),
        ([entry("pipe", kind=tarfile.FIFOTYPE)], "device"),
        ([entry("x", b"1"), entry("x", b"2")], "twice"),
        ([entry("x" * 300, kind=tarfile.XHDTYPE, content=b"y" * 2**21)], "entry header|invalid header"),  # Python 3.13 refuses it itself
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
def test_any_bytes_are_unpacked_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    home = tmp_path_factory.mktemp("h")
    digest = put_bytes(home, content)
    with pytest.raises(BundleUnavailable):
        asyncio.run(Bundles(home).ensure(digest))


async def test_prune_keeps_what_is_named(tmp_path: Path) -> None:
    first, second = put(tmp_path, entry("a", b"1")), put(tmp_path, entry("a", b"2"))
    bundles = Bundles(tmp_path)
    await bundles.ensure(first)
    await bundles.ensure(second)
    assert bundles.prune({first}) == [second]
    assert [d.name for d in (tmp_path / "node" / "code").iterdir()] == [first]
    assert (await bundles.ensure(second)).exists()


_CHILD = """
import asyncio, sys
from pathlib import Path
from snapshotter.bundles import Bundles
print("up", flush=True)
asyncio.run(Bundles(Path(sys.argv[1])).ensure(sys.argv[2]))
"""


@pytest.mark.slow  # unpacks 3,000 files, and is killed
def test_killed_unpacking_leaves_no_half_bundle(tmp_path: Path) -> None:
    digest = put(tmp_path, *[entry(f"d{i % 50}/f{i}", b"x" * 200) for i in range(3000)])
    code = tmp_path / "node" / "code"
    for delay_s in (0.0, 0.03, 0.06, 0.1, 0.2):
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path), digest], stdout=subprocess.PIPE, cwd=REPOSITORY)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        if (code / digest).exists():
            assert sum(1 for f in (code / digest).rglob("f*")) == 3000
            Bundles(tmp_path).prune(set())
    done = asyncio.run(Bundles(tmp_path).ensure(digest))
    assert [d.name for d in code.iterdir()] == [digest]
    assert sum(1 for f in done.rglob("f*")) == 3000


# -- from a store that is no directory ---------------------------------------------------------------------------------
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


async def test_what_a_bucket_lacks_or_has_wrong_is_said_and_leaves_nothing(tmp_path: Path, bucket: ObjectStore) -> None:
    digest, raw = packed(entry("app.py", b"x = 1"))
    bundles = Bundles(tmp_path, blobs=bucket)
    with pytest.raises(BundleUnavailable, match=r"is not in the blob store \(<S3Store s3://.*deploy again"):
        await bundles.ensure(digest)
    await bucket.put(blob_key(digest), raw + b"!")
    with pytest.raises(BundleUnavailable, match=f"{digest} of <S3Store s3://.* is corrupt"):
        await bundles.ensure(digest)
    assert list((tmp_path / "node" / "code").iterdir()) == []
    await bucket.put(blob_key(digest), raw)
    assert (await bundles.ensure(digest)).is_dir()


async def test_a_bucket_that_does_not_answer_is_said(tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    async with contextlib.aclosing(open_store(f"s3://{s3_bucket}", setting="platform.blobs", attempts=1)) as store:
        with pytest.raises(BundleUnavailable, match="cannot be fetched: s3://"):
            await Bundles(tmp_path, blobs=store).ensure("0" * 64)
    assert list((tmp_path / "node" / "code").iterdir()) == []
