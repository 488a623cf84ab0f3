"""What stays of corrupt files is little, and what is removed is removed whatever its mode."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.core.disk_floor import BelowFloor, DiskFloor
from weight_cache.manifest import Manifest, ManifestFile
from weight_cache.store.disk_eviction import EvictionPlan
from weight_cache.store.layout import LinkingStopped, StoreDirectory


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
    graves = directory.bury(
        EvictionPlan(
            models=("m", "not here"),
            files=("f", "nor this"),
            partials=("p", "nor that"),
            size_bytes=0,
        )
    )
    for folder in ("models", "files", "partial"):
        assert list((directory.root / folder).iterdir()) == []
    assert len(graves) == len(list((directory.root / "tmp").iterdir())) == 3
    directory.remove(*graves)
    assert list((directory.root / "tmp").iterdir()) == []


def many_folders(directory: StoreDirectory, count: int) -> Manifest:
    """A model of that many directories, all of whose files are one empty one, which is here."""
    files = tuple(
        ManifestFile(path=f"{n:05d}/f", size_bytes=0, chunk_sha256s=()) for n in range(count)
    )
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


class FewNames:
    """os.link(2) of a file system on which a file has `most` names, as ext4 has 65,000."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.link = os.link

    def __call__(self, source: Path, path: Path) -> None:
        if source.stat().st_nlink >= self.most:
            raise OSError(errno.EMLINK, "Too many links", str(source))
        self.link(source, path)


def test_a_model_whose_file_has_all_the_names_that_it_may_have_gets_a_copy_of_it(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", FewNames(4))
    manifest = many_folders(directory, 7)
    shared = directory.file(manifest.files[0].digest)
    shared.write_bytes(b"weights")
    directory.reseal(shared)
    directory.publish_model("m", manifest)
    directory.publish_model("another tenant's", manifest)
    linked = sorted((directory.root / "models").glob("*/*/f"))
    assert [path.read_bytes() for path in linked] == [b"weights"] * 14
    assert all(directory.is_sealed(path, 7) for path in (*linked, shared))
    assert len({path.stat().st_ino for path in linked}) == 5, (
        "each file has three names beside its own"
    )
    assert list((directory.root / "tmp").iterdir()) == []


def test_no_copy_is_made_below_the_floor_of_the_disk_or_when_it_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", FewNames(1))
    stopped = threading.Event()

    disk = [100, 1000]

    def free(_: Path) -> int:
        stopped.set()
        return disk[0]

    directory = StoreDirectory(tmp_path, floor=DiskFloor(tmp_path, 100, free=free))
    try:
        manifest = many_folders(directory, 1)
        directory.file(manifest.files[0].digest).write_bytes(b"weights")
        for error in (BelowFloor, LinkingStopped):
            with pytest.raises(error):
                directory.publish_model("m", manifest, stopped)
            stopped.clear()
            disk.pop(0)
            assert [list((directory.root / folder).iterdir()) for folder in ("tmp", "models")] == [
                [],
                [],
            ]
    finally:
        directory.close()


def test_linking_ends_when_the_disk_falls_below_its_floor(tmp_path: Path) -> None:
    looks = iter([(2000, 10_000), (1500, 10_000), (999, 10_000)])
    directory = StoreDirectory(
        tmp_path, floor=DiskFloor(tmp_path, 1, inodes=lambda _: next(looks, (999, 10_000)))
    )
    try:
        with pytest.raises(BelowFloor):
            directory.publish_model("m", many_folders(directory, 300))
        assert [list((directory.root / folder).iterdir()) for folder in ("tmp", "models")] == [
            [],
            [],
        ]
    finally:
        directory.close()
