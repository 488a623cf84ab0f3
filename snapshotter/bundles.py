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
from pathlib import Path, PurePosixPath
from typing import IO, Self

from snapshotter.archives import Archive, local_archive, missing
from snapshotter.errors import BundleUnavailable
from snapshotter.staging import discard, freeze, staged, sweep
from weight_cache.objects import DirectoryStore, ObjectStore

MAX_UNPACKED_BYTES = 4 * 1024**3
"""Bound of one archive's content: the controller takes 100 MiB packed, and source compresses some 5 to 10 times."""
MAX_ENTRIES = 200_000
"""Bound of an archive's entries: an inode costs 256 bytes on ext4 whether or not the entry has content."""

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_MAX_HEADER_BYTES = 1024 * 1024
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
        packed = archive.path.open("rb")
    except FileNotFoundError as e:
        raise missing(digest, archive.origin) from e
    with packed:
        found = _sha256(packed)
        if found != digest:
            message = f"{archive.origin} is corrupt: its sha256 is {found[:12]}…, not {digest[:12]}…: delete it and deploy again"
            raise BundleUnavailable(message)
        packed.seek(0)
        try:
            with gzip.open(packed) as plain, tarfile.open(fileobj=plain, mode="r|", tarinfo=_BoundedInfo) as tar:
                _Extraction(into, max_bytes).run(tar)
        except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as e:
            raise BundleUnavailable(f"bundle {digest[:12]} is not a .tar.gz archive: {e}") from e


class _BoundedInfo(tarfile.TarInfo):
    """A header whose extensions (long names, pax records) are held in memory while parsed, so they get a bound of their own."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.type not in tarfile.REGULAR_TYPES and info.size > _MAX_HEADER_BYTES:
            raise BundleUnavailable(f"the archive has an entry header of {info.size} bytes")
        return info


class _Extraction:
    """One archive on its way to disk. `_folders` are the directories made here: entries go nowhere else."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes
        self._folders: set[PurePosixPath] = {PurePosixPath(".")}
        self._files: set[PurePosixPath] = set()
        self._links: list[PurePosixPath] = []

    def run(self, tar: tarfile.TarFile) -> None:
        for count, member in enumerate(tar, start=1):
            if count > MAX_ENTRIES:
                raise BundleUnavailable(f"the archive has more than {MAX_ENTRIES} entries")
            self._entry(tar, member)
        for link in self._links:
            self._check_link(link)

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _relative(member.name, member.name)
        if member.isdir():
            self._folder(name)
            return
        self._folder(name.parent)
        if name in self._files or name in self._folders or name in self._links:
            raise BundleUnavailable(f"the archive holds {member.name!r} twice")
        if member.isreg():
            source = tar.extractfile(member)
            assert source is not None  # by tarfile's contract for regular members
            self._file(name, source, member)
        elif member.issym():
            os.symlink(member.linkname, self._root / name)
            self._links.append(name)
        elif member.islnk():
            self._hard_link(name, member)
        else:
            raise BundleUnavailable(
                f"the archive holds {member.name!r}, a device, pipe or socket: only files, directories and links may be"
            )

    def _folder(self, name: PurePosixPath) -> None:
        for folder in [*reversed(name.parents), name]:
            if folder not in self._folders:
                if folder in self._files or folder in self._links:
                    raise BundleUnavailable(f"the archive goes through {str(folder)!r}, which is not a directory")
                (self._root / folder).mkdir()
                self._folders.add(folder)

    def _file(self, name: PurePosixPath, source: IO[bytes], member: tarfile.TarInfo) -> None:
        self._left_bytes -= member.size
        if self._left_bytes < 0:
            raise BundleUnavailable(
                f"the archive unpacks to more than {self._max_bytes} bytes: leave data out of it (.pilotlightignore), or use Weights"
            )
        mode = 0o755 if member.mode & 0o100 else 0o644
        descriptor = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as out:
            while block := source.read(_BLOCK_BYTES):
                out.write(block)
        self._files.add(name)

    def _hard_link(self, name: PurePosixPath, member: tarfile.TarInfo) -> None:
        target = _relative(member.linkname, member.name)
        if target not in self._files:
            raise BundleUnavailable(f"the archive's {member.name!r} links to {member.linkname!r}, which is no file before it")
        os.link(self._root / target, self._root / name)
        self._files.add(name)

    def _check_link(self, link: PurePosixPath) -> None:
        """Everything is on disk now, so resolving tells where a chain of links really ends."""
        root = os.path.realpath(self._root)
        end = os.path.realpath(self._root / link)
        if os.path.isabs(os.readlink(self._root / link)) or os.path.commonpath([root, end]) != root:
            raise BundleUnavailable(f"the archive's link {str(link)!r} leads outside of it")


def _relative(name: str, shown: str) -> PurePosixPath:
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
