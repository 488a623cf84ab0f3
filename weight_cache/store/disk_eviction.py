"""Eviction policy: GreedyDual-Size-Frequency (L. Cherkasova, HP Labs HPL-98-69R1, 1998) over
models.

A model's priority is `clock + uses * seconds to fetch it again / bytes that its eviction frees`.
The model with the lowest priority is evicted, and the clock advances to its priority; a use sets a
model's clock to the current one, so past popularity ages. Unused data is removed before any model:
first partial files, then files of no model. A file that another model needs stays; models whose
eviction frees nothing come last. A directory counts as one inode, and in a model's priority as one
disk block. Uses are counted since process start; models found on disk are evicted by last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Files = Mapping[str, int]
"""digest → size in bytes."""
ReloadSeconds = Callable[[int], float]
"""Bytes → seconds to fetch them again."""

_FOLDER_BYTES = 4096
"""Disk usage of a directory: one block on most file systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """What to remove from the disk: models (their directories) first, then files and partial
    files."""

    models: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    partials: tuple[str, ...] = ()
    size_bytes: int = 0
    folders: int = 0

    @property
    def inodes(self) -> int:
        """Number of files and directories removed."""
        return len(self.files) + len(self.partials) + self.folders

    def is_enough(self, excess_bytes: int, excess_files: int) -> bool:
        """Whether it frees that many bytes and inodes."""
        return self.size_bytes >= excess_bytes and self.inodes >= excess_files


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCandidate:
    """A model without leases or pins. `clock`: the policy's clock at its last use; `folders`: its
    directories besides its root."""

    files: Files
    folders: int = 0
    uses: int
    clock: float
    last_used_at: float

    def worth(self, freed_bytes: int, reload_s: ReloadSeconds) -> float:
        """The eviction priority: cost per freed byte plus the clock."""
        return self.clock + self.uses * reload_s(freed_bytes) / freed_bytes


def plan_eviction(
    excess_bytes: int,
    excess_files: int = 0,
    *,
    files: Files,
    partials: Files,
    candidates: Mapping[str, EvictionCandidate],
    kept: Iterable[Files],
    reload_s: ReloadSeconds,
) -> tuple[EvictionPlan, float]:
    """Choose victims of at least `excess_bytes` and `excess_files`, or everything evictable; also
    return the new clock (0 if no model is evicted).

    `files` are on the disk; `kept` are the files of models that stay: leased, pinned, arriving,
    wanted."""
    users = _FileReferences(files, candidates, kept)
    half = _until(excess_bytes, excess_files, partials.items())
    freed = sum(partials[digest] for digest in half)
    loose = _until(
        excess_bytes - freed,
        excess_files - len(half),
        ((d, size) for d, size in files.items() if not users.has(d)),
    )
    freed += sum(files[digest] for digest in loose)
    models: list[str] = []
    gone = [*loose]
    folders = 0
    clock = 0.0
    left = dict(candidates)
    while left and (freed < excess_bytes or len(half) + len(gone) + folders < excess_files):
        name, worth = min(
            ((n, users.worth(n, c, reload_s)) for n, c in left.items()),
            key=lambda pair: (pair[1], left[pair[0]].last_used_at),
        )
        candidate = left.pop(name)
        alone = users.leave(name, candidate)
        models.append(name)
        folders += candidate.folders
        gone += alone
        freed += sum(files[digest] for digest in alone)
        clock = max(clock, worth if alone or candidate.folders else 0.0)
    return EvictionPlan(
        models=tuple(models),
        files=tuple(gone),
        partials=tuple(half),
        size_bytes=freed,
        folders=folders,
    ), clock


def _until(excess_bytes: int, excess_files: int, sized: Iterable[tuple[str, int]]) -> list[str]:
    taken: list[str] = []
    for digest, size in sized:
        if excess_bytes <= 0 and len(taken) >= excess_files:
            break
        taken.append(digest)
        excess_bytes -= size
    return taken


class _FileReferences:
    """Tracks which models use each file, and the bytes used by each candidate alone."""

    def __init__(
        self, files: Files, candidates: Mapping[str, EvictionCandidate], kept: Iterable[Files]
    ) -> None:
        self._files = files
        self._users: dict[str, set[str]] = {}
        for number, claim in enumerate(kept):
            for digest in claim:
                self._users.setdefault(digest, set()).add(f"kept {number}")
        for name, candidate in candidates.items():
            for digest in candidate.files:
                self._users.setdefault(digest, set()).add(name)
        self._alone = dict.fromkeys(candidates, 0)
        for digest, users in self._users.items():
            self._count_alone(digest, users)

    def has(self, digest: str) -> bool:
        return digest in self._users

    def worth(self, name: str, candidate: EvictionCandidate, reload_s: ReloadSeconds) -> float:
        freed = self._alone[name] + candidate.folders * _FOLDER_BYTES
        return candidate.worth(freed, reload_s) if freed else float("inf")

    def leave(self, name: str, candidate: EvictionCandidate) -> list[str]:
        """Remove a model; return the files that only it used."""
        alone = []
        for digest in candidate.files:
            users = self._users[digest]
            users.discard(name)
            if users:
                self._count_alone(digest, users)
            else:
                alone.append(digest)
        return alone

    def _count_alone(self, digest: str, users: set[str]) -> None:
        if len(users) == 1 and (only := next(iter(users))) in self._alone:
            self._alone[only] += self._files.get(digest, 0)
