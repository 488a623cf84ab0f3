"""Unpacks an archive of source code, with the node agent's rights: before a tenant's process sees
it, and as root where tenants are separated.

An archive is a `.tar.gz`, named by its sha256. Clients pack it, so its content is untrusted: the
hash is checked before parsing, and entries must not leave the directory or pass through a link, and
must be files, directories or links. What is written belongs to the node agent, whatever owners and
modes the archive names."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.tar_stream import TarContent, read_tar_entries
from pilotlight.core.threads import BoundedThreads
from snapshotter.errors import BundleUnavailable
from snapshotter.images.blob_archives import Archive, missing

MAX_UNPACKED_BYTES = 4 * 1024**3
"""Limit for one archive's content: the controller accepts 100 MiB packed, and source code
compresses 5 to 10 times."""
MAX_ENTRIES = 200_000
"""Limit for an archive's entries: each costs an inode of 256 bytes on ext4 even without content."""

UNPACKED_RATIO = 50
UNPACKED_FLOOR_BYTES = 64 * 1024**2
"""An archive unpacks to at most this multiple of its packed size, or this many bytes if that is
more; its tenant's storage counts the packed size."""
UNPACKING = BoundedThreads(4, "unpack")
"""Threads that unpack the archives of all tenants; an archive of gigabytes occupies one for a
while."""
BLOCK_OF_ENTRY = 4096  # bytes on disk, on most file systems
_LOOK_BYTES = 8 * 1024**2
_LOOK_ENTRIES = 64
"""Written between two checks of the free disk space."""
_MAX_HOPS = 40  # path_resolution(7)
_MAX_STEPS = 2_000_000  # for all links together
_MAX_PATH = 4095  # PATH_MAX without the terminating NUL (limits.h)
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UnpackedSize:
    """The disk space and entries of an unpacked bundle."""

    size_bytes: int
    entries: int


def unpack(
    archive: Archive,
    digest: str,
    into: Path,
    *,
    max_bytes: int = MAX_UNPACKED_BYTES,
    floor: DiskFloor | None = None,
) -> UnpackedSize:
    """Unpack a `.tar.gz` whose sha256 must be `digest` into the existing directory `into`; returns
    its size on disk.

    Raises BundleUnavailable, BelowFloor, OSError.
    """
    try:
        packed = archive.open()
    except FileNotFoundError as e:
        raise missing(digest, archive.origin) from e
    with packed:
        found = _sha256(packed)
        if found != digest:
            message = (
                f"{archive.origin} is corrupt: its sha256 is {found[:12]}…, not "
                f"{digest[:12]}…: delete it and deploy again"
            )
            raise BundleUnavailable(message)
        most = min(max_bytes, max(UNPACKED_FLOOR_BYTES, UNPACKED_RATIO * packed.tell()))
        packed.seek(0)
        extraction = _Extraction(into, most, floor or no_floor())
        try:
            with gzip.open(packed) as plain:
                extraction.run(read_tar_entries(plain))
        except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as e:
            raise BundleUnavailable(f"bundle {digest[:12]} is not a .tar.gz archive: {e}") from e
        return extraction.size()


