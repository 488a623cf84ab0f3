"""Files on a web server, with entity tags, ranges and conditions as RFC 9110 has them, and with
faults."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self

from tests.fakes.loopback import LoopbackServer

RESET, SHORT = "reset", "short"
"""Faults: the connection is dropped before the answer, or in the middle of its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is at an address. `knows_conditions` False: the server ignores If-Match, as simple ones
    do."""

    content: bytes
    etag: str = ""
    modified: str = ""
    is_ranged: bool = True
    has_length: bool = True
    knows_conditions: bool = True
    encoding: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request. Header names are in small letters."""

    path: str
    headers: Mapping[str, str]


class WebFiles:
    """The server. A context manager; tests change `files`, `redirects`, `token` and `faults`
    between requests.

    `faults`: what happens to the next requests: a status, RESET or SHORT; None is no fault.
    """

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.redirects: dict[str, str] = {}
        self.token: str | None = None
        self.faults: deque[int | str | None] = deque()
        self.seen: list[Seen] = []
        self._server = LoopbackServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"web": self}))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, name="web files"
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def ranges(self) -> list[str]:
        """The ranges that were asked for, without the first look at each file."""
        return [
            found for seen in self.seen if (found := seen.headers.get("range", "")) != "bytes=0-0"
        ]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    web: WebFiles
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: tests look at `seen`."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.web.seen.append(
            Seen(path=path, headers={key.lower(): value for key, value in self.headers.items()})
        )
        fault = self.web.faults.popleft() if self.web.faults else None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answer(path, fault)

    def _answer(self, path: str, fault: int | str | None) -> None:
        if fault == RESET:
            self.close_connection = True
            self.connection.shutdown(2)
        elif isinstance(fault, int):
            self._send(fault, b"", {"retry-after": "7"} if fault == 429 else {})
        elif (
            self.web.token is not None
            and self.headers.get("authorization") != f"Bearer {self.web.token}"
        ):
            self._send(401, b"", {})
        elif path in self.web.redirects:
            self._send(302, b"", {"location": self.web.redirects[path]})
        elif path not in self.web.files:
            self._send(404, b"", {})
        else:
            self._file(self.web.files[path], is_short=fault == SHORT)

    def _file(self, file: Served, *, is_short: bool) -> None:
        pairs = {
            "etag": file.etag,
            "last-modified": file.modified,
            "content-encoding": file.encoding,
        }
        headers = {key: value for key, value in pairs.items() if value}
        wanted = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("range") or "")
        if file.knows_conditions and self._is_other(file):
            self._send(412, b"", headers)
        elif wanted is None or not file.is_ranged:
            self._send(200, file.content, headers, is_short=is_short, has_length=file.has_length)
        elif int(wanted[1]) >= len(file.content):
            self._send(416, b"", {"content-range": f"bytes */{len(file.content)}"})
        else:
            first, last = int(wanted[1]), min(int(wanted[2]), len(file.content) - 1)
            span = {"content-range": f"bytes {first}-{last}/{len(file.content)}"}
            self._send(206, file.content[first : last + 1], {**headers, **span}, is_short=is_short)

    def _is_other(self, file: Served) -> bool:
        match, unmodified = self.headers.get("if-match"), self.headers.get("if-unmodified-since")
        return (match is not None and match != file.etag) or (
            unmodified is not None and unmodified != file.modified
        )

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        *,
        is_short: bool = False,
        has_length: bool = True,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if has_length:
            self.send_header("content-length", str(len(body)))
        self.close_connection = is_short or not has_length
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if is_short else body)
