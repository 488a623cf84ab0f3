"""Quarantined snapshots: kept for diagnosis, never served.

The reason is written before the directory is moved, so a kill in between leaves a reason without a
snapshot, which the next start removes, and never a snapshot without a reason."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.durability import write_durably
from snapshotter.linux import atomic_directory
from snapshotter.snapshots.manifest import (
    MANIFEST,
    SnapshotInvalid,
    SnapshotManifest,
    parse,
)
from snapshotter.snapshots.memory_report import describe
from snapshotter.types import RevisionKey, SnapshotInfo, SnapshotState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quarantined:
    """One quarantined snapshot. `manifest` is None if it cannot be read; `at`: wall clock."""

    id: str
    reason: str
    at: float
    directory: Path
    image_bytes: int
    manifest: SnapshotManifest | None

    def info(self) -> SnapshotInfo:
        """The API representation; mostly empty if the manifest cannot be read."""
        if self.manifest is not None:
            return info_of(
                self.manifest,
                state=SnapshotState.QUARANTINED,
                last_used_at=self.at,
                reason=self.reason,
            )
        return SnapshotInfo(
            id=self.id,
            revision=RevisionKey(""),
            state=SnapshotState.QUARANTINED,
            in_place=False,
            pages="",
            image_bytes=self.image_bytes,
            reason=self.reason,
            phases_ms={},
            cold_ms=0.0,
            restore_ms=0.0,
            created_at=self.at,
            last_used_at=self.at,
            restores=0,
            remote=False,
            identity={},
            labels={},
        )


def info_of(
    manifest: SnapshotManifest,
    *,
    state: SnapshotState,
    last_used_at: float,
    restores: int = 0,
    remote: bool = False,
    reason: str = "",
) -> SnapshotInfo:
    """The API representation of a manifest."""
    proof = manifest.proof
    launch = manifest.point.get("launch", {})
    is_engine = launch.get("entry", {}).get("engine") is not None
    return SnapshotInfo(
        id=manifest.id,
        revision=manifest.revision,
        state=state,
        in_place=manifest.in_place,
        pages=manifest.pages,
        image_bytes=manifest.image_bytes,
        reason=reason,
        phases_ms=manifest.phases_ms,
        cold_ms=manifest.cold_ms,
        restore_ms=0.0 if proof is None else proof.answer_ms.get(manifest.pages, proof.restore_ms),
        created_at=manifest.created_at,
        last_used_at=last_used_at,
        restores=restores,
        remote=remote,
        identity=manifest.identity.to_json(),
        labels=manifest.labels,
        where="disk, store" if remote else "disk",
        heap_bytes=sum(manifest.heap_bytes.values()),
        heap_why="; ".join(
            describe(manifest, has_weights=bool(launch.get("weights")), is_engine=is_engine)
        ),
    )


def move(
    directory: Path,
    into: Path,
    *,
    manifest: SnapshotManifest | None,
    reason: str,
    now: float | None = None,
) -> Quarantined:
    """Move a snapshot out of the catalog. Blocking. Raises OSError."""
    into.mkdir(mode=0o700, exist_ok=True)
    at = time.time() if now is None else now
    final = into / f"{directory.name}.{secrets.token_hex(4)}"
    write_durably(_reason_file(final), json.dumps({"reason": reason, "at": at}).encode())
    directory.rename(final)
    return Quarantined(
        id=directory.name,
        reason=reason,
        at=at,
        directory=final,
        image_bytes=_bytes_in(final),
        manifest=manifest,
    )


def remove(record: Quarantined) -> None:
    """Delete it. Blocking, idempotent."""
    if record.directory.exists():
        atomic_directory.remove_tree(record.directory)
    _reason_file(record.directory).unlink(missing_ok=True)


def load(directory: Path, key: bytes) -> list[Quarantined]:
    """Load the snapshots quarantined by earlier agents; remove reasons without one. Blocking."""
    records = []
    for reason_file in sorted(directory.glob("sn-*.json")):
        final = reason_file.with_suffix("")
        try:
            body = json.loads(reason_file.read_bytes())
            reason, at = str(body["reason"]), float(body["at"])
        except (OSError, ValueError, KeyError, TypeError):
            reason, at = "the reason cannot be read", 0.0
        if not final.exists():
            reason_file.unlink()
            continue
        record = Quarantined(
            id=final.name.partition(".")[0],
            reason=reason,
            at=at,
            directory=final,
            image_bytes=_bytes_in(final),
            manifest=_manifest(final, key),
        )
        records.append(record)
    return records


def _manifest(directory: Path, key: bytes) -> SnapshotManifest | None:
    try:
        return parse((directory / MANIFEST).read_bytes(), key)
    except (OSError, SnapshotInvalid):
        return None


def _reason_file(final: Path) -> Path:
    return final.with_name(f"{final.name}.json")


def _bytes_in(directory: Path) -> int:
    return sum(p.lstat().st_size for p in directory.rglob("*") if not p.is_dir())
