"""Archives the files that a worker wrote before its snapshot point: its work directory, /tmp and
/dev/shm, as part of a snapshot.

Plain PAX tar, with holes in the format of GNU tar 1.x (`GNU.sparse.map`), so that any tar can read
it. Included: owner, mode, times to the nanosecond, symbolic and hard links, holes. Excluded:
sockets, pipes, devices. Both directions run as root over names that a tenant chose: every step is
one openat(2) that follows no link, and limits apply to the bytes written, because a name may refer
to another file by the time it is opened. When CRIU opens by name what a process had open, it
follows links with root's rights; therefore an archive contains no link that leads out of these
directories. Runs in the shim; standard library only. Sources: pax (POSIX.1-2001), lseek(2),
openat(2).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from snapshotter.shim.sandbox import mounts
from snapshotter.shim.sandbox.symlinks import escapes_root

MAX_BYTES = 64 * 1024**2
"""Data in one archive: it is written at the snapshot point and read in the hot path of every
restore."""
_MAX_HEADER_BYTES = 40 * 1024**2
"""Names, link targets and hole maps in one archive: 2 KiB for each of the maximum number of
entries."""
_MAX_ENTRIES = 20_000
_MAX_WALKED = 2 * _MAX_ENTRIES
"""Names visited if only some are archived: those in an archive, and as many that were written
since."""
_MAX_PIECES = MAX_BYTES // 4096
"""Data segments between the holes of one file."""
_MAX_DEPTH = 64
_BLOCK = 512
_COPY_BYTES = 1024**2
_END = bytes(2 * _BLOCK)
REMAPPED = "link_remap."
"""Prefix of CRIU's names for open files that had been unlinked."""

ROOTS = {"work": f"{mounts.ROOT}/work", "tmp": f"{mounts.ROOT}/tmp", "shm": "/dev/shm"}
"""First part of a name in the archive → its directory in a slot."""
_SAME_AS_TMP = ("/tmp", "/var/tmp")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ArchiveTooLarge(ValueError):
    """Raised when an archive would exceed its limits; the message names the biggest file and the
    remedy."""


class SymlinkEscapes(ArchiveTooLarge):
    """Raised when a symbolic link leads out of the archived directories; the message names it and
    the remedy."""


