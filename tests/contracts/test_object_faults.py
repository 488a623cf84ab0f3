"""What goes wrong between us and an object store, chosen fault by fault: the same errors with each
client that reads it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.object_store.errors import (
    ObjectChanged,
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreUnavailable,
)
from pilotlight.core.object_store.s3 import S3Store
from tests.fakes.faulty_objects import Fault, FaultyObjects, Kind, Pauses, faulty_objects
from tests.fakes.s3_server import OTHER_VARIABLES

CONTENT = bytes(range(256)) * 1024
ATTEMPTS = 3
TIMEOUT_S = 1.0
"""Where the server is silent; where it answers, a busy machine may take its time."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyObjects]:
    with faulty_objects() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        for name in OTHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        running.objects["p/k"] = CONTENT
        yield running


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@contextlib.asynccontextmanager
async def store_of(
    server: FaultyObjects, client: str, pauses: Pauses, *, timeout_s: float
) -> AsyncIterator[S3Store]:
    store = S3Store(
        bucket=server.bucket,
        prefix="p",
        client=client,
        attempts=ATTEMPTS,
        timeout_s=timeout_s,
        part_bytes=100_000,
        pause=pauses,
    )
    await read(store)  # finding credentials is no part of what is timed
    server.seen.clear()
    yield store
    await store.aclose()


@pytest.fixture(params=["boto3", "obstore"])
async def store(
    request: pytest.FixtureRequest, server: FaultyObjects, pauses: Pauses
) -> AsyncIterator[S3Store]:
    async with store_of(server, request.param, pauses, timeout_s=20) as store:
        yield store


@pytest.fixture(params=["boto3", "obstore"])
async def impatient(
    request: pytest.FixtureRequest, server: FaultyObjects, pauses: Pauses
) -> AsyncIterator[S3Store]:
    async with store_of(server, request.param, pauses, timeout_s=TIMEOUT_S) as store:
        yield store


async def read(store: S3Store, *, etag: str | None = None) -> bytes:
    return bytes(await store.read("k", offset_bytes=100, length_bytes=1000, etag=etag))


# -- what may pass ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="status", status=500),
        Fault(kind="status", status=503, times=ATTEMPTS - 1),
        Fault(kind="status", status=429),
        Fault(kind="cut"),
        Fault(kind="reset"),
    ],
    ids=lambda fault: fault.kind,
)
async def test_what_passes_is_asked_for_again(
    store: S3Store, server: FaultyObjects, fault: Fault
) -> None:
    failures = fault.times
    server.fail(fault)
    assert await read(store) == CONTENT[100:1100]
    assert server.count("GET") == failures + 1


@pytest.mark.parametrize("kind", ["silent", "stalled"])
async def test_silence_is_asked_again(
    impatient: S3Store, server: FaultyObjects, kind: Kind
) -> None:
    server.fail(Fault(kind=kind))
    assert await read(impatient) == CONTENT[100:1100]
    assert server.count("GET") == 2


async def test_a_slow_answer_is_waited_for(impatient: S3Store, server: FaultyObjects) -> None:
    # longer than the timeout in all, but never silent for as long
    server.fail(Fault(kind="slow", pause_s=TIMEOUT_S / 5))
    assert await read(impatient) == CONTENT[100:1100]
    assert server.count("GET") == 1


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_storm_ends_the_patience(
    store: S3Store, server: FaultyObjects, pauses: Pauses, status: int
) -> None:
    server.fail(Fault(kind="status", status=status, times=100))
    with pytest.raises(ObjectStoreUnavailable, match=rf"s3://bucket/p/k: .*{status}"):
        await read(store)
    assert server.count("GET") == ATTEMPTS
    assert len(pauses) <= ATTEMPTS - 1
    assert all(0 <= pause <= 1 for pause in pauses)


async def test_writes_are_insisted_on_too(store: S3Store, server: FaultyObjects) -> None:
    server.fail(
        *(Fault(kind="status", method=method) for method in ("PUT", "HEAD", "DELETE")),
        Fault(kind="status", key=""),
    )
    await store.put("new", b"value")
    info = await store.info("new")
    assert info is not None
    assert info.size_bytes == 5
    assert await store.keys("n") == ["new"]
    await store.delete("new")
    assert set(server.objects) == {"p/k"}


