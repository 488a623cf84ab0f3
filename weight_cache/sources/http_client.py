"""Range reads from web servers: one request per range, with retries, each response checked against
the request.

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

from pilotlight.core.transport.cookies import no_cookies
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
    """A file as described by its server.

    Attributes:
        etag: its strong entity tag, or "".
        modified: `Last-Modified` as sent, or "".
        is_ranged: whether the server supports ranges.
    """

    url: str
    size_bytes: int
    etag: str = ""
    modified: str = ""
    is_ranged: bool = True

    def conditions(self) -> dict[str, str]:
        """Headers that make the server refuse another version."""
        if self.etag:
            return {"if-match": self.etag}
        return {"if-unmodified-since": self.modified} if self.modified else {}

    def check(self, headers: Mapping[str, str]) -> None:
        """Check the version of a response, for servers that ignore conditions. Raises
        SourceInvalid."""
        if self.etag:
            is_same = _strong_etag(headers) == self.etag
        else:
            is_same = not self.modified or headers.get("last-modified") == self.modified
        if not is_same:
            raise source_changed_error(redact_url(self.url))


class RangeClient:
    """An HTTP client with retries; thread-safe. `headers` are sent with every request, but not to
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
        """Describe a file by reading its first byte: servers of signed URLs refuse HEAD. Raises
        SourceInvalid."""
        return self.patiently(lambda: self._describe(url))

    def read(self, file: RemoteFile, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Read exactly this range of this version. Raises SourceInvalid."""
        if not length_bytes:
            return b""
        return self.patiently(lambda: self._read(file, offset_bytes, length_bytes))

    def patiently(self, work: Callable[[], T]) -> T:
        """Run `work` with retries (`retry_transient`)."""
        return retry_transient(work, attempts=self._attempts, pause=self._pause)

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Send GET; yield a response of status 200, 206 or 416 with unread body, to be read with
        `body`. Raises SourceInvalid."""
        with _translated(url), self._http.stream("GET", url, headers=dict(headers)) as response:
            _check_status(url, response)
            yield response

    def body(self, url: str, response: httpx.Response) -> Iterator[bytes]:
        """Stream the body of a response. Raises SourceInvalid."""
        with _translated(url):
            yield from response.iter_raw()

    def _describe(self, url: str) -> RemoteFile:
        with self.get(url, {"range": "bytes=0-0"}) as response:
            headers = response.headers
            if headers.get("content-encoding", "identity") != "identity":
                raise SourceInvalid(
                    f"{redact_url(url)}: the server encodes the file ({headers['content-encoding']}), "
                    f"so it cannot be read in ranges"
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
                        f"{redact_url(url)}: the server does not send the file's length"
                    )
                return RemoteFile(size_bytes=int(length), is_ranged=False, **tags)
            return RemoteFile(size_bytes=_range_of(url, headers)[1], **tags)

    def _read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        wanted = {"range": f"bytes={offset}-{offset + length - 1}", **file.conditions()}
        with self.get(file.url, wanted) as response:
            file.check(response.headers)
            # some servers send small files only as a whole
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
            f"{redact_url(url)}: no valid response: {str(e) or type(e).__name__}"
        ) from e
    except (httpx.InvalidURL, httpx.TooManyRedirects, httpx.DecodingError) as e:
        raise SourceInvalid(f"{redact_url(url)}: {e}") from e


def read_exact_body(pieces: Iterator[bytes], length: int, *, url: str) -> bytes:
    """Read a body of exactly this length, and not more."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > length:
            raise SourceInvalid(f"{redact_url(url)}: the server sent more than was requested")
    if len(data) < length:
        raise TransientSourceError(
            f"{redact_url(url)}: the response ended after {len(data)} of {length} bytes"
        )
    return bytes(data)


def bearer_header(token: str | None) -> dict[str, str]:
    """The header with a token, without surrounding whitespace (tokens read from a file may end with
    a newline). Raises SourceInvalid."""
    if not token:
        return {}
    if not _TOKEN.fullmatch(word := token.strip()):
        raise SourceInvalid(
            "the token contains spaces, line breaks or other invalid characters: check its source"
        )
    return {"authorization": f"Bearer {word}"}


def redact_url(url: str) -> str:
    """The URL without user, password and query, which may be secret. Raises SourceInvalid for an
    invalid URL."""
    try:
        address = urlsplit(url)
    except ValueError as e:
        raise SourceInvalid(f"invalid URL of weights: {e}") from e
    return address._replace(
        netloc=address.netloc.rpartition("@")[2], query="", fragment=""
    ).geturl()


def _strong_etag(headers: Mapping[str, str]) -> str:
    """The entity tag, unless it is weak, which does not identify bytes."""
    etag = headers.get("etag", "")
    return "" if etag.startswith("W/") else etag


def _range_of(url: str, headers: Mapping[str, str]) -> tuple[int, int]:
    """Parse Content-Range: the offset of the body, and the total length."""
    match = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if match is None:
        raise SourceInvalid(
            f"{redact_url(url)}: invalid Content-Range from the server: "
            f"{headers.get('content-range', 'nothing')!r}"
        )
    return int(match[1] or 0), int(match[3])


def _check_status(url: str, response: httpx.Response) -> None:
    status, where = response.status_code, redact_url(url)
    if url.startswith("https:") and response.url.scheme != "https":
        raise SourceInvalid(
            f"{where} redirects to {redact_url(str(response.url))}, which is not encrypted"
        )
    if status in (200, 206) or (
        status == 416 and response.headers.get("content-range") == "bytes */0"
    ):
        return
    if status in (412, 416):
        raise source_changed_error(where)
    if status in (401, 403):
        raise SourceInvalid(
            f"{where}: access refused ({status}): set a token with read access, with secret="
        )
    if status in (404, 410):
        raise SourceInvalid(f"{where}: not found ({status})")
    if status >= 500 or status in _TRANSIENT_STATUSES:
        wish = response.headers.get("retry-after", "")
        raise TransientSourceError(
            f"{where}: the server is temporarily unavailable ({status})",
            retry_after_s=float(wish) if wish.isdecimal() else None,
        )
    raise SourceInvalid(f"{where}: the server refused ({status})")
