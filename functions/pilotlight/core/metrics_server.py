"""Serves a process's metrics over HTTP/1.1: on a Unix socket, and on a TCP address if configured.

The Unix socket belongs to the platform's user (mode 0600). Every process of the machine, including
tenants', can connect to a TCP address, so over TCP a request needs the platform's bearer token
(`metrics_token`). `/healthz` and the paths of `probe` need none: they report whether a process
works, and nothing about tenants."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hmac
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid

REQUEST_TIMEOUT_S = 10.0
_MAX_HEAD_BYTES = 16 * 1024
_MIN_TOKEN_CHARACTERS = 16
_REASONS = {
    200: "OK",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}

Probe = Callable[[str], Awaitable[tuple[int, str] | None]]
"""Answers a probe's path with a status and a text; None for all other paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """Where one process serves its metrics.

    Attributes:
        socket_path: Unix socket; None = none.
        listen: `host:port`, with the token; None = no TCP.
        token_file: file with the token; read, and created if missing, only with `listen`.
        setting: name of the setting for `listen`, for messages.
        listener: already bound to `socket_path`; None = the server binds it.
        token: already read from `token_file`; None = the server reads it.
    """

    socket_path: Path | None
    listen: str | None = None
    token_file: Path | None = None
    setting: str = "metrics_listen"
    listener: socket.socket | None = None
    token: str | None = None

    def opened(self) -> MetricsAddress:
        """Do everything that needs the privileges of the directories' owner. Raises
        SettingsInvalid, OSError."""
        listener = private_listener(self.socket_path) if self.socket_path is not None else None
        token = (
            metrics_token(self.token_file)
            if self.listen is not None and self.token_file is not None
            else None
        )
        return replace(self, listener=listener, token=token)


def metrics_socket(paths: Paths, process: str) -> Path:
    """`<run>/metrics-<process>.sock`."""
    return paths.run / f"metrics-{process}.sock"


def metrics_token_file(platform: PlatformSettings, paths: Paths) -> Path:
    """`platform.metrics_token_file`, else `<home>/metrics.token`."""
    return (
        Path(platform.metrics_token_file)
        if platform.metrics_token_file is not None
        else paths.home / "metrics.token"
    )


def metrics_token(file: Path) -> str:
    """Read the token in `file`; create it (0600) if missing. Raises SettingsInvalid."""
    try:
        if not file.exists():
            _create(file)
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise SettingsInvalid(
            f"{file}: cannot use it as the metrics token: {e}: set platform.metrics_token_file"
        ) from e
    if len(token) < _MIN_TOKEN_CHARACTERS or not token.isascii() or len(token.split()) != 1:
        raise SettingsInvalid(
            f"{file}: no valid metrics token: write one word of at least {_MIN_TOKEN_CHARACTERS} "
            f"ASCII characters"
        )
    return token


def _create(file: Path) -> None:
    fresh = file.with_name(f"{file.name}.{os.getpid()}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as f:
            f.write(secrets.token_urlsafe(32) + "\n")
        # another process created it first: use its token
        with contextlib.suppress(FileExistsError):
            os.link(fresh, file)
    finally:
        fresh.unlink()


@dataclass(slots=True, kw_only=True)
class MetricsServer:
    """Serves one registry. Owner: the event loop.

    Attributes:
        registry: the metrics to serve.
        refresh: called before each scrape.
        probe: answers further paths without a token.
        in_thread: render in a thread, for a large registry that is safe to read there.
    """

    registry: CollectorRegistry
    refresh: Callable[[], None] | None = None
    probe: Probe | None = None
    in_thread: bool = False

    async def serve(self, address: MetricsAddress) -> list[asyncio.Server]:
        """Serve at `address` until the servers are closed. Raises SettingsInvalid if the TCP
        address cannot be bound, OSError for the socket."""
        servers: list[asyncio.Server] = []
        try:
            if address.socket_path is not None:
                listener = address.listener or private_listener(address.socket_path)
                servers.append(
                    await asyncio.start_unix_server(
                        self._on_connection(None), sock=listener, limit=_MAX_HEAD_BYTES
                    )
                )
            if address.listen is not None:
                assert address.token_file is not None
                servers.append(
                    await self._serve_tcp(
                        address, address.token or metrics_token(address.token_file)
                    )
                )
        except BaseException:
            for server in servers:
                server.close()
            raise
        return servers

    async def _serve_tcp(self, address: MetricsAddress, token: str) -> asyncio.Server:
        host, _, port = (address.listen or "").rpartition(":")
        try:
            return await asyncio.start_server(
                self._on_connection(token), host.strip("[]"), int(port), limit=_MAX_HEAD_BYTES
            )
        except OSError as e:
            raise SettingsInvalid(
                f"{address.setting} = {address.listen!r}: cannot listen: {e.strerror or e}"
            ) from e

    def _on_connection(
        self, token: str | None
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(
                OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
            ):
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    writer.write(
                        await self.answer(await reader.readuntil(b"\r\n\r\n"), token=token)
                    )
                    await writer.drain()
            writer.close()

        return serve_one

    async def answer(self, head: bytes, *, token: str | None) -> bytes:
        """The response to a request with this head; `token`: required bearer token, or None."""
        request_line, _, rest = head.decode("latin-1").partition("\r\n")
        method, target = (*request_line.split(" "), "", "")[:2]
        path = target.partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response(405, b"GET only\n")
        if self.probe is not None and (probed := await self.probe(path)) is not None:
            return _response(probed[0], probed[1].encode() + b"\n")
        if path == "/healthz":
            return _response(200, b"ok\n")
        if path not in ("/", "/metrics"):
            return _response(404, b"/metrics or /healthz\n")
        headers = _headers(rest)
        if token is not None and not _has_token(headers.get("authorization", ""), token):
            return _response(
                401,
                b"a bearer token is needed: see metrics_token_file\n",
                {"WWW-Authenticate": "Bearer"},
            )
        if self.refresh is not None:
            self.refresh()
        encode, content_type = choose_encoder(headers.get("accept", ""))
        is_zipped = "gzip" in headers.get("accept-encoding", "")

        def render() -> bytes:
            text: bytes = encode(self.registry)
            return gzip.compress(text, compresslevel=1) if is_zipped else text

        body = await asyncio.to_thread(render) if self.in_thread else render()
        extra = {"Content-Encoding": "gzip"} if is_zipped else {}
        return _response(
            200, body, {"Content-Type": content_type, **extra}, with_body=method == "GET"
        )


def private_listener(path: Path) -> socket.socket:
    """Create a Unix socket that only its owner can connect to at any moment, replacing the socket
    of an earlier process."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(fresh))
        fresh.chmod(0o600)
        listener.listen(128)  # no connection is accepted before, whatever its mode was
        listener.setblocking(False)
        fresh.rename(path)
    except BaseException:
        listener.close()
        fresh.unlink(missing_ok=True)
        raise
    return listener


def _headers(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.split("\r\n"))
    return {name.strip().lower(): value.strip() for name, colon, value in lines if colon}


def _has_token(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode(), token.encode()
    )


def _response(
    status: int, body: bytes, headers: dict[str, str] | None = None, *, with_body: bool = True
) -> bytes:
    lines = {
        "Content-Type": "text/plain; charset=utf-8",
        **(headers or {}),
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        + "\r\n"
    )
    return head.encode() + (body if with_body else b"")
