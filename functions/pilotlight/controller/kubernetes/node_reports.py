"""The latest reports of a cluster's nodes. In memory: each node sends a full report within seconds,
so a restart loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from snapshotter.node_reports import NodeReport

FRESH_S = 60.0
"""Age up to which a report is valid; six reports are missing after it."""
FORGET_S = 3600.0
MAX_NODES = 5000
"""Kubernetes' own limit for a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node's latest report and when it arrived: wall clock, seconds since the epoch."""

    report: NodeReport
    at: float

    def is_fresh(self, now: float) -> bool:
        """Whether the report is still valid."""
        return now - self.at <= FRESH_S


def _hot(report: NodeReport) -> tuple[Sequence[str], Sequence[str]]:
    """What node labels are made of."""
    return report.weights, [snapshot.revision for snapshot in report.snapshots]


class NodeReports:
    """The latest report of each node. Owner: the controller's event loop."""

    def __init__(self) -> None:
        self._known: dict[str, NodeStatus] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<NodeReports {len(self._known)}>"

    def take(self, report: NodeReport, *, now: float) -> None:
        """Replace the node's previous report."""
        self._known = {
            name: known for name, known in self._known.items() if now - known.at <= FORGET_S
        }
        if len(self._known) >= MAX_NODES and report.node not in self._known:
            del self._known[min(self._known, key=lambda name: self._known[name].at)]
        before = self._known.get(report.node)
        self._known[report.node] = NodeStatus(report=report, at=now)
        if before is None or _hot(before.report) != _hot(report):
            self._changed.set()

    def all(self) -> Sequence[NodeStatus]:
        """Return all reports by node name, expired ones included."""
        return [self._known[name] for name in sorted(self._known)]

    def fresh(self, *, now: float) -> dict[str, NodeReport]:
        """Return the valid reports by node name."""
        return {name: known.report for name, known in self._known.items() if known.is_fresh(now)}

    async def wait_changed(self) -> None:
        """Wait until the hot items of a node differ from those when this last returned."""
        await self._changed.wait()
        self._changed.clear()
