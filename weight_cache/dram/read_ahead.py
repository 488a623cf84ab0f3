"""Reads leased models ahead into memory, within a budget, so that page faults at start hit the page
cache.

A model counts once regardless of its number of leases. Bytes already in memory take room, too; a
model that does not fit is read in part. Reading stops with the model's last lease."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from weight_cache.dram import page_cache
from weight_cache.types import Tier

_log = logging.getLogger(__name__)
_NICE = 10
"""Niceness of the reading threads: serving processes have priority."""
_THREADS = 2
_SPARE_SHARE = 0.5
"""Share of the available memory to use: the rest is for the process that starts with the model."""

Observe = Callable[[Tier, int, float], None]
"""Called with (source tier, bytes, seconds) of each read-ahead."""


@dataclass(slots=True, eq=False)
class _Reading:
    size_bytes: int
    holders: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None


class ReadAhead:
    """Reads leased models ahead. Owner: one event loop; threads access only `stop`.

    max_bytes: budget for all leased models together; 0 = no read-ahead.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        observe: Observe,
        available: Callable[[], int] = page_cache.available_bytes,
    ) -> None:
        self._max_bytes = max_bytes
        self._observe = observe
        self._available = available
        self._readings: dict[str, _Reading] = {}
        self._threads = ThreadPoolExecutor(
            _THREADS, thread_name_prefix="read-ahead", initializer=_lower_priority
        )
        self.brought_bytes = 0

    def __repr__(self) -> str:
        return (
            f"<ReadAhead {self.held_bytes}/{self._max_bytes} bytes of {len(self._readings)} models>"
        )

    @property
    def max_bytes(self) -> int:
        """Budget for all leased models together."""
        return self._max_bytes

    @property
    def held_bytes(self) -> int:
        """Part of the budget used by leased models."""
        return sum(reading.size_bytes for reading in self._readings.values())

    def begin(self, manifest: str, files: Sequence[Path], *, is_resident: bool = False) -> None:
        """Count a lease on the model of these files and read them ahead, unless another lease began
        that already. Returns at once.

        is_resident: they are in memory: count their room without reading them.
        """
        reading = self._readings.get(manifest)
        if reading is not None:
            reading.holders += 1
            return
        size_bytes, room = (
            sum(page_cache.file_sizes(files).values()),
            max(0, self._max_bytes - self.held_bytes),
        )
        reading = self._readings[manifest] = _Reading(size_bytes=min(size_bytes, room), holders=1)
        if room < size_bytes:
            text = "read ahead cut manifest=%s size=%d room=%d of=%d (weight_cache.dram_max_bytes)"
            _log.info(text, manifest[:12], size_bytes, room, self._max_bytes)
        if reading.size_bytes and not is_resident:
            reading.task = asyncio.create_task(
                self._run(manifest, files, reading), name=f"read ahead {manifest[:12]}"
            )

    def end(self, manifest: str) -> None:
        """End one lease; reading stops after the last one. Call once for each `begin`."""
        reading = self._readings[manifest]
        reading.holders -= 1
        if not reading.holders:
            reading.stop.set()
            del self._readings[manifest]

    async def aclose(self) -> None:
        """Stop reading and wait for the readers."""
        tasks = [reading.task for reading in self._readings.values() if reading.task is not None]
        for reading in self._readings.values():
            reading.stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown()

    async def _run(self, manifest: str, files: Sequence[Path], reading: _Reading) -> None:
        brought = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._populate, files, reading
        )
        self.brought_bytes += brought.size_bytes
        self._observe(Tier.NVME, brought.size_bytes, brought.seconds)
        if brought.size_bytes or brought.left_bytes:
            text = "read ahead manifest=%s bytes=%d ms=%.0f left=%d"
            _log.info(
                text, manifest[:12], brought.size_bytes, brought.seconds * 1000, brought.left_bytes
            )

    def _populate(self, files: Sequence[Path], reading: _Reading) -> page_cache.ReadAheadResult:
        """Runs in a thread. Available memory includes the cached pages of these files."""
        room = min(reading.size_bytes, int(self._available() * _SPARE_SHARE))
        return page_cache.populate_page_cache(files, room_bytes=room, stopped=reading.stop.is_set)


def _lower_priority() -> None:
    """Lower the priority of this thread only (setpriority(2): "On Linux the nice value is an
    attribute of the thread")."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
