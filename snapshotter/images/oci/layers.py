"""The root file system of a container image, put together from its layers.

Layers are what a tenant pushed: untrusted. The tree of what was made here is kept in memory, and an
entry is written only into a directory of it, so that nothing is written, linked or removed through
a link, whatever a layer says. Links are kept as they are, and nothing here follows one. Owners,
set-id bits and device nodes are left out: the root is mounted `nosuid` and `nodev`, and a worker
has one uid.

Source: OCI Image Format Specification 1.1, layer.md ("Applying Changesets", "Whiteouts")."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.tar_stream import ReadableStream, TarContent, read_tar_entries
from snapshotter.errors import BundleUnavailable
from snapshotter.linux.atomic_directory import remove_tree

MAX_DEPTH = 90
"""Deepest directory: `atomic_directory` reads no tree of more than 100."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_FILE, _LINK = "file", "link"
_MAX_PATH = 4095  # PATH_MAX without the terminating NUL (limits.h)
_STEPS_OF_ENTRY = 20
"""Entries that opaque directories may look at, for each entry of the image."""
_BLOCK_BYTES = 1024 * 1024
_LOOK_BYTES = 8 * 1024**2
"""Written between two checks of the free disk space."""
_BLOCK_OF_ENTRY = 4096

Folder = dict[str, "Folder | str"]
"""A directory that was made here: name → directory, or `file`, or `link`."""
WrittenPaths = dict[str, "WrittenPaths"]
"""What the current layer wrote below a directory. Not a set of paths: 500,000 of 4 KiB are 2 GB."""


