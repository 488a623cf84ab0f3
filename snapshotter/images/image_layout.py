"""What a worker needs of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Where the parts of an image are; host paths.

    Attributes:
        python: the interpreter's executable, inside `prefix`, which is inside `rootfs` where the
            image brings its own.
        prefix: the interpreter's installation.
        site: package directories, in their order on sys.path.
        env: the image's environment variables.
        files: the package directory that has the copied files; None = no such files.
        links: first parts of the absolute paths of copied files, which are below `files`
            (`pilotlight.core.image_steps`), unless the image brings its own root file system.
        rootfs: its root file system; None = the machine's.
        rootfs_digest: of the distribution packages in it, with their versions; of a container
            image's manifest.
    """

    python: Path
    prefix: Path
    site: tuple[Path, ...]
    env: Mapping[str, str]
    files: Path | None = None
    links: tuple[str, ...] = ()
    rootfs: Path | None = None
    rootfs_digest: str = ""
