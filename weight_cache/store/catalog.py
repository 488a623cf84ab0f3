"""In-memory catalog of the store: models, leases, pins, and eviction decisions. Does no I/O.

A file belongs to every model that names it. A model is either *arriving* (claimed) or *here*
(complete). Leases hold complete models; pins exempt them from eviction. Each file's bytes count
once, from the moment they are claimed, so incoming models cannot exceed the budget. Of an unclaimed
*partial* file, the bytes on disk count.

Invariants: `used_bytes <= max_bytes` after every claim; a leased, pinned or arriving model is never
evicted; a file is removed only when no complete or arriving model names it, a partial file only
when no arriving model does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weight_cache.errors import StoreFull
from weight_cache.store.disk_eviction import (
    EvictionCandidate,
    EvictionPlan,
    Files,
    ReloadSeconds,
    plan_eviction,
)
from weight_cache.types import Lease, ModelInfo

__all__ = ["Catalog", "EvictionPlan", "Files"]

_PINNED_SHARE = 0.5
"""Part of the budget: tenants create pins, but all tenants share the store."""
_KNOWN_MODELS = 256
_KNOWN_FILES = 200_000
"""Limits of models and files remembered while not in the store: their missing bytes are known
without a request to the origin."""


def guess_reload_s(size_bytes: int) -> float:
    """Default estimate without measurements: one request plus 0.5 GB/s."""
    return 0.05 + size_bytes / 5e8


@dataclass(slots=True, eq=False)
class _Model:
    files: Files
    last_used_at: float
    clock: float
    folders: int = 0
    uses: int = 1
    leases: set[str] = field(default_factory=set)


class Catalog:
    """State of the store. Owner: the store's event loop; every method is synchronous, so no lock is
    needed."""

    def __init__(
        self,
        max_bytes: int,
        *,
        reload_s: ReloadSeconds = guess_reload_s,
        shortage: Callable[[int, int], tuple[int, int]] = lambda *_: (0, 0),
    ) -> None:
        """`shortage`: given bytes and files to add, the bytes and files that must leave the disk
        first, regardless of the budget."""
        self.max_bytes = max_bytes
        self._shortage = shortage
        self._reload_s = reload_s
        self._clock = 0.0
        self._files: dict[str, int] = {}
        self._partials: dict[str, int] = {}
        self._known: OrderedDict[str, Files] = OrderedDict()
        self._pins: set[str] = set()
        self._models: dict[str, _Model] = {}
        self._claims: dict[str, Files] = {}
        self._claimed_folders: dict[str, int] = {}
        self._leases: dict[str, Lease] = {}

    def __repr__(self) -> str:
        figures = (
            f"models={len(self._models)} arriving={len(self._claims)} leases={len(self._leases)}"
        )
        return f"<Catalog {self.used_bytes}/{self.max_bytes} bytes {figures}>"

    @property
    def used_bytes(self) -> int:
        """Bytes on disk or claimed, each file once."""
        return sum(self._needed().values())

    @property
    def partial_bytes(self) -> int:
        """Bytes on disk of partial files."""
        return sum(self._partials.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned models in the store, each file once."""
        return sum(
            {
                d: s
                for name in self._pins & self._models.keys()
                for d, s in self._models[name].files.items()
            }.values()
        )

    @property
    def arriving(self) -> int:
        """Number of arriving models."""
        return len(self._claims)

    def names(self) -> set[str]:
        """All models that are complete or arriving."""
        return self._models.keys() | self._claims.keys()

    def is_here(self, manifest: str) -> bool:
        """Whether the model is complete and can be leased now."""
        return manifest in self._models

    def held(self, lease_id: str) -> Lease | None:
        """The lease with that id."""
        return self._leases.get(lease_id)

    def has_file(self, digest: str) -> bool:
        """Whether the file is on disk."""
        return digest in self._files

    def files_of(self, manifest: str) -> Files:
        """The files of a complete model; KeyError otherwise."""
        return self._models[manifest].files

    def file_names(self) -> set[str]:
        """All files on disk."""
        return set(self._files)

    def is_leased(self, manifest: str) -> bool:
        """Whether the model has leases."""
        return manifest in self._models and bool(self._models[manifest].leases)

    def is_pinned(self, manifest: str) -> bool:
        """Whether the model is pinned, in the store or not."""
        return manifest in self._pins

    def pins(self) -> set[str]:
        """All pinned models."""
        return set(self._pins)

    def pin(self, manifest: str) -> None:
        """Exempt a model from eviction. Idempotent. Raises StoreFull if more than half of the
        budget would be pinned."""
        here = {
            d: s
            for name in {*self._pins, manifest} & self._models.keys()
            for d, s in self._models[name].files.items()
        }
        wanted, limit = sum(here.values()), int(self.max_bytes * _PINNED_SHARE)
        if manifest not in self._pins and wanted > limit:
            raise StoreFull(
                f"with this model {wanted} bytes would be pinned, but at most {limit} may be, half "
                f"of the store's budget, to leave room for other models. Unpin another model, or "
                f"raise weight_cache.max_bytes"
            )
        self._pins.add(manifest)

    def adopt_pin(self, manifest: str) -> None:
        """Register a pin found on disk at startup, regardless of the current budget."""
        self._pins.add(manifest)

    def unpin(self, manifest: str) -> bool:
        """Make a model evictable again; False if it was not pinned."""
        was_pinned = manifest in self._pins
        self._pins.discard(manifest)
        return was_pinned

    def know(self, manifest: str, files: Files) -> None:
        """Remember the files of a model; of models not in the store, only the newest are kept."""
        self._known[manifest] = files
        self._known.move_to_end(manifest)
        while len(self._known) > _KNOWN_MODELS or (
            len(self._known) > 1 and sum(map(len, self._known.values())) > _KNOWN_FILES
        ):
            self._known.popitem(last=False)

    def missing(self, manifest: str) -> int | None:
        """Bytes of the model that are not in the store; None if its files are unknown."""
        if manifest in self._models:
            return 0
        files = self._known.get(manifest)
        if files is None:
            return None
        return sum(
            size - self._partials.get(digest, 0)
            for digest, size in files.items()
            if digest not in self._files
        )

    def claim(self, manifest: str, files: Files, *, folders: int = 0) -> EvictionPlan:
        """Reserve room for a model; return what must be evicted first. Raises StoreFull with the
        sizes, and changes nothing then.

        `folders`: directories in the model besides its root; each takes an inode.
        """
        size = sum(files.values())
        if size > self.max_bytes:
            raise StoreFull(
                f"weights of {size} bytes are larger than the store's budget of {self.max_bytes} "
                f"bytes: raise weight_cache.max_bytes"
            )
        needed = self._needed(files)
        coming = [size for digest, size in needed.items() if digest not in self._files]
        short, short_files = (
            self._shortage(sum(coming), len(coming) + folders) if coming or folders else (0, 0)
        )
        excess = max(sum(needed.values()) - self.max_bytes, short)
        removal, clock = self._choose(excess, short_files, files)
        if not removal.is_enough(short, short_files):
            raise StoreFull(
                f"weights of {size} bytes do not fit: {short} more bytes and {short_files} more "
                f"inodes must be free on the disk (platform.disk_floor_bytes reserves some for the "
                f"journals), but only {removal.size_bytes} bytes in {removal.inodes} files and "
                f"directories of the store can be evicted: free disk space"
            )
        if removal.size_bytes < excess:
            raise StoreFull(
                f"weights of {size} bytes do not fit: {self.used_bytes} of {self.max_bytes} bytes "
                f"are used and only {removal.size_bytes} can be evicted (the rest is in use). "
                f"Raise weight_cache.max_bytes, or stop functions that hold weights"
            )
        self._delete_row(removal)
        self._clock = max(self._clock, clock)
        self._claims[manifest] = dict(files)
        self._claimed_folders[manifest] = folders
        self.know(manifest, self._claims[manifest])
        return removal

    def drop(self, manifest: str) -> EvictionPlan | None:
        """Return what to remove to drop a model; None if it is leased, pinned or arriving, or no
        part of it is in the store."""
        if self.is_leased(manifest) or manifest in self._pins or manifest in self._claims:
            return None
        model = self._models.get(manifest)
        files = model.files if model is not None else self._known.get(manifest, {})
        others = {
            d for name, m in self._models.items() if name != manifest for d in m.files
        } | self._claimed()
        alone = tuple(d for d in files if d in self._files and d not in others)
        half = tuple(d for d in files if d in self._partials and d not in self._claimed())
        if model is None and not alone and not half:
            return None
        freed = sum(self._files[d] for d in alone) + sum(self._partials[d] for d in half)
        removal = EvictionPlan(
            models=(manifest,) if model is not None else (),
            files=alone,
            partials=half,
            size_bytes=freed,
        )
        self._delete_row(removal)
        return removal

    def partial_left(self, digest: str, size_bytes: int) -> None:
        """Register a partial file with `size_bytes` on disk (0: none)."""
        self._partials.pop(digest, None)
        if size_bytes:
            self._partials[digest] = size_bytes

    def file_arrived(self, digest: str, size_bytes: int) -> None:
        """Register a verified file on disk."""
        self._files[digest] = size_bytes
        self._partials.pop(digest, None)

    def model_arrived(self, manifest: str, *, now: float) -> None:
        """Register a claimed model as complete; leases from before a quarantine are valid again."""
        held = {lease.id for lease in self._leases.values() if lease.manifest == manifest}
        folders = self._claimed_folders.pop(manifest, 0)
        self._models[manifest] = _Model(
            files=self._claims.pop(manifest),
            last_used_at=now,
            clock=self._clock,
            folders=folders,
            leases=held,
        )

    def abandon(self, manifest: str) -> None:
        """Cancel a claim. Files that did arrive stay for the next attempt, and are evicted
        first."""
        del self._claims[manifest]
        self._claimed_folders.pop(manifest, None)

    def adopt(self, manifest: str, files: Files, *, last_used_at: float, folders: int = 0) -> None:
        """Register a model and its files found on disk at startup."""
        self._files.update(files)
        self.know(manifest, files)
        self._models[manifest] = _Model(
            files=dict(files), last_used_at=last_used_at, clock=self._clock, folders=folders
        )

    def rank_adopted(self) -> None:
        """Order the adopted models for eviction by last use, the only information known about them.
        Called once, after startup."""
        models = sorted(self._models.values(), key=lambda model: model.last_used_at)
        worths = [
            self._reload_s(size) / size for size in (sum(m.files.values()) for m in models) if size
        ]
        step = max(worths, default=0.0)  # larger than any difference due to sizes
        for model in models:
            self._clock += step
            model.clock = self._clock

    def lease(self, lease: Lease, *, now: float) -> None:
        """Add a lease on a complete model (KeyError otherwise). Repeating it updates the last use
        and the process whose exit ends it."""
        model = self._models[lease.manifest]
        model.uses += lease.id not in model.leases
        model.leases.add(lease.id)
        model.clock = self._clock
        model.last_used_at = max(model.last_used_at, now)
        self._leases[lease.id] = lease

    def release(self, lease_id: str, *, now: float) -> Lease | None:
        """Remove a lease; None if there was no such lease."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and (model := self._models.get(lease.manifest)) is not None:
            model.leases.discard(lease_id)
            model.last_used_at = now
        return lease

    def quarantine(self, files: set[str]) -> tuple[str, ...]:
        """Remove corrupt files and the models that name them (returned). Leases on these models
        wait until they are complete again."""
        broken = tuple(name for name, model in self._models.items() if files & model.files.keys())
        for name in broken:
            del self._models[name]
        for digest in files:
            self._files.pop(digest, None)
        return broken

    def leases(self) -> list[Lease]:
        """All leases, oldest first."""
        return sorted(self._leases.values(), key=lambda lease: lease.acquired_at)

    def models(self) -> list[ModelInfo]:
        """All complete models, least recently used first."""
        return [
            ModelInfo(
                manifest=name,
                size_bytes=sum(m.files.values()),
                files=len(m.files),
                leases=len(m.leases),
                last_used_at=m.last_used_at,
                is_pinned=name in self._pins,
            )
            for name, m in sorted(self._models.items(), key=lambda item: item[1].last_used_at)
        ]

    def _needed(self, wanted: Files | None = None) -> dict[str, int]:
        """Files that must fit, each once: on disk, partial, claimed, wanted."""
        needed = {**self._partials, **self._files}
        for files in self._claims.values():
            needed.update(files)
        return {**needed, **(wanted or {})}

    def _claimed(self) -> set[str]:
        return {digest for files in self._claims.values() for digest in files}

    def _choose(self, excess: int, excess_files: int, wanted: Files) -> tuple[EvictionPlan, float]:
        if excess <= 0 and excess_files <= 0:
            return EvictionPlan(), 0.0
        arriving = self._claimed() | wanted.keys()
        candidates = dict(self._candidates())
        return plan_eviction(
            excess,
            excess_files,
            files=self._files,
            partials={d: s for d, s in self._partials.items() if d not in arriving},
            candidates=candidates,
            kept=[
                *(m.files for name, m in self._models.items() if name not in candidates),
                *self._claims.values(),
                wanted,
            ],
            reload_s=self._reload_s,
        )

    def _candidates(self) -> Iterator[tuple[str, EvictionCandidate]]:
        for name, m in self._models.items():
            if not m.leases and name not in self._pins:
                yield (
                    name,
                    EvictionCandidate(
                        files=m.files,
                        folders=m.folders,
                        uses=m.uses,
                        clock=m.clock,
                        last_used_at=m.last_used_at,
                    ),
                )

    def _delete_row(self, removal: EvictionPlan) -> None:
        for name in removal.models:
            del self._models[name]
        for digest in removal.files:
            del self._files[digest]
        for digest in removal.partials:
            del self._partials[digest]
