"""Watches the controller's configuration: routes and keys arrive as a feed of changes, which is
stored on disk for the next start.

`routes.ndjson` is a log: each change is appended as it arrives, and the log is rewritten when the
feed resets or it has grown far beyond its live entries. It is a copy, so it is not synced: a torn
last line is ignored, and the controller is authoritative."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import httpx

from activator.routing.route_table import RouteTable
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import FEED_PATH, FeedChange
from snapshotter.agent import launch_signature

log = logging.getLogger(__name__)

POLL_S = 25.0
"""Long poll timeout: below the 30 s of common proxies."""
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 2.0
CATCH_UP_S = 1.0
"""How long the response to a change may wait for the feed: a poll takes milliseconds, and a broken
feed must not block deployments."""
COMPACT_FACTOR = 4
"""The log is rewritten once it has this many lines for each live key."""


class ConfigCache:
    """The feed on disk. Memory has the position of each live line, not the line. Owner: the
    watcher's task."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._live: dict[tuple[str, str], tuple[int, int]] = {}
        self._lines = 0
        self._size = 0
        self._file: BinaryIO | None = None

    def load(self) -> Iterator[FeedChange]:
        """Yield the changes on disk, oldest first; an unreadable tail is truncated. Exhaust it
        before `append`."""
        self._live.clear()
        self._lines = self._size = 0
        self._file = self._open("ab+")
        self._file.seek(0)
        for line in self._file:
            try:
                change = FeedChange(**json.loads(line))
            except (ValueError, TypeError):
                log.warning(
                    "routes on disk end in a torn line, which is ignored path=%s after=%d",
                    self._path,
                    self._lines,
                )
                break
            self._record_line(change, len(line))
            yield change
        self._file.truncate(self._size)
        self._compact_if_needed()

    def append(self, changes: list[FeedChange]) -> None:
        """Append changes to the log."""
        if self._file is None:
            return
        for change in changes:
            line = (
                json.dumps(
                    {
                        "seq": change.seq,
                        "kind": change.kind,
                        "key": change.key,
                        "value": change.value,
                    }
                ).encode()
                + b"\n"
            )
            self._file.write(line)
            self._record_line(change, len(line))
        self._file.flush()
        self._compact_if_needed()

    def reset(self) -> None:
        """Delete all changes on disk."""
        if self._file is not None:
            self._file.truncate(0)
        self._live.clear()
        self._lines = self._size = 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, mode: str) -> BinaryIO:
        # 0600: it contains sealed secrets and hashes of keys
        return cast(
            BinaryIO, open(self._path, mode, opener=lambda path, flags: os.open(path, flags, 0o600))
        )

    def _record_line(self, change: FeedChange, length: int) -> None:
        if change.value is None:
            self._live.pop((change.kind, change.key), None)
        else:
            self._live[change.kind, change.key] = (self._size, length)
        self._lines += 1
        self._size += length

    def _compact_if_needed(self) -> None:
        if self._file is None or self._lines <= COMPACT_FACTOR * (len(self._live) + 256):
            return
        fresh_path = self._path.with_suffix(".new")
        fresh_path.unlink(missing_ok=True)
        kept: dict[tuple[str, str], tuple[int, int]] = {}
        size = 0
        with open(
            fresh_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as fresh:
            for key, (offset, length) in sorted(self._live.items(), key=lambda item: item[1]):
                self._file.seek(offset)
                fresh.write(self._file.read(length))
                kept[key] = (size, length)
                size += length
        fresh_path.replace(self._path)
        self.close()
        self._file = self._open("ab+")
        self._live, self._lines, self._size = kept, len(kept), size


def _is_sealed(change: FeedChange) -> bool:
    if change.kind != "function" or change.value is None:
        return True
    return all(
        launch_signature.LABEL in document["launch"].get("labels", {})
        for document in change.value["revisions"].values()
    )


class ConfigWatcher:
    """Keeps a RouteTable in sync with the controller."""

    def __init__(
        self,
        *,
        table: RouteTable,
        controller: Endpoint,
        token: str,
        log_path: Path,
        needs_seals: bool = False,
    ) -> None:
        """`needs_seals`: the node agent accepts only sealed launch documents, so unsealed routes on
        disk are discarded."""
        self._table = table
        self._needs_seals = needs_seals
        self._log = ConfigCache(log_path)
        self._client = controller_client(
            controller, token=token, timeout_s=10.0, read_s=POLL_S + 10.0
        )
        self.first_answer = asyncio.Event()
        self.is_connected = False
        self._applied = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"<ConfigWatcher {'connected' if self.is_connected else 'disconnected'} version "
            f"{self._table.version}>"
        )

    def load(self) -> int:
        """Apply the changes that the last process left on disk; returns their number."""
        count, are_sealed = 0, True
        for change in self._log.load():
            self._table.apply(change)
            count += 1
            are_sealed = are_sealed and _is_sealed(change)
        if self._needs_seals and not are_sealed:
            log.info("routes on disk have no seals; discarding them and fetching all again")
            self._table.clear()
            self._table.version = 0
            self._log.reset()
            return 0
        return count

    async def follow(self) -> None:
        """Poll forever; while the controller is down, retry and keep the last routes."""
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        while True:
            try:
                await self._poll()
                backoff.reset()
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as e:
                if not backoff.failures:
                    log.warning(
                        "controller does not answer; continuing with the current routes version=%d "
                        "error=%r",
                        self._table.version,
                        e,
                    )
                self.is_connected = False
                await backoff.pause()

    async def catch_up(self) -> None:
        """Return once the table has all current changes of the controller, or after CATCH_UP_S, or
        when the controller does not answer."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                response = await self._client.get(
                    FEED_PATH, params={"after": self._table.version, "wait_s": 0}
                )
                response.raise_for_status()
                position = int(response.json()["seq"])
                while self._table.version < position:
                    await self._applied.wait()
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as e:
            log.warning("routes may be stale version=%d error=%r", self._table.version, e)

    async def _poll(self) -> None:
        """Fetch all pages of one response and apply them at once, so that no function is missing
        during a reset."""
        position, is_reset = self._table.version, False
        changes: list[FeedChange] = []
        wait_s, has_more = (POLL_S if self.is_connected else 0.0), True
        while has_more:
            response = await self._client.get(
                FEED_PATH, params={"after": position, "wait_s": wait_s}
            )
            response.raise_for_status()
            body = response.json()
            if body["reset"]:
                is_reset, changes = True, []
            changes += [FeedChange(**change) for change in body["changes"]]
            position, has_more, wait_s = int(body["seq"]), bool(body.get("more")), 0.0
        self._apply(changes, position, is_reset=is_reset)
        self.is_connected = True
        self.first_answer.set()

    def _apply(self, changes: list[FeedChange], position: int, *, is_reset: bool) -> None:
        if is_reset:
            self._table.clear()
            self._log.reset()
        for change in changes:
            self._table.apply(change)
        self._log.append(changes)
        self._table.version = position
        applied, self._applied = self._applied, asyncio.Event()
        applied.set()

    async def aclose(self) -> None:
        """Close the connection and the log."""
        self._log.close()
        await self._client.aclose()
