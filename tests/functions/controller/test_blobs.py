"""Blobs in a directory and in S3: in whole, out in ranges, nobody else's."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.controller.weights.blob_download import (
    BlobResponse,
    ByteRange,
    RangeConditions,
    blob_response,
    parse_range,
)
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.object_store import (
    DirectoryStore,
    ObjectInfo,
    ObjectStore,
    blob_key,
    open_store,
)
from pilotlight.core.object_store.errors import ObjectStoreError
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec
from weight_cache.manifest import FileHash
from weight_cache.sources.manifest_builder import build_manifest

DATA = random.Random(1).randbytes(300_000)
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(params=["directory", "s3"])
async def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    where = (
        str(tmp_path / "blobs")
        if request.param == "directory"
        else f"s3://{request.getfixturevalue('s3_bucket')}/the/blobs"
    )
    store = open_store(where, setting="platform.blobs")
    yield store
    await store.aclose()


@pytest.fixture
async def http(controller: Controller) -> httpx.AsyncClient:
    """A client whose tenant has sent DATA."""
    assert (await controller.http.put(f"/v1/blobs/{DIGEST}", content=DATA)).json()["created"]
    return controller.http


async def get(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.get(
        f"/v1/blobs/{DIGEST}",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


# -- in --------------------------------------------------------------------------------------------
async def test_an_upload_lies_in_the_store_and_nowhere_else(
    http: httpx.AsyncClient, controller: Controller, tmp_path: Path
) -> None:
    objects = controller.context.files.objects
    assert await objects.get(blob_key(DIGEST), max_bytes=len(DATA)) == DATA
    files = {p for p in (tmp_path / "blobs").rglob("*") if p.is_file()}
    assert files == {
        p
        for p in (objects.local_path(blob_key(d)) for d in (DIGEST, BUNDLE_DIGEST))
        if p is not None
    }
    assert not (await http.put(f"/v1/blobs/{DIGEST}", content=DATA)).json()["created"]


async def test_wrong_bytes_reach_no_store(controller: Controller) -> None:
    refused = await controller.http.put(f"/v1/blobs/{DIGEST}", content=DATA[1:])
    assert refused.status_code == 400
    assert await controller.context.files.objects.info(blob_key(DIGEST)) is None
    assert not list(controller.context.files.incoming.iterdir())


async def test_what_the_store_lost_or_cut_short_is_taken_in_again(
    http: httpx.AsyncClient, controller: Controller
) -> None:
    objects = controller.context.files.objects
    for harm in (objects.delete(blob_key(DIGEST)), objects.put(blob_key(DIGEST), DATA[:-1])):
        await harm
        assert (await http.head(f"/v1/blobs/{DIGEST}")).status_code == 404
        assert (await get(http)).status_code == 404
        assert (await http.put(f"/v1/blobs/{DIGEST}", content=DATA)).status_code == 200
        assert (await get(http)).content == DATA


async def test_a_deploys_manifest_is_read_from_the_store(
    controller: Controller, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.bin").write_bytes(DATA)
    raw = build_manifest(tmp_path / "model").to_bytes()
    manifest, whole = hashlib.sha256(raw).hexdigest(), FileHash()
    whole.update(DATA)
    await controller.http.put(f"/v1/blobs/{whole.hexdigest()}?chunked=true", content=DATA)
    await controller.http.put(f"/v1/blobs/{manifest}", content=raw)
    functions = {"functions": [spec(weights=[{"name": "w", "manifest": manifest}])]}
    assert (await controller.http.post("/v1/apps/search/deploy", json=functions)).status_code == 200

    await controller.context.files.objects.delete(blob_key(manifest))
    lost = await controller.http.post("/v1/apps/search/deploy", json=functions)
    assert (lost.status_code, lost.json()["missing"]) == (400, {"blob": manifest})


class Gone(DirectoryStore):
    """Refuses everything, after so many reads."""

    reads_left = 0

    def local_path(self, key: str) -> None:  # type: ignore[override]  # as if it were far away
        """Nowhere near."""

    async def info(self, key: str) -> Any:
        raise ObjectStoreError(f"{key}: no answer in 30 s")

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        raise ObjectStoreError(f"{key}: no answer in 30 s")

    async def put_file(self, key: str, path: Path, *, may_move: bool = False) -> None:
        raise ObjectStoreError(f"{key}: no answer in 30 s")

    async def read(
        self, key: str, *, offset_bytes: int, length_bytes: int, etag: str | None = None
    ) -> bytes:
        if self.reads_left == 0:
            raise ObjectStoreError(f"{key}: no answer in 30 s")
        self.reads_left -= 1
        return bytes(length_bytes)


@pytest.mark.parametrize("blobs", ["directory"], indirect=True)
async def test_a_store_that_does_not_answer_is_unavailable_for_now(
    http: httpx.AsyncClient, controller: Controller, tmp_path: Path
) -> None:
    files = replace(controller.context.files, objects=Gone(tmp_path / "gone"))
    gone = Controller(**{**vars(controller), "context": replace(controller.context, files=files)})
    other = b"another"
    async with gone.client(controller.key) as client:
        for request in (
            client.get(f"/v1/blobs/{DIGEST}"),
            client.put(f"/v1/blobs/{hashlib.sha256(other).hexdigest()}", content=other),
        ):
            refused = await request
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "no answer in 30 s" in refused.json()["detail"]
    assert not list(files.incoming.iterdir())


# -- out -------------------------------------------------------------------------------------------
async def test_a_blob_comes_back_whole_or_in_parts(http: httpx.AsyncClient) -> None:
    whole = await get(http)
    assert (whole.status_code, whole.content) == (200, DATA)
    assert (whole.headers["etag"], whole.headers["accept-ranges"]) == (f'"{DIGEST}"', "bytes")
    assert whole.headers["content-length"] == str(len(DATA))
    part = await get(http, range="bytes=100000-299998")
    assert (part.status_code, part.content) == (206, DATA[100_000:299_999])
    assert part.headers["content-range"] == "bytes 100000-299998/300000"
    assert (await get(http, range="bytes=-10")).content == DATA[-10:]
    assert (await get(http, range="bytes=299990-")).content == DATA[-10:]


async def test_a_range_without_a_byte_is_a_problem_that_names_the_size(
    http: httpx.AsyncClient,
) -> None:
    refused = await get(http, range="bytes=300000-")
    assert (refused.status_code, refused.headers["content-range"]) == (416, "bytes */300000")
    assert refused.headers["content-type"] == "application/problem+json"
    assert "300000 bytes" in refused.json()["detail"]


async def test_who_has_it_is_told_so_and_who_has_another_gets_the_whole(
    http: httpx.AsyncClient,
) -> None:
    for known in (f'"{DIGEST}"', f'"x", W/"{DIGEST}"', "*"):
        assert ((has := await get(http, if_none_match=known)).status_code, has.content) == (
            304,
            b"",
        )
    assert (await get(http, range="bytes=0-9", if_range=f'"{DIGEST}"')).content == DATA[:10]
    assert (await get(http, range="bytes=0-9", if_range='"another"')).content == DATA


async def test_an_empty_blob_is_one(controller: Controller) -> None:
    digest = hashlib.sha256(b"").hexdigest()
    await controller.http.put(f"/v1/blobs/{digest}", content=b"")
    assert (
        (found := await controller.http.get(f"/v1/blobs/{digest}")).status_code,
        found.content,
    ) == (200, b"")
    assert (
        await controller.http.get(f"/v1/blobs/{digest}", headers={"range": "bytes=0-"})
    ).status_code == 416


@pytest.mark.parametrize("blobs", ["directory"], indirect=True)
async def test_only_a_tenants_own_deployers_get_a_blob(
    http: httpx.AsyncClient, controller: Controller
) -> None:
    stranger = controller.client(await controller.other_tenant())
    assert (
        (await get(stranger)).status_code
        == (await get(stranger, range="bytes=0-1")).status_code
        == 404
    )
    invoker = controller.client(await controller.new_key(name="ci", scope="invoke"))
    assert (await get(invoker)).status_code == 403
    assert (await get(controller.client(None))).status_code == 401
    await stranger.put(f"/v1/blobs/{DIGEST}", content=DATA)
    assert (await get(stranger)).content == DATA
    assert (await http.get("/v1/blobs/..%2f..%2fplatform.key")).status_code == 404
    assert (await http.get("/v1/blobs/x")).status_code == 400


class Watched(DirectoryStore):
    """As if it were far away; `asked` are the keys that it was asked about."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []

    def local_path(self, key: str) -> None:  # type: ignore[override]
        """Nowhere near."""

    async def info(self, key: str) -> ObjectInfo | None:
        self.asked.append(key)
        return await super().info(key)


