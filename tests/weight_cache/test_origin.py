"""What every origin does, the fake one and the real one alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.origins import MemoryOrigin
from weight_cache.errors import OriginUnavailable
from weight_cache.objects import DirectoryStore
from weight_cache.origin import ObjectOrigin, Origin

Put = Callable[[bytes], str]


@pytest.fixture(params=["memory", "directory"])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Origin, Put]:
    if request.param == "memory":
        memory = MemoryOrigin()
        return memory, memory.put

    def put(content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        (tmp_path / digest[:2]).mkdir(exist_ok=True)
        (tmp_path / digest[:2] / digest).write_bytes(content)
        return digest

    return ObjectOrigin(DirectoryStore(tmp_path)), put


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
