"""A directory is read as it was listed, or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from weight_cache.errors import ManifestInvalid, SourceInvalid
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.sources import open_source
from weight_cache.sources.directory import DirectorySource
from weight_cache.sources.manifest_builder import build_manifest
from weight_cache.sources.source import SourceFile


def test_ranges_are_read_from_the_file_that_was_listed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b").write_bytes(b"0123456789")
    (tmp_path / "a").touch()
    source = open_source(tmp_path)

    empty, file = source.files()

    assert [(f.path, f.size_bytes) for f in (empty, file)] == [("a", 0), ("sub/b", 10)]
    assert source.read(file, 3, 4) == b"3456"
    assert source.read(empty, 0, 0) == b""
    assert source.name == str(tmp_path)
    source.close()


def test_file_that_changes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")
    source = DirectorySource(tmp_path)
    (listed,) = source.files()
    os.utime(file, ns=(1, 1))
    file.write_bytes(b"new")
    with pytest.raises(SourceInvalid, match="changed while it was read"):
        source.read(listed, 0, 3)
    file.unlink()
    with pytest.raises(SourceInvalid, match="No such file"):
        source.read(listed, 0, 3)


def test_file_that_is_replaced_by_an_equally_long_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    source = DirectorySource(tmp_path)
    (listed,) = source.files()
    (tmp_path / "b").write_bytes(b"new")
    info = (tmp_path / "a").stat()
    os.utime(tmp_path / "b", ns=(info.st_atime_ns, info.st_mtime_ns))
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(SourceInvalid, match="changed"):
        source.read(listed, 0, 3)


def test_a_version_counts_as_lasting_once_it_has_settled(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert [f.is_lasting for f in DirectorySource(tmp_path).files()] == [False]


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceInvalid, match="not a directory"):
        open_source(tmp_path / "nothing")
    with pytest.raises(SourceInvalid, match="unsupported source of weights"):
        open_source("gs://bucket/model")
    with pytest.raises(SourceInvalid, match="contains no files"):
        open_source(tmp_path).files()


class Counting:
    """A source of two files that counts what is read of it, and by how many at once."""

    name = "counting"
    reads_at_once = 4

    def __init__(self, *, is_ranged: bool) -> None:
        self.content = {"a": os.urandom(2 * CHUNK_BYTES + 5), "b": b"", "c": b"c"}
        self.is_ranged = is_ranged
        self.ranges: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def files(self) -> list[SourceFile]:
        return [
            SourceFile(path=p, size_bytes=len(c), version="1", is_ranged=self.is_ranged)
            for p, c in self.content.items()
        ]

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        with self._lock:
            self.ranges.append((file.path, offset_bytes, length_bytes))
        return self.content[file.path][offset_bytes : offset_bytes + length_bytes]

    def close(self) -> None:
        return


@pytest.mark.parametrize("is_ranged", [True, False])
def test_every_byte_is_read_once_and_the_manifest_is_the_directorys(
    tmp_path: Path, *, is_ranged: bool
) -> None:
    source = Counting(is_ranged=is_ranged)
    for path, content in source.content.items():
        (tmp_path / path).write_bytes(content)

    assert build_manifest(source) == build_manifest(tmp_path)

    wanted = [
        ("a", 0, CHUNK_BYTES),
        ("a", CHUNK_BYTES, CHUNK_BYTES),
        ("a", 2 * CHUNK_BYTES, 5),
        ("c", 0, 1),
    ]
    assert sorted(source.ranges) == wanted
    if not is_ranged:
        assert [r for r in source.ranges if r[0] == "a"] == wanted[:3]


def test_the_first_error_ends_the_reading(tmp_path: Path) -> None:
    class Broken(Counting):
        def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
            raise SourceInvalid("gone")

    with pytest.raises(SourceInvalid, match="gone"):
        build_manifest(Broken(is_ranged=True))


def test_only_the_files_that_are_wanted_are_read(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    for path in ("model.safetensors", "config.json", "onnx/model.onnx", "onnx/config.json"):
        (tmp_path / path).write_text(path)
    source = open_source(tmp_path, include=["model.*", "*.json"])

    files = source.files()

    assert [f.path for f in files] == ["config.json", "model.safetensors", "onnx/config.json"]
    assert source.read(files[0], 0, 6) == b"config"
    assert (source.name, source.reads_at_once > 0) == (str(tmp_path), True)
    source.close()
    with pytest.raises(SourceInvalid, match=r"no file '\*\.bin'; it has config\.json, model"):
        open_source(tmp_path, include=["*.bin"]).files()


@pytest.mark.parametrize(
    "paths, said",
    [
        (["../escape"], "plain relative path"),
        (["/etc/passwd"], "plain relative path"),
        (["a//b"], "plain relative path"),
        (["a", "a/b"], "a file and a directory"),
        (["a", "a"], "without duplicates"),
    ],
)
def test_a_source_whose_paths_escape_or_collide_is_refused_before_it_is_read(
    paths: list[str], said: str
) -> None:
    class Wrong(Counting):
        def files(self) -> list[SourceFile]:
            return [SourceFile(path=path, size_bytes=1, version="1") for path in paths]

    source = Wrong(is_ranged=True)
    with pytest.raises(ManifestInvalid, match=said):
        build_manifest(source)
    assert source.ranges == []


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    source = open_source(tmp_path)
    with pytest.raises(SourceInvalid, match="not a file"):
        source.files()
    with pytest.raises(SourceInvalid, match="not a directory"):
        open_source(tmp_path / "a")
