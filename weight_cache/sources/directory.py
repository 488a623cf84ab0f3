"""A directory of model files on this machine.

A file's version is its inode and its timestamps. The kernel's clock for these is coarse, so a
version younger than two seconds is not considered lasting (as in git's index:
Documentation/technical/racy-git)."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from weight_cache.errors import SourceInvalid
from weight_cache.sources.source import SourceFile, sort_source_files, source_changed_error

_SETTLED_S = 2.0
"""FAT stores times in units of two seconds; other common file systems are finer."""


class DirectorySource:
    """The files below `root`. Symbolic links are followed only inside it."""

    def __init__(self, root: Path) -> None:
        self._asked = root
        self._root = Path(os.path.realpath(root))  # tolerates cyclic links
        if not self._root.is_dir():
            raise SourceInvalid(f"{root} is not a directory")

    def __repr__(self) -> str:
        return f"<DirectorySource {self._root}>"

    @property
    def name(self) -> str:
        """The directory's path."""
        return str(self._root)

    @property
    def reads_at_once(self) -> int:
        """One per core: each reader also hashes."""
        return os.cpu_count() or 1

    def files(self) -> list[SourceFile]:
        """All files. Raises SourceInvalid for a link to outside and for anything that is neither a
        file nor a directory."""
        now_s = time.time()
        try:
            return sort_source_files(
                (self._described(path, now_s) for path in self._walk()), where=str(self._asked)
            )
        except OSError as e:
            raise SourceInvalid(f"{e.filename or self._asked} cannot be read: {e.strerror}") from e

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range and check the file's version. Raises SourceInvalid."""
        path = self._root / file.path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = _read(descriptor, offset_bytes, length_bytes)
                is_same = _version(os.fstat(descriptor)) == file.version
            finally:
                os.close(descriptor)
        except OSError as e:
            raise SourceInvalid(f"{path} cannot be read: {e.strerror}") from e
        if not is_same or len(data) != length_bytes:
            raise source_changed_error(path)
        return data

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _described(self, path: Path, now_s: float) -> SourceFile:
        info = path.stat()
        newest = max(info.st_mtime, info.st_ctime)
        return SourceFile(
            path=path.relative_to(self._root).as_posix(),
            size_bytes=info.st_size,
            version=_version(info),
            is_lasting=newest + _SETTLED_S < now_s,
        )

    def _walk(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self._root, onerror=_raise):
            for name in [*folders, *files]:
                self._check(Path(folder, name))
            yield from (Path(folder, name) for name in files)

    def _check(self, path: Path) -> None:
        if path.is_symlink():
            self._check_link(path)
        elif not path.is_dir() and not stat.S_ISREG(path.lstat().st_mode):
            raise SourceInvalid(f"{path} is neither a file nor a directory")

    def _check_link(self, link: Path) -> None:
        target = Path(os.path.realpath(link))
        if not target.is_file():
            raise SourceInvalid(f"{link} links to {target}, which is not a file")
        if not target.is_relative_to(self._root):
            raise SourceInvalid(
                f"{link} links out of {self._root}: copy the directory with links followed (cp "
                f"-rL) and use that"
            )


def _version(info: os.stat_result) -> str:
    return f"{info.st_dev:x}-{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}-{info.st_ctime_ns:x}"


def _read(descriptor: int, offset: int, length: int) -> bytes:
    """Read up to `length` bytes; a single pread(2) may return fewer."""
    first = os.pread(descriptor, length, offset)
    parts, missing = [first], length - len(first)
    while missing and parts[-1]:
        parts.append(os.pread(descriptor, missing, offset + length - missing))
        missing -= len(parts[-1])
    return first if len(parts) == 1 else b"".join(parts)


def _raise(error: OSError) -> None:
    raise error