class RootFilesystem:
    """A directory to which layers are applied, oldest first. Owner: one thread. Blocking.

    Attributes:
        size_bytes: disk space of what was written, replaced files included, and of what was read
            and left out.
        entries: files, directories and links, replaced ones included.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        max_entries: int,
        floor: DiskFloor,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`root`: an empty directory that only we can write to. `check`: called now and then, ends
        the work by raising."""
        self._root = root
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._floor = floor
        self._check = check
        self._tree: Folder = {}
        self._touched: WrittenPaths = {}
        self._left_steps = max_entries * _STEPS_OF_ENTRY
        self._unseen_bytes = _LOOK_BYTES  # check the disk before the first byte
        self.size_bytes = 0
        self.entries = 0

    def __repr__(self) -> str:
        return f"<RootFilesystem {self._root} {self.entries} entries>"

    def apply(self, layer: ReadableStream) -> None:
        """Apply an uncompressed layer. Raises BundleUnavailable, BelowFloor, OSError; tarfile's
        errors for what is no archive."""
        self._touched.clear()
        for member, content in read_tar_entries(layer):
            self._count(0)
            self._entry(member, content)
            self._skip(content)

    def make_directory(self, name: str) -> None:
        """Make a directory, where a container runtime makes one for a mount. Raises
        BundleUnavailable if there is something else."""
        self._folder(_parts(name), name)

    def _skip(self, content: TarContent) -> None:
        """Read what no file got, such as the content of a whiteout, and count it: a packed layer
        may have a thousand times its size of it."""
        self._require_bytes(content.left_bytes)
        while block := content.read(_BLOCK_BYTES):
            self._wrote(len(block))

    def _entry(self, member: tarfile.TarInfo, content: TarContent) -> None:
        parts = _parts(member.name)
        if not parts:
            return  # the root itself
        *above, name = parts
        if name == _OPAQUE:
            folder = self._folder(above, member.name)
            touched = self._touched
            for part in above:
                touched = touched.get(part, {})
            self._clear(folder, "/".join(above), touched)
            return
        if name.startswith(_WHITEOUT):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise _invalid(member.name, "is a whiteout of no name")
            self._remove(self._folder(above, member.name), "/".join(above), hidden)
            return
        if member.isdir():
            self._make_way(parts, keeps_folder=True)
            self._folder(parts, member.name)
        elif member.isreg():
            folder = self._make_way(parts)
            self._write(self._path(parts), member, content)
            folder[name] = _FILE
        elif member.issym():
            folder = self._make_way(parts)
            self._count(len(member.linkname))
            os.symlink(_target(member), self._path(parts))
            folder[name] = _LINK
        elif member.islnk():
            source = self._file(_parts(member.linkname), member.name)
            folder = self._make_way(parts)
            os.link(source, self._path(parts), follow_symlinks=False)
            folder[name] = _FILE
        self._touch(parts)

    def _make_way(self, parts: list[str], *, keeps_folder: bool = False) -> Folder:
        """The directory of an entry, in which its name is free now."""
        *above, name = parts
        folder = self._folder(above, "/".join(parts))
        there = folder.get(name)
        if there is not None and not (keeps_folder and isinstance(there, dict)):
            self._remove(folder, "/".join(above), name)
        return folder

    def _folder(self, parts: list[str], entry: str) -> Folder:
        """The directory, made if it is missing. Raises BundleUnavailable where a part of it is a
        file or a link."""
        folder = self._tree
        for depth, part in enumerate(parts, start=1):
            below = folder.get(part)
            if below is None:
                if depth > MAX_DEPTH:
                    raise _invalid(entry, f"is deeper than {MAX_DEPTH} directories")
                self._count(0)
                self._path(parts[:depth]).mkdir(mode=0o755)
                below = folder[part] = {}
                self._touch(parts[:depth])
            if not isinstance(below, dict):
                at = "/".join(parts[:depth])
                raise _invalid(entry, f"is below {at!r}, which is a {below}, and none is followed")
            folder = below
        return folder

    def _file(self, parts: list[str], entry: str) -> Path:
        """A file of the tree, for a hard link."""
        folder: Folder | str | None = self._tree
        for part in parts:
            folder = folder.get(part) if isinstance(folder, dict) else None
        if folder != _FILE:
            raise _invalid(entry, f"is a hard link to {'/'.join(parts)!r}, which is no file")
        return self._path(parts)

    def _write(self, path: Path, member: tarfile.TarInfo, content: TarContent) -> None:
        self._require_bytes(member.size)
        mode = 0o755 if member.mode & 0o111 else 0o644
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as out:
            while block := content.read(_BLOCK_BYTES):
                self._wrote(len(block))
                out.write(block)

    def _remove(self, folder: Folder, above: str, name: str) -> None:
        there = folder.pop(name, None)
        path = self._path([above, name] if above else [name])
        if isinstance(there, dict):
            remove_tree(path)
        elif there is not None:
            path.unlink()

    def _clear(self, folder: Folder, at: str, touched: WrittenPaths) -> None:
        """Remove from a directory what earlier layers put there (an opaque whiteout)."""
        for name, below in list(folder.items()):
            self._left_steps -= 1
            if self._left_steps < 0:
                raise BundleUnavailable("the image has too many opaque directories")
            if name not in touched:
                self._remove(folder, at, name)
            elif isinstance(below, dict):
                self._clear(below, f"{at}/{name}" if at else name, touched[name])

    def _touch(self, parts: list[str]) -> None:
        """Mark a path, and those above it, as written by this layer."""
        touched = self._touched
        for part in parts:
            touched = touched.setdefault(part, {})

    def _path(self, parts: list[str]) -> Path:
        return self._root.joinpath(*parts)

    def _count(self, size: int) -> None:
        self.entries += 1
        if self.entries > self._max_entries:
            raise BundleUnavailable(f"the image has more than {self._max_entries} entries")
        self._require_bytes(size)
        self._wrote(_BLOCK_OF_ENTRY)

    def _require_bytes(self, more: int) -> None:
        if self.size_bytes + more > self._max_bytes:
            raise BundleUnavailable(f"the image unpacks to more than {self._max_bytes} bytes")

    def _wrote(self, size: int) -> None:
        self.size_bytes += size
        self._unseen_bytes += size
        if self._unseen_bytes >= _LOOK_BYTES:
            self._check()
            self._floor.require()
            self._unseen_bytes = 0


def _parts(name: str) -> list[str]:
    """The parts of an entry's name, which may begin with `./` or `/`. Raises BundleUnavailable."""
    if len(name) > _MAX_PATH or "\0" in name:
        raise _invalid(name[:200], "is no valid path")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _invalid(name, "leads out of the image")
    return parts


def _target(member: tarfile.TarInfo) -> str:
    target = member.linkname
    if not target or "\0" in target or len(target) > _MAX_PATH:
        raise _invalid(member.name, "is a link to no valid path")
    return target


def _invalid(name: str, why: str) -> BundleUnavailable:
    return BundleUnavailable(f"the image's entry {name[:200]!a} {why}")
