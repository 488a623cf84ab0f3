"""Prepares tensors of `pilotlight.weights` in this process for a fork or a snapshot.

Read-ahead threads end before a fork. Unused pools are unmapped before a dump; pools in use block
it, because the dump would contain all of them. No module is imported, so that a process that never
loaded tensors pays nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def stop_reading_ahead() -> None:
    """End our read-ahead threads; missing pages are then read on access."""
    if (ahead := _loaded("prefetch")) is not None:
        ahead.stop_prefetching()


def release_pools() -> None:
    """Unmap unused pools. A pool maps itself again on its next allocation."""
    if (pool := _loaded("pool")) is not None:
        pool.release_pools()


def pools_in_use() -> Iterator[tuple[int, int]]:
    """Size and used part, in bytes, of each pool that contains tensors."""
    if (pool := _loaded("pool")) is not None:
        yield from ((one.size_bytes, one.used_bytes) for one in pool.pools_in_use())


def _loaded(name: str) -> Any:
    return sys.modules.get(f"weight_cache.tensors.{name}")
