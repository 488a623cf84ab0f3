"""A receiver of webhooks on loopback that checks signatures its own way, and misbehaves when told
to."""

from __future__ import annotations

import asyncio
import contextlib
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.hmac import HMAC

Reply = bytes | None
"""What is written as an answer; None: nothing ever."""
OK = b"HTTP/1.1 204 No Content\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Received:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes

    def is_signed_with(self, secret: str) -> bool:
        """The check of a receiver, after the specification's text and with another library than the
        sender's."""
        signed = (
            f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode()
            + self.body
        )
        for version, _, signature in (
            part.partition(",") for part in self.headers["webhook-signature"].split(" ")
        ):
            mac = HMAC(b64decode(secret.removeprefix("whsec_")), hashes.SHA256())
            mac.update(signed)
            if version == "v1" and mac.finalize() == b64decode(signature):
                return True
        return False


@dataclass(kw_only=True)
class Receiver:
    """Owner: the test's loop. `reply` decides by the number of the request, from 1."""

    reply: Callable[[int], Reply] = lambda _: OK
    received: list[Received] = field(default_factory=list)
    port: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}/hook"

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Receiver]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.released.set()
            server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.received.append(await _read(reader))
            answer = self.reply(len(self.received))
            self.arrived.set()
            if answer is None:
                await self.released.wait()
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the sender left first
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip()
    line, *rest = head.split("\r\n")
    headers: dict[str, Any] = {
        name.lower(): value.strip() for name, _, value in (text.partition(":") for text in rest)
    }
    return Received(
        line=line, headers=headers, body=await reader.readexactly(int(headers["content-length"]))
    )
