"""The read side of logs: find by labels, instance, call and time; follow. Files of dead instances stay until retention takes them.

`<logs>/<name>.json` says whose log it is; `<name>.log.1` and `<name>.log` are its lines (format: `snapshotter/logpipe.py`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime as dt
import heapq
import json
import os
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.inotify import watching

TAIL_LINES = 40
"""Last lines that an error carries: a Python traceback and what led to it."""
_TAIL_BYTES = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """What is asked for; None everywhere means everything.

    Attributes:
        labels: labels that the log's owner must have.
        instance_id: one instance, or one slot for its boot log.
        since: wall clock, seconds since the epoch.
        tail: only the last so many lines.
        call_id: lines printed inside that call, or inside a batch that it was in (ids with a comma between them).
    """

    labels: Mapping[str, str]
    instance_id: str | None = None
    since: float | None = None
    tail: int | None = None
    call_id: str | None = None

    def takes(self, line: Mapping[str, Any]) -> bool:
        """Whether a parsed line is wanted."""
        if self.since is not None and line["time"] < self.since:
            return False
        return self.call_id is None or self.call_id in (line["call"] or "").split(",")


class Logs:
    """The directory of logs. Owner: the event loop; the shims write the `.log` files, only we write `.json` and delete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __repr__(self) -> str:
        return f"<Logs {self._directory}>"

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory

    def register(self, name: str, *, labels: Mapping[str, str], revision: str, now: float) -> None:
        """Say whose log `name` will be."""
        about = {"labels": dict(labels), "revision": revision, "started_at": now}
        (self._directory / f"{name}.json").write_text(json.dumps(about))

    async def tail(self, name: str) -> list[str]:
        """The text of the last TAIL_LINES lines of one log."""
        return await asyncio.to_thread(self._tail, name)

    def _tail(self, name: str) -> list[str]:
        try:
            with (self._directory / f"{name}.log").open("rb") as f:
                f.seek(max(0, f.seek(0, 2) - _TAIL_BYTES))
                text = f.read().decode(errors="replace").rstrip("\n")
        except FileNotFoundError:
            return []
        return [line.split(" ", 3)[-1] for line in text.split("\n")[-TAIL_LINES:]] if text else []

    async def read(self, query: LogQuery, *, until: Mapping[str, tuple[int, int]] | None = None) -> AsyncGenerator[Mapping[str, Any], None]:
        """Matching lines, oldest first; of a file named in `until` (inode, size) not beyond that size."""
        for line in await asyncio.to_thread(self._collect, query, until or {}):
            yield line

    async def follow(self, query: LogQuery) -> AsyncGenerator[Mapping[str, Any], None]:
        """Matching lines, then those that are written from now on, until cancelled."""
        positions: dict[str, tuple[int, int]] = {}
        with watching(self._directory) as watch:
            for name in self._names(query):
                self._remember(name, positions)
            async for line in self.read(query, until=positions):
                yield line
            while True:
                for line in self._news(query, positions):
                    yield line
                await watch.wait_changed()

    def prune(self, *, alive: Collection[str], keep_s: float, total_bytes: int, now: float) -> int:
        """Delete logs of the dead: too old ones, then the oldest until `total_bytes` hold the rest. Returns how many."""
        dead = sorted((self._age(about), about.stem) for about in self._directory.glob("*.json") if about.stem not in alive)
        held = sum(self._size(name) for _, name in dead)
        deleted = 0
        for written_at, name in dead:
            if now - written_at <= keep_s and held <= total_bytes:
                break
            held -= self._size(name)
            deleted += 1
            for suffix in (".log.1", ".log", ".json"):
                (self._directory / f"{name}{suffix}").unlink(missing_ok=True)
        return deleted

    def _age(self, about: Path) -> float:
        log = about.with_suffix(".log")
        return (log if log.exists() else about).stat().st_mtime

    def _size(self, name: str) -> int:
        return sum(f.stat().st_size for s in (".log", ".log.1") if (f := self._directory / f"{name}{s}").exists())

    def _names(self, query: LogQuery) -> list[str]:
        names = [query.instance_id] if query.instance_id else [p.stem for p in self._directory.glob("*.json")]
        return [name for name in names if self._belongs(name, query.labels)]

    def _belongs(self, name: str, labels: Mapping[str, str]) -> bool:
        if not _NAME.match(name):
            return False  # a stranger's question becomes part of a path here
        try:
            about = json.loads((self._directory / f"{name}.json").read_text())
        except (OSError, ValueError):
            return False
        owned: Mapping[str, str] = about["labels"]
        return labels.items() <= owned.items()

    def _collect(self, query: LogQuery, until: Mapping[str, tuple[int, int]]) -> list[Mapping[str, Any]]:
        merged = heapq.merge(*(self._lines(name, query, until.get(name)) for name in self._names(query)), key=lambda line: line["time"])
        if query.tail is None:
            return list(merged)
        return list(collections.deque(merged, maxlen=max(0, query.tail)))

    def _lines(self, name: str, query: LogQuery, until: tuple[int, int] | None) -> Iterator[Mapping[str, Any]]:
        for suffix in (".log.1", ".log"):
            with contextlib.suppress(FileNotFoundError), (self._directory / f"{name}{suffix}").open("rb") as f:
                inode, end = until or (0, 0)
                bounded = os.fstat(f.fileno()).st_ino == inode
                for raw in f:
                    end -= len(raw)
                    if bounded and end < 0:
                        break
                    if (line := parse(name, raw)) is not None and query.takes(line):
                        yield line

    def _remember(self, name: str, positions: dict[str, tuple[int, int]]) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = (self._directory / f"{name}.log").stat()
            positions[name] = (status.st_ino, status.st_size)

    def _news(self, query: LogQuery, positions: dict[str, tuple[int, int]]) -> Iterator[Mapping[str, Any]]:
        for name in self._names(query):
            inode, position = positions.get(name, (0, 0))
            try:
                f = (self._directory / f"{name}.log").open("rb")
            except FileNotFoundError:
                continue
            with f:
                status = os.fstat(f.fileno())
                f.seek(position if status.st_ino == inode else 0)
                data = f.read()
                whole, newline, _ = data.rpartition(b"\n")
                positions[name] = (status.st_ino, f.tell() - len(data) + len(whole) + len(newline))
            for raw in whole.split(b"\n") if newline else []:
                if (line := parse(name, raw)) is not None and query.takes(line):
                    yield line


def parse(name: str, raw: bytes) -> Mapping[str, Any] | None:
    """One line of a log file; None when it is not one (cut off by a crash)."""
    parts = raw.decode(errors="replace").rstrip("\n").split(" ", 3)
    if len(parts) != 4:
        return None
    try:
        moment = dt.datetime.fromisoformat(parts[0]).timestamp()
    except ValueError:
        return None
    return {"time": moment, "instance": name, "stream": parts[1], "call": None if parts[2] == "-" else parts[2], "text": parts[3]}
