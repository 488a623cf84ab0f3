"""Identities, manifests and snapshots in the shape of real ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from snapshotter.snapshots.catalog import Catalog, Snapshot
from snapshotter.snapshots.identity import Identity
from snapshotter.snapshots.manifest import FileMark, Proof, SnapshotManifest
from snapshotter.snapshots.mapped_files import BindMounts

KEY = b"k" * 32
NO_BINDS = BindMounts(())
FILES = {
    "core-1.img": b"core" * 500,
    "pages-1.img": bytes(range(256)) * 40,
    "mm-1.img": b"mm" * 100,
}


def identity(**changes: str) -> Identity:
    values = {f.name: f"{f.name} of it" for f in fields(Identity)}
    return Identity(**{**values, "revision": "fn-1@r1", **changes})


def draft(**changes: Any) -> SnapshotManifest:
    values: dict[str, Any] = {
        "identity": identity(),
        "created_at": 1000.0,
        "in_place": False,
        "point": {"pid": 1001, "threads": [], "phases_ms": {"import": 3.5}},
        "cold_ms": 5400.0,
        "labels": {"app": "demo"},
    }
    return SnapshotManifest(**{**values, **changes})


def mark(text: str = "a") -> FileMark:
    return FileMark(bytes=5, sha256=(text * 64)[:64])


def proof() -> Proof:
    return Proof(at=1001.0, answer_ms={"eager": 150.0, "lazy": 200.0}, restore_ms=90.0)


async def publish(
    catalogue: Catalog,
    *,
    images: Mapping[str, bytes] = FILES,
    files_tar: bytes = b"tar",
    now: float = 1000.0,
    **changes: Any,
) -> Snapshot:
    """Published, not proven."""
    async with catalogue.stage() as stage:
        for name, content in images.items():
            (stage.images / name).write_bytes(content)
        stage.files_tar.write_bytes(files_tar)
        return await catalogue.publish(stage, draft(**changes), now=now)


async def ready(catalogue: Catalog, **changes: Any) -> Snapshot:
    """Published and proven."""
    snapshot = await publish(catalogue, **changes)
    return await catalogue.mark_proven(
        snapshot.id, proof(), pages="eager", phases_ms={"prove": 300.0}
    )
