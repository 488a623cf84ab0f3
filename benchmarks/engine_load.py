"""Streams of a language model, read as bytes: the same client for the engine's own Unix socket and
for the gateway's port.

Written on asyncio's streams alone, so that it costs the two cores that everything runs on as little
as possible."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE_S = 180.0


class AskFailed(Exception):
    """Raised when a request was not answered 200; the message is the answer."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """One answer. Milliseconds from before the connection; `gaps_ms` between pieces that hold
    tokens."""

    first_ms: float = 0.0
    last_ms: float = 0.0
    pieces: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    start: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where streams are asked for: a Unix socket, or a port. `model`: what it is called there."""

    model: str
    socket: Path | None = None
    port: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection. Raises OSError."""
        if self.socket is not None:
            return await asyncio.open_unix_connection(str(self.socket))
        return await asyncio.open_connection("127.0.0.1", self.port)


def body_of(model: str, *, prompt: list[int], tokens: int) -> dict[str, Any]:
    """A completion that runs to its length, as a stream."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(door: Door, *, prompt: list[int], tokens: int) -> Stream:
    """One stream, to its end. Raises AskFailed, OSError."""
    async with asyncio.timeout(PATIENCE_S):
        began = time.perf_counter()
        reader, writer = await door.connect()
        try:
            body = json.dumps(body_of(door.model, prompt=prompt, tokens=tokens)).encode()
            head = "".join(f"{name}: {value}\r\n" for name, value in door.headers.items())
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nhost: engine\r\n{head}content-type: "
                f"application/json\r\naccept: text/event-stream\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            return await _read(reader, began)
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, began: float) -> Stream:
    stream, last = Stream(), 0.0
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise AskFailed(
            f"{head.decode(errors='replace')}{(await reader.read(2000)).decode(errors='replace')}"
        )
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"pilotlight-start":
            stream.start = value.strip().decode()
    rest = b""
    while data := await reader.read(65536):
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if b'"error"' in line and line.startswith(b"data:"):
                raise AskFailed(line.decode(errors="replace"))
            if (
                not line.startswith(b"data:")
                or b'"text":"' not in line.replace(b'"text": "', b'"text":"')
                or b'"choices":[]' in line
            ):
                continue
            stream.pieces += 1
            if stream.pieces == 1:
                stream.first_ms = (now - began) * 1000
            else:
                stream.gaps_ms.append((now - last) * 1000)
            last = now
    stream.last_ms = (last - began) * 1000
    if not stream.pieces:
        raise AskFailed("the stream ended without a token")
    return stream


async def together(
    door: Door, *, streams: int, tokens: int, prompt_tokens: int, seed: int
) -> list[Stream]:
    """So many streams at once, each with a prompt of its own."""
    prompts = [
        [16 + (seed * 7919 + n * 104_729 + i * 31) % 200 for i in range(prompt_tokens)]
        for n in range(streams)
    ]
    return await asyncio.gather(*(ask(door, prompt=prompt, tokens=tokens) for prompt in prompts))
