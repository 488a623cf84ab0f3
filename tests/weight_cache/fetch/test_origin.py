"""What every origin does, the fake one and the real one alike; and what the real one makes of a
store's failures."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from pilotlight.core.object_store import DirectoryStore, blob_key
from pilotlight.core.object_store.s3 import S3Store
from tests.fakes.faulty_objects import Fault, FaultyObjects, Kind, faulty_objects
from tests.fakes.origins import MemoryOrigin
from tests.fakes.s3_server import OTHER_VARIABLES
from weight_cache.errors import OriginUnavailable
from weight_cache.fetch.origin import ObjectOrigin, Origin
from weight_cache.manifest import CHUNK_BYTES

Put = Callable[[bytes], str]
ATTEMPTS = 3
TIMEOUT_S = 0.5
"""Where the server is silent; where it answers, a busy machine may take its time."""


def put_file(root: Path, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    (root / digest[:2]).mkdir(exist_ok=True)
    (root / digest[:2] / digest).write_bytes(content)
    return digest


@pytest.fixture(params=["memory", "directory"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Origin, Put]:
    if request.param == "memory":
        memory = MemoryOrigin()
        return memory, memory.put
    return ObjectOrigin(DirectoryStore(tmp_path)), lambda content: put_file(tmp_path, content)


# -- every origin ----------------------------------------------------------------------------------
async def test_ranges_are_read(origin: tuple[Origin, Put]) -> None:
    source, put = origin
    blob = put(b"0123456789")
    assert await source.size(blob) == 10
    assert await source.read(blob, offset_bytes=3, length_bytes=4) == b"3456"


async def test_range_past_the_end_is_short(origin: tuple[Origin, Put]) -> None:
    source, put = origin
    blob = put(b"0123456789")
    assert await source.read(blob, offset_bytes=8, length_bytes=4) == b"89"
    assert await source.read(blob, offset_bytes=20, length_bytes=4) == b""


async def test_missing_blob_is_unavailable(origin: tuple[Origin, Put]) -> None:
    source, _ = origin
    for digest in ("0" * 64, "../../etc/passwd"):
        with pytest.raises(OriginUnavailable):
            await source.size(digest)
        with pytest.raises(OriginUnavailable):
            await source.read(digest, offset_bytes=0, length_bytes=1)


# -- the real one, over a directory ----------------------------------------------------------------
async def test_a_blob_replaced_while_it_is_read_is_refused_and_read_anew(tmp_path: Path) -> None:
    origin = ObjectOrigin(DirectoryStore(tmp_path))
    blob = put_file(tmp_path, b"0123456789")
    assert await origin.read(blob, offset_bytes=1, length_bytes=2) == b"12"
    (tmp_path / "new").write_bytes(b"abcdefghijkl")
    (tmp_path / "new").rename(tmp_path / blob[:2] / blob)
    with pytest.raises(
        OriginUnavailable,
        match=rf"blob {blob[:12]} of <DirectoryStore .*> was replaced while it was read",
    ):
        await origin.read(blob, offset_bytes=3, length_bytes=2)
    assert await origin.read(blob, offset_bytes=3, length_bytes=2) == b"de"


async def test_a_blob_that_lost_its_end_is_noticed(tmp_path: Path) -> None:
    origin = ObjectOrigin(DirectoryStore(tmp_path))
    blob = put_file(tmp_path, b"0123456789")
    assert await origin.size(blob) == 10
    (tmp_path / blob[:2] / blob).write_bytes(b"01")
    with pytest.raises(OriginUnavailable, match="was replaced"):
        await origin.read(blob, offset_bytes=0, length_bytes=10)


async def test_a_missing_blob_says_how_to_get_it_back(tmp_path: Path) -> None:
    with pytest.raises(
        OriginUnavailable,
        match=r"blob 000000000000 of <DirectoryStore .*> is missing\. Deploy again",
    ):
        await ObjectOrigin(DirectoryStore(tmp_path)).size("0" * 64)


class HungStore(DirectoryStore):
    """Never answers, as a file system of another machine that went away."""

    asked = 0

    async def read(
        self, key: str, *, offset_bytes: int, length_bytes: int, etag: str | None = None
    ) -> bytes:
        self.asked += 1
        await asyncio.Event().wait()
        return b""


async def test_a_store_without_an_end_of_its_own_is_given_up_too(tmp_path: Path) -> None:
    store = HungStore(tmp_path)
    origin = ObjectOrigin(store, attempts=2, timeout_s=0.01)
    with pytest.raises(OriginUnavailable, match=r"in 2 attempts: no answer within 0\.01 s"):
        await origin.read("0" * 64, offset_bytes=0, length_bytes=1)
    assert store.asked == 2


# -- the real one, over a server that fails --------------------------------------------------------
@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjects]:
    with faulty_objects() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        for name in OTHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        running.objects["warm"] = b"up"
        yield running


async def no_pause(seconds: float) -> None:
    assert seconds >= 0


@contextlib.asynccontextmanager
async def origin_of(server: FaultyObjects, *, timeout_s: float) -> AsyncIterator[ObjectOrigin]:
    store = S3Store(bucket=server.bucket, prefix="", attempts=1, timeout_s=timeout_s)
    # finding credentials is no part of what is timed
    await store.read("warm", offset_bytes=0, length_bytes=1)
    server.seen.clear()
    origin = ObjectOrigin(store, attempts=ATTEMPTS, timeout_s=timeout_s, pause=no_pause)
    yield origin
    await origin.aclose()


@pytest.fixture
async def remote(server: FaultyObjects) -> AsyncIterator[ObjectOrigin]:
    async with origin_of(server, timeout_s=20) as origin:
        yield origin


@pytest.fixture
async def impatient(server: FaultyObjects) -> AsyncIterator[ObjectOrigin]:
    async with origin_of(server, timeout_s=TIMEOUT_S) as origin:
        yield origin


@pytest.fixture
async def soon_patient(server: FaultyObjects) -> AsyncIterator[ObjectOrigin]:
    """Gives silence up soon, and its next answer has longer than a busy machine takes."""
    async with origin_of(server, timeout_s=3 * TIMEOUT_S) as origin:
        yield origin


def put_object(server: FaultyObjects, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    server.objects[blob_key(digest)] = content
    return digest


@pytest.mark.parametrize("kind", ["status", "cut", "reset", "short"])
async def test_what_passes_is_asked_for_again(
    remote: ObjectOrigin, server: FaultyObjects, kind: Kind
) -> None:
    blob = put_object(server, b"0123456789")
    await remote.size(blob)
    server.fail(Fault(kind=kind, times=ATTEMPTS - 1))
    assert await remote.read(blob, offset_bytes=2, length_bytes=8) == b"23456789"
    assert server.count("GET") == ATTEMPTS


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_storm_ends_as_an_error_that_counts_the_attempts(
    remote: ObjectOrigin, server: FaultyObjects, status: int
) -> None:
    blob = put_object(server, b"0123456789")
    server.fail(Fault(kind="status", status=status, times=1000))
    with pytest.raises(
        OriginUnavailable,
        match=rf"blob {blob[:12]} of <S3Store s3://bucket/> could not be read in 3 attempts: .*{status}",
    ):
        await remote.read(blob, offset_bytes=0, length_bytes=8)
    assert server.count("GET") == ATTEMPTS


@pytest.mark.parametrize(
    "status, words", [(403, "access refused"), (404, "is missing. Deploy again"), (400, "refused")]
)
async def test_a_refusal_is_final(
    remote: ObjectOrigin, server: FaultyObjects, status: int, words: str
) -> None:
    blob = put_object(server, b"0123456789")
    server.fail(Fault(kind="status", status=status))
    with pytest.raises(OriginUnavailable, match=words):
        await remote.read(blob, offset_bytes=0, length_bytes=8)
    assert server.count("GET") == 1


@pytest.mark.parametrize("kind", ["silent", "stalled"])
async def test_silence_is_asked_again(
    soon_patient: ObjectOrigin, server: FaultyObjects, kind: Kind
) -> None:
    blob = put_object(server, b"0123456789")
    server.fail(Fault(kind=kind))
    assert await soon_patient.read(blob, offset_bytes=2, length_bytes=8) == b"23456789"
    assert server.count("GET") == 2


@pytest.mark.parametrize("kind", ["silent", "stalled"])
async def test_a_hung_origin_is_given_up(
    impatient: ObjectOrigin, server: FaultyObjects, kind: Kind
) -> None:
    blob = put_object(server, b"0123456789")
    server.fail(Fault(kind=kind, times=1000))
    async with asyncio.timeout(30):
        with pytest.raises(OriginUnavailable, match="could not be read in 3 attempts"):
            await impatient.read(blob, offset_bytes=0, length_bytes=10)


async def test_ranges_of_a_large_blob_are_of_one_version(
    remote: ObjectOrigin, server: FaultyObjects
) -> None:
    blob = put_object(server, b"0123456789")
    assert await remote.read(blob, offset_bytes=0, length_bytes=CHUNK_BYTES) == b"0123456789"
    assert (server.count("HEAD"), server.seen[-1].if_match is not None) == (1, True)
    server.objects[blob_key(blob)] = b"another one"
    with pytest.raises(OriginUnavailable, match="was replaced"):
        await remote.read(blob, offset_bytes=CHUNK_BYTES, length_bytes=CHUNK_BYTES)


async def test_a_small_blob_costs_one_request(remote: ObjectOrigin, server: FaultyObjects) -> None:
    blob = put_object(server, b"0123456789")
    assert await remote.read(blob, offset_bytes=0, length_bytes=10) == b"0123456789"
    assert [one.method for one in server.seen] == ["GET"]


async def test_a_cancelled_read_is_over_at_once(
    remote: ObjectOrigin, server: FaultyObjects
) -> None:
    blob = put_object(server, b"0123456789")
    server.fail(Fault(kind="silent"))
    reading = asyncio.create_task(remote.read(blob, offset_bytes=0, length_bytes=10))
    while not server.count("GET"):
        await asyncio.sleep(0.001)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await remote.read(blob, offset_bytes=0, length_bytes=10) == b"0123456789"


async def test_wrong_bytes_are_for_the_store_to_find(
    remote: ObjectOrigin, server: FaultyObjects
) -> None:
    blob = put_object(server, b"0123456789")
    server.fail(Fault(kind="wrong"))
    assert await remote.read(blob, offset_bytes=0, length_bytes=1) == bytes([0x30 ^ 0xFF])