@pytest.mark.parametrize("blobs", ["directory"], indirect=True)
async def test_another_tenants_blob_takes_no_other_way_than_none(
    http: httpx.AsyncClient, controller: Controller, tmp_path: Path
) -> None:
    stranger = await controller.other_tenant()
    watched = Watched(tmp_path / "blobs")
    seen = Controller(
        **{
            **vars(controller),
            "context": replace(
                controller.context, files=replace(controller.context.files, objects=watched)
            ),
        }
    )
    async with seen.client(stranger) as client:
        for digest in (DIGEST, "0" * 64):
            assert (await client.head(f"/v1/blobs/{digest}")).status_code == 404
            assert (await client.put(f"/v1/blobs/{digest}", content=b"wrong")).status_code == 400
        assert watched.asked == []
        version = await watched.info(blob_key(DIGEST))
        assert (await client.put(f"/v1/blobs/{DIGEST}", content=DATA)).json()["created"]
        assert await watched.info(blob_key(DIGEST)) == version, (
            "it is not written again, while others read it"
        )


@given(st.binary(max_size=20), st.integers(0, 25), st.integers(0, 25))
def test_ranges_are_those_of_slices(data: bytes, first: int, last: int) -> None:
    for asked, expected in (
        (f"bytes={first}-{last}", data[first : last + 1] if first <= last else data),
        (f"bytes={first}-", data[first:]),
        (f"bytes=-{last}", data[-last:] if last else b""),
    ):
        part = parse_range(len(data), asked)
        assert (data[part.begin : part.end] if part else b"") == expected
        assert part is None or part.is_whole or part.begin < part.end <= len(data)


