"""The nouns of bytes on a node. Standard library only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self


class Tier(enum.StrEnum):
    """Where bytes are, farthest first."""

    ORIGIN = "origin"
    NVME = "nvme"
    DRAM = "dram"
    HBM = "hbm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A verified range of one file: `length_bytes` from `offset_bytes`, with the sha256 (hex) of just these bytes."""

    offset_bytes: int
    length_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Somebody's hold on a model: while it lasts, nothing of the model is evicted.

    Attributes:
        id: derived from holder and manifest, so that asking twice gives the same lease.
        manifest: sha256 (hex) of the manifest.
        holder: who holds it; opaque, unique per use (the node agent names a slot).
        acquired_at: wall clock, seconds since the epoch.
    """

    id: str
    manifest: str
    holder: str
    acquired_at: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLease:
    """A lease as its holder sees it: `path` is the read-only model directory, stable and immutable while the lease lasts."""

    lease_id: str
    manifest: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a model is on its way into the store."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model in the store: its bytes (shared files counted in full), its leases, its last use (seconds since the epoch)."""

    manifest: str
    size_bytes: int
    files: int
    leases: int
    last_used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """The store at one moment; counters run since the process started.

    Attributes:
        used_bytes: bytes on disk and reserved for what is arriving; at most `max_bytes`.
        arriving: models on their way in.
        hits, misses: leases that found their model here, or had to fetch.
        fetched_bytes: taken from the origin.
        evicted_models, evicted_bytes: made to go for others.
        quarantined_files: found corrupt and set aside.
    """

    max_bytes: int
    used_bytes: int
    models: int
    leases: int
    arriving: int
    hits: int
    misses: int
    fetched_bytes: int
    evicted_models: int
    evicted_bytes: int
    quarantined_files: int

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)
