"""Ranges of files on web servers: one question per range, asked again when it may help, and checked
against what was asked.

Source: RFC 9110, sections 8.8 (validators), 13 (conditional requests), 14 (ranges).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from pilotlight.core.cookies import no_cookies
from weight_cache.errors import SourceInvalid
from weight_cache.sources.retries import ATTEMPTS, TIMEOUT_S, TransientSourceError, retry_transient
from weight_cache.sources.source import source_changed_error

T = TypeVar("T")
_LENGTH = r"\d{1,18}"
_CONTENT_RANGE = re.compile(rf"bytes (?:({_LENGTH})-({_LENGTH})|\*)/({_LENGTH})\Z", re.ASCII)
_CONTENT_LENGTH = re.compile(_LENGTH, re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
_TRANSIENT_STATUSES = frozenset({408, 425, 429})
_MAX_REDIRECTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as its server described it.

    Attributes:
        etag: its strong entity tag; "" where it has none.
        modified: `Last-Modified` as it was sent; "" where it was not.
        is_ranged: whether the server answers ranges.
    """

    url: str
    size_bytes: int
    etag: str = ""
    modified: str = ""
    is_ranged: bool = True

    def conditions(self) -> dict[str, str]:
        """Headers that make a server refuse another version."""
        if self.etag:
            return {"if-match": self.etag}
        return {"if-unmodified-since": self.modified} if self.modified else {}

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse an answer about another version, by servers that know no conditions. Raises
        SourceInvalid."""
        if self.etag:
            is_same = _strong_etag(headers) == self.etag
        else:
            is_same = not self.modified or headers.get("last-modified") == self.modified
        if not is_same:
            raise source_changed_error(redact_url(self.url))


class RangeClient:
    """An HTTP client with patience; threads share it. `headers` go with every request, but not to
    other hosts after a redirect."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        attempts: int = ATTEMPTS,
        timeout_s: float = TIMEOUT_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._attempts = attempts
        self._pause = pause
        self._http = httpx.Client(
            headers={"user-agent": "pilotlight", "accept-encoding": "identity", **(headers or {})},
            timeout=timeout_s,
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            cookies=no_cookies(),
        )

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def describe(self, url: str) -> RemoteFile:
        """Ask about a file by reading its first byte: servers that sign addresses refuse HEAD.
        Raises SourceInvalid."""
        return self.patiently(lambda: self._describe(url))

    def read(self, file: RemoteFile, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly this range of that version. Raises SourceInvalid."""
        if not length_bytes:
            return b""
        return self.patiently(lambda: self._read(file, offset_bytes, length_bytes))

    def patiently(self, work: Callable[[], T]) -> T:
        """See `patience.patiently`."""
        return retry_transient(work, attempts=self._attempts, pause=self._pause)

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """An answer of status 200, 206 or 416, its body unread: read it with `body`. Raises
        SourceInvalid."""
        with _translated(url), self._http.stream("GET", url, headers=dict(headers)) as response:
            _check_status(url, response)
            yield response

    def body(self, url: str, response: httpx.Response) -> Iterator[bytes]:
        """The body of an answer, as it comes. Raises SourceInvalid."""
        with _translated(url):
            yield from response.iter_raw()

    def _describe(self, url: str) -> RemoteFile:
        with self.get(url, {"range": "bytes=0-0"}) as response:
            headers = response.headers
            if headers.get("content-encoding", "identity") != "identity":
                raise SourceInvalid(
                    f"{redact_url(url)}: the server encodes the file ({headers['content-encoding']}), "
                    f"so ranges mean nothing"
                )
            tags = {
                "url": url,
                "etag": _strong_etag(headers),
                "modified": headers.get("last-modified", ""),
            }
            if response.status_code == 200:
                length = headers.get("content-length", "")
                if not _CONTENT_LENGTH.fullmatch(length):
                    raise SourceInvalid(
                        f"{redact_url(url)}: the server does not tell the file's length"
                    )
                return RemoteFile(size_bytes=int(length), is_ranged=False, **tags)
            return RemoteFile(size_bytes=_range_of(url, headers)[1], **tags)

    def _read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        wanted = {"range": f"bytes={offset}-{offset + length - 1}", **file.conditions()}
        with self.get(file.url, wanted) as response:
            file.check(response.headers)
            # some servers give small files no other way
            is_whole = response.status_code == 200 and length == file.size_bytes
            if not is_whole and (
                response.status_code != 206
                or _range_of(file.url, response.headers) != (offset, file.size_bytes)
            ):
                raise source_changed_error(redact_url(file.url))
            return read_exact_body(self.body(file.url, response), length, url=file.url)


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as e:
        raise TransientSourceError(
            f"{redact_url(url)}: no proper answer: {str(e) or type(e).__name__}"
        ) from e
    except (httpx.InvalidURL, httpx.TooManyRedirects, httpx.DecodingError) as e:
        raise SourceInvalid(f"{redact_url(url)}: {e}") from e


def read_exact_body(pieces: Iterator[bytes], length: int, *, url: str) -> bytes:
    """A body of exactly this length; no more of it is read."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > length:
            raise SourceInvalid(f"{redact_url(url)}: the server sends more than was asked for")
    if len(data) < length:
        raise TransientSourceError(
            f"{redact_url(url)}: the answer broke off after {len(data)} of {length} bytes"
        )
    return bytes(data)


def bearer_header(token: str | None) -> dict[str, str]:
    """The header that carries a token; what comes from a file may end with a line's end. Raises
    SourceInvalid."""
    if not token:
        return {}
    if not _TOKEN.fullmatch(word := token.strip()):
        raise SourceInvalid(
            "the token has spaces, line ends or letters that no token has: look at where it comes from"
        )
    return {"authorization": f"Bearer {word}"}


def redact_url(url: str) -> str:
    """The address without user, password and query: any of these may be a key. Raises SourceInvalid
    for what is none."""
    try:
        address = urlsplit(url)
    except ValueError as e:
        raise SourceInvalid(f"an address of weights is none: {e}") from e
    return address._replace(
        netloc=address.netloc.rpartition("@")[2], query="", fragment=""
    ).geturl()


def _strong_etag(headers: Mapping[str, str]) -> str:
    """The entity tag, unless it is a weak one, which says nothing about bytes."""
    etag = headers.get("etag", "")
    return "" if etag.startswith("W/") else etag


def _range_of(url: str, headers: Mapping[str, str]) -> tuple[int, int]:
    """Where the body begins, and the length of the whole."""
    match = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if match is None:
        raise SourceInvalid(
            f"{redact_url(url)}: the server's Content-Range says "
            f"{headers.get('content-range', 'nothing')!r}"
        )
    return int(match[1] or 0), int(match[3])


def _check_status(url: str, response: httpx.Response) -> None:
    status, where = response.status_code, redact_url(url)
    if url.startswith("https:") and response.url.scheme != "https":
        raise SourceInvalid(
            f"{where} leads to {redact_url(str(response.url))}, which is not encrypted"
        )
    if status in (200, 206) or (
        status == 416 and response.headers.get("content-range") == "bytes */0"
    ):
        return
    if status in (412, 416):
        raise source_changed_error(where)
    if status in (401, 403):
        raise SourceInvalid(
            f"{where}: access refused ({status}): give a token that may read it, with secret="
        )
    if status in (404, 410):
        raise SourceInvalid(f"{where}: there is nothing at that address ({status})")
    if status >= 500 or status in _TRANSIENT_STATUSES:
        wish = response.headers.get("retry-after", "")
        raise TransientSourceError(
            f"{where}: the server is not able to answer now ({status})",
            retry_after_s=float(wish) if wish.isdecimal() else None,
        )
    raise SourceInvalid(f"{where}: the server refused ({status})")
