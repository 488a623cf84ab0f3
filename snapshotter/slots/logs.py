"""Reads logs: find by labels, instance, call and time; follow. Files of exited instances remain
until they are pruned (`log_pruning`).

`<logs>/<name>.json` holds the owner; `<name>.log.1` and `<name>.log` hold the lines (format:
`snapshotter/shim/log_pipe.py`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime as dt
import heapq
import json
import math
import operator
import os
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlight.core.threads import BoundedThreads
from snapshotter.errors import LogsBusy
from snapshotter.linux.inotify import watching
from snapshotter.slots.log_owners import LogOwners

TAIL_LINES = 40
"""Number of last lines in an error: a Python traceback and its context."""
_TAIL_BYTES = 64 * 1024
MAX_READS = 4
"""Concurrent reads per tenant, without followers: each holds some megabytes, and the files of the
time range that it reads."""
_RETRY_S = 5
MAX_FOLLOWERS = 32
"""Concurrent followers per tenant: each is notified of every change of a log."""
_BATCH_LINES = 200
_BATCH_BYTES = 256 * 1024
"""Lines, and bytes of their text, that are buffered for one reader."""
_LINES_UNTIL_PAUSE = 20
"""A batch counts this many filtered lines as one: it ends after 4000 of them, some 20 ms, so that
no reader blocks a thread."""
_READING = BoundedThreads(4, "read logs")
"""Threads for blocking reads: log readers are many, and starts need the default threads."""
_POLL_INTERVAL_S = 0.25
"""Poll interval of a follower while its logs are written; the first line after a pause is delivered
at once."""
_WATCH_INTERVAL_S = 0.05
"""Interval at which changed log files are collected."""
_Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LogQuery:
    """Selects log lines; None selects all.

    Attributes:
        labels: labels that the log's owner must have.
        instance_id: one instance, or one slot for its boot log.
        since: wall clock, seconds since the epoch.
        tail: only this many last lines.
        call_id: lines printed during that call, or during a batch that contained it (ids separated
            by commas).
    """

    labels: Mapping[str, str]
    instance_id: str | None = None
    since: float | None = None
    tail: int | None = None
    call_id: str | None = None

    def matches(self, line: Mapping[str, Any]) -> bool:
        """Whether a parsed line matches."""
        if self.since is not None and line["time"] < self.since:
            return False
        return self.call_id is None or self.call_id in (line["call"] or "").split(",")


class Logs:
    """The log directory. Owner: the event loop; the shims write the `.log` files, only this class
    writes `.json`, and `LogPruner` deletes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._owners = LogOwners(directory)
        self._readers: collections.Counter[tuple[str, str]] = collections.Counter()
        self._followers: dict[str, set[_Follower]] = {}
        self._watch = contextlib.ExitStack()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __repr__(self) -> str:
        return f"<Logs {self._directory}>"

    @property
    def directory(self) -> Path:
        """Path of the log directory."""
        return self._directory

    def register(
        self,
        name: str,
        *,
        labels: Mapping[str, str],
        revision: str,
        now: float,
        log_bytes: int | None = None,
    ) -> None:
        """Record the owner of log `name`. `log_bytes`: limit of all logs of its tenant; None = no
        limit, or unknown."""
        about = {
            "labels": dict(labels),
            "revision": revision,
            "started_at": now,
            "log_bytes": log_bytes,
        }
        (self._directory / f"{name}.json").write_text(json.dumps(about))
        self._owners.invalidate(name)

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

    async def read(
        self, query: LogQuery, *, on_begun: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[_Line, None]:
        """Matching lines, oldest first. At most one batch is in memory. Raises LogsBusy, or awaits
        `on_begun`."""
        with self._reading(query, "read", MAX_READS):
            if on_begun is not None:
                await on_begun()
            async for line in _batched(self._existing_lines(query, {})):
                yield line

    async def follow(
        self, query: LogQuery, *, on_begun: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[_Line, None]:
        """Matching lines, then new ones as they are written, until cancelled. Raises LogsBusy, or
        awaits `on_begun`."""
        positions: dict[str, tuple[int, int]] = {}
        with self._reading(query, "follow", MAX_FOLLOWERS), self._following(query) as follower:
            if on_begun is not None:
                await on_begun()
            await _READING.run(self._record_positions, query, positions)
            async for line in _batched(self._existing_lines(query, positions)):
                yield line
            names: set[str] | None = None
            while True:
                async for line in _batched(self._new_lines(query, positions, names)):
                    yield line
                names = await follower.wait_changed()

    @contextlib.contextmanager
    def _following(self, query: LogQuery) -> Iterator[_Follower]:
        """Register a follower of its tenant's logs; all followers share one watch."""
        tenant, follower = query.labels.get("tenant", ""), _Follower()
        if not self._followers:
            self._watch.enter_context(
                watching(self._directory, self._notify_followers, pause_s=_WATCH_INTERVAL_S)
            )
        self._followers.setdefault(tenant, set()).add(follower)
        try:
            yield follower
        finally:
            self._followers[tenant].discard(follower)
            if not self._followers[tenant]:
                del self._followers[tenant]
            if not self._followers:
                self._watch.close()

    def _notify_followers(self, files: set[str] | None) -> None:
        """Notify followers of written files: those of the owner's tenant and those without a
        tenant; all of them if the owner is unknown or `files` is None."""
        by_tenant: dict[str | None, set[str]] = {}
        for name in {file.partition(".")[0] for file in files or ()}:
            owner = self._owners.cached(name)
            by_tenant.setdefault(
                None if owner is None else owner.labels.get("tenant", ""), set()
            ).add(name)
        unknown = by_tenant.pop(None, set())
        for tenant, followers in self._followers.items():
            names = unknown | (
                by_tenant.get(tenant, set()) if tenant else set[str]().union(*by_tenant.values())
            )
            for follower in followers if files is None or names else ():
                follower.notify(None if files is None else names)

    @contextlib.contextmanager
    def _reading(self, query: LogQuery, verb: str, most: int) -> Iterator[None]:
        key = query.labels.get("tenant", ""), verb
        if self._readers[key] >= most:
            raise LogsBusy(
                f"{most} requests already {verb} logs of this tenant, the limit: end one of them, "
                f"or try again later",
                {"limit": most, "retry_after_s": _RETRY_S},
            )
        self._readers[key] += 1
        try:
            yield
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def _names(self, query: LogQuery) -> list[str]:
        return (
            self._owned([query.instance_id], query)
            if query.instance_id
            else self._owners.names(query.labels)
        )

    def _owned(self, names: Iterable[str], query: LogQuery) -> list[str]:
        candidates = [name for name in names if query.instance_id in (None, "", name)]
        owners = [(name, self._owners.owner(name)) for name in candidates]
        return [
            name
            for name, owner in owners
            if owner is not None and query.labels.items() <= owner.labels.items()
        ]

    def _existing_lines(
        self, query: LogQuery, until: dict[str, tuple[int, int]]
    ) -> Iterator[_Line | None]:
        """Lines that exist. `until`: receives (inode, size) of each file, up to which it is
        read."""
        names = self._names(query)
        if query.tail is None:
            yield from self._all(names, query, until)
            return
        # counted, then read again: this many lines would not fit into memory
        if query.tail > _BATCH_LINES:
            for name in names:
                self._record_position(name, until)
            yield from _last(query.tail, lambda: self._all(names, query, until))
            return
        last: collections.deque[_Line] = collections.deque(maxlen=max(0, query.tail))
        for number, line in enumerate(self._all(names, query, until)):
            if line is not None:
                last.append(line)
            if line is None or number % _LINES_UNTIL_PAUSE == 0:
                yield None
        while last:
            yield last.popleft()

    def _all(
        self, names: Sequence[str], query: LogQuery, until: Mapping[str, tuple[int, int]]
    ) -> Iterator[_Line | None]:
        begun = [
            (self._started_at(name), self._lines(name, query, until.get(name))) for name in names
        ]
        return _merged(sorted(begun, key=operator.itemgetter(0)))

    def _started_at(self, name: str) -> float:
        owner = self._owners.cached(name)
        return owner.started_at if owner is not None else 0.0

    def _lines(
        self, name: str, query: LogQuery, until: tuple[int, int] | None
    ) -> Iterator[_Line | None]:
        for suffix in (".log.1", ".log"):
            with (
                contextlib.suppress(FileNotFoundError),
                (self._directory / f"{name}{suffix}").open("rb") as f,
            ):
                inode, end = until or (0, 0)
                bounded = os.fstat(f.fileno()).st_ino == inode
                for number, raw in enumerate(f):
                    end -= len(raw)
                    if bounded and end < 0:
                        break
                    if (line := parse(name, raw)) is not None and query.matches(line):
                        yield line
                    elif number % _LINES_UNTIL_PAUSE == 0:
                        yield None

    def _record_position(self, name: str, positions: dict[str, tuple[int, int]]) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = (self._directory / f"{name}.log").stat()
            positions[name] = (status.st_ino, status.st_size)

    def _record_positions(self, query: LogQuery, positions: dict[str, tuple[int, int]]) -> None:
        for name in self._names(query):
            self._record_position(name, positions)

    def _new_lines(
        self, query: LogQuery, positions: dict[str, tuple[int, int]], among: set[str] | None
    ) -> Iterator[_Line | None]:
        """Lines written since `positions`. `among`: only logs of these names."""
        for name in self._names(query) if among is None else self._owned(among, query):
            inode, position = positions.get(name, (0, 0))
            try:
                f = (self._directory / f"{name}.log").open("rb")
            except FileNotFoundError:
                continue
            with f:
                status = os.fstat(f.fileno())
                position = f.seek(position if status.st_ino == inode else 0)
                for number, raw in enumerate(f):
                    if not raw.endswith(b"\n"):
                        break  # the line is incomplete
                    position += len(raw)
                    positions[name] = (status.st_ino, position)
                    if (line := parse(name, raw)) is not None and query.matches(line):
                        yield line
                    elif number % _LINES_UNTIL_PAUSE == 0:
                        yield None


class _Follower:
    """One follower. Owner: the event loop."""

    def __init__(self) -> None:
        self._names: set[str] | None = set()
        self._changed = asyncio.Event()
        self._polled_at = -math.inf

    def notify(self, names: set[str] | None) -> None:
        """Logs of these names were written; None: any log may have been."""
        self._names = None if names is None or self._names is None else self._names | names
        self._changed.set()

    async def wait_changed(self) -> set[str] | None:
        """Wait for a change, at most once per poll interval; returns the names of logs written
        since the last call."""
        await self._changed.wait()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._polled_at + _POLL_INTERVAL_S - loop.time())
        self._polled_at = loop.time()
        self._changed.clear()
        names, self._names = self._names, set()
        return names


def _last(most: int, lines: Callable[[], Iterator[_Line | None]]) -> Iterator[_Line | None]:
    """The last `most` of `lines`, which are read twice."""
    spare = -most
    for number, line in enumerate(lines()):
        spare += line is not None
        if line is None or number % _LINES_UNTIL_PAUSE == 0:
            yield None
    for number, line in enumerate(lines()):
        if line is not None and spare <= 0:
            yield line
        elif line is None or number % _LINES_UNTIL_PAUSE == 0:
            yield None
        spare -= line is not None


async def _batched(lines: Iterator[_Line | None]) -> AsyncGenerator[_Line, None]:
    """Read and parse in a thread, some milliseconds at a time, at the reader's pace."""
    is_over = False
    while not is_over:
        batch, is_over = await _READING.run(_batch, lines)
        for line in batch:
            yield line


def _batch(lines: Iterator[_Line | None]) -> tuple[list[_Line], bool]:
    """The next lines, and whether these are the last. A None among `lines` stands for one or more
    filtered lines."""
    batch, size = list[_Line](), 0
    for seen, line in enumerate(lines, 1):
        if line is not None:
            batch.append(line)
            size += len(line["text"])
        if seen >= _BATCH_LINES or size >= _BATCH_BYTES:
            return batch, False
    return batch, True


def _merged(begun: list[tuple[float, Iterator[_Line | None]]]) -> Iterator[_Line | None]:
    """Merge logs, oldest line first. `begun`: start times and lines of the logs, sorted; a log is
    opened only when its start time is reached."""
    waiting = collections.deque(begun)
    heap: list[tuple[float, int, _Line, Iterator[_Line | None]]] = []
    number = 0  # at equal times, the log that began first comes first

    def advance(number: int, lines: Iterator[_Line | None]) -> Iterator[None]:
        for line in lines:
            if line is not None:
                heapq.heappush(heap, (line["time"], number, line, lines))
                return
            yield None

    while heap or waiting:
        while waiting and (not heap or waiting[0][0] <= heap[0][0]):
            yield from advance(number := number + 1, waiting.popleft()[1])
        if heap:
            _, first, line, lines = heapq.heappop(heap)
            yield line
            yield from advance(first, lines)


def parse(name: str, raw: bytes) -> Mapping[str, Any] | None:
    """One line of a log file; None if it is malformed (truncated by a crash)."""
    parts = raw.decode(errors="replace").rstrip("\n").split(" ", 3)
    if len(parts) != 4:
        return None
    try:
        moment = dt.datetime.fromisoformat(parts[0]).timestamp()
    except ValueError:
        return None
    return {
        "time": moment,
        "instance": name,
        "stream": parts[1],
        "call": None if parts[2] == "-" else parts[2],
        "text": parts[3],
    }
