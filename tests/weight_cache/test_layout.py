"""What stays of corrupt files is little, and what is removed is removed whatever its mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weight_cache.layout import StoreDirectory
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
