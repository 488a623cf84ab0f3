"""What stays of corrupt files is little, and what is removed is removed whatever its mode."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weight_cache.disk import BelowFloor, DiskFloor
from weight_cache.layout import LinkingStopped, StoreDirectory
from weight_cache.manifest import Manifest, ManifestFile
from weight_cache.victims import Removal


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    opened = StoreDirectory(tmp_path)
    yield opened
    opened.close()
    opened.close()


def put(directory: StoreDirectory, digest: str, *, size_bytes: int = 10) -> None:
    directory.file(digest).touch()
    os.truncate(directory.file(digest), size_bytes)


def test_newest_two_corrupt_files_are_kept(directory: StoreDirectory) -> None:
    for i in range(4):
        put(directory, f"f{i}")
        directory.quarantine(f"f{i}")
        os.utime(directory.root / "quarantine" / f"f{i}", (i, i))
    directory.quarantine("gone")
    directory.trim_quarantine()
    assert sorted(p.name for p in (directory.root / "quarantine").iterdir()) == ["f2", "f3"]


def test_huge_corrupt_file_is_not_kept(directory: StoreDirectory) -> None:
    put(directory, "huge", size_bytes=3 * 1024**3)
    directory.quarantine("huge")
    directory.trim_quarantine()
    assert list((directory.root / "quarantine").iterdir()) == []


def test_names_go_at_once_and_remains_later(directory: StoreDirectory) -> None:
    put(directory, "f")
    (directory.root / "partial" / "p").touch()
    (directory.root / "partial" / "p.done").touch()
    (directory.model("m") / "sub").mkdir(parents=True)
    (directory.model("m") / "sub" / "w").hardlink_to(directory.file("f"))
    (directory.model("m") / "sub").chmod(0o555)
    directory.settle("m")
    graves = directory.bury(Removal(models=("m", "not here"), files=("f", "nor this"), partials=("p", "nor that"), size_bytes=0))
    for folder in ("models", "files", "partial"):
        assert list((directory.root / folder).iterdir()) == []
    assert len(graves) == len(list((directory.root / "tmp").iterdir())) == 3
    directory.remove(*graves)
    assert list((directory.root / "tmp").iterdir()) == []


def many_folders(directory: StoreDirectory, count: int) -> Manifest:
    """A model of that many directories, all of whose files are one empty one, which is here."""
    files = tuple(ManifestFile(path=f"{n:05d}/f", size_bytes=0, chunk_sha256s=()) for n in range(count))
    directory.file(files[0].digest).touch()
    return Manifest(files=files)


def test_linking_ends_when_it_is_not_waited_for(directory: StoreDirectory) -> None:
    manifest = many_folders(directory, 3)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(LinkingStopped):
        directory.publish_model("m", manifest, stopped)
    assert [list((directory.root / folder).iterdir()) for folder in ("tmp", "models")] == [[], []]
    directory.publish_model("m", manifest)
    assert len(list(directory.model("m").iterdir())) == 3


def test_linking_ends_when_the_disk_falls_below_its_floor(tmp_path: Path) -> None:
    looks = iter([(2000, 10_000), (1500, 10_000), (999, 10_000)])
    directory = StoreDirectory(tmp_path, floor=DiskFloor(tmp_path, 1, inodes=lambda _: next(looks, (999, 10_000))))
    try:
        with pytest.raises(BelowFloor):
            directory.publish_model("m", many_folders(directory, 300))
        assert [list((directory.root / folder).iterdir()) for folder in ("tmp", "models")] == [[], []]
    finally:
        directory.close()
