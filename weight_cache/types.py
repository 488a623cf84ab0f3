"""The nouns of bytes on a node. Standard library only."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self


class ReadPriority(enum.StrEnum):
    """Who waits for bytes, most urgent first: a caller, nobody yet, nobody at all."""

    START = "start"
    PREFETCH = "prefetch"
    SCRUB = "scrub"


class Tier(enum.StrEnum):
    """Where bytes are, farthest first."""

    ORIGIN = "origin"
    NVME = "nvme"
    DRAM = "dram"
    HBM = "hbm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A verified range of one file: `length_bytes` from `offset_bytes`, with the sha256 (hex) of
    just these bytes."""

    offset_bytes: int
    length_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a safetensors file.

    Attributes:
        dtype: as safetensors names it: `F32`, `BF16`, `I64`, …
        shape: in elements; () is a scalar.
        offset_bytes, length_bytes: where its bytes lie, counted from the begin of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Somebody's hold on a model: while it lasts, nothing of the model is evicted.

    Attributes:
        id: derived from holder and manifest, so that asking twice gives the same lease. manifest:
        sha256 (hex) of the manifest. holder: who holds it; opaque, unique per use (the node agent
        names a slot). acquired_at: wall clock, seconds since the epoch. pid, pid_started: the
        process whose end ends the lease: its id, and its start time in clock ticks since boot
        (proc_pid_stat(5),
            field 22), so that another process of that id is not taken for it. None: the lease ends
            when it is closed.
    """

    id: str
    manifest: str
    holder: str
    acquired_at: float
    pid: int | None = None
    pid_started: int | None = None

    @staticmethod
    def id_of(manifest: str, holder: str) -> str:
        """The id of `holder`'s lease on `manifest`."""
        return "l-" + hashlib.sha256(f"{manifest}\n{holder}".encode()).hexdigest()[:24]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLease:
    """A lease as its holder sees it: `path` is the read-only model directory, stable and immutable
    while the lease lasts.

    `tier`: where most of its bytes were when it was asked for.
    """

    lease_id: str
    manifest: str
    path: Path
    tier: Tier = Tier.NVME


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLease:
    """A lease that was opened; its model may still be on its way.

    Attributes:
        ready: whether the model is here already: `path` is its directory then, and nobody needs to
        wait. path: where the model lies once it is here; None while it is on its way. tier: where
        its bytes were when it was opened: ORIGIN when some have to be fetched. expected_s: how long
        until it can be read at the speed of memory, as predicted; None when its size is not known
        here yet.
    """

    lease_id: str
    manifest: str
    ready: bool
    tier: Tier
    path: Path | None = None
    expected_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How long until a model can be read at the speed of memory.

    Attributes:
        tier: where it would be served from now: ORIGIN when some of it is not on this node.
        seconds: None when its size is not known here: its manifest was never fetched.
        missing: bytes by the tier where they are now and have to be moved up from.
    """

    tier: Tier
    seconds: float | None
    missing: Mapping[Tier, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a model is on its way into the store."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model in the store: its bytes (shared files counted in full), its leases, its last use
    (seconds since the epoch).

    `is_pinned`: kept whoever needs room.
    """

    manifest: str
    size_bytes: int
    files: int
    leases: int
    last_used_at: float
    is_pinned: bool = False


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
        partial_bytes: on the disk, of files that are half here.
        pinned_bytes: on the disk, of models that stay whoever needs room.
        resumed_bytes: not fetched again, because an earlier try had brought them.
        scrubbed_bytes: read again and compared, while nothing else was to do.
        given_bytes: taken from other nodes.
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
    partial_bytes: int = 0
    pinned_bytes: int = 0
    resumed_bytes: int = 0
    scrubbed_bytes: int = 0
    given_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)
