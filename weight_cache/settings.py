"""Section `weight_cache` of platform.yaml."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from weight_cache.peers import discovery

MIN_BYTES = 64 * 1024 * 1024
"""Below a few chunks no model fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCacheSettings:
    """What an operator may say about this process.

    Attributes:
        metrics_listen: host:port of the Prometheus text, behind a bearer token
        (`platform.metrics_token_file`); None = only on
            `<run>/metrics-weight_cache.sock`.
        max_bytes: disk that the store may use; None = half of what is free when the process starts.
        dram_max_bytes: of models that is read ahead into the page cache for a start; None = half of
        the machine's memory; 0 = never. reads_at_once: ranges (chunks) on their way from the origin
        at the same time, all models together; each takes 16 MiB of memory. prefetch_share: of
        these, at most this part for models that nobody waits for, while somebody waits for another.
        origin_attempts: how often a range is asked for before a start fails. origin_timeout_s:
        silence of the origin after which an attempt has failed. scrub_bytes_per_s: what is on disk
        is read again at this pace and compared with its hashes; 0 = never. peers: other nodes'
        weight caches, asked before the origin: a list of host:port, or `dns:<name>:<port>`, a name
        that stands for all
            of them and is resolved again every 10 s; this node may be among them. Empty = none.
        peer_listen: host:port where this node serves others, to whom it proves the platform's key;
        None = it serves nobody. peer_timeout_s: to connect to a peer, and until it begins to
        answer; then the next one is asked, or the origin. peer_uploads_at_once: chunks on their way
        to other nodes at the same time. peer_upload_bytes_per_s: all uploads together; 0 = no
        bound. peer_distrust_s: a peer that gave wrong bytes is not asked for so long.
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