class InvalidArchive(ValueError):
    """Raised when an archive is invalid: a name or link leads out of its directory, an entry has an
    unsupported type, or the data is corrupt."""


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Entries up to byte `end` of `fd`, without the end mark of a tar. `names`: names of the
    entries."""

    fd: int
    end: int
    names: frozenset[str] = frozenset()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


@dataclass(kw_only=True)
class _Tally:
    """Totals of a walk, and its limits."""

    max_bytes: int = MAX_BYTES
    max_header_bytes: int = _MAX_HEADER_BYTES
    bytes: int = 0
    header_bytes: int = 0
    entries: int = 0
    biggest: tuple[int, str] = (0, "")
    links: dict[tuple[int, int], str] = field(default_factory=dict)

    @property
    def left_bytes(self) -> int:
        """Data that may still be written."""
        return self.max_bytes - self.bytes

    def add(self, name: str, size: int) -> None:
        """Count the data of one entry. Raises ArchiveTooLarge."""
        self.entries += 1
        self.bytes += size
        self.biggest = max(self.biggest, (size, name))
        if self.bytes > self.max_bytes:
            size, name = self.biggest
            raise ArchiveTooLarge(
                f"files written before the snapshot point take more than "
                f"{self.max_bytes // 1024**2} MiB, the biggest is "
                f"{place(name)} ({size // 1024} KiB): write it in enter(snap=False), or put it "
                f"into the image"
            )
        if self.entries > _MAX_ENTRIES or name.count("/") > _MAX_DEPTH:
            raise ArchiveTooLarge(
                f"more than {_MAX_ENTRIES} files, or deeper than {_MAX_DEPTH}, were written "
                f"before the snapshot point: {place(name)}"
            )

    def add_header(self, name: str, size: int) -> None:
        """Count the header of one entry. Raises ArchiveTooLarge."""
        self.header_bytes += size
        if self.header_bytes > self.max_header_bytes:
            raise ArchiveTooLarge(
                f"names of files written before the snapshot point take more than "
                f"{self.max_header_bytes // 1024**2} MiB: {place(name)}"
            )


def place(name: str) -> str:
    """Path of an entry in the slot."""
    root, _, rest = name.partition("/")
    return f"{ROOTS[root]}/{rest}" if rest else ROOTS[root]


def measure(roots: dict[str, str] = ROOTS, *, max_bytes: int = MAX_BYTES) -> None:
    """Check whether an archive would fit. Raises ArchiveTooLarge, SymlinkEscapes, OSError."""
    tally = _Tally(max_bytes=max_bytes)
    for name, _, status in _walk(roots):
        tally.add(name, _data_bytes(status))
        if stat.S_ISLNK(status.st_mode):
            _require_inside(name, roots)


def pack(fd: int, roots: dict[str, str] = ROOTS, *, max_bytes: int = MAX_BYTES) -> Archive:
    """Archive everything below `roots` to the empty file `fd`, which the archive then owns. Raises
    ArchiveTooLarge, SymlinkEscapes, OSError."""
    try:
        end, names = write(fd, roots, max_bytes=max_bytes)
        return Archive(fd=fd, end=end, names=names)
    except BaseException:
        os.close(fd)
        raise


def write(
    fd: int,
    roots: dict[str, str] = ROOTS,
    *,
    max_bytes: int = MAX_BYTES,
    max_header_bytes: int = _MAX_HEADER_BYTES,
    wanted: Callable[[str], bool] = lambda _: True,
) -> tuple[int, frozenset[str]]:
    """Append entries to `fd` within both limits; returns its size and their names. Raises
    ArchiveTooLarge, SymlinkEscapes, OSError."""
    tally, names = _Tally(max_bytes=max_bytes, max_header_bytes=max_header_bytes), set()
    with os.fdopen(os.dup(fd), "wb") as out:
        out.seek(0, os.SEEK_END)
        for name, directory, status in _walk(roots):
            if wanted(name):
                if stat.S_ISLNK(status.st_mode):
                    _require_inside(name, roots)
                if _write_entry(out, name, directory, status, tally):
                    names.add(name)
        return out.tell(), frozenset(names)


def finish(fd: int) -> int:
    """Write the end mark of a tar; returns the total size. Raises OSError."""
    size = os.lseek(fd, 0, os.SEEK_END)
    return size + os.write(fd, _END)


def copy(archive: Archive, to: int) -> None:
    """Append the entries of an archive to another file. Raises OSError."""
    os.lseek(to, 0, os.SEEK_END)
    at = 0
    while at < archive.end:
        chunk = os.pread(archive.fd, min(_COPY_BYTES, archive.end - at), at)
        if not chunk:
            raise OSError(f"the archive ends at {at} of {archive.end} bytes")
        at += len(chunk)
        _write_all(to, chunk)


def remapped(archive: Archive | None) -> list[str]:
    """Names that CRIU gave to unlinked files since `archive` was made. Raises OSError."""
    known = archive.names if archive else frozenset()
    return [
        name
        for name, _, _ in _walk(ROOTS)
        if name.rpartition("/")[2].startswith(REMAPPED) and name not in known
    ]


def remove(name: str) -> None:
    """Delete the file of an entry; no error if it does not exist."""
    with contextlib.suppress(OSError), _parent(name, ROOTS) as (directory, last):
        os.unlink(last, dir_fd=directory)


def unpack(fd: int, roots: dict[str, str] = ROOTS) -> int:
    """Extract an archive, before any other process is in the slot; returns where its entries end.
    An empty file is an empty archive.

    Raises InvalidArchive, OSError.
    """
    later: list[tuple[str, tarfile.TarInfo]] = []
    links: list[str] = []
    with os.fdopen(os.dup(fd), "rb") as raw:
        raw.seek(0)
        if not raw.read(1):
            return 0
        raw.seek(0)
        try:
            with tarfile.open(
                fileobj=raw, mode="r:", encoding="utf-8", errors="surrogateescape"
            ) as archive:
                for info in archive:
                    _extract(archive, info, roots)
                    if info.isdir():
                        later.append((info.name, info))
                    elif info.issym() or info.islnk():
                        links.append(info.name)
                if out := [name for name in links if _leads_out(name, roots)]:
                    raise InvalidArchive(f"a link leads out of the slot's directories: {out[0]!r}")
                for name, info in reversed(later):
                    _stamp(name, info, roots)
                return archive.offset
        except (tarfile.TarError, EOFError, ValueError) as e:
            raise InvalidArchive(f"the archive of the slot's files is invalid: {e}") from e


# -- writing


def _walk(roots: dict[str, str]) -> Iterator[tuple[str, int, os.stat_result]]:
    """(name, its directory, its status) of everything, parents first. The directory's descriptor is
    valid until the next step.

    Raises ArchiveTooLarge, OSError.
    """
    walked = 0
    for root, path in roots.items():
        directory = os.open(path, _DIRECTORY)
        yield root, directory, os.fstat(directory)
        for entry in _below(root, directory):
            walked += 1
            if walked > _MAX_WALKED:
                raise ArchiveTooLarge(
                    f"there are more than {_MAX_WALKED} files in the work directory, /tmp and "
                    f"/dev/shm: {place(entry[0])}"
                )
            yield entry


def _below(prefix: str, directory: int) -> Iterator[tuple[str, int, os.stat_result]]:
    """Walk a directory. Takes ownership of `directory`. Files that disappear during the walk are
    skipped."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MAX_WALKED + 1)]
        for entry in sorted(names):
            name = f"{prefix}/{entry}"
            try:
                status = os.stat(entry, dir_fd=directory, follow_symlinks=False)
                yield name, directory, status
                if stat.S_ISDIR(status.st_mode) and name.count("/") <= _MAX_DEPTH:
                    yield from _below(name, os.open(entry, _DIRECTORY, dir_fd=directory))
            except (FileNotFoundError, NotADirectoryError):
                continue
    finally:
        os.close(directory)


