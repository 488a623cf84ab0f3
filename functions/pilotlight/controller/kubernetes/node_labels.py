"""Labels of nodes that say which weights and snapshots are hot there, so that pods are put where
their bytes are.

Made of the nodes' own reports; a node that is silent for a minute has none. Only what changed is
written. A node is no place for many labels, so it gets at most `MAX_LABELS`, for what was used
last."""

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
from pilotlight.kubernetes.names import CACHE_DOMAIN, HOT, snapshot_label, weights_label
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.watch_events import WatchChange
from snapshotter.types import NodeReport

_log = logging.getLogger(__name__)
MAX_LABELS = 50
LOOK_S = 5.0
"""How often it is looked for nodes that have fallen silent; news is acted on at once."""
SETTLE_S = 60.0
"""After the begin, in which nodes that have not reported yet keep their labels: a controller that
starts anew knows of none."""
_PREFIX = f"{CACHE_DOMAIN}/"


def desired_labels(report: NodeReport | None) -> frozenset[str]:
    """Keys that a node should have; none without a report. Weights and snapshots in turns, the last
    used first."""
    if report is None:
        return frozenset()
    weights = [weights_label(manifest) for manifest in report.weights]
    snapshots = [snapshot_label(snapshot.revision) for snapshot in report.snapshots]
    in_turns = [key for pair in zip_longest(weights, snapshots) for key in pair if key is not None]
    return frozenset(list(dict.fromkeys(in_turns))[:MAX_LABELS])


def label_patch(labels: Mapping[str, str], wanted: frozenset[str]) -> dict[str, str | None]:
    """What to write to make `labels` say `wanted`; other people's labels are left alone. {} when
    nothing is to be done."""
    there = {key: value for key, value in labels.items() if key.startswith(_PREFIX)}
    more: dict[str, str | None] = {key: HOT for key in sorted(wanted) if there.get(key) != HOT}
    return {**more, **{key: None for key in sorted(there) if key not in wanted}}


class NodeLabels:
    """Owner: its task, in the controller that leads.

    Attributes:
        writes: patches that were sent.
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
        """`wall`: by which reports are dated, seconds since the epoch."""
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
        """Until cancelled; errors are said, and what they left undone is done in a later round."""
        async with self._nodes:
            while True:
                if self._nodes.is_synced:
                    await self.look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await self._reports.wait_changed()

    async def look(self) -> None:
        """One round."""
        now = self._wall()
        fresh = self._reports.fresh(now=now)
        for node in self._nodes.items():
            name = node["metadata"]["name"]
            if name not in fresh and now < self._silent_until:
                continue
            labels = self._written.get(name, node["metadata"].get("labels") or {})
            if patch := label_patch(labels, desired_labels(fresh.get(name))):
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
        # until the watch tells the same
        self._written[name] = written["metadata"].get("labels") or {}
        _log.info("labels.written node=%s changes=%d", name, len(labels))

    def _on_change(self, change: WatchChange) -> None:
        """What is seen counts, but for what is older than what we wrote, which the next change
        tells."""
        if change.type != "SYNCED":
            self._written.pop(change.key[1], None)
