"""Report of `deploy` on each function it started: cold, restore and fork times, and obstacles.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.cli.core.formatting import format_milliseconds

LARGE_HEAP_BYTES = 256_000_000
"""A smaller image, read in 0.1 s at 2.5 GB/s, needs no remark; a larger one usually contains
weights by value."""
_MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """How one function started.

    Attributes:
        cold_ms: from nothing to the snapshot point; None if it was not booted from nothing.
        import_ms: to the snapshot point where the packages of its image were imported already; None
        otherwise. restore_ms: from its snapshot to the first answer; None without a snapshot.
        fork_ms: from the Template to a serving instance; None if it was not forked. threads: extra
        threads and processes that prevent a fork. snapshot: the platform's report on the snapshot: `SnapshotInfo`, `{"refused": [reasons]}`, `{"off": why}`,
        `{"failed": message}`.
    """

    function: str
    cold_ms: float | None
    import_ms: float | None = None
    restore_ms: float | None = None
    fork_ms: float | None = None
    threads: tuple[str, ...] = ()
    snapshot: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        steps = []
        if self.cold_ms is not None:
            steps.append(f"cold {format_milliseconds(self.cold_ms)}")
        if self.import_ms is not None:
            steps.append(f"import {format_milliseconds(self.import_ms)}")
        if self.restore_ms is not None:
            steps.append(f"restore {format_milliseconds(self.restore_ms)}")
        if self.fork_ms is not None:
            steps.append(f"fork {format_milliseconds(self.fork_ms)}")
        out = " → ".join(steps)
        if image_bytes := (self.snapshot or {}).get("image_bytes"):
            out += f"; image {image_bytes / _MB:,.0f} MB"
        return out

    def remarks(self) -> Iterator[str]:
        """Further remarks, one sentence each."""
        snapshot = self.snapshot or {}
        if self.threads:
            each = (
                "each instance is restored from its snapshot"
                if self.restore_ms is not None
                else "each start is COLD"
            )
            yield (
                f"it cannot be forked, because it started threads or processes: "
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
            # the agent's message begins with the revision's key, which means nothing to users
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
            unexplained = "weights declared as pilotlight.Weights are mapped instead of copied"
            yield (
                snapshot.get("heap_why")
                or f"the image carries {heap_bytes / _MB:,.0f} MB of memory by value: {unexplained}"
            )


def summarize_start(function: str, body: Mapping[str, Any], *, waited_ms: float) -> StartReport:
    """Summarize a warm-up report. The phases of its Template are the cold start, unless the
    Template itself was restored."""
    template, snapshot = body.get("template") or {}, body.get("snapshot")
    start_ms, kind = float(body.get("start_ms") or 0), body.get("start_kind")
    phases = template.get("phases_ms") or {}
    whole_ms = sum(float(ms) for ms in phases.values())
    booted_ms = 0.0 if "restore" in phases else whole_ms
    proven = snapshot if snapshot and snapshot.get("state") == "READY" else {}
    import_ms = whole_ms if {"restore", "import"} <= phases.keys() else None
    if import_ms is None and kind == "IMPORT":
        import_ms = start_ms or waited_ms
    cold_ms = float(proven.get("cold_ms") or 0) or booted_ms
    if not cold_ms and import_ms is None:
        cold_ms = start_ms or waited_ms
    return StartReport(
        function=function,
        cold_ms=cold_ms or None,
        import_ms=import_ms,
        restore_ms=float(proven.get("restore_ms") or 0) or None,
        fork_ms=start_ms if kind == "FORK" and start_ms else None,
        threads=tuple(template.get("threads") or ()),
        snapshot=snapshot,
    )
