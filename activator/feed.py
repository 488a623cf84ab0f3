"""Following the controller: routes and keys arrive as a feed of changes, and are kept on disk for the next start.

`routes.ndjson` is a log: each change is appended as it arrives, and written anew from the start when the feed resets or the log
has grown well past what it holds. It is a copy, so it is not synced: a torn last line is left out, and the controller has the truth.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from activator.routes import RouteTable
from pilotlight.protocol import FEED_PATH, HEADER_PLATFORM_TOKEN, FeedChange

log = logging.getLogger(__name__)

POLL_S = 25.0
"""How long the controller may hold a poll open: below common proxies' 30 s."""
RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits after the first, second, … failed poll; the last one repeats."""
COMPACT_FACTOR = 4
"""The log is written anew once it holds this many lines for each live key."""


class FeedLog:
    """The feed on disk. Owner: the follower task."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._live: dict[tuple[str, str], bytes] = {}
        self._lines = 0
        self._file: BinaryIO | None = None

    def load(self) -> list[FeedChange]:
        """The changes on disk, oldest first; an unreadable tail is left out."""
        changes: list[FeedChange] = []
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                try:
                    change = FeedChange(**json.loads(line))
                except (ValueError, TypeError):
                    log.warning("routes on disk end in a torn line path=%s after=%d", self._path, len(changes))
                    break
                changes.append(change)
                self._note(change, line + b"\n")
        self._compact()
        return changes

    def append(self, changes: list[FeedChange]) -> None:
        """Keep these changes too."""
        if self._file is None:
            return
        for change in changes:
            line = json.dumps({"seq": change.seq, "kind": change.kind, "key": change.key, "value": change.value}).encode() + b"\n"
            self._note(change, line)
            self._file.write(line)
        self._file.flush()
        if self._lines > COMPACT_FACTOR * (len(self._live) + 256):
            self._compact()

    def reset(self) -> None:
        """Forget what is on disk."""
        self._live.clear()
        self._compact()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _note(self, change: FeedChange, line: bytes) -> None:
        self._lines += 1
        if change.value is None:
            self._live.pop((change.kind, change.key), None)
        else:
            self._live[change.kind, change.key] = line

    def _compact(self) -> None:
        self.close()
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it holds sealed secrets and hashes of keys
        with os.fdopen(descriptor, "wb") as f:
            f.writelines(self._live.values())
        fresh.replace(self._path)
        self._lines = len(self._live)
        self._file = self._path.open("ab")


class FeedFollower:
    """Keeps a RouteTable equal to the controller's state."""

    def __init__(self, *, table: RouteTable, socket: Path, token: str, log_path: Path) -> None:
        self._table = table
        self._log = FeedLog(log_path)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket)),
            base_url="http://controller",
            headers={HEADER_PLATFORM_TOKEN: token},
            timeout=httpx.Timeout(10.0, read=POLL_S + 10.0),
        )
        self.first_answer = asyncio.Event()
        self.is_connected = False

    def __repr__(self) -> str:
        return f"<FeedFollower {'connected' if self.is_connected else 'disconnected'} version {self._table.version}>"

    def load(self) -> int:
        """Take in what the last run left on disk; returns how many changes."""
        changes = self._log.load()
        for change in changes:
            self._table.apply(change)
        return len(changes)

    async def follow(self) -> None:
        """Poll forever; a controller that is down is asked again, and the last routes stay in force."""
        failures = 0
        while True:
            try:
                await self._poll()
                failures = 0
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as e:
                if failures == 0:
                    log.warning("controller does not answer; going on with routes version=%d error=%r", self._table.version, e)
                self.is_connected = False
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1

    async def _poll(self) -> None:
        wait_s = POLL_S if self.is_connected else 0.0
        response = await self._client.get(FEED_PATH, params={"after": self._table.version, "wait_s": wait_s})
        response.raise_for_status()
        self._take(response.json())
        self.is_connected = True
        self.first_answer.set()

    def _take(self, body: dict[str, Any]) -> None:
        if body["reset"]:
            self._table.clear()
            self._log.reset()
        changes = [FeedChange(**change) for change in body["changes"]]
        for change in changes:
            self._table.apply(change)
        self._log.append(changes)
        self._table.version = int(body["seq"])

    async def aclose(self) -> None:
        """Close the connection and the log."""
        self._log.close()
        await self._client.aclose()
