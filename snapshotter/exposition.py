"""Prometheus text over HTTP/1.1, on a Unix socket and, where wanted, on a TCP address. One answer per connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

_PATIENCE_S = 5.0
_HEAD_LIMIT_BYTES = 16 * 1024
_HEAD = b"HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


async def expose(text: Callable[[], bytes], *, socket_path: Path, listen: str | None) -> list[asyncio.Server]:
    """Serve `text()` to whoever asks with GET. Raises OSError when an address is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, body = (b"200 OK", text()) if head.startswith(b"GET ") else (b"405 Method Not Allowed", b"GET only\n")
                writer.write(_HEAD % (status, len(body)) + body)
                await writer.drain()
        writer.close()

    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket_path)
    servers = [await asyncio.start_unix_server(answer, socket_path, limit=_HEAD_LIMIT_BYTES)]
    os.chmod(socket_path, 0o600)
    if listen is not None:
        host, _, port = listen.rpartition(":")
        servers.append(await asyncio.start_server(answer, host.strip("[]"), int(port), limit=_HEAD_LIMIT_BYTES))
    return servers