# -- what does not pass ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "status, expected, words",
    [
        (404, ObjectNotFound, "p/k is missing"),
        (403, ObjectStoreError, "access refused .AccessDenied.*need permission to get"),
        (401, ObjectStoreError, "access refused .InvalidToken"),
        (400, ObjectStoreError, "the store refused .400"),
        (301, ObjectStoreError, "301|AWS_DEFAULT_REGION"),
    ],
)
async def test_a_refusal_is_final(
    store: S3Store, server: FaultyObjects, status: int, expected: type[ObjectStoreError], words: str
) -> None:
    server.fail(Fault(kind="status", status=status))
    with pytest.raises(expected, match=words) as caught:
        await read(store)
    assert type(caught.value) is expected
    assert server.count("GET") == 1


async def test_a_missing_bucket_is_not_a_missing_object(
    store: S3Store, server: FaultyObjects
) -> None:
    server.fail(Fault(kind="status", status=404, code="NoSuchBucket"))
    with pytest.raises(ObjectStoreError, match="the bucket does not exist") as caught:
        await read(store)
    assert not isinstance(caught.value, ObjectNotFound)


async def test_a_refused_listing_and_a_refused_write_are_final(
    store: S3Store, server: FaultyObjects
) -> None:
    server.fail(
        Fault(kind="status", status=403, key=""), Fault(kind="status", status=403, method="PUT")
    )
    with pytest.raises(ObjectStoreError, match="access refused"):
        await store.keys("")
    with pytest.raises(ObjectStoreError, match="access refused"):
        await store.put("new", b"")
    assert (server.count("GET"), server.count("PUT")) == (1, 1)


async def test_wrong_bytes_are_for_the_caller_to_find(
    store: S3Store, server: FaultyObjects
) -> None:
    server.fail(Fault(kind="wrong"))
    assert await read(store) == bytes(b ^ 0xFF for b in CONTENT[100:1100])


async def test_a_server_without_ranges_is_named(store: S3Store, server: FaultyObjects) -> None:
    server.ranges = False
    with pytest.raises(ObjectStoreError, match="must support Range"):
        await read(store)


# -- versions --------------------------------------------------------------------------------------
async def test_a_replaced_object_is_noticed(store: S3Store, server: FaultyObjects) -> None:
    info = await store.info("k")
    assert info is not None
    server.fail(Fault(kind="replaced", content=b"other" * 1000))
    with pytest.raises(ObjectChanged, match="p/k was replaced"):
        await read(store, etag=info.etag)
    assert server.seen[-1].if_match == info.etag
    assert server.count("GET") == 1


async def test_a_replaced_object_is_noticed_where_conditions_are_ignored(
    store: S3Store, server: FaultyObjects
) -> None:
    server.conditions = False
    info = await store.info("k")
    assert info is not None
    server.objects["p/k"] = b"other" * 1000
    with pytest.raises(ObjectChanged, match="p/k was replaced"):
        await read(store, etag=info.etag)


async def test_without_tags_there_are_no_versions(store: S3Store, server: FaultyObjects) -> None:
    server.etags = False
    info = await store.info("k")
    assert info is not None
    assert info.etag == ""
    assert await read(store, etag=info.etag) == CONTENT[100:1100]
    assert server.seen[-1].if_match is None


async def test_a_weak_tag_is_compared_and_not_sent(store: S3Store, server: FaultyObjects) -> None:
    with pytest.raises(ObjectChanged):
        await read(store, etag='W/"1"')
    assert server.seen[-1].if_match is None


