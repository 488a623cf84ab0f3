"""Section `weight_cache` of platform.yaml."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BYTES = 64 * 1024 * 1024
"""Below a few chunks no model fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCacheSettings:
    """What an operator may say about this process.

    Attributes:
        metrics_listen: host:port of the Prometheus text; None = only on `<run>/metrics-weight_cache.sock`.
        max_bytes: disk that the store may use; None = half of what is free when the process starts.
    """

    metrics_listen: str | None = "127.0.0.1:8704"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes = {self.max_bytes!r}: must be at least {MIN_BYTES}, or null for half of the free disk")
        if self.metrics_listen is not None and not self.metrics_listen.rpartition(":")[2].isdigit():
            raise ValueError(f"metrics_listen = {self.metrics_listen!r}: expected host:port, or null for none")
