"""HTTP/1.1 on loopback for fakes: keep-alive, chunked bodies both ways, and dropped connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.user_code import Answer, Asked


class LoopbackServer(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[Any] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for request in list(self._open):
            with contextlib.suppress(OSError):
                # SHUT_RDWR: a handler that waits for a client's next request wakes up
                request.shutdown(2)
        super().server_close()


def handler_for(answer_to: Callable[[Asked], Answer | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: tests look at `asked`."""

        def serve(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(url.query).items()}
            headers = {key.lower(): value for key, value in self.headers.items()}
            asked = Asked(
                method=self.command, path=url.path, query=query, headers=headers, body=self._body()
            )
            answer = answer_to(asked)
            if answer is None:
                self.close_connection = True
                self.connection.shutdown(2)
                return
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._send(answer)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve  # noqa: N815 - the names that http.server calls

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def _send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            for key, value in {"content-type": answer.content_type, **answer.headers}.items():
                self.send_header(key, value)
            if answer.stream is None:
                self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else answer.body)
                return
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for piece in answer.stream:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    return Handler
