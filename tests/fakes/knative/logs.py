"""A container's log as the kubelet keeps it: each line with its time, one file for each life of the
container; and what is read of it."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping
from pathlib import Path


class ContainerLog:
    """One container's. Owner: the event loop. `path` is the present life's, `previous` that of the
    life before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = path.with_suffix(".previous")

    async def keep(self, stream: asyncio.StreamReader) -> None:
        """Write what comes, until its end; begins a new file."""
        if self.path.exists():
            self.path.replace(self.previous)
        rest = b""
        with self.path.open("wb", buffering=0) as out:
            while data := await stream.read(65536):
                *whole, rest = (rest + data).split(b"\n")
                stamp = _now()
                out.write(b"".join(stamp + line + b"\n" for line in whole))
            if rest:
                out.write(_now() + rest + b"\n")

    def tail(self, most_bytes: int = 2048) -> str:
        """The end, without times."""
        return b"".join(
            bare(line) for line in self.path.read_bytes().splitlines(keepends=True)
        ).decode(errors="replace")[-most_bytes:]


def chosen(text: bytes, query: Mapping[str, str]) -> bytes:
    """What of a log a request wants: `sinceTime`, `tailLines`, `timestamps`."""
    lines = text.splitlines(keepends=True)
    since = query.get("sinceTime", "")
    if since:
        lines = [line for line in lines if line.split(b" ", 1)[0].decode() >= since.rstrip("Z")]
    if "tailLines" in query:
        lines = lines[-int(query["tailLines"]) :] if int(query["tailLines"]) else []
    if query.get("timestamps") == "true":
        return b"".join(lines)
    return b"".join(bare(line) for line in lines)


def bare(line: bytes) -> bytes:
    """A line without its time."""
    return line.partition(b" ")[2]


def _now() -> bytes:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()