def _require_inside(name: str, roots: dict[str, str]) -> None:
    """An early check by name; the authoritative check happens in the new slot, where nothing can
    change the archive."""
    if _leads_out(name, roots):
        raise SymlinkEscapes(
            f"{place(name)} is a symbolic link that leads out of the work directory, /tmp and "
            f"/dev/shm: "
            "make it in enter(snap=False), or copy what it leads to"
        )


def _leads_out(name: str, roots: dict[str, str]) -> bool:
    root, _, rest = name.partition("/")
    homes = [*roots.values(), *(_SAME_AS_TMP if roots is ROOTS else ())]
    return escapes_root(f"{roots[root]}/{rest}", homes=homes, files_below=mounts.ROOT)


def _data_bytes(status: os.stat_result) -> int:
    return min(status.st_size, status.st_blocks * 512) if stat.S_ISREG(status.st_mode) else 0


def _write_entry(
    out: IO[bytes], name: str, directory: int, status: os.stat_result, tally: _Tally
) -> bool:
    """Write header and data of one entry; False if it is excluded or does not exist."""
    last = name.rpartition("/")[2]
    if stat.S_ISREG(status.st_mode):
        return _write_file(out, name, last, directory, tally)
    info = _header(name, status)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(last, dir_fd=directory)
    else:
        tally.add(name, 0)
        return False
    tally.add(name, 0)
    _write_header(out, info, tally)
    return True


def _header(name: str, status: os.stat_result) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    info.mtime = status.st_mtime_ns // 10**9
    info.pax_headers = {"mtime": f"{status.st_mtime_ns // 10**9}.{status.st_mtime_ns % 10**9:09d}"}
    return info


def _write_header(out: IO[bytes], info: tarfile.TarInfo, tally: _Tally) -> None:
    encoded = _encoded(info)
    tally.add_header(info.name, len(encoded))
    out.write(encoded)


def _write_file(out: IO[bytes], name: str, last: str, directory: int, tally: _Tally) -> bool:
    """Write the file that is opened, whatever the walk saw under its name."""
    try:
        fd = os.open(
            last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
        )
    except FileNotFoundError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return False
        info, size, inode = _header(name, status), status.st_size, (status.st_dev, status.st_ino)
        if inode in tally.links:
            info.type, info.linkname = tarfile.LNKTYPE, tally.links[inode]
            tally.add(name, 0)
            _write_header(out, info, tally)
            return True
        pieces = _pieces(fd, size, most_bytes=tally.left_bytes)
        info.size = sum(length for _, length in pieces)
        tally.add(name, info.size)
        tally.links[inode] = name
        if info.size < size:
            flat = ",".join(f"{start},{length}" for start, length in pieces)
            more = {
                "GNU.sparse.size": str(size),
                "GNU.sparse.numblocks": str(len(pieces)),
                "GNU.sparse.map": flat,
            }
            info.pax_headers = {**info.pax_headers, **more}
        _write_header(out, info, tally)
        for start, length in pieces:
            _copy_piece(fd, start, length, out)
        out.write(bytes(-info.size % _BLOCK))
    finally:
        os.close(fd)
    return True


