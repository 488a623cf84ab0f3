"""Being the one leader, and reconciling while it is so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket

from pilotlight.cluster.api import Cluster
from pilotlight.cluster.errors import ClusterError
from pilotlight.cluster.lease import Election
from pilotlight.controller.cluster import departed
from pilotlight.controller.cluster.labels import NodeLabels
from pilotlight.controller.cluster.reconciler import Reconciler
from pilotlight.controller.context import Context

log = logging.getLogger(__name__)

LEASE = "pilotlight-reconciler"
_AGAIN_S = 5.0


async def campaign(context: Context) -> None:
    """Run for the leadership, again and again, until cancelled."""
    context.statuses.is_kept = True
    while True:
        try:
            await _run_once(context)
        except ClusterError as e:
            log.error("event=cluster_not_reached error=%s", e)  # credentials that are missing or wrong: somebody has to act first
        await asyncio.sleep(_AGAIN_S)


async def _run_once(context: Context) -> None:
    settings = context.config.cluster
    async with await Cluster.connect(settings) as cluster:
        election = Election(cluster, name=LEASE, namespace=settings.namespace, identity=identity())
        async with election:
            while True:
                await election.wait_leader()
                await lead(context, cluster, election)


async def lead(context: Context, cluster: Cluster, election: Election) -> None:
    """Reconcile until another may lead. The work has stopped when this returns."""
    reconciler = Reconciler(cluster, store=context.store, key=context.key, bell=context.bell, statuses=context.statuses)
    log.info("event=reconciling cluster=%r", cluster)
    tasks = [
        asyncio.create_task(election.wait_follower(), name="another may lead"),
        asyncio.create_task(reconciler.run(), name="reconciler"),
        asyncio.create_task(departed.keep(cluster), name="departed"),
        asyncio.create_task(NodeLabels(cluster, context.nodes).run(), name="node labels"),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    log.info("event=not_reconciling reason=%s", ", ".join(sorted(task.get_name() for task in done)))
    for task in done:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()  # a defect ends the process's task, and is told there


def identity() -> str:
    """Different for every process, and readable: the pod's name, and something random."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
