"""What the disk says is told in words that help."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.weight_cache.models import chunked, digest_of
from weight_cache.errors import StoreFailed, StoreFull, WeightCacheError
from weight_cache.fetch.file_download import check_room, disk_error, hash_file


@pytest.mark.parametrize(
    "number, kind, said",
    [
        (errno.ENOSPC, StoreFull, "no room for model x"),
        (errno.EDQUOT, StoreFull, "no room for model x"),
        (errno.EACCES, StoreFailed, "Permission denied"),
        (errno.EROFS, StoreFailed, "Read-only"),
        (errno.EIO, StoreFailed, "health"),
    ],
)
def test_errors_of_the_disk(number: int, kind: type[WeightCacheError], said: str) -> None:
    error = disk_error(OSError(number, os.strerror(number)), Path("/disk"), "model x")
    assert type(error) is kind
    assert said in str(error)
    assert "/disk" in str(error)


def test_no_room_is_said_with_both_figures(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    with pytest.raises(StoreFull, match=rf"no room for {10**18} bytes: \d+ are free"):
        check_room(tmp_path, 10**18)


def test_file_on_the_disk_has_the_digest_of_its_content(tmp_path: Path) -> None:
    for content in (b"", b"abc", chunked(b"a", tail=b"")):
        (tmp_path / "f").write_bytes(content)
        assert hash_file(tmp_path / "f") == digest_of(content)
