"""What `deploy` says of each function that it brought up: cold, restored, forked, and what stands
in the way. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.cli.core.formatting import format_milliseconds

LARGE_HEAP_BYTES = 256_000_000
"""An image that reads itself in 0.1 s at 2.5 GB/s is nothing to talk about; beyond it weights are
usually carried by value."""
_MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """How one function came up when it was asked to.

    Attributes:
        cold_ms: from nothing to the snapshot point. restore_ms: from its snapshot to the first
        answer; None without one. fork_ms: from the Template to an instance that serves; None where
        it was not forked. threads: surplus threads, and processes, that keep it from being forked.
        snapshot: what the platform says of the snapshot: `SnapshotInfo`, `{"refused": [reasons]}`,
        `{"off": why}`, `{"failed": message}`.
    """

    function: str
    cold_ms: float
    restore_ms: float | None = None
    fork_ms: float | None = None
    threads: tuple[str, ...] = ()
    snapshot: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        steps = [f"cold {format_milliseconds(self.cold_ms)}"]
        if self.restore_ms is not None:
            steps.append(f"restore {format_milliseconds(self.restore_ms)}")
        if self.fork_ms is not None:
            steps.append(f"fork {format_milliseconds(self.fork_ms)}")
        out = " → ".join(steps)
        if image_bytes := (self.snapshot or {}).get("image_bytes"):
            out += f"; image {image_bytes / _MB:,.0f} MB"
        return out

    def remarks(self) -> Iterator[str]:
        """What else there is to know, a sentence each."""
        snapshot = self.snapshot or {}
        if self.threads:
            each = (
                "each instance is restored from its snapshot"
                if self.restore_ms is not None
                else "each start is COLD"
            )
            yield (
                f"it cannot be forked, because of threads or processes that it began: "
                f"{', '.join(self.threads)}; {each}"
            )
        for reason in snapshot.get("refused", ()):
            said = str(reason.get("message") or reason.get("what") or reason.get("kind"))
            where = (
                f" ({reason['where']})"
                if reason.get("where") and reason["where"] not in said
                else ""
            )
            yield f"no snapshot: {said}{where}"
        if "off" in snapshot:
            # the agent's own words begin with the revision's key, which says nothing here
            why = str(snapshot["off"])
            yield f"no snapshot: {why.partition(': ')[2] if why.startswith('no snapshot of ') else why}"
        if "failed" in snapshot:
            yield f"no snapshot: {snapshot['failed']}; it starts by FORK and COLD"
        if snapshot.get("state") == "QUARANTINED":
            yield (
                f"its snapshot {snapshot['id']} is quarantined: {snapshot.get('reason')}; it "
                f"starts by FORK and COLD"
            )
        if (heap_bytes := int(snapshot.get("heap_bytes") or 0)) >= LARGE_HEAP_BYTES:
            unexplained = (
                "weights that are pilotlight.Weights, mapped and not copied, stay out of it"
            )
            yield (
                snapshot.get("heap_why")
                or f"the image carries {heap_bytes / _MB:,.0f} MB of memory by value: {unexplained}"
            )


def summarize_start(function: str, body: Mapping[str, Any], *, waited_ms: float) -> StartReport:
    """What a warm-up's report says: its Template's phases are the cold start, unless that Template
    was restored itself."""
    template, snapshot = body.get("template") or {}, body.get("snapshot")
    start_ms, kind = float(body.get("start_ms") or 0), body.get("start_kind")
    phases = template.get("phases_ms") or {}
    booted_ms = 0.0 if "restore" in phases else sum(float(ms) for ms in phases.values())
    proven = snapshot if snapshot and snapshot.get("state") == "READY" else {}
    return StartReport(
        function=function,
        cold_ms=float(proven.get("cold_ms") or 0) or booted_ms or start_ms or waited_ms,
        restore_ms=float(proven.get("restore_ms") or 0) or None,
        fork_ms=start_ms if kind == "FORK" and start_ms else None,
        threads=tuple(template.get("threads") or ()),
        snapshot=snapshot,
    )
