"""A kept manifest is used for exactly the files it was made of, and never believed when it is
damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pilotlight.packaging.manifest_cache import ManifestCache
from weight_cache.manifest import Manifest, ManifestFile
from weight_cache.sources import SourceFile

SOURCE = "s3://bucket/m"
FILES = [SourceFile(path="a", size_bytes=1, version="1")]


@pytest.fixture(name="cache")
def _cache(tmp_path: Path) -> ManifestCache:
    return ManifestCache(directory=tmp_path / "manifests", max_entries=3)


def manifest_of(digit: str = "1") -> Manifest:
    return Manifest(files=(ManifestFile(path="a", size_bytes=1, chunk_sha256s=(digit * 64,)),))


def test_what_was_kept_is_found_for_the_same_versions_only(cache: ManifestCache) -> None:
    assert cache.get(SOURCE, FILES) is None
    cache.put(SOURCE, FILES, manifest_of())

    assert cache.get(SOURCE, FILES) == manifest_of()
    assert cache.get("s3://bucket/other", FILES) is None
    assert cache.get(SOURCE, [SourceFile(path="a", size_bytes=1, version="2")]) is None
    cache.forget(SOURCE, FILES)
    assert cache.get(SOURCE, FILES) is None


def test_versions_that_do_not_last_are_not_kept(cache: ManifestCache) -> None:
    files = [SourceFile(path="a", size_bytes=1, version="1", is_lasting=False)]
    cache.put(SOURCE, files, manifest_of())
    assert cache.get(SOURCE, files) is None


@pytest.mark.parametrize("position", [0, 10, 70, 90, 200])
def test_a_damaged_entry_counts_as_absent(cache: ManifestCache, position: int) -> None:
    cache.put(SOURCE, FILES, manifest_of())
    (entry,) = cache.directory.iterdir()
    content = bytearray(entry.read_bytes())
    content[position % len(content)] ^= 1
    entry.write_bytes(content)
    assert cache.get(SOURCE, FILES) is None
    entry.write_bytes(b"")
    assert cache.get(SOURCE, FILES) is None


def test_an_entry_of_other_files_counts_as_absent(cache: ManifestCache) -> None:
    cache.put(
        SOURCE,
        FILES,
        Manifest(files=(ManifestFile(path="b", size_bytes=1, chunk_sha256s=("1" * 64,)),)),
    )
    assert cache.get(SOURCE, FILES) is None


def test_what_was_used_least_recently_goes_first(cache: ManifestCache) -> None:
    for age, source in enumerate(("one", "two", "three")):
        cache.put(source, FILES, manifest_of())
        newest = max(cache.directory.iterdir(), key=lambda p: p.stat().st_mtime_ns)
        os.utime(newest, (age, age))
    assert cache.get("one", FILES) is not None  # used just now
    cache.put("four", FILES, manifest_of())

    assert [cache.get(source, FILES) is not None for source in ("one", "two", "three", "four")] == [
        True,
        False,
        True,
        True,
    ]


def test_too_many_bytes_are_too_many_entries(tmp_path: Path) -> None:
    cache = ManifestCache(directory=tmp_path, max_bytes=600)
    for source in "abcdef":
        cache.put(source, FILES, manifest_of())
    assert 0 < sum(p.stat().st_size for p in tmp_path.iterdir()) <= 600


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = ManifestCache.of_user({"XDG_CACHE_HOME": str(tmp_path / "file")})
    cache.put(SOURCE, FILES, manifest_of())
    assert cache.get(SOURCE, FILES) is None
