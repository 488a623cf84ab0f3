"""Files on web servers: one per URL, named by the last part of its path.

Each response must have the version seen first, by strong entity tag or else by Last-Modified. From
a server without range support, a file is read sequentially over one connection that stays open."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from weight_cache.errors import SourceInvalid
from weight_cache.sources.http_client import (
    RangeClient,
    RemoteFile,
    bearer_header,
    read_exact_body,
    redact_url,
)
from weight_cache.sources.source import SourceFile, sort_source_files, source_changed_error

_READS_AT_ONCE = 8


class WebSource:
    """The files at `urls`. `token` is sent with every request as `Authorization: Bearer`."""

    def __init__(
        self, urls: Sequence[str], *, token: str | None = None, web: RangeClient | None = None
    ) -> None:
        self._urls = {_name(url): url for url in urls}
        if len(self._urls) != len(urls):
            raise SourceInvalid(
                f"two of {', '.join(redact_url(url) for url in urls)} have the same last part, "
                f"which names the file"
            )
        self._web = web or RangeClient(headers=bearer_header(token))
        self._files: dict[str, RemoteFile] = {}
        self._streams: dict[str, _Stream] = {}

    def __repr__(self) -> str:
        return f"<WebSource {self.name}>"

    @property
    def name(self) -> str:
        """The URLs without secrets."""
        return ", ".join(redact_url(url) for url in self._urls.values())

    @property
    def reads_at_once(self) -> int:
        """A single stream is often slower than the network."""
        return _READS_AT_ONCE

    def files(self) -> list[SourceFile]:
        """Describe all files with requests to their servers. Raises SourceInvalid."""
        with ThreadPoolExecutor(_READS_AT_ONCE, "ask the web") as pool:
            self._files = dict(
                zip(self._urls, pool.map(self._web.describe, self._urls.values()), strict=True)
            )
        self._streams = {
            path: _Stream(self._web, file)
            for path, file in self._files.items()
            if not file.is_ranged
        }
        return sort_source_files(
            (_source_file(path, file) for path, file in self._files.items()), where=self.name
        )

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range of the listed version. Raises SourceInvalid."""
        if not length_bytes:
            return b""
        if stream := self._streams.get(file.path):
            return stream.read(offset_bytes, length_bytes)
        return self._web.read(
            self._files[file.path], offset_bytes=offset_bytes, length_bytes=length_bytes
        )

    def close(self) -> None:
        """Close all connections."""
        for stream in self._streams.values():
            stream.close()
        self._web.close()


@dataclass(slots=True)
class _Stream:
    """A file read sequentially from one response. The lock is held while reading; a read at another
    offset than `_at` starts again."""

    web: RangeClient
    file: RemoteFile
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _pieces: Iterator[bytes] = field(default_factory=lambda: iter(()))
    _rest: bytes = b""
    _at: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, offset: int, length: int) -> bytes:
        with self._lock:
            return self.web.patiently(lambda: self._read(offset, length))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _read(self, offset: int, length: int) -> bytes:
        try:
            if offset != self._at:
                self._begin()
                for at in range(0, offset, 1 << 20):
                    self._read_bytes(min(1 << 20, offset - at))
            data = self._read_bytes(length)
            self._at = offset + length
        except SourceInvalid:
            self._end()
            raise
        return data

    def _begin(self) -> None:
        self._end()
        response = self._open.enter_context(self.web.get(self.file.url, self.file.conditions()))
        self.file.check(response.headers)
        if response.headers.get("content-length") != str(self.file.size_bytes):
            raise source_changed_error(redact_url(self.file.url))
        self._pieces = self.web.body(self.file.url, response)

    def _read_bytes(self, length: int) -> bytes:
        parts, missing = [self._rest[:length]], length - len(self._rest[:length])
        self._rest = self._rest[length:]
        while missing and (piece := next(self._pieces, b"")):
            parts.append(piece[:missing])
            self._rest = piece[missing:]
            missing -= len(parts[-1])
        return read_exact_body(iter(parts), length, url=self.file.url)

    def _end(self) -> None:
        self._at, self._rest, self._pieces = -1, b"", iter(())
        self._open.close()


def _source_file(path: str, file: RemoteFile) -> SourceFile:
    is_signed = bool(urlsplit(file.url).query)  # the same URL may later return another file
    return SourceFile(
        path=path,
        size_bytes=file.size_bytes,
        version=file.etag or file.modified,
        is_lasting=bool(file.etag) and not is_signed,
        is_ranged=file.is_ranged,
    )


def _name(url: str) -> str:
    address = redact_url(url)
    name = unquote(urlsplit(address).path.rpartition("/")[2])
    if not name or "/" in name:
        raise SourceInvalid(
            f"{address} names no file: give the URL of each file, not of their directory"
        )
    return name
