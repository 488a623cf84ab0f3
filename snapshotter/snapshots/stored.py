"""One snapshot in its directory, and the errors of the catalog."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from snapshotter.linux import atomic_directory
from snapshotter.snapshots.manifest import FILES_TAR, IMAGES, MANIFEST, SnapshotManifest
from snapshotter.snapshots.quarantine import info_of
from snapshotter.types import SnapshotInfo, SnapshotState


class CatalogLocked(Exception):
    """Raised when another agent holds the directory's lock."""


class DiskBudgetExceeded(Exception):
    """Raised when a snapshot does not fit into the disk budget even after evicting unused ones."""


class SnapshotCorrupt(Exception):
    """Raised when a snapshot has been found damaged; it is already quarantined."""


class LibraryChanged(Exception):
    """Raised when a file that a snapshot maps has changed; `field` is `file:<in-slot path>`."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} changed since the snapshot was made: the process maps it and cannot be "
            f"restored without it"
        )
        self.field = f"file:{path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot on this node.

    Attributes:
        last_used_at: wall clock.
        restores: since the agent started.
        copy: sha256 of the record of its copy in the object store; "" if none is known.
        copy_bytes: size of the copy.
    """

    manifest: SnapshotManifest
    directory: Path
    state: SnapshotState
    last_used_at: float
    restores: int = 0
    copy: str = ""
    copy_bytes: int = 0

    @property
    def remote(self) -> bool:
        """Whether a copy is known to exist."""
        return bool(self.copy)

    @property
    def id(self) -> str:
        """Its id, derived from the content."""
        return self.manifest.id

    @property
    def images(self) -> Path:
        """The directory of CRIU's images."""
        return self.directory / IMAGES

    @property
    def files_tar(self) -> Path:
        """The slot's writable tree at the snapshot point."""
        return self.directory / FILES_TAR

    def info(self) -> SnapshotInfo:
        """The API representation."""
        return info_of(
            self.manifest,
            state=self.state,
            last_used_at=self.last_used_at,
            restores=self.restores,
            remote=self.remote,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStaging:
    """The staging directory of a snapshot: `images/` (existing, empty) and `files.tar` (written by
    its creator)."""

    work: atomic_directory.StagingDirectory

    @property
    def images(self) -> Path:
        """The directory for CRIU's images."""
        return self.work.directory / IMAGES

    @property
    def files_tar(self) -> Path:
        """The path of the archive to write; a snapshot without files has none."""
        return self.work.directory / FILES_TAR


def files_of(directory: Path) -> list[Path]:
    """The files in a directory that its manifest must list. Raises OSError."""
    files = sorted((directory / IMAGES).iterdir())
    return [*files, directory / FILES_TAR] if (directory / FILES_TAR).exists() else files


def has_nothing_else(snapshot: Snapshot) -> bool:
    """Whether it contains only files in the manifest. CRIU opens images by name, so an unlisted one
    must not be present."""
    try:
        top, images = os.listdir(snapshot.directory), os.listdir(snapshot.images)
    except OSError:
        return False
    names = {*(n for n in top if n not in (IMAGES, MANIFEST)), *(f"{IMAGES}/{n}" for n in images)}
    return names == snapshot.manifest.files.keys()
