"""A small object server over a dictionary, whose faults are chosen: enough of S3's protocol for one
object in one request.

It runs in threads, so that blocking clients and event loops may ask it alike. Faults are lined up
in `faults` and used up in order, each by the next request that it fits."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import struct
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from xml.sax.saxutils import escape

Kind = Literal["status", "silent", "stalled", "slow", "short", "cut", "reset", "wrong", "replaced"]
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CODES = {
    401: "InvalidToken",
    403: "AccessDenied",
    404: "NoSuchKey",
    429: "SlowDown",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(kw_only=True, slots=True)
class Fault:
    """What goes wrong, `times` times, with requests of `method` for `key` (None: any).

    Kinds: `status` answers with that status; `silent` never answers; `stalled` stops in the middle
    of the body; `slow` pauses `pause_s` between pieces; `short` announces a shorter body and closes
    in order; `cut` closes in the middle of the body; `reset` breaks the connection there; `wrong`
    flips every bit; `replaced` puts `content` in the object's place before the request is answered.
    """

    kind: Kind
    times: int = 1
    method: str = "GET"
    key: str | None = None
    status: int = 503
    code: str | None = None
    pause_s: float = 0.005
    content: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One request as it came."""

    method: str
    key: str
    range: str | None
    if_match: str | None


class FaultyObjects:
    """The server's state. Threads of the server read and write it under `_lock`; a test writes
    before it asks.

    Attributes:
        objects: content by key. faults: still to come. seen: requests so far. etags, ranges,
        conditions: whether the server has entity tags, honours Range, honours If-Match. page_size:
        keys in one answer to a listing.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.bucket = "bucket"
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.etags = True
        self.ranges = True
        self.conditions = True
        self.page_size = 1000
        self.closing = threading.Event()
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"<FaultyObjects {self.address} objects={len(self.objects)} seen={len(self.seen)} "
            f"faults={len(self.faults)}>"
        )

    @property
    def environment(self) -> dict[str, str]:
        """Makes the standard chain of credentials find this server."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL": self.address,
        }

    def url(self, key: str) -> str:
        """For plain HTTP clients."""
        return f"{self.address}/{self.bucket}/{key}"

    def fail(self, *faults: Fault) -> None:
        """Line copies of them up."""
        with self._lock:
            self.faults.extend(replace(fault) for fault in faults)

    def note(self, request: Seen) -> Fault | None:
        """Remember the request; the fault that it meets."""
        with self._lock:
            self.seen.append(request)
            for fault in self.faults:
                if fault.method == request.method and fault.key in (None, request.key):
                    fault.times -= 1
                    if not fault.times:
                        self.faults.remove(fault)
                    if fault.kind == "replaced":
                        self.objects[request.key] = fault.content
                    return fault
        return None

    def count(self, method: str, key: str | None = None) -> int:
        """Requests of that method so far."""
        with self._lock:
            return sum(1 for one in self.seen if one.method == method and key in (None, one.key))


@contextlib.contextmanager
def faulty_objects() -> Iterator[FaultyObjects]:
    """A running server on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.block_on_close = True
    server.daemon_threads = False
    state = FaultyObjects(f"http://127.0.0.1:{server.server_port}")
    server.state = state  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="faulty objects")
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        thread.join()
        for connection in tuple(state.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """The connection is remembered: who keeps it open while idle must not hold up the server's
        end."""
        super().setup()
        self.state.connections.add(self.connection)

    def finish(self) -> None:
        """Forgotten again."""
        self.state.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: tests look at `seen`."""

    @property
    def state(self) -> FaultyObjects:
        state: FaultyObjects = self.server.state  # type: ignore[attr-defined]
        return state

    def do_GET(self) -> None:
        fault = self._begin()
        if fault is None or not self._refused(fault):
            if self.key:
                self._object(fault, with_body=True)
            else:
                self._listing()

    def do_HEAD(self) -> None:
        fault = self._begin()
        if fault is None or not self._refused(fault):
            self._object(fault, with_body=False)

    def do_PUT(self) -> None:
        fault = self._begin()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is None or not self._refused(fault):
            self.state.objects[self.key] = body
            self._answer(200, {"ETag": _etag(body)})

    def do_DELETE(self) -> None:
        fault = self._begin()
        if fault is None or not self._refused(fault):
            self.state.objects.pop(self.key, None)
            self._answer(204, {})

    def _begin(self) -> Fault | None:
        parts = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(parts.query))
        self.key = (
            urllib.parse.unquote(parts.path).removeprefix(f"/{self.state.bucket}").removeprefix("/")
        )
        return self.state.note(
            Seen(
                method=self.command,
                key=self.key,
                range=self.headers.get("Range"),
                if_match=self.headers.get("If-Match"),
            )
        )

    def _refused(self, fault: Fault) -> bool:
        match fault.kind:
            case "status":
                self._error(fault.status, fault.code or _CODES.get(fault.status, "Error"))
            case "silent":
                self.state.closing.wait()
                self.close_connection = True
            case _:
                return False
        return True

    def _object(self, fault: Fault | None, *, with_body: bool) -> None:
        content = self.state.objects.get(self.key)
        if content is None:
            return self._error(404, "NoSuchKey")
        condition = self.headers.get("If-Match")
        if (
            condition is not None
            and self.state.conditions
            and condition not in ("*", _etag(content))
        ):
            return self._error(412, "PreconditionFailed")
        headers = {
            "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT",
            "Accept-Ranges": "bytes" if self.state.ranges else "none",
        }
        if self.state.etags:
            headers["ETag"] = _etag(content)
        status, body = 200, content
        if (wanted := _RANGE.fullmatch(self.headers.get("Range", ""))) and self.state.ranges:
            begin, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            if begin > end:
                return self._error(416, "InvalidRange")
            status, body = 206, content[begin : end + 1]
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
        if fault is not None and fault.kind == "short":
            body = body[: len(body) // 2]
        return self._answer(status, headers, body, fault=fault, with_body=with_body)

    def _listing(self) -> None:
        prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
        keys = sorted(key for key in self.state.objects if key.startswith(prefix) and key > after)
        page, more = keys[: self.state.page_size], len(keys) > self.state.page_size
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.state.objects[key])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        self._answer(200, {"Content-Type": "application/xml"}, body.encode())

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>chosen by the test</Message></Error>".encode()
        self._answer(
            status, {"Content-Type": "application/xml"}, body, with_body=self.command != "HEAD"
        )

    def _answer(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        fault: Fault | None = None,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            with contextlib.suppress(ConnectionError):  # who was cancelled reads no further
                self._send(body, fault)
        else:
            self.wfile.flush()

    def _send(self, body: bytes, fault: Fault | None) -> None:
        match fault.kind if fault else None:
            case "stalled" | "cut" | "reset":
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self._break_off(fault)
            case "slow":
                assert fault is not None
                for at in range(0, len(body), max(1, len(body) // 8)):
                    self.wfile.write(body[at : at + max(1, len(body) // 8)])
                    self.wfile.flush()
                    self.state.closing.wait(fault.pause_s)
            case "wrong":
                self.wfile.write(bytes(b ^ 0xFF for b in body))
            case _:
                self.wfile.write(body)
        self.wfile.flush()

    def _break_off(self, fault: Fault | None) -> None:
        self.close_connection = True
        if fault is not None and fault.kind == "stalled":
            self.state.closing.wait()
        if fault is not None and fault.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class Pauses(list[float]):
    """Takes none, and remembers how long they would have been."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
