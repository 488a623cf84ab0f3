"""Settings of section `weight_cache` in platform.yaml."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from weight_cache.peers import discovery

MIN_BYTES = 64 * 1024 * 1024
"""A smaller store cannot hold any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCacheSettings:
    """Configuration of the weight cache process.

    Attributes:
        metrics_listen: host:port of the Prometheus endpoint, behind a bearer token
            (`platform.metrics_token_file`); None = only on `<run>/metrics-weight_cache.sock`.
        max_bytes: disk that the store may use; None = half of the free disk at process start.
        dram_max_bytes: memory for reading leased models ahead into the page cache; None = half of
            the machine's memory; 0 = no read-ahead.
        reads_at_once: concurrent range reads (chunks) from the origin, over all models; each takes
            16 MiB of memory.
        prefetch_share: largest part of these for prefetches while a start waits.
        origin_attempts: attempts to read a range before a start fails.
        origin_timeout_s: an attempt fails after this long without data from the origin.
        scrub_bytes_per_s: rate at which the disk is read again and verified; 0 = never.
        peers: weight caches of other nodes, tried before the origin: a list of host:port, or
            `dns:<name>:<port>`, a name that resolves to all of them and is resolved again every
            10 s. The list may include this node. Empty = none.
        peer_listen: host:port where this node serves chunks to others that authenticate with the
            platform's key; None = not served.
        peer_timeout_s: limit to connect to a peer and to receive the first byte; then the next peer
            or the origin is tried.
        peer_uploads_at_once: concurrent chunk uploads to other nodes.
        peer_upload_bytes_per_s: limit of all uploads together; 0 = no limit.
        peer_distrust_s: how long a peer that sent corrupt bytes is excluded.
    """

    metrics_listen: str | None = None
    max_bytes: int | None = None
    dram_max_bytes: int | None = None
    reads_at_once: int = 8
    prefetch_share: float = 0.25
    origin_attempts: int = 5
    origin_timeout_s: float = 30.0
    scrub_bytes_per_s: int = 32 * 1024 * 1024
    peers: list[str] | str = field(default_factory=list)
    peer_listen: str | None = None
    peer_timeout_s: float = 1.0
    peer_uploads_at_once: int = 8
    peer_upload_bytes_per_s: int = 512 * 1024 * 1024
    peer_distrust_s: float = 600.0

    def dram_bytes(self) -> int:
        """`dram_max_bytes`, or half of the machine's memory."""
        if self.dram_max_bytes is not None:
            return self.dram_max_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    def __post_init__(self) -> None:
        _check("reads_at_once", self.reads_at_once, 1, 256)
        _check("prefetch_share", self.prefetch_share, 0.01, 1)
        _check("origin_attempts", self.origin_attempts, 1, 100)
        _check("origin_timeout_s", self.origin_timeout_s, 0.1, 3600)
        _check("scrub_bytes_per_s", self.scrub_bytes_per_s, 0, 10**12)
        _check("peer_timeout_s", self.peer_timeout_s, 0.05, 60)
        _check("peer_uploads_at_once", self.peer_uploads_at_once, 1, 64)
        _check("peer_upload_bytes_per_s", self.peer_upload_bytes_per_s, 0, 10**12)
        _check("peer_distrust_s", self.peer_distrust_s, 0, 86400)
        discovery.check_peers(self.peers)
        if self.peer_listen is not None:
            discovery.check_peer_listen(self.peer_listen)
        if self.dram_max_bytes is not None:
            _check("dram_max_bytes", self.dram_max_bytes, 0, 10**15)
        if self.max_bytes is not None and self.max_bytes < MIN_BYTES:
            raise ValueError(
                f"max_bytes = {self.max_bytes!r}: must be at least {MIN_BYTES}, or null for half "
                f"of the free disk"
            )
        if self.metrics_listen is not None and not self.metrics_listen.rpartition(":")[2].isdigit():
            raise ValueError(
                f"metrics_listen = {self.metrics_listen!r}: expected host:port, or null for none"
            )


def _check(key: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ValueError(f"{key} = {value!r}: must be {lowest} to {highest}")