@pytest.mark.parametrize(
    "asked",
    [
        None,
        "",
        "bytes=",
        "bytes=-",
        "bytes=1-2,4-5",
        "items=0-1",
        "bytes=a-b",
        f"bytes=0-{'9' * 5000}",
    ],
)
def test_what_is_no_single_range_is_ignored(asked: str | None) -> None:
    assert parse_range(10, asked) == ByteRange(begin=0, end=10, is_whole=True)


# -- an answer that ends too early -----------------------------------------------------------------
class Wire:
    """A caller at the other end of ASGI, who leaves after so many messages."""

    def __init__(self, *, leaves_after: int = 1000) -> None:
        self.sent: list[Any] = []
        self._left = asyncio.Event()
        self._leaves_after = leaves_after

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if len(self.sent) >= self._leaves_after:
            self._left.set()
            await asyncio.sleep(3600)

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def far(tmp_path: Path) -> BlobStore:
    """Blobs of a store that answers two reads."""
    store = Gone(tmp_path)
    store.reads_left = 2
    return BlobStore(objects=store, incoming=tmp_path, limit_bytes=1_000_000, read_bytes=70_000)


def everything(files: BlobStore, turn: asyncio.Semaphore | None = None) -> BlobResponse:
    response = blob_response(
        files,
        DIGEST,
        len(DATA),
        RangeConditions(range=None, if_range=None, if_none_match=None),
        turn=turn or asyncio.Semaphore(1),
    )
    assert isinstance(response, BlobResponse)
    return response


async def test_a_store_that_fails_in_the_middle_breaks_the_answer(
    far: BlobStore, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire()
    await everything(far)({"type": "http"}, wire.receive, wire.send)
    assert [len(m.get("body", b"")) for m in wire.sent] == [0, 70_000, 70_000]
    assert all(m["more_body"] for m in wire.sent[1:]), "nothing says that this was all"
    assert "event=download_broken" in caplog.text


async def test_a_download_waits_for_those_that_are_not_read(far: BlobStore) -> None:
    turn, first, second = asyncio.Semaphore(1), Wire(leaves_after=1), Wire()
    # the first one neither reads nor leaves
    stays = everything(far, turn)({"type": "http"}, Wire().receive, first.send)
    held = asyncio.create_task(stays)
    waits = everything(far, turn)({"type": "http"}, second.receive, second.send)
    waiting = asyncio.create_task(waits)
    await asyncio.wait([held, waiting], timeout=0.2)
    assert (len(first.sent), second.sent) == (1, [])
    held.cancel()
    await asyncio.wait([held])
    await waiting
    assert second.sent


async def test_nothing_is_read_for_a_caller_that_left(far: BlobStore) -> None:
    wire = Wire(leaves_after=2)
    store = far.objects
    assert isinstance(store, Gone)
    store.reads_left = 100
    await everything(far)({"type": "http"}, wire.receive, wire.send)
    await asyncio.sleep(0)
    assert store.reads_left >= 98
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_a_bundle_is_as_it_was(controller: Controller) -> None:
    assert (await controller.http.get(f"/v1/blobs/{BUNDLE_DIGEST}")).content == BUNDLE