def _pieces(fd: int, size: int, *, most_bytes: int) -> list[tuple[int, int]]:
    """(start, length) of the data segments; a final hole is represented by an empty last segment,
    as in GNU tar.

    Stops after `most_bytes` of data, which the result then exceeds: the file may change during the
    scan. Raises ArchiveTooLarge.
    """
    found, at, data = list[tuple[int, int]](), 0, 0
    while at < size and data <= most_bytes:
        if len(found) > _MAX_PIECES:
            raise ArchiveTooLarge(
                f"a file written before the snapshot point has more than {_MAX_PIECES} holes"
            )
        try:
            start = min(size, os.lseek(fd, at, os.SEEK_DATA))  # the file may have grown
        except OSError:  # ENXIO: only a hole remains
            break
        at = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        found.append((start, at - start))
        data += at - start
    if not found or sum(found[-1]) < size:
        found.append((size, 0))
    return found


def _copy_piece(fd: int, start: int, length: int, out: IO[bytes]) -> None:
    while length:
        # the file was truncated during the read
        chunk = os.pread(fd, min(length, _COPY_BYTES), start) or bytes(min(length, _COPY_BYTES))
        out.write(chunk)
        start, length = start + len(chunk), length - len(chunk)


def _encoded(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# -- extracting


@contextlib.contextmanager
def _parent(name: str, roots: dict[str, str]) -> Iterator[tuple[int, str]]:
    """The directory of `name`, opened step by step, and its last part ("." for a root). Raises
    InvalidArchive, OSError."""
    root, *parts = name.split("/")
    if root not in roots or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidArchive(f"an entry's name leads out of the slot's directories: {name!r}")
    directory = os.open(roots[root], _DIRECTORY)
    try:
        for part in parts[:-1]:
            deeper = os.open(part, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = deeper
        yield directory, parts[-1] if parts else "."
    finally:
        os.close(directory)


def _extract(archive: tarfile.TarFile, info: tarfile.TarInfo, roots: dict[str, str]) -> None:
    with _parent(info.name, roots) as (directory, last):
        if info.isdir():
            if last != ".":
                _make_way(directory, last)
                os.mkdir(last, 0o700, dir_fd=directory)
            return  # owner, mode and time are set after its content
        _make_way(directory, last)
        if info.issym():
            os.symlink(info.linkname, last, dir_fd=directory)
        elif info.islnk():
            with _parent(info.linkname, roots) as (source, name):
                os.link(name, last, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
            return
        elif info.isreg():
            _extract_file(archive, info, directory, last)
        else:
            raise InvalidArchive(f"an entry is neither file, directory nor link: {info.name!r}")
        _stamp_at(directory, last, info)


def _make_way(directory: int, last: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(last, dir_fd=directory)


def _extract_file(
    archive: tarfile.TarFile, info: tarfile.TarInfo, directory: int, last: str
) -> None:
    source = archive.extractfile(info)
    if source is None:
        raise InvalidArchive(f"an entry has no data: {info.name!r}")
    fd = os.open(
        last,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
        dir_fd=directory,
    )
    with source, os.fdopen(fd, "wb") as target:
        os.ftruncate(fd, info.size)
        for start, length in _sparse(info) or [(0, info.size)]:
            source.seek(start)
            target.seek(start)
            while length:
                chunk = source.read(min(length, _COPY_BYTES))
                if not chunk:
                    raise InvalidArchive(f"an entry is truncated: {info.name!r}")
                target.write(chunk)
                length -= len(chunk)


def _sparse(info: tarfile.TarInfo) -> list[tuple[int, int]]:
    pieces: Any = info.sparse
    return pieces or []


def _stamp(name: str, info: tarfile.TarInfo, roots: dict[str, str]) -> None:
    with _parent(name, roots) as (directory, last):
        _stamp_at(directory, last, info)


def _stamp_at(directory: int, last: str, info: tarfile.TarInfo) -> None:
    os.chown(last, info.uid, info.gid, dir_fd=directory, follow_symlinks=False)
    if not info.issym():
        os.chmod(last, info.mode, dir_fd=directory)
    seconds, _, fraction = info.pax_headers.get("mtime", str(int(info.mtime))).partition(".")
    mtime_ns = int(seconds) * 10**9 + int(fraction.ljust(9, "0")[:9] or 0)
    os.utime(last, ns=(mtime_ns, mtime_ns), dir_fd=directory, follow_symlinks=False)
