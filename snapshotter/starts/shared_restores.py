"""Restores that several starts of one revision wait for.

The first start restores a worker; starts that come meanwhile do not restore another one, they wait.
If there are any when it is there, the worker becomes a Template, and all of them, the first one
included, are forked from it; otherwise it serves in place. Two restores beside each other use the
processors twice, and their memory is not shared; so it is worth it from two starts on, and for
eight of them saves seven.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from snapshotter.errors import SnapshotterError
from snapshotter.slots.sockets import seen
from snapshotter.types import RevisionKey
from weight_cache.errors import WeightCacheError


class SharedRestore:
    """One restore. Owner: the start that runs it (`SharedRestores.lead`).

    Attributes:
        followers: starts that wait for it now.
        has_failed: set by its owner: no worker was restored, and none will be from this snapshot.
    """

    def __init__(self) -> None:
        self.followers = 0
        self.has_failed = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(seen)

    async def follow(self) -> bool:
        """Wait for its end; False if it failed. Raises the error that ended it. If its owner was
        cancelled, one of the followers restores next."""
        self.followers += 1
        try:
            await asyncio.shield(self._ended)
        finally:
            self.followers -= 1
        return not self.has_failed

    def end(self, error: Exception | None = None) -> None:
        """Wake the followers."""
        if error is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


class SharedRestores:
    """Restores in progress that further starts may wait for. Owner: the event loop."""

    def __init__(self) -> None:
        self._running: dict[RevisionKey, SharedRestore] = {}

    def __repr__(self) -> str:
        followers = sum(one.followers for one in self._running.values())
        return f"<SharedRestores {len(self._running)} running, {followers} starts wait>"

    def get(self, revision: RevisionKey) -> SharedRestore | None:
        """The one to wait for."""
        return self._running.get(revision)

    @contextlib.contextmanager
    def lead(self, revision: RevisionKey) -> Iterator[SharedRestore]:
        """Let starts of this revision wait for what happens within the context; an error of a
        start is theirs as well."""
        shared = self._running[revision] = SharedRestore()
        error: Exception | None = None
        try:
            yield shared
        except (SnapshotterError, WeightCacheError) as e:
            error = e
            raise
        finally:
            del self._running[revision]
            shared.end(error)
