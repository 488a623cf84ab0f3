"""Source archives, unpacked once per node.

An archive is a `.tar.gz` in the blob store (a directory, or S3), named by its sha256; unpacked it is a read-only directory of the same
name, which slots bind. It was packed by a client, so nothing in it is believed: the hash is checked before a byte is parsed,
and entries may neither leave the directory, nor pass through a link, nor be anything but files, directories and links.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from snapshotter.archives import Archive, local_archive, missing
from snapshotter.errors import BundleUnavailable
from snapshotter.staging import discard, freeze, staged, sweep
from snapshotter.tarstream import Content, entries
from weight_cache.objects import DirectoryStore, ObjectStore

MAX_UNPACKED_BYTES = 4 * 1024**3
"""Bound of one archive's content: the controller takes 100 MiB packed, and source compresses some 5 to 10 times."""
MAX_ENTRIES = 200_000
"""Bound of an archive's entries: an inode costs 256 bytes on ext4 whether or not the entry has content."""

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_MAX_HOPS = 40  # path_resolution(7)
_MAX_STEPS = 2_000_000  # of all links together
_MAX_PATH = 4095  # PATH_MAX without its end (limits.h)
_BLOCK_BYTES = 1024 * 1024


class Bundles:
    """The unpacked bundles below `<home>/node/code`.

    Owner: one event loop. `_flights` changes only between awaits, so a digest is unpacked by one task however many ask.
    """

    def __init__(self, home: Path, *, blobs: ObjectStore | None = None, max_bytes: int = MAX_UNPACKED_BYTES) -> None:
        """`blobs` None: the directory `<home>/blobs`."""
        self._blobs = DirectoryStore(home / "blobs") if blobs is None else blobs
        self._code = home / "node" / "code"
        self._max_bytes = max_bytes
        self._flights: dict[str, asyncio.Task[Path]] = {}
        self._swept = False

    def __repr__(self) -> str:
        return f"<Bundles {self._code} unpacking={len(self._flights)}>"

    async def ensure(self, digest: str) -> Path:
        """The read-only directory of bundle `digest`, unpacked if need be. Raises BundleUnavailable.

        Cancelling one caller leaves the unpacking to the others; it is short and its result is kept.
        """
        target = self._code / _checked(digest)
        if target.exists():
            return target
        flight = self._flights.get(digest)
        if flight is None:
            flight = asyncio.create_task(self._bring(digest, target), name=f"unpack {digest[:12]}")
            self._flights[digest] = flight
            flight.add_done_callback(lambda _: self._flights.pop(digest, None))
        return await asyncio.shield(flight)

    def prune(self, keep: set[str]) -> list[str]:
        """Remove unpacked bundles not in `keep` and not being unpacked; returns their digests. The blobs stay."""
        present = [d.name for d in self._code.iterdir() if _DIGEST.match(d.name)] if self._code.exists() else []
        gone = sorted(set(present) - keep - self._flights.keys())
        for digest in gone:
            discard(self._code / digest)
        return gone

    async def _bring(self, digest: str, target: Path) -> Path:
        if not self._swept:
            self._swept = True
            await asyncio.to_thread(sweep, self._code)
        try:
            async with local_archive(self._blobs, digest, beside=self._code) as archive:
                await asyncio.to_thread(self._unpack, archive, digest, target)
        except OSError as e:
            raise BundleUnavailable(f"bundle {digest[:12]} cannot be unpacked to {target}: {e.strerror or e}") from e
        return target

    def _unpack(self, archive: Archive, digest: str, target: Path) -> None:
        with staged(target) as temp:
            unpack(archive, digest, temp, max_bytes=self._max_bytes)
            freeze(temp)


def unpack(archive: Archive, digest: str, into: Path, *, max_bytes: int = MAX_UNPACKED_BYTES) -> None:
    """Unpack a `.tar.gz` whose sha256 must be `digest` into the existing directory `into`. Raises BundleUnavailable, OSError."""
    try:
        packed = archive.open()
    except FileNotFoundError as e:
        raise missing(digest, archive.origin) from e
    with packed:
        found = _sha256(packed)
        if found != digest:
            message = f"{archive.origin} is corrupt: its sha256 is {found[:12]}…, not {digest[:12]}…: delete it and deploy again"
            raise BundleUnavailable(message)
        packed.seek(0)
        try:
            with gzip.open(packed) as plain:
                _Extraction(into, max_bytes).run(entries(plain))
        except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as e:
            raise BundleUnavailable(f"bundle {digest[:12]} is not a .tar.gz archive: {e}") from e


