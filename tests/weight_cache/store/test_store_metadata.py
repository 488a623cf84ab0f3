"""Notes are whole or not there, and say nothing that is not true."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.weight_cache.models import manifest_of
from weight_cache.store.store_metadata import FOLDERS, StoreMetadata
from weight_cache.types import Lease

LEASE = Lease(id="l-1", manifest="m", holder="s", acquired_at=5.0, pid=7, pid_started=70)


@pytest.fixture
def notes(tmp_path: Path) -> StoreMetadata:
    for folder in (*FOLDERS, "tmp"):
        (tmp_path / folder).mkdir()
    count = itertools.count()
    return StoreMetadata(tmp_path, lambda: tmp_path / "tmp" / str(next(count)))


def test_manifest_that_is_not_what_its_name_says_is_none(
    tmp_path: Path, notes: StoreMetadata
) -> None:
    manifest = manifest_of({"w": b"abc"})
    notes.write_manifest(manifest.digest, manifest.to_bytes())
    assert notes.manifest(manifest.digest) == manifest
    (tmp_path / "manifests" / manifest.digest).write_bytes(manifest_of({"w": b"abd"}).to_bytes())
    assert notes.manifest(manifest.digest) is None
    assert notes.manifest("0" * 64) is None


def test_newest_manifests_of_models_that_are_gone_stay_for_a_while(
    tmp_path: Path, notes: StoreMetadata
) -> None:
    for i in range(70):
        notes.write_manifest(f"{i:02}", b"x")
        os.utime(tmp_path / "manifests" / f"{i:02}", (i, i))
    notes.prune_manifests({"00"})
    assert notes.manifests() == ["00", *(f"{i:02}" for i in range(6, 70))]


def test_leases_of_this_boot_are_found_again_and_others_removed(
    tmp_path: Path, notes: StoreMetadata
) -> None:
    notes.write_lease(LEASE)
    text = (tmp_path / "leases" / "l-1").read_text()
    (tmp_path / "leases" / "l-2").write_text(text.replace('"boot": "', '"boot": "another '))
    (tmp_path / "leases" / "l-3").write_text(text[:20])
    (tmp_path / "leases" / "l-4").write_text('{"boot": 1}')
    (tmp_path / "leases" / "l-5").write_text("[]")
    (tmp_path / "leases" / "old").write_text(
        text.replace(', "pid": 7, "pid_started": 70', "").replace("l-1", "old")
    )
    assert [lease.id for lease in notes.leases()] == ["l-1", "old"]
    assert next(notes.leases()) == LEASE
    assert sorted(p.name for p in (tmp_path / "leases").iterdir()) == ["l-1", "old"]
    notes.remove_lease("l-1")
    notes.remove_lease("l-1")


def test_pins_and_position(notes: StoreMetadata) -> None:
    assert (notes.pins(), notes.scrubbed()) == ([], "")
    notes.write_pin("m")
    notes.write_pin("m")
    notes.write_scrub_position("abc")
    notes.write_scrub_position("abd")
    assert (notes.pins(), notes.scrubbed()) == (["m"], "abd")
    notes.remove_pin("m")
    notes.remove_pin("m")
    assert notes.pins() == []


def test_long_manifests_of_models_that_are_gone_are_few(
    tmp_path: Path, notes: StoreMetadata
) -> None:
    for i in range(4):
        notes.write_manifest(f"{i}", b"x")
        os.truncate(tmp_path / "manifests" / f"{i}", 60 * 1024**2)
        os.utime(tmp_path / "manifests" / f"{i}", (i, i))
    notes.prune_manifests({"0"})
    assert notes.manifests() == ["0", "2", "3"]
