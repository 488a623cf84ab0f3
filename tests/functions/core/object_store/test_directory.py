"""What only a directory of objects does: files, their modes, and disks that refuse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.core.object_store import DirectoryStore
from pilotlight.core.object_store.errors import ObjectChanged, ObjectNotFound, ObjectStoreError


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """A disk that refuses to take more, as far as this process can tell (Python ignores
    SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_refuses_leaves_what_was_there(
    store: DirectoryStore, tmp_path: Path
) -> None:
    await store.put("k", b"old")
    (tmp_path / "large").write_bytes(bytes(100_000))
    with files_of_at_most(10_000):
        with pytest.raises(ObjectStoreError, match="k cannot be written: File too large"):
            await store.put("k", bytes(100_000))
        with pytest.raises(ObjectStoreError, match="k cannot be written: File too large"):
            await store.put_file("k", tmp_path / "large")
    assert await store.get("k", max_bytes=10) == b"old"
    assert os.listdir(tmp_path / "store") == ["k"]


async def test_a_fetch_onto_a_disk_that_refuses_leaves_no_file(
    store: DirectoryStore, tmp_path: Path
) -> None:
    await store.put("k", bytes(100_000))
    with files_of_at_most(10_000), pytest.raises(ObjectStoreError, match="File too large"):
        await store.fetch("k", tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_root_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = DirectoryStore(tmp_path / "file")
    with pytest.raises(ObjectStoreError, match="cannot be written"):
        await store.put("k", b"")
    with pytest.raises(ObjectNotFound):
        await store.get("k", max_bytes=1)
    assert await store.info("k") is None
    await store.delete("k")


async def test_a_file_is_given_away_without_a_copy(store: DirectoryStore, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"content")
    inode = (tmp_path / "in").stat().st_ino
    await store.put_file("a/b", tmp_path / "in", may_move=True)
    assert not (tmp_path / "in").exists()
    assert (tmp_path / "store/a/b").stat().st_ino == inode


async def test_files_are_private(store: DirectoryStore) -> None:
    await store.put("k", b"")
    assert store.local_path("k").stat().st_mode & 0o777 == 0o600


async def test_unfinished_files_are_not_listed(store: DirectoryStore, tmp_path: Path) -> None:
    await store.put("a/k", b"")
    (tmp_path / "store/a/.k.0123").write_bytes(b"half")
    assert await store.keys("") == ["a/k"]


async def test_an_object_that_changes_in_place_is_noticed(store: DirectoryStore) -> None:
    await store.put("k", b"one")
    info = await store.info("k")
    assert info is not None
    os.utime(store.local_path("k"), ns=(1, 1))
    with pytest.raises(ObjectChanged):
        await store.read("k", offset_bytes=0, length_bytes=3, etag=info.etag)


KILLED = """
import asyncio, os, sys
from pathlib import Path
from pilotlight.core.object_store import DirectoryStore
os.fsync = lambda descriptor: os.kill(os.getpid(), 9)  # what was written is not on the disk yet
asyncio.run(DirectoryStore(Path(sys.argv[1])).put("k", b"new"))
"""


async def test_a_kill_in_the_middle_of_a_put_leaves_the_old_object(
    store: DirectoryStore, tmp_path: Path
) -> None:
    await store.put("k", b"old")
    argv = [sys.executable, "-c", KILLED, str(tmp_path / "store")]
    done = await asyncio.to_thread(subprocess.run, argv, cwd=Path(__file__).parents[4], check=False)
    assert done.returncode == -9
    assert await store.get("k", max_bytes=3) == b"old"
    assert await store.keys("") == ["k"]


async def test_what_is_no_file_of_the_store_is_not_read(
    store: DirectoryStore, tmp_path: Path
) -> None:
    """Who writes there may have fewer rights than who reads."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret").write_text("root's own")
    await store.put("aa/real", b"bytes")
    root = store.local_path("aa/real").parents[1]
    (root / "aa/link").symlink_to(tmp_path / "elsewhere/secret")
    (root / "bb").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(root / "aa/pipe")
    for key in ("aa/link", "bb/secret", "aa/pipe"):
        for work in (
            store.get(key, max_bytes=99),
            store.read(key, offset_bytes=0, length_bytes=9),
            store.info(key),
        ):
            with pytest.raises(ObjectStoreError, match="cannot be"):
                await work
        with pytest.raises(ObjectStoreError):
            await store.fetch(key, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    assert await store.get("aa/real", max_bytes=99) == b"bytes"