class _Extraction:
    """One archive on its way to disk. `_folders` are the directories made here: entries go nowhere else. All that is made is counted."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes
        self._folders: set[PurePosixPath] = {PurePosixPath(".")}
        self._files: set[PurePosixPath] = set()
        self._links: set[PurePosixPath] = set()
        self._left_entries = MAX_ENTRIES
        self._left_steps = _MAX_STEPS

    def run(self, members: Iterable[tuple[tarfile.TarInfo, Content]]) -> None:
        for member, content in members:
            self._count()
            self._entry(member, content)
        for link in sorted(self._links):
            self._check_link(link)

    def _count(self) -> None:
        self._left_entries -= 1
        if self._left_entries < 0:
            raise BundleUnavailable(f"the archive has more than {MAX_ENTRIES} entries")

    def _entry(self, member: tarfile.TarInfo, content: Content) -> None:
        name = _relative(member.name, member.name)
        if member.isdir():
            self._folder(name)
            return
        self._folder(name.parent)
        if name in self._files or name in self._folders or name in self._links:
            raise BundleUnavailable(f"the archive holds {member.name!r} twice")
        if member.isreg():
            self._file(name, content, member)
        elif member.issym():
            self._take(len(member.linkname))
            os.symlink(_link_target(member), self._root / name)
            self._links.add(name)
        elif member.islnk():
            self._hard_link(name, member)
        else:
            raise BundleUnavailable(
                f"the archive holds {member.name!r}, a device, pipe or socket: only files, directories and links may be"
            )

    def _folder(self, name: PurePosixPath) -> None:
        missing = []
        while name not in self._folders:  # which holds the root
            missing.append(name)
            name = name.parent
        for folder in reversed(missing):
            if folder in self._files or folder in self._links:
                raise BundleUnavailable(f"the archive goes through {str(folder)!r}, which is not a directory")
            self._count()
            (self._root / folder).mkdir()
            self._folders.add(folder)

    def _file(self, name: PurePosixPath, source: Content, member: tarfile.TarInfo) -> None:
        self._take(member.size)
        mode = 0o755 if member.mode & 0o100 else 0o644
        descriptor = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as out:
            while block := source.read(_BLOCK_BYTES):
                out.write(block)
        self._files.add(name)

    def _take(self, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise BundleUnavailable(
                f"the archive unpacks to more than {self._max_bytes} bytes: leave data out of it (.pilotlightignore), or use Weights"
            )

    def _hard_link(self, name: PurePosixPath, member: tarfile.TarInfo) -> None:
        target = _relative(member.linkname, member.name)
        if target not in self._files:
            raise BundleUnavailable(f"the archive's {member.name!r} links to {member.linkname!r}, which is no file before it")
        os.link(self._root / target, self._root / name)
        self._files.add(name)

    def _check_link(self, link: PurePosixPath) -> None:
        """Follow it as the kernel would (path_resolution(7)): everything is on disk now, so a chain of links shows where it really ends."""
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
                raise BundleUnavailable(f"the archive's link {str(link)!r} goes through more links than a kernel follows")
            target = PurePosixPath(os.readlink(self._root.joinpath(*at)))
            if target.is_absolute():
                raise BundleUnavailable(f"the archive's link {str(link)!r} leads outside of it")
            at.pop()
            ahead += reversed(target.parts)


def _link_target(member: tarfile.TarInfo) -> str:
    if not member.linkname or "\0" in member.linkname or len(member.linkname) > _MAX_PATH:
        raise BundleUnavailable(f"the archive's link {_shown(member.name)} leads to {_shown(member.linkname)}, which is no path")
    return member.linkname


def _shown(name: str) -> str:
    return ascii(name[:200])


def _relative(name: str, shown: str) -> PurePosixPath:
    if len(name) > _MAX_PATH:
        raise BundleUnavailable(f"the archive's entry {_shown(shown)}… has a path of more than {_MAX_PATH} characters")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise BundleUnavailable(f"the archive's entry {shown!r} leads outside of it")
    return path


def _checked(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise BundleUnavailable(f"{digest!r} does not name a bundle: expected the 64 hex digits of a sha256")
    return digest


def _sha256(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # BinaryIO has all that it needs
