"""Data types of the weight cache. Standard library only."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.json_record import JsonRecord


class ReadPriority(enum.StrEnum):
    """Priority of a read, most urgent first: a caller waits, a prefetch, background scrubbing."""

    START = "start"
    PREFETCH = "prefetch"
    SCRUB = "scrub"


class Tier(enum.StrEnum):
    """Where bytes are stored, farthest first."""

    ORIGIN = "origin"
    NVME = "nvme"
    DRAM = "dram"
    HBM = "hbm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A verified range of one file: `length_bytes` from `offset_bytes`, with the sha256 (hex) of
    these bytes."""

    offset_bytes: int
    length_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a safetensors file.

    Attributes:
        dtype: as safetensors names it: `F32`, `BF16`, `I64`, …
        shape: in elements; () is a scalar.
        offset_bytes, length_bytes: position of its bytes in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(JsonRecord):
    """A lease on a model: while it exists, no file of the model is evicted.

    Attributes:
        id: derived from holder and manifest, so that opening twice gives the same lease.
        manifest: sha256 (hex) of the manifest.
        holder: opaque name of the holder, unique per use (the node agent names a slot).
        acquired_at: wall clock, seconds since the epoch.
        pid, pid_started: the process whose exit ends the lease: its id, and its start time in clock
            ticks since boot (proc_pid_stat(5), field 22), which detects a reused id. None: the
            lease ends when it is closed.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLease:
    """A lease as its holder sees it: `path` is the read-only model directory, stable and immutable
    for the duration of the lease.

    `tier`: where most of its bytes were when the lease was opened.
    """

    lease_id: str
    manifest: str
    path: Path
    tier: Tier = Tier.NVME


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLease:
    """The answer to opening a lease, whose model may still be incomplete.

    Attributes:
        ready: the model is complete and `path` is its directory; there is no need to wait.
        path: the model's directory; None while it is being fetched.
        tier: where its bytes were when the lease was opened; ORIGIN if some must be fetched.
        expected_s: predicted time until it can be read at memory speed; None if its size is not
            known on this node yet.
    """

    lease_id: str
    manifest: str
    ready: bool
    tier: Tier
    path: Path | None = None
    expected_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time until a model can be read at memory speed.

    Attributes:
        tier: where it would be served from now; ORIGIN if part of it is not on this node.
        seconds: None if its size is not known on this node: its manifest was never fetched.
        missing: bytes to move up, by the tier where they are now.
    """

    tier: Tier
    seconds: float | None
    missing: Mapping[Tier, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Progress of fetching a model into the store."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model in the store: its size (shared files counted in full), its leases, its last use
    (seconds since the epoch).

    `is_pinned`: exempt from eviction.
    """

    manifest: str
    size_bytes: int
    files: int
    leases: int
    last_used_at: float
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics(JsonRecord):
    """Statistics of the store at one moment; counters start with the process.

    Attributes:
        used_bytes: bytes on disk and reserved for incoming models; at most `max_bytes`.
        arriving: models being fetched.
        hits, misses: leases whose model was in the store, or had to be fetched.
        fetched_bytes: from the origin.
        evicted_models, evicted_bytes: removed to make room.
        quarantined_files: found corrupt and moved to quarantine.
        partial_bytes: on disk, of partial files.
        pinned_bytes: on disk, of pinned models.
        resumed_bytes: kept from an earlier attempt, so not fetched again.
        scrubbed_bytes: read again and verified by the scrubber.
        given_bytes: from other nodes.
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