# -- whole files -----------------------------------------------------------------------------------
async def test_a_fetch_survives_what_passes(
    store: S3Store, server: FaultyObjects, tmp_path: Path
) -> None:
    server.fail(Fault(kind="status", status=503), Fault(kind="cut"), Fault(kind="reset"))
    await store.fetch("k", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "fault, expected",
    [
        (Fault(kind="status", status=403), ObjectStoreError),
        (Fault(kind="status", status=503, times=100), ObjectStoreUnavailable),
        (Fault(kind="replaced", content=os.urandom(len(CONTENT))), ObjectChanged),
        (Fault(kind="replaced", content=b""), ObjectStoreError),
    ],
    ids=["403", "503", "replaced", "emptied"],
)
async def test_a_fetch_that_fails_leaves_no_file(
    store: S3Store,
    server: FaultyObjects,
    tmp_path: Path,
    fault: Fault,
    expected: type[ObjectStoreError],
) -> None:
    server.fail(fault)
    with pytest.raises(expected):
        await store.fetch("k", tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_fetch_to_nowhere_says_so(
    store: S3Store, server: FaultyObjects, tmp_path: Path
) -> None:
    with pytest.raises(ObjectStoreError, match="No such file or directory"):
        await store.fetch("k", tmp_path / "nowhere" / "out")
    assert server.count("GET") == 0


# -- cancelling and closing ------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["silent", "stalled"])
async def test_a_cancelled_read_is_over_at_once_and_the_store_goes_on(
    store: S3Store, server: FaultyObjects, kind: Kind
) -> None:
    server.fail(Fault(kind=kind))
    reading = asyncio.create_task(read(store))
    while not server.count("GET"):
        await asyncio.sleep(0.001)
    reading.cancel()
    began = asyncio.get_running_loop().time()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert asyncio.get_running_loop().time() - began < 10
    assert await read(store) == CONTENT[100:1100]


async def test_long_listings_come_in_pages(store: S3Store, server: FaultyObjects) -> None:
    server.page_size = 3
    server.objects = {f"p/k{i}": b"" for i in range(10)}
    assert await store.keys("k") == [f"k{i}" for i in range(10)]
    assert server.count("GET") == 4


class Counted(ThreadPoolExecutor):
    """One thread. `jobs` were given to it; `begun` is set when they are `expected`."""

    def __init__(self, expected: int) -> None:
        super().__init__(1)
        self._expected = expected
        self.jobs = 0
        self.begun = asyncio.Event()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Executor."""
        self.jobs += 1
        if self.jobs == self._expected:
            self.begun.set()
        return super().submit(*args, **kwargs)


async def test_a_fetch_that_is_left_writes_to_no_file_that_is_opened_after_it(
    store: S3Store, tmp_path: Path
) -> None:
    free = threading.Event()
    threads = Counted(expected=2)
    asyncio.get_running_loop().set_default_executor(threads)
    busy = asyncio.get_running_loop().run_in_executor(None, free.wait)
    fetching = asyncio.create_task(store.fetch("k", tmp_path / "fetched"))
    await threads.begun.wait()  # a part came, and waits for a thread to write it

    fetching.cancel()
    asyncio.get_running_loop().call_later(0.05, free.set)
    with pytest.raises(asyncio.CancelledError):
        await fetching
    with (tmp_path / "another").open("wb") as another:
        free.set()
        await busy
        await asyncio.to_thread(os.fsync, another.fileno())

    assert (tmp_path / "another").read_bytes() == b""
    assert not (tmp_path / "fetched").exists()


async def test_uploads_at_once_read_no_more_than_is_being_sent(
    server: FaultyObjects, tmp_path: Path
) -> None:
    threads = Counted(expected=2)
    asyncio.get_running_loop().set_default_executor(threads)
    (tmp_path / "file").write_bytes(CONTENT)
    server.fail(Fault(kind="silent", times=2, method="PUT"))
    store = S3Store(
        bucket=server.bucket, prefix="p", client="boto3", attempts=1, timeout_s=TIMEOUT_S, at_once=2
    )

    uploads = [asyncio.create_task(store.put_file(f"new-{n}", tmp_path / "file")) for n in range(6)]
    done, _ = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
    jobs = threads.jobs
    ended = await asyncio.gather(*uploads, return_exceptions=True)
    await store.aclose()

    assert len(done) <= 2
    assert jobs <= 4  # those that were silent, and who came after them
    assert [type(each) for each in ended] == [ObjectStoreUnavailable] * 2 + [type(None)] * 4
