"""One snapshot in its directory, and the errors of the shelf that it stands on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from snapshotter.linux import atomic_directory
from snapshotter.snapshots.manifest import FILES_TAR, IMAGES, MANIFEST, SnapshotManifest
from snapshotter.snapshots.quarantine import info_of
from snapshotter.types import SnapshotInfo, SnapshotState


class CatalogLocked(Exception):
    """Raised when another agent holds the directory."""


class DiskBudgetExceeded(Exception):
    """Raised when a snapshot does not fit into the disk budget, whatever unused ones go."""


class SnapshotCorrupt(Exception):
    """Raised when a snapshot was found damaged just now; it has been moved aside."""


class LibraryChanged(Exception):
    """Raised when a file that a snapshot maps is another one now; `field` is `file:<in-slot
    path>`."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} changed since the snapshot was made: it is mapped by the process, which "
            f"cannot come back without it"
        )
        self.field = f"file:{path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot on this node. `last_used_at`: wall clock; `restores`: since the agent began;
    `remote`: a copy is known to exist."""

    manifest: SnapshotManifest
    directory: Path
    state: SnapshotState
    last_used_at: float
    restores: int = 0
    remote: bool = False

    @property
    def id(self) -> str:
        """Of the content."""
        return self.manifest.id

    @property
    def images(self) -> Path:
        """CRIU's directory."""
        return self.directory / IMAGES

    @property
    def files_tar(self) -> Path:
        """The slot's writable tree as of the snapshot point."""
        return self.directory / FILES_TAR

    def info(self) -> SnapshotInfo:
        """For the door."""
        return info_of(
            self.manifest,
            state=self.state,
            last_used_at=self.last_used_at,
            restores=self.restores,
            remote=self.remote,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStaging:
    """Where a snapshot is being made: `images/` (there, empty) and `files.tar` (to be written by
    its maker)."""

    work: atomic_directory.StagingDirectory

    @property
    def images(self) -> Path:
        """CRIU's directory."""
        return self.work.directory / IMAGES

    @property
    def files_tar(self) -> Path:
        """To be written; a snapshot without files has none."""
        return self.work.directory / FILES_TAR


def files_of(directory: Path) -> list[Path]:
    """What a manifest is to name of a directory that was written. Raises OSError."""
    files = sorted((directory / IMAGES).iterdir())
    return [*files, directory / FILES_TAR] if (directory / FILES_TAR).exists() else files


def has_nothing_else(snapshot: Snapshot) -> bool:
    """CRIU opens images by name: one that the manifest does not name must not lie there."""
    try:
        top, images = os.listdir(snapshot.directory), os.listdir(snapshot.images)
    except OSError:
        return False
    names = {*(n for n in top if n not in (IMAGES, MANIFEST)), *(f"{IMAGES}/{n}" for n in images)}
    return names == snapshot.manifest.files.keys()
