"""Measured bandwidth between tiers, and predicted transfer times.

A hop's bandwidth is a moving average weighted by bytes: a transfer of `HALF_BYTES` halves the
weight of all earlier ones, so small files (slow for other reasons) hardly count and one large model
counts at once. The sums of bytes and of seconds decay together, which averages seconds per byte,
the quantity that predicts a time. `TransferRate` takes durations as arguments; this module reads no
clock."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from weight_cache.types import Tier

HALF_BYTES = 256 * 1024**2
"""Observed bytes after which earlier observations have half the weight."""
_GUESS_BYTES = 16 * 1024**2
"""Weight of the initial guess: less than one observed chunk."""
_GUESSES: Mapping[Tier, float] = {Tier.ORIGIN: 500e6, Tier.NVME: 2e9, Tier.DRAM: 10e9}
"""Initial bandwidth in bytes per second from each tier upwards: an object store over 10 Gbit/s with
hashing and fsync, a cloud's NVMe disk, PCIe 4 with pageable memory. Within a small factor on any
machine, and outweighed by the first model."""

_REQUEST_S = 0.05
"""Fixed cost of a fetch: requests for a manifest and a file, sync and publication, and the blocked
start. Without it the cost per byte would not depend on the model's size, and of two models used
equally often eviction could not prefer the larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRate:
    """A hop's bandwidth as two decaying sums: `size_bytes / seconds`."""

    size_bytes: float
    seconds: float

    @classmethod
    def guess(cls, bytes_per_s: float) -> Self:
        """An initial value that the first observations outweigh."""
        return cls(size_bytes=_GUESS_BYTES, seconds=_GUESS_BYTES / bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth."""
        return self.size_bytes / self.seconds

    def seen(self, size_bytes: int, seconds: float) -> TransferRate:
        """The rate updated with a transfer of `size_bytes` in `seconds`."""
        fade = 0.5 ** (size_bytes / HALF_BYTES)
        return TransferRate(
            size_bytes=self.size_bytes * fade + size_bytes, seconds=self.seconds * fade + seconds
        )


class TierBandwidths:
    """The bandwidth of each hop, keyed by its source tier. Owner: one event loop; every method is
    synchronous.

    `origin`: the repr of the origin; bandwidth is tracked per origin.
    """

    def __init__(self, *, origin: str) -> None:
        self._origin = origin
        self._rates = {
            self._key(tier): TransferRate.guess(speed) for tier, speed in _GUESSES.items()
        }

    def __repr__(self) -> str:
        speeds = (f"{tier}={self.bytes_per_s(tier) / 1e6:.0f}" for tier in _GUESSES)
        return f"<TierBandwidths MB/s {' '.join(speeds)}>"

    def bytes_per_s(self, tier: Tier) -> float:
        """Bandwidth from `tier` upwards. Raises KeyError for HBM, the top tier."""
        return self._rates[self._key(tier)].bytes_per_s

    def speeds(self) -> dict[Tier, float]:
        """Bandwidth upwards in bytes per second, by tier."""
        return {tier: self.bytes_per_s(tier) for tier in _GUESSES}

    def observe(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """Record a transfer of `size_bytes` from `tier` in `seconds`. Transfers of zero bytes or
        zero time are ignored."""
        if size_bytes > 0 and 0 < seconds < float("inf"):
            key = self._key(tier)
            self._rates[key] = self._rates[key].seen(size_bytes, seconds)

    def predict(self, missing: Mapping[Tier, int], *, queued_bytes: int = 0) -> float:
        """Seconds until bytes in these tiers are in memory, with `queued_bytes` of other models
        from the origin ahead of them.

        Bytes from the origin pass through memory on their way to the disk, so they need no second
        read."""
        ahead = queued_bytes if missing.get(Tier.ORIGIN) else 0
        return sum(
            (size + (ahead if tier is Tier.ORIGIN else 0)) / self.bytes_per_s(tier)
            for tier, size in missing.items()
            if size > 0
        )

    def reload_s(self, size_bytes: int) -> float:
        """Predicted cost of evicting these bytes: the time to fetch them again, with the fixed cost
        of a fetch."""
        return _REQUEST_S + self.predict({Tier.ORIGIN: size_bytes})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {key: [rate.size_bytes, rate.seconds] for key, rate in self._rates.items()}

    def take_over(self, body: Mapping[str, Any]) -> None:
        """Load the values of an earlier process; ignore invalid ones and those of other origins."""
        for key in self._rates.keys() & body.keys():
            with contextlib.suppress(TypeError, ValueError):
                size_bytes, seconds = (float(value) for value in body[key])
                if 0 < size_bytes < float("inf") and 0 < seconds < float("inf"):
                    self._rates[key] = TransferRate(size_bytes=size_bytes, seconds=seconds)

    def _key(self, tier: Tier) -> str:
        return f"{tier} {self._origin}" if tier is Tier.ORIGIN else tier.value


def load_bandwidths(path: Path, *, origin: str) -> TierBandwidths:
    """Load the bandwidths stored at `path`; initial guesses for missing ones. Blocking."""
    bandwidths = TierBandwidths(origin=origin)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        bandwidths.take_over(json.loads(path.read_text()))
    return bandwidths


def save_bandwidths(path: Path, bandwidths: TierBandwidths) -> None:
    """Store the bandwidths for the next process, atomically. Raises OSError. Blocking; not flushed,
    since they can be measured again."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(bandwidths.to_json()))
    temporary.rename(path)
