"""Tensors of `pilotlight.weights` in this process, as far as a fork or a snapshot is concerned.

Threads that read ahead end before a fork. Pools that nobody uses are unmapped before a dump; those
in use are in its way, because it would carry all of them. Whoever never loaded tensors pays for
none of this: nothing is imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def stop_reading_ahead() -> None:
    """No thread of ours is left; pages that are missing come when they are touched."""
    if (ahead := _loaded("prefetch")) is not None:
        ahead.stop_prefetching()


def release_pools() -> None:
    """Unmap what is not in use. A pool maps itself again when something is taken from it."""
    if (pool := _loaded("pool")) is not None:
        pool.release_pools()


def pools_in_use() -> Iterator[tuple[int, int]]:
    """Size and used part, in bytes, of each pool that has tensors on it."""
    if (pool := _loaded("pool")) is not None:
        yield from ((one.size_bytes, one.used_bytes) for one in pool.pools_in_use())


def _loaded(name: str) -> Any:
    return sys.modules.get(f"weight_cache.tensors.{name}")
