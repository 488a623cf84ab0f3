"""Templates resident on this node: one per revision, within a memory budget, evicted in least
recently used order.

A Template whose worker has surplus threads cannot be forked: it is *single*, becomes the next
instance itself, and is removed from here. One that was restored is frozen until then
(`frozen_workers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.types import RevisionKey, TemplateInfo


@dataclass(kw_only=True, eq=False)
class Template:
    """One resident Template. Owner: the event loop.

    Attributes:
        is_dumped: a snapshot is being made of it: it must not be evicted.
    """

    occupied: OccupiedSlot
    threads: tuple[str, ...]
    phases_ms: Mapping[str, float]
    single: bool
    last_used_at: float
    pss_bytes: int = 0
    forks: int = 0
    is_dumped: bool = False

    @property
    def revision(self) -> RevisionKey:
        """Its revision's key."""
        return self.occupied.launch.revision

    @property
    def held_bytes(self) -> int:
        """Memory of the Template and its parked forks."""
        return self.pss_bytes + self.occupied.parked_bytes

    def info(self) -> TemplateInfo:
        """Its RPC representation."""
        return TemplateInfo(
            revision=self.revision,
            pid=self.occupied.slot.worker_pid,
            pss_bytes=self.held_bytes,
            parked=len(self.occupied.slot.parked),
            threads=self.threads,
            phases_ms=dict(self.phases_ms),
            forks=self.forks,
            last_used_at=self.last_used_at,
            labels=dict(self.occupied.launch.labels),
        )


class Templates:
    """The resident Templates. Owner: the event loop; no awaits, so no lock is needed.

    Attributes:
        budget_bytes: limit of their memory, parked forks included.
        frozen_idle_s: how long a frozen one is kept after the revision's last instance.
    """

    def __init__(self, budget_bytes: int = 0, *, frozen_idle_s: float = 600.0) -> None:
        self.budget_bytes = budget_bytes
        self.frozen_idle_s = frozen_idle_s
        self._by_revision: dict[RevisionKey, Template] = {}
        self._single: set[RevisionKey] = set()

    def __repr__(self) -> str:
        return f"<Templates {len(self._by_revision)} resident, {self.pss_bytes() // 1024**2} MiB>"

    def __iter__(self) -> Iterator[Template]:
        return iter(list(self._by_revision.values()))

    def get(self, revision: RevisionKey) -> Template | None:
        """The Template of a revision, without marking it as used."""
        return self._by_revision.get(revision)

    def use(self, revision: RevisionKey, now: float) -> Template | None:
        """The Template for a start, marked as most recently used. A single one is returned once."""
        template = self._by_revision.get(revision)
        if template is None:
            return None
        template.last_used_at = now
        template.forks += 1
        if template.single:
            del self._by_revision[revision]
        return template

    def add(self, template: Template) -> None:
        """Add a worker that has reached its snapshot point."""
        self._by_revision[template.revision] = template
        if template.single:
            self._single.add(template.revision)

    def is_single(self, revision: RevisionKey) -> bool:
        """Whether a worker of this revision is known to be unforkable."""
        return revision in self._single

    def remove(self, template: Template) -> bool:
        """Remove a Template; False if it was not registered."""
        if self._by_revision.get(template.revision) is not template:
            return False
        del self._by_revision[template.revision]
        return True

    def of_slot(self, slot_id: str) -> Template | None:
        """The Template in a slot."""
        return next((t for t in self._by_revision.values() if t.occupied.slot.id == slot_id), None)

    def pss_bytes(self) -> int:
        """Total memory of all Templates, as last measured."""
        return sum(t.held_bytes for t in self._by_revision.values())

    def parked(self) -> int:
        """Number of parked forks of all Templates."""
        return sum(len(t.occupied.slot.parked) for t in self._by_revision.values())

    def victims(self, *, need_bytes: int, unused_only: bool) -> list[Template]:
        """The least recently used Templates that together free `need_bytes`; fewer if there are not
        enough, none if `need_bytes` is not positive."""
        chosen: list[Template] = []
        for template in sorted(self._by_revision.values(), key=lambda t: t.last_used_at):
            if need_bytes <= 0:
                break
            if template.is_dumped or (unused_only and template.occupied.slot.running):
                continue
            chosen.append(template)
            need_bytes -= template.held_bytes
        return chosen
