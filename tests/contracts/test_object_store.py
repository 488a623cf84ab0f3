"""Object stores: the same promises in a directory and over S3's protocol, with each client that
reads it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.core.object_store import ObjectStore, blob_key, blob_store, open_store
from pilotlight.core.object_store.errors import (
    ObjectChanged,
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreUnavailable,
)
from pilotlight.core.object_store.s3 import S3Store
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid

PART_BYTES = 5 * 1024 * 1024
"""The least that S3 takes as a part, except for the last."""


@pytest.fixture(
    params=[
        "directory",
        "boto3",
        "obstore",
        pytest.param("boto3, seaweedfs", marks=pytest.mark.soak),
        pytest.param("obstore, seaweedfs", marks=pytest.mark.soak),
    ]
)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    client, _, server = request.param.partition(", ")
    if client == "directory":
        store = open_store(str(tmp_path / "store"), setting="blobs")
    else:
        bucket = request.getfixturevalue(f"{server or 's3'}_bucket")
        store = S3Store(bucket=bucket, prefix="some/prefix", client=client, part_bytes=PART_BYTES)
    yield store
    await store.aclose()


# -- values ----------------------------------------------------------------------------------------
async def test_what_was_put_comes_back(store: ObjectStore) -> None:
    await store.put("a/b.json", b"one")
    await store.put("a/b.json", b"another")
    assert await store.get("a/b.json", max_bytes=7) == b"another"
    with pytest.raises(ObjectStoreError, match="longer than 6 bytes"):
        await store.get("a/b.json", max_bytes=6)


async def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    await store.put("empty", b"")
    assert await store.get("empty", max_bytes=10) == b""
    assert await store.read("empty", offset_bytes=0, length_bytes=10) == b""
    info = await store.info("empty")
    assert info is not None
    assert info.size_bytes == 0


async def test_what_is_missing_is_said(store: ObjectStore, tmp_path: Path) -> None:
    assert await store.info("a/nothing") is None
    assert await store.keys("a/") == []
    with pytest.raises(ObjectNotFound, match="a/nothing"):
        await store.get("a/nothing", max_bytes=10)
    with pytest.raises(ObjectNotFound, match="a/nothing"):
        await store.read("a/nothing", offset_bytes=0, length_bytes=1)
    with pytest.raises(ObjectNotFound, match="a/nothing"):
        await store.fetch("a/nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    await store.delete("a/nothing")


async def test_keys_are_listed_by_prefix(store: ObjectStore) -> None:
    for key in ("a/2", "a/1", "ab/1", "b"):
        await store.put(key, b"")
    assert await store.keys("a/") == ["a/1", "a/2"]
    assert await store.keys("") == ["a/1", "a/2", "ab/1", "b"]
    await store.delete("a/1")
    assert await store.keys("a/") == ["a/2"]


async def test_many_at_once(store: ObjectStore) -> None:
    await asyncio.gather(*(store.put(f"k/{i}", bytes([i])) for i in range(20)))
    assert await asyncio.gather(*(store.get(f"k/{i}", max_bytes=1) for i in range(20))) == [
        bytes([i]) for i in range(20)
    ]


@pytest.mark.parametrize("key", ["../up", "/root", "a//b", "a/../b", ".hidden", "", "a\n"])
async def test_a_store_keeps_to_itself(store: ObjectStore, key: str, tmp_path: Path) -> None:
    for call in (
        store.put(key, b""),
        store.get(key, max_bytes=1),
        store.read(key, offset_bytes=0, length_bytes=1),
        store.info(key),
        store.fetch(key, tmp_path / "new"),
        store.put_file(key, tmp_path / "new"),
        store.delete(key),
    ):
        with pytest.raises(ValueError, match="is not a valid key"):
            await call


# -- ranges and versions ---------------------------------------------------------------------------
async def test_ranges_are_read_and_are_short_at_the_end_only(store: ObjectStore) -> None:
    await store.put("digits", b"0123456789")
    assert await store.read("digits", offset_bytes=3, length_bytes=4) == b"3456"
    assert await store.read("digits", offset_bytes=8, length_bytes=4) == b"89"
    assert await store.read("digits", offset_bytes=10, length_bytes=4) == b""
    assert await store.read("digits", offset_bytes=500, length_bytes=4) == b""
    assert await store.read("digits", offset_bytes=3, length_bytes=0) == b""


async def test_a_range_of_another_version_is_refused(store: ObjectStore) -> None:
    await store.put("k", b"first")
    first = await store.info("k")
    assert first is not None
    assert await store.read("k", offset_bytes=1, length_bytes=2, etag=first.etag) == b"ir"
    await store.put("k", b"second")
    with pytest.raises(ObjectChanged, match="k"):
        await store.read("k", offset_bytes=1, length_bytes=2, etag=first.etag)
    second = await store.info("k")
    assert second is not None
    assert second.size_bytes == 6
    assert second.etag != first.etag


# -- files -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("size_bytes", [0, 10, PART_BYTES, 2 * PART_BYTES + 3])
async def test_files_go_in_and_come_out(
    store: ObjectStore, tmp_path: Path, size_bytes: int
) -> None:
    (tmp_path / "in").write_bytes(content := os.urandom(size_bytes))
    await store.put_file("file", tmp_path / "in")
    assert (tmp_path / "in").exists()
    info = await store.fetch("file", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    assert info == await store.info("file")
    assert info.size_bytes == size_bytes
    assert await store.keys("") == ["file"]


async def test_a_file_may_be_given_away(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"content")
    await store.put_file("deep/file", tmp_path / "in", may_move=True)
    assert await store.get("deep/file", max_bytes=100) == b"content"


async def test_a_file_that_cannot_be_read_is_not_put(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(ObjectStoreError, match="No such file"):
        await store.put_file("file", tmp_path / "nothing")
    assert await store.keys("") == []


async def test_a_fetch_does_not_touch_a_file_that_is_there(
    store: ObjectStore, tmp_path: Path
) -> None:
    await store.put("k", b"new")
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(ObjectStoreError, match="File exists"):
        await store.fetch("k", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"old"


async def test_a_fetch_that_is_cancelled_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(3 * PART_BYTES))
    await store.put_file("file", tmp_path / "in")
    fetching = asyncio.create_task(store.fetch("file", tmp_path / "out"))
    while not (tmp_path / "out").exists() and not fetching.done():
        await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert not (tmp_path / "out").exists()
    await store.fetch("file", tmp_path / "out")
    assert (tmp_path / "out").stat().st_size == 3 * PART_BYTES


async def test_a_put_that_is_cancelled_leaves_the_whole_or_nothing(
    store: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(content := os.urandom(3 * PART_BYTES))
    for turns in (1, 3, 50):
        putting = asyncio.create_task(store.put_file("file", tmp_path / "in"))
        for _ in range(turns):
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
        for key in await store.keys(""):
            assert await store.get(key, max_bytes=len(content)) == content
    assert not list(tmp_path.glob("store/.*"))


def test_a_local_file_is_told_of_directories_only(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), setting="s")
    assert store.local_path("a/b") == tmp_path / "a/b"
    with pytest.raises(ValueError, match="is not a valid key"):
        store.local_path("../b")
    assert open_store("s3://b", setting="s").local_path("a/b") is None


# -- the bucket ------------------------------------------------------------------------------------
async def test_what_others_put_into_a_bucket_is_not_listed(s3_bucket: str) -> None:
    import boto3

    store = S3Store(bucket=s3_bucket, prefix="p")
    await store.put("a/1", b"")
    client = boto3.client("s3", region_name="us-east-1")
    for stray in ("p/a/../2", "p/a/two words", "p/a/"):
        client.put_object(Bucket=s3_bucket, Key=stray, Body=b"")
    client.close()
    assert await store.keys("a/") == ["a/1"]
    await store.aclose()


async def test_an_upload_that_fails_leaves_no_parts(s3_bucket: str, tmp_path: Path) -> None:
    import boto3

    # S3 refuses such small parts in the end
    store = S3Store(bucket=s3_bucket, prefix="", part_bytes=1024, attempts=1)
    (tmp_path / "in").write_bytes(os.urandom(3000))
    with pytest.raises(ObjectStoreError, match="EntityTooSmall"):
        await store.put_file("file", tmp_path / "in")
    client = boto3.client("s3", region_name="us-east-1")
    assert "Uploads" not in client.list_multipart_uploads(Bucket=s3_bucket)
    client.close()
    assert await store.keys("") == []
    await store.aclose()


@pytest.mark.parametrize("client", ["boto3", "obstore"])
async def test_a_store_that_does_not_answer_is_an_error(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = S3Store(bucket=s3_bucket, prefix="", client=client, attempts=1)
    with pytest.raises(ObjectStoreUnavailable, match=f"s3://{s3_bucket}.*AWS_ENDPOINT_URL"):
        await store.keys("")
    with pytest.raises(ObjectStoreUnavailable, match=f"s3://{s3_bucket}/k.*AWS_ENDPOINT_URL"):
        await store.read("k", offset_bytes=0, length_bytes=1)
    await store.aclose()


async def test_a_bucket_that_is_not_there_is_an_error(s3_bucket: str) -> None:
    store = S3Store(bucket=f"{s3_bucket}-not", prefix="p")
    with pytest.raises(ObjectStoreError, match="the bucket does not exist"):
        await store.put("a", b"")
    await store.aclose()


@pytest.mark.parametrize("client", ["boto3", "obstore"])
async def test_without_credentials_the_way_to_give_some_is_said(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = S3Store(bucket=s3_bucket, prefix="", client=client, attempts=3)
    with pytest.raises(ObjectStoreError, match="AWS_PROFILE"):
        await store.get("k", max_bytes=1)
    await store.aclose()


async def test_a_bundle_of_certificates_is_taken_along(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = S3Store(bucket=s3_bucket, prefix="", client="obstore", attempts=1)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(ObjectStoreError, match=r"none\.pem"):
        await store.get("k", max_bytes=1)
    await store.aclose()


# -- names -----------------------------------------------------------------------------------------
def test_which_store_is_meant_is_read_from_the_setting() -> None:
    assert repr(open_store("/srv/copies", setting="s")) == "<DirectoryStore /srv/copies>"
    assert repr(open_store("s3://b/some/where/", setting="s")) == "<S3Store s3://b/some/where/>"
    for where in ("s3://", "s3://b/../c", "gs://bucket", ""):
        with pytest.raises(ValueError, match=r"snapshotter\.snapshot_store"):
            open_store(where, setting="snapshotter.snapshot_store")
    with pytest.raises(ValueError, match="must be one of auto, boto3, obstore"):
        open_store("s3://b", setting="s", client="curl")


def test_blobs_lie_where_the_platform_says(tmp_path: Path) -> None:
    paths = Paths(home=tmp_path, run=tmp_path / "run")
    assert repr(blob_store(PlatformSettings(), paths)) == f"<DirectoryStore {tmp_path}/blobs>"
    assert (
        repr(blob_store(PlatformSettings(blobs="/mnt/all"), paths)) == "<DirectoryStore /mnt/all>"
    )
    assert repr(blob_store(PlatformSettings(blobs="s3://b/p"), paths)) == "<S3Store s3://b/p/>"
    with pytest.raises(SettingsInvalid, match=r"platform\.blobs"):
        blob_store(PlatformSettings(blobs="s3://"), paths)


def test_a_blob_is_filed_under_its_first_digits() -> None:
    assert blob_key("ab" + "0" * 62) == "ab/ab" + "0" * 62
    for wrong in ("ab", "../" + "0" * 61, "A" * 64, "0" * 64 + "\n"):
        with pytest.raises(ValueError, match="64 hex digits"):
            blob_key(wrong)
