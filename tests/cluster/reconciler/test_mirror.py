"""What was written counts until the watch tells it, or a whole listing lacks it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import CONFIG_MAP, Kind
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import WatchChange


async def test_what_was_deleted_while_the_watch_was_cut_is_told_by_the_next_listing(
    kubeconfig: Path,
) -> None:
    changes: list[tuple[Kind, WatchChange]] = []
    gone = asyncio.Event()

    def changed(kind: Kind, change: WatchChange) -> None:
        changes.append((kind, change))
        if change.type == "DELETED":
            gone.set()

    async with await Cluster.connect(ClusterSettings(kubeconfig=str(kubeconfig))) as cluster:
        mirror = Informers(cluster, on_change=changed)
        written = {"metadata": {"name": "a", "namespace": "fn-acme", "resourceVersion": "7"}}
        mirror.note(CONFIG_MAP, written)
        assert mirror.get(CONFIG_MAP, "a", "fn-acme") == written
        async with mirror, asyncio.timeout(20):
            await gone.wait()
        assert mirror.get(CONFIG_MAP, "a", "fn-acme") is None
        assert [(kind, change) for kind, change in changes if change.type == "DELETED"] == [
            (CONFIG_MAP, WatchChange("DELETED", written))
        ]
