"""Trees of hard links: verified files in a tenant's own directory, without a copy and without a
mount.

A pod's mounts are made when it starts, so later mounts do not reach it; links in a directory that
is mounted already do. Trees are created beside their target and published by one rename(2), so a
tree under its final name is complete. Blocking; called in threads.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from snapshotter.errors import Unsupported
from snapshotter.linux.atomic_directory import remove_tree, staging_directory


def show(source: Path, target: Path, *, may_copy: bool) -> None:
    """Link the tree `source` at `target`, read-only and world-readable; an existing one is kept.

    `may_copy`: copy files if both are on different file systems; for code, not for weights.

    Raises Unsupported when links cannot be made there, OSError.
    """
    if target.exists():
        return
    with staging_directory(target.parent, label=target.name[:16]) as work:
        _link_tree(source, work.directory, may_copy=may_copy)
        work.directory.chmod(0o555)
        work.directory.rename(target)


def remove_links(target: Path) -> None:
    """Remove a tree of links; the linked files remain. No error if it does not exist. Raises
    OSError."""
    if target.is_dir():
        # a random name: in containers every agent has the same pid
        renamed = target.parent / f".tmp-gone-{target.name[:16]}-{secrets.token_hex(4)}"
        target.rename(renamed)
        remove_tree(renamed)


def _link_tree(source: Path, target: Path, *, may_copy: bool) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            place = target / entry.name
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), place)
            elif entry.is_dir():
                place.mkdir()
                _link_tree(Path(entry.path), place, may_copy=may_copy)
                place.chmod(0o555)
            else:
                _link(entry.path, place, may_copy=may_copy)


def _link(source: str, place: Path, *, may_copy: bool) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM):
            raise
        if not may_copy:
            why = f"weights cannot be linked for pods at {place.parent} ({e.strerror})"
            raise Unsupported(
                f"{why}: put snapshotter.pods and platform.home on one file system"
            ) from e
        shutil.copyfile(source, place)
        shutil.copymode(source, place)