class _Extraction:
    """The extraction of one archive. Entries may only go into `_folders`, the directories created
    by it. Everything created is counted."""

    def __init__(self, root: Path, max_bytes: int, floor: DiskFloor) -> None:
        self._root = root
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes
        self._floor = floor
        self._unseen_bytes = _LOOK_BYTES  # check the disk before the first byte
        self._folders: set[PurePosixPath] = {PurePosixPath(".")}
        self._files: set[PurePosixPath] = set()
        self._links: set[PurePosixPath] = set()
        self._left_entries = MAX_ENTRIES
        self._left_steps = _MAX_STEPS

    def size(self) -> UnpackedSize:
        """The size of what was written."""
        made = MAX_ENTRIES - self._left_entries
        return UnpackedSize(self._max_bytes - self._left_bytes + made * BLOCK_OF_ENTRY, made)

    def _wrote(self, size: int) -> None:
        """Count written bytes and periodically check the free disk space. Raises BelowFloor."""
        self._unseen_bytes += size
        if self._unseen_bytes >= _LOOK_BYTES:
            self._floor.require()
            self._unseen_bytes = 0

    def run(self, members: Iterable[tuple[tarfile.TarInfo, TarContent]]) -> None:
        for member, content in members:
            self._count()
            self._entry(member, content)
        for link in sorted(self._links):
            self._check_link(link)

    def _count(self) -> None:
        self._left_entries -= 1
        self._wrote(_LOOK_BYTES // _LOOK_ENTRIES)
        if self._left_entries < 0:
            raise BundleUnavailable(f"the archive has more than {MAX_ENTRIES} entries")

    def _entry(self, member: tarfile.TarInfo, content: TarContent) -> None:
        name = _relative(member.name, member.name)
        if member.isdir():
            self._folder(name)
            return
        self._folder(name.parent)
        if name in self._files or name in self._folders or name in self._links:
            raise BundleUnavailable(f"the archive contains {member.name!r} twice")
        if member.isreg():
            self._file(name, content, member)
        elif member.issym():
            self._count_bytes(len(member.linkname))
            os.symlink(_link_target(member), self._root / name)
            self._links.add(name)
        elif member.islnk():
            self._hard_link(name, member)
        else:
            raise BundleUnavailable(
                f"the archive contains {member.name!r}, a device, pipe or socket: only files, "
                f"directories and links are allowed"
            )

    def _folder(self, name: PurePosixPath) -> None:
        missing = []
        while name not in self._folders:  # contains the root
            missing.append(name)
            name = name.parent
        for folder in reversed(missing):
            if folder in self._files or folder in self._links:
                raise BundleUnavailable(
                    f"the archive has entries below {str(folder)!r}, which is not a directory"
                )
            self._count()
            (self._root / folder).mkdir()
            self._folders.add(folder)

    def _file(self, name: PurePosixPath, source: TarContent, member: tarfile.TarInfo) -> None:
        self._count_bytes(member.size)
        mode = 0o755 if member.mode & 0o100 else 0o644
        descriptor = os.open(
            self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode
        )
        with open(descriptor, "wb") as out:
            while block := source.read(_BLOCK_BYTES):
                self._wrote(len(block))
                out.write(block)
        self._files.add(name)

    def _count_bytes(self, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise BundleUnavailable(
                f"the archive unpacks to more than {self._max_bytes} bytes: exclude data "
                f"(.pilotlightignore), or use Weights"
            )

    def _hard_link(self, name: PurePosixPath, member: tarfile.TarInfo) -> None:
        target = _relative(member.linkname, member.name)
        if target not in self._files:
            raise BundleUnavailable(
                f"the archive's {member.name!r} is a hard link to {member.linkname!r}, which is "
                f"not a file before it"
            )
        os.link(self._root / target, self._root / name)
        self._files.add(name)

    def _check_link(self, link: PurePosixPath) -> None:
        """Follow a link as the kernel would (path_resolution(7)), to verify that its final target
        is inside. Runs when everything is on disk, so chains of links are resolved completely."""
        at: list[str] = list(link.parent.parts)
        ahead = [link.name]
        hops = 0
        while ahead:
            self._left_steps -= 1
            part = ahead.pop()
            if part == "..":
                if not at:
                    raise BundleUnavailable(f"the archive's link {str(link)!r} leads outside of it")
                at.pop()
                continue
            at.append(part)
            if PurePosixPath(*at) not in self._links:
                continue
            hops += 1
            if hops > _MAX_HOPS or self._left_steps < 0:
                raise BundleUnavailable(
                    f"the archive's link {str(link)!r} passes through more links than the kernel "
                    f"follows"
                )
            target = PurePosixPath(os.readlink(self._root.joinpath(*at)))
            if target.is_absolute():
                raise BundleUnavailable(f"the archive's link {str(link)!r} leads outside of it")
            at.pop()
            ahead += reversed(target.parts)


def _link_target(member: tarfile.TarInfo) -> str:
    if not member.linkname or "\0" in member.linkname or len(member.linkname) > _MAX_PATH:
        raise BundleUnavailable(
            f"the archive's link {_format(member.name)} has the target {_format(member.linkname)}, "
            f"which is not a valid path"
        )
    return member.linkname


def _format(name: str) -> str:
    return ascii(name[:200])


def _relative(name: str, shown: str) -> PurePosixPath:
    if len(name) > _MAX_PATH:
        raise BundleUnavailable(
            f"the archive's entry {_format(shown)}… has a path of more than {_MAX_PATH} characters"
        )
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise BundleUnavailable(f"the archive's entry {shown!r} leads outside of it")
    return path


def _sha256(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
