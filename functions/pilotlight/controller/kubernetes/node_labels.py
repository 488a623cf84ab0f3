"""Node labels that name the hot weights and snapshots of each node, so that pods are scheduled
where their bytes are.

The labels come from the nodes' own reports; a node that has not reported for a minute has none.
Only changes are written. Nodes should not have many labels, so each gets at most `MAX_LABELS`, for
the most recently used items."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError, NotFound
from pilotlight.kubernetes.kinds import NODE
from pilotlight.kubernetes.names import HOT, cache_domain, snapshot_label, weights_label
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import WatchChange
from snapshotter.node_reports import NodeReport

_log = logging.getLogger(__name__)
MAX_LABELS = 50
LOOK_S = 5.0
"""Interval of the check for nodes that stopped reporting; reports are acted on at once."""
SETTLE_S = 60.0
"""Time after the start in which nodes that have not reported yet keep their labels: a restarted
controller has no reports."""


def desired_labels(report: NodeReport | None, settings: ClusterSettings) -> frozenset[str]:
    """Return the label keys that a node should have; none without a report. Weights and snapshots
    alternate, most recently used first."""
    if report is None:
        return frozenset()
    weights = [weights_label(settings, manifest) for manifest in report.weights]
    snapshots = [snapshot_label(settings, snapshot.revision) for snapshot in report.snapshots]
    in_turns = [key for pair in zip_longest(weights, snapshots) for key in pair if key is not None]
    return frozenset(list(dict.fromkeys(in_turns))[:MAX_LABELS])


def label_patch(
    labels: Mapping[str, str], wanted: frozenset[str], settings: ClusterSettings
) -> dict[str, str | None]:
    """Return the patch that turns `labels` into `wanted`; labels of others are not changed. {} if
    no change is needed."""
    prefix = f"{cache_domain(settings)}/"
    there = {key: value for key, value in labels.items() if key.startswith(prefix)}
    more: dict[str, str | None] = {key: HOT for key in sorted(wanted) if there.get(key) != HOT}
    return {**more, **{key: None for key in sorted(there) if key not in wanted}}


class NodeLabels:
    """Writes node labels. Owner: its task, in the leading controller.

    Attributes:
        writes: number of patches sent.
    """

    def __init__(
        self,
        cluster: Cluster,
        nodes: NodeReports,
        *,
        wall: Callable[[], float] = time.time,
        look_s: float = LOOK_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`wall`: the clock of the reports, seconds since the epoch."""
        self._cluster = cluster
        self._reports = nodes
        self._wall = wall
        self._look_s = look_s
        self._silent_until = wall() + settle_s
        self._written: dict[str, Mapping[str, str]] = {}
        self._nodes = Reflector(cluster, NODE, on_change=self._on_change)
        self.writes = 0

    def __repr__(self) -> str:
        return f"<NodeLabels {len(self._nodes.items())} nodes {self.writes} writes>"

    async def run(self) -> None:
        """Run until cancelled. Errors are logged, and a later round repeats the failed writes."""
        async with self._nodes:
            while True:
                if self._nodes.is_synced:
                    await self.poll_once()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await self._reports.wait_changed()

    async def poll_once(self) -> None:
        """Run one round."""
        now = self._wall()
        fresh = self._reports.fresh(now=now)
        for node in self._nodes.items():
            name = node["metadata"]["name"]
            if name not in fresh and now < self._silent_until:
                continue
            labels = self._written.get(name, node["metadata"].get("labels") or {})
            wanted = desired_labels(fresh.get(name), self._cluster.settings)
            if patch := label_patch(labels, wanted, self._cluster.settings):
                await self._write(name, patch)

    async def _write(self, name: str, labels: Mapping[str, str | None]) -> None:
        body: dict[str, Any] = {"metadata": {"labels": dict(labels)}}
        self.writes += 1
        try:
            written = await self._cluster.patch(NODE, name, None, body)
        except NotFound:
            return  # the node has left
        except ClusterError as e:
            _log.warning("labels.not_written node=%s error=%s", name, e)
            return
        # used until the watch reports the same labels
        self._written[name] = written["metadata"].get("labels") or {}
        _log.info("labels.written node=%s changes=%d", name, len(labels))

    def _on_change(self, change: WatchChange) -> None:
        """Use the watched labels instead of the written ones. If they are older than our write, the
        next change corrects that."""
        if change.type != "SYNCED":
            self._written.pop(change.key[1], None)
