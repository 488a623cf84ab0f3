"""How fast bytes climb from tier to tier, from what was seen, and how long the next ones will take.

A hop's speed is a moving average that weighs by bytes: a transfer of `HALF_BYTES` halves the weight
of all before it, so that small files (which are slow for reasons of their own) hardly count, and
one large model is believed at once. Sums of bytes and of seconds fade together, which averages
seconds per byte: what predicts a time. Times pass through `TransferRate` as values; nothing here
reads a clock."""

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
"""Of observed bytes: a change of speed is half believed after one model of this size."""
_GUESS_BYTES = 16 * 1024**2
"""What a first guess weighs: less than one chunk that was really seen."""
_GUESSES: Mapping[Tier, float] = {Tier.ORIGIN: 500e6, Tier.NVME: 2e9, Tier.DRAM: 10e9}
"""Bytes per second upwards from a tier until something was seen: an object store over 10 Gbit/s
with hashing and fsync, a cloud's NVMe disk, PCIe 4 with pageable memory. Wrong by a factor of a few
on any machine, and forgotten after the first model."""

_REQUEST_S = 0.05
"""To ask for a manifest and a file, to sync and publish them, and a start that stands still
meanwhile. Without it a second would cost the same bytes whatever the model's size, and of two
models that are used alike eviction could not prefer the larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRate:
    """A hop's speed as two fading sums. `size_bytes / seconds` is the speed."""

    size_bytes: float
    seconds: float

    @classmethod
    def guess(cls, bytes_per_s: float) -> Self:
        """A belief that the first observations outweigh."""
        return cls(size_bytes=_GUESS_BYTES, seconds=_GUESS_BYTES / bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """The speed."""
        return self.size_bytes / self.seconds

    def seen(self, size_bytes: int, seconds: float) -> TransferRate:
        """After a transfer of `size_bytes` in `seconds`."""
        fade = 0.5 ** (size_bytes / HALF_BYTES)
        return TransferRate(
            size_bytes=self.size_bytes * fade + size_bytes, seconds=self.seconds * fade + seconds
        )


class TierBandwidths:
    """The speed of each hop, named by the tier that bytes leave. Owner: one event loop; every
    method is synchronous.

    `origin`: where bytes come from (its repr): each origin has a speed of its own.
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
        """Speed upwards from `tier`. Raises KeyError for HBM, above which there is nothing."""
        return self._rates[self._key(tier)].bytes_per_s

    def speeds(self) -> dict[Tier, float]:
        """Bytes per second upwards, by tier."""
        return {tier: self.bytes_per_s(tier) for tier in _GUESSES}

    def observe(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """`size_bytes` climbed from `tier` in `seconds`. What took no time, or moved nothing, says
        nothing."""
        if size_bytes > 0 and 0 < seconds < float("inf"):
            key = self._key(tier)
            self._rates[key] = self._rates[key].seen(size_bytes, seconds)

    def predict(self, missing: Mapping[Tier, int], *, queued_bytes: int = 0) -> float:
        """Seconds until bytes that lie in these tiers are in memory, `queued_bytes` of others from
        the origin before them.

        What comes from the origin passes through memory on its way to the disk: it does not have to
        be read again."""
        ahead = queued_bytes if missing.get(Tier.ORIGIN) else 0
        return sum(
            (size + (ahead if tier is Tier.ORIGIN else 0)) / self.bytes_per_s(tier)
            for tier, size in missing.items()
            if size > 0
        )

    def reload_s(self, size_bytes: int) -> float:
        """What evicting these bytes would cost whoever needs them next: their transfer, and what
        even the smallest model costs."""
        return _REQUEST_S + self.predict({Tier.ORIGIN: size_bytes})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {key: [rate.size_bytes, rate.seconds] for key, rate in self._rates.items()}

    def take_over(self, body: Mapping[str, Any]) -> None:
        """What an earlier process saw; of what is broken, or of another origin, nothing."""
        for key in self._rates.keys() & body.keys():
            with contextlib.suppress(TypeError, ValueError):
                size_bytes, seconds = (float(value) for value in body[key])
                if 0 < size_bytes < float("inf") and 0 < seconds < float("inf"):
                    self._rates[key] = TransferRate(size_bytes=size_bytes, seconds=seconds)

    def _key(self, tier: Tier) -> str:
        return f"{tier} {self._origin}" if tier is Tier.ORIGIN else tier.value


def load_bandwidths(path: Path, *, origin: str) -> TierBandwidths:
    """The speeds that an earlier process kept at `path`; first guesses where it kept none.
    Blocking."""
    bandwidths = TierBandwidths(origin=origin)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        bandwidths.take_over(json.loads(path.read_text()))
    return bandwidths


def save_bandwidths(path: Path, bandwidths: TierBandwidths) -> None:
    """Write the speeds for the next process, whole or not at all. Raises OSError. Blocking; not
    flushed: it can be learned again."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(bandwidths.to_json()))
    temporary.rename(path)
