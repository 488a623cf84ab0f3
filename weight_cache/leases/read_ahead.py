"""Models that are held are read ahead into memory, within a budget: a start then faults pages that
are there.

One model counts once however many hold it. What is in memory already takes room like what is read;
a model that does not fit is read as far as it does. Reading ends with the model's last lease."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from weight_cache.leases import page_cache
from weight_cache.types import Tier

_log = logging.getLogger(__name__)
_NICE = 10
"""Of the threads that read: serving processes come first."""
_THREADS = 2
_SPARE_SHARE = 0.5
"""Of the memory that could be had: the rest is for whoever starts with the model."""

Observe = Callable[[Tier, int, float], None]
"""Told of what climbed: from which tier, how many bytes, in how many seconds."""


@dataclass(slots=True, eq=False)
class _Reading:
    size_bytes: int
    holders: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None


class ReadAhead:
    """What is read ahead for whom. Owner: one event loop; `stop` is the only thing that threads
    look at.

    max_bytes: of models that are held, together; 0 = never.
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
        """Of models that are held, together."""
        return self._max_bytes

    @property
    def held_bytes(self) -> int:
        """Room that models take which are held now."""
        return sum(reading.size_bytes for reading in self._readings.values())

    def begin(self, manifest: str, files: Sequence[Path], *, is_resident: bool = False) -> None:
        """Somebody holds the model of these files: read them ahead, unless that was begun for
        somebody else. Returns at once.

        is_resident: they are in memory; they take room, and nothing is read.
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
        """One who held it does no more; after the last one nothing more is read. One `end` for each
        `begin`."""
        reading = self._readings[manifest]
        reading.holders -= 1
        if not reading.holders:
            reading.stop.set()
            del self._readings[manifest]

    async def aclose(self) -> None:
        """Stop reading, and wait until nobody does."""
        tasks = [reading.task for reading in self._readings.values() if reading.task is not None]
        for reading in self._readings.values():
            reading.stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown()

    async def _run(self, manifest: str, files: Sequence[Path], reading: _Reading) -> None:
        brought = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._bring, files, reading
        )
        self.brought_bytes += brought.size_bytes
        self._observe(Tier.NVME, brought.size_bytes, brought.seconds)
        if brought.size_bytes or brought.left_bytes:
            text = "read ahead manifest=%s bytes=%d ms=%.0f left=%d"
            _log.info(
                text, manifest[:12], brought.size_bytes, brought.seconds * 1000, brought.left_bytes
            )

    def _bring(self, files: Sequence[Path], reading: _Reading) -> page_cache.ReadAheadResult:
        """In a thread. What could be had includes what the page cache holds of these very files."""
        room = min(reading.size_bytes, int(self._available() * _SPARE_SHARE))
        return page_cache.populate_page_cache(files, room_bytes=room, stopped=reading.stop.is_set)


def _lower_priority() -> None:
    """For this thread alone: setpriority(2), "On Linux the nice value is an attribute of the
    thread"."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
