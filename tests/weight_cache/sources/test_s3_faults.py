"""What a store does wrong is asked for again where that may help, and told where it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fakes.faulty_objects import Fault, FaultyObjects, faulty_objects
from weight_cache.errors import SourceInvalid
from weight_cache.sources.s3 import S3Source
from weight_cache.sources.source import SourceFile

CONTENT = os.urandom(100_000)


@pytest.fixture(name="server", scope="module")
def _server() -> Iterator[FaultyObjects]:
    with faulty_objects() as server:
        yield server


@pytest.fixture(name="source", scope="module")
def _source(server: FaultyObjects) -> Iterator[S3Source]:
    """One for all tests: making a client takes longer than they do."""
    source = S3Source(
        bucket=server.bucket,
        prefix="m",
        given=server.environment,
        timeout_s=30.0,
        pause=lambda _: None,
    )
    yield source
    source.close()


@pytest.fixture(name="impatient", scope="module")
def _impatient(server: FaultyObjects) -> Iterator[S3Source]:
    """One that gives silence up soon."""
    source = S3Source(
        bucket=server.bucket,
        prefix="m",
        given=server.environment,
        timeout_s=0.2,
        pause=lambda _: None,
    )
    yield source
    source.close()


@pytest.fixture(name="store")
def _store(server: FaultyObjects) -> FaultyObjects:
    server.objects = {"m/a": CONTENT}
    server.faults.clear()
    server.seen.clear()
    server.etags = server.ranges = server.conditions = True
    return server


@pytest.fixture(name="file")
def _file(store: FaultyObjects, source: S3Source) -> SourceFile:
    assert list(store.objects) == ["m/a"]
    (file,) = source.files()
    return file


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="status", status=503, times=4),
        Fault(kind="status", status=500, times=4),
        Fault(kind="status", status=429, times=4),
        Fault(kind="short", times=2),
        Fault(kind="cut", times=2),
        Fault(kind="reset", times=2),
        Fault(kind="silent"),
        Fault(kind="stalled"),
        Fault(kind="slow"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_what_passes_is_asked_for_again(
    store: FaultyObjects, source: S3Source, impatient: S3Source, file: SourceFile, fault: Fault
) -> None:
    store.fail(fault)
    asked = impatient if fault.kind in ("silent", "stalled") else source
    assert asked.read(file, 10, 50_000) == CONTENT[10:50_010]


@pytest.mark.parametrize(
    "status, said",
    [
        (403, "access refused"),
        (401, "access refused"),
        (404, "no object with that name"),
        (400, "refused"),
    ],
)
def test_a_refusal_is_told_at_once(
    store: FaultyObjects, source: S3Source, file: SourceFile, status: int, said: str
) -> None:
    before = store.count("GET")
    store.fail(Fault(kind="status", status=status, times=9))
    with pytest.raises(SourceInvalid, match=said):
        source.read(file, 0, 10)
    assert store.count("GET") == before + 1


def test_a_storm_that_does_not_pass_is_told(store: FaultyObjects, source: S3Source) -> None:
    store.fail(Fault(kind="status", status=503, times=9))
    with pytest.raises(SourceInvalid, match="temporarily unavailable"):
        source.files()
    assert store.count("GET") == 5


@pytest.mark.parametrize("conditions", [True, False])
def test_an_object_that_is_replaced_meanwhile_is_refused(
    store: FaultyObjects, source: S3Source, file: SourceFile, *, conditions: bool
) -> None:
    store.conditions = conditions
    store.fail(Fault(kind="replaced", content=b"x" * len(CONTENT)))
    with pytest.raises(SourceInvalid, match="changed while it was read"):
        source.read(file, 0, len(CONTENT))


def test_a_store_without_tags_is_read_but_never_remembered(
    store: FaultyObjects, source: S3Source
) -> None:
    store.etags = False
    (file,) = source.files()
    assert (file.version, file.is_lasting) == ("", False)
    assert source.read(file, 5, 5) == CONTENT[5:10]


def test_a_store_without_ranges_is_refused_but_for_whole_objects(
    store: FaultyObjects, source: S3Source, file: SourceFile
) -> None:
    store.ranges = False
    assert source.read(file, 0, len(CONTENT)) == CONTENT
    with pytest.raises(SourceInvalid, match="does not support range requests"):
        source.read(file, 0, 10)
