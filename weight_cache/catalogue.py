"""Who is in the store, who is held, and who goes when room is needed: decisions without I/O.

A file belongs to every model that names it. A model is *arriving* (claimed), or *here*; leases hold models that are here. Bytes
count once per file, from the moment they are claimed, so that what is arriving can never overrun the budget.

Invariants: `used_bytes <= max_bytes` after every claim; a leased or arriving model is never a victim; a file goes only when no
model that is here or arriving names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weight_cache.errors import StoreFull
from weight_cache.types import Lease, ModelInfo

Files = Mapping[str, int]
"""digest → size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What must leave the disk: models (their directories) first, then files."""

    models: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    size_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Model:
    files: Files
    last_used_at: float
    leases: set[str] = field(default_factory=set)


class Catalogue:
    """The store's memory. Owner: the store's event loop; every method is synchronous, so no lock is needed."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._files: dict[str, int] = {}
        self._models: dict[str, _Model] = {}
        self._claims: dict[str, Files] = {}
        self._leases: dict[str, Lease] = {}

    def __repr__(self) -> str:
        figures = f"models={len(self._models)} arriving={len(self._claims)} leases={len(self._leases)}"
        return f"<Catalogue {self.used_bytes}/{self.max_bytes} bytes {figures}>"

    @property
    def used_bytes(self) -> int:
        """Bytes on disk and claimed, each file once."""
        wanted = dict(self._files)
        for files in self._claims.values():
            wanted.update(files)
        return sum(wanted.values())

    @property
    def arriving(self) -> int:
        """How many models are on their way."""
        return len(self._claims)

    def is_here(self, manifest: str) -> bool:
        """Whether the model can be leased now."""
        return manifest in self._models

    def is_held(self, lease_id: str) -> bool:
        """Whether there is such a lease."""
        return lease_id in self._leases

    def has_file(self, digest: str) -> bool:
        """Whether the file is on disk."""
        return digest in self._files

    def files_of(self, manifest: str) -> Files:
        """The files of a model that is here; KeyError otherwise."""
        return self._models[manifest].files

    def file_names(self) -> set[str]:
        """Every file on disk."""
        return set(self._files)

    def claim(self, manifest: str, files: Files) -> Removal:
        """Make room for a model; returns what must go first. Raises StoreFull, naming the figures, and changes nothing then."""
        needed = {**self._files, **{d: s for claim in self._claims.values() for d, s in claim.items()}, **files}
        excess = sum(needed.values()) - self.max_bytes
        removal = self._choose(excess, set(files))
        if removal.size_bytes < excess:
            raise StoreFull(
                f"weights of {sum(files.values())} bytes do not fit: {self.used_bytes} of {self.max_bytes} bytes are used and only "
                f"{removal.size_bytes} may go (the rest is in use). Raise weight_cache.max_bytes, or stop functions that hold weights"
            )
        self._forget(removal)
        self._claims[manifest] = dict(files)
        return removal

    def file_arrived(self, digest: str, size_bytes: int) -> None:
        """A file is on disk, verified."""
        self._files[digest] = size_bytes

    def model_arrived(self, manifest: str, *, now: float) -> None:
        """A claimed model is on disk; leases from before it was condemned hold again."""
        held = {lease.id for lease in self._leases.values() if lease.manifest == manifest}
        self._models[manifest] = _Model(files=self._claims.pop(manifest), last_used_at=now, leases=held)

    def abandon(self, manifest: str) -> None:
        """A claim came to nothing; files that did arrive stay for the next try, and go first when room is needed."""
        del self._claims[manifest]

    def adopt(self, manifest: str, files: Files, *, last_used_at: float) -> None:
        """A model found on disk at start-up, its files too."""
        self._files.update(files)
        self._models[manifest] = _Model(files=dict(files), last_used_at=last_used_at)

    def lease(self, lease: Lease) -> None:
        """Hold a model that is here (KeyError otherwise). Asking again changes nothing but the last use."""
        model = self._models[lease.manifest]
        model.leases.add(lease.id)
        model.last_used_at = max(model.last_used_at, lease.acquired_at)
        self._leases.setdefault(lease.id, lease)

    def release(self, lease_id: str, *, now: float) -> Lease | None:
        """Let go; None when there was no such lease."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and (model := self._models.get(lease.manifest)) is not None:
            model.leases.discard(lease_id)
            model.last_used_at = now
        return lease

    def condemn(self, files: set[str]) -> tuple[str, ...]:
        """These files are corrupt: neither they nor the models that name them (returned) are here any more. Leases wait for them."""
        broken = tuple(name for name, model in self._models.items() if files & model.files.keys())
        for name in broken:
            del self._models[name]
        for digest in files:
            self._files.pop(digest, None)
        return broken

    def leases(self) -> list[Lease]:
        """Every lease, oldest first."""
        return sorted(self._leases.values(), key=lambda lease: lease.acquired_at)

    def models(self) -> list[ModelInfo]:
        """Every model that is here, least recently used first."""
        return [
            ModelInfo(
                manifest=name, size_bytes=sum(m.files.values()), files=len(m.files), leases=len(m.leases), last_used_at=m.last_used_at
            )
            for name, m in sorted(self._models.items(), key=lambda item: item[1].last_used_at)
        ]

    def _choose(self, excess: int, wanted: set[str]) -> Removal:
        """Victims worth at least `excess` bytes, or all that may go: files of no model first, then models by last use."""
        users: dict[str, int] = {}
        for files in [*(m.files for m in self._models.values()), *self._claims.values(), dict.fromkeys(wanted, 0)]:
            for digest in files:
                users[digest] = users.get(digest, 0) + 1
        models: list[str] = []
        files_gone: list[str] = []
        freed = 0
        for digest, size in self._files.items():
            if freed < excess and digest not in users:
                files_gone.append(digest)
                freed += size
        for name, model in sorted(self._models.items(), key=lambda item: item[1].last_used_at):
            if freed >= excess or model.leases:
                continue
            models.append(name)
            for digest in model.files:
                users[digest] -= 1
                if not users[digest]:
                    files_gone.append(digest)
                    freed += self._files[digest]
        return Removal(models=tuple(models), files=tuple(files_gone), size_bytes=freed)

    def _forget(self, removal: Removal) -> None:
        for name in removal.models:
            del self._models[name]
        for digest in removal.files:
            del self._files[digest]
