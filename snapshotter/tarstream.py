"""Reads a tar stream that a stranger packed: ustar, GNU long names and pax records (POSIX.1-2008,
pax, "ustar Interchange Format").

`tarfile` reads more than our archives have, and what it holds while it reads has no bound: sparse
maps, global records, headers before headers without end (each a call inside the other), and a
search in each pax header that takes the square of its length (CVE-2024-6232). Here each block is
looked at once, and headers that describe an entry have a bound. Of `tarfile` only the parser of one
block is used."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Protocol, Self

MAX_EXTENSION_BYTES = 64 * 1024
"""Of all headers that describe one entry: two paths of PATH_MAX (4096 bytes), and times and names
that are not used."""
_BLOCK_BYTES = tarfile.BLOCKSIZE
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSIONS = (*_PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_SPARSE = b"GNU.sparse."


class Readable(Protocol):
    """What is read: a file, or what unpacks one."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; nothing at the end."""
        ...


class Content:
    """The bytes of one entry. Read it before the next entry is asked for, which skips what is
    left."""

    def __init__(self, stream: Readable, size: int) -> None:
        self._stream = stream
        self._left = size
        self._padding = -size % _BLOCK_BYTES

    def __repr__(self) -> str:
        return f"<Content {self._left} bytes left>"

    def read(self, size: int) -> bytes:
        """At most `size` bytes; nothing at the end. Raises tarfile.ReadError where the archive ends
        before."""
        if not self._left:
            return b""
        data = self._stream.read(min(size, self._left))
        if not data:
            raise tarfile.ReadError("unexpected end of data")
        self._left -= len(data)
        return data

    def skip(self) -> None:
        """Read to the end, padding included."""
        while self.read(_BLOCK_BYTES * 128):
            pass
        if self._padding:
            _exactly(self._stream, self._padding)
            self._padding = 0


class _Described:
    """What headers before an entry say of it."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._left = MAX_EXTENSION_BYTES

    def add(self, info: tarfile.TarInfo, stream: Readable) -> Self:
        """One more header. Raises tarfile.HeaderError, ReadError."""
        self._left -= max(info.size, _BLOCK_BYTES)
        if self._left < 0 or info.size < 0:
            raise tarfile.HeaderError(f"an entry header of more than {MAX_EXTENSION_BYTES} bytes")
        data = _exactly(stream, info.size + -info.size % _BLOCK_BYTES)[: info.size]
        if info.type == tarfile.GNUTYPE_LONGNAME:
            self._values[b"path"] = data.partition(b"\0")[0]
        elif info.type == tarfile.GNUTYPE_LONGLINK:
            self._values[b"linkpath"] = data.partition(b"\0")[0]
        elif info.type in _PAX:
            self._values.update(_records(data))
        return self  # what holds for all entries (git's comment, times) says nothing that is used

    def apply(self, info: tarfile.TarInfo) -> None:
        """Change the entry that they describe. Raises tarfile.HeaderError."""
        if any(key.startswith(_SPARSE) for key in self._values):
            raise tarfile.HeaderError("a sparse file")
        if (path := self._values.get(b"path")) is not None:
            info.name = _text(path).rstrip("/")
        if (target := self._values.get(b"linkpath")) is not None:
            info.linkname = _text(target)
        if (size := self._values.get(b"size")) is not None:
            info.size = _number(size)


def entries(stream: Readable) -> Iterator[tuple[tarfile.TarInfo, Content]]:
    """The entries of a plain tar stream, in order. Raises tarfile.TarError for what is none.

    Names are as they stand there, bytes that are not UTF-8 as surrogates: nothing here says that
    they are safe."""
    described = _Described()
    while (block := _exactly(stream, _BLOCK_BYTES)).strip(b"\0"):
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        if info.type in _EXTENSIONS:
            described.add(info, stream)
            continue
        described.apply(info)
        described = _Described()
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.HeaderError("a sparse file")
        if info.size < 0:
            raise tarfile.HeaderError(f"an entry of {info.size} bytes")
        content = Content(stream, info.size if info.isreg() else 0)
        yield info, content
        content.skip()


def _records(data: bytes) -> dict[bytes, bytes]:
    """Pax records, each `"%d %s=%s\\n"` with its own length first. Raises tarfile.HeaderError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        length = _number(data[at:space]) if space > 0 else 0
        record = data[space + 1 : at + length]
        key, equals, value = record[:-1].partition(b"=")
        if not equals or not record.endswith(b"\n") or at + length > len(data):
            raise tarfile.HeaderError("a pax record that is cut off, or is none")
        found[key] = value
        at += length
    return found


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise tarfile.HeaderError(f"{text[:20]!r} where a number should be")
    return int(text)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _exactly(stream: Readable, size: int) -> bytes:
    parts = []
    while size:
        if not (part := stream.read(size)):
            raise tarfile.ReadError("unexpected end of data")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
