"""Reads an untrusted tar stream: ustar, GNU long names and pax records (POSIX.1-2008, pax, "ustar
Interchange Format").

`tarfile` accepts more than our archives contain and reads without bounds: sparse maps, global
records, unlimited chains of headers (parsed recursively), and a search in each pax header that is
quadratic in its length (CVE-2024-6232). Here each block is read once, and the headers of an entry
are bounded. Of `tarfile` only the parser of a single block is used.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Protocol, Self

MAX_EXTENSION_BYTES = 64 * 1024
"""Limit of all headers of one entry: two paths of PATH_MAX (4096 bytes), and times and names, which
are ignored."""
_BLOCK_BYTES = tarfile.BLOCKSIZE
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSIONS = (*_PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_SPARSE = b"GNU.sparse."


class ReadableStream(Protocol):
    """Source of bytes: a file or a decompressor."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; empty at the end."""


class TarContent:
    """The bytes of one entry. Read them before requesting the next entry, which skips the rest."""

    def __init__(self, stream: ReadableStream, size: int) -> None:
        self._stream = stream
        self._remaining = size
        self._padding = -size % _BLOCK_BYTES

    def __repr__(self) -> str:
        return f"<TarContent {self._remaining} bytes left>"

    @property
    def left_bytes(self) -> int:
        """Bytes that were not read yet."""
        return self._remaining

    def read(self, size: int) -> bytes:
        """At most `size` bytes; empty at the end. Raises tarfile.ReadError if the archive is
        truncated."""
        if not self._remaining:
            return b""
        data = self._stream.read(min(size, self._remaining))
        if not data:
            raise tarfile.ReadError("unexpected end of data")
        self._remaining -= len(data)
        return data

    def skip(self) -> None:
        """Read to the end, padding included."""
        while self.read(_BLOCK_BYTES * 128):
            pass
        if self._padding:
            _exactly(self._stream, self._padding)
            self._padding = 0


class _PendingHeaders:
    """Metadata from the extension headers of an entry."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._remaining = MAX_EXTENSION_BYTES

    def add(self, info: tarfile.TarInfo, stream: ReadableStream) -> Self:
        """Add one header. Raises tarfile.HeaderError, ReadError."""
        self._remaining -= max(info.size, _BLOCK_BYTES)
        if self._remaining < 0 or info.size < 0:
            raise tarfile.HeaderError(f"the headers of an entry exceed {MAX_EXTENSION_BYTES} bytes")
        data = _exactly(stream, info.size + -info.size % _BLOCK_BYTES)[: info.size]
        if info.type == tarfile.GNUTYPE_LONGNAME:
            self._values[b"path"] = data.partition(b"\0")[0]
        elif info.type == tarfile.GNUTYPE_LONGLINK:
            self._values[b"linkpath"] = data.partition(b"\0")[0]
        elif info.type in _PAX:
            self._values.update(_records(data))
        return self  # global headers (git's comment, times) hold nothing that is used

    def apply(self, info: tarfile.TarInfo) -> None:
        """Apply the metadata to the entry. Raises tarfile.HeaderError."""
        if any(key.startswith(_SPARSE) for key in self._values):
            raise tarfile.HeaderError("sparse files are not supported")
        if (path := self._values.get(b"path")) is not None:
            info.name = _text(path).rstrip("/")
        if (target := self._values.get(b"linkpath")) is not None:
            info.linkname = _text(target)
        if (size := self._values.get(b"size")) is not None:
            info.size = _number(size)


def read_tar_entries(stream: ReadableStream) -> Iterator[tuple[tarfile.TarInfo, TarContent]]:
    """The entries of an uncompressed tar stream, in order. Raises tarfile.TarError for invalid
    input.

    Names are unchanged and not sanitized; bytes that are not UTF-8 become surrogates.
    """
    described = _PendingHeaders()
    while (block := _exactly(stream, _BLOCK_BYTES)).strip(b"\0"):
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if info.type in _EXTENSIONS:
            described.add(info, stream)
            continue
        described.apply(info)
        described = _PendingHeaders()
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.HeaderError("sparse files are not supported")
        if info.size < 0:
            raise tarfile.HeaderError(f"an entry has the negative size {info.size}")
        content = TarContent(stream, info.size if info.isreg() else 0)
        yield info, content
        content.skip()


def _records(data: bytes) -> dict[bytes, bytes]:
    """Parse pax records, each `"%d %s=%s\\n"` with its own length first. Raises
    tarfile.HeaderError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        length = _number(data[at:space]) if space > 0 else 0
        record = data[space + 1 : at + length]
        key, equals, value = record[:-1].partition(b"=")
        if not equals or not record.endswith(b"\n") or at + length > len(data):
            raise tarfile.HeaderError("a truncated or malformed pax record")
        found[key] = value
        at += length
    return found


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise tarfile.HeaderError(f"expected a number, got {text[:20]!r}")
    return int(text)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _exactly(stream: ReadableStream, size: int) -> bytes:
    parts = []
    while size:
        if not (part := stream.read(size)):
            raise tarfile.ReadError("unexpected end of data")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
