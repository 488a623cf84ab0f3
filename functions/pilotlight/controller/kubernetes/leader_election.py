"""Leader election of controllers in a cluster; the leader reconciles."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from pilotlight.controller.context import Context
from pilotlight.controller.kubernetes import orphaned_journals
from pilotlight.controller.kubernetes.node_labels import NodeLabels
from pilotlight.controller.kubernetes.reconciler import Reconciler
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.leader_election import LeaderElection

log = logging.getLogger(__name__)

LeaderTask = Callable[[], Coroutine[Any, Any, None]]
LEASE = "pilotlight-reconciler"
_AGAIN_S = 5.0
_MEASURE_S = 10.0


async def run_leader_election(context: Context) -> None:
    """Take part in the election until cancelled."""
    context.statuses.is_kept = True
    while True:
        try:
            await _run_once(context)
        except ClusterError as e:
            # for example missing or wrong credentials, which the operator must correct
            log.error("event=cluster_not_reached error=%s", e)
        except (ExceptionGroup, LookupError, TypeError, ValueError) as e:
            # a defect must not stop reconciliation permanently
            log.critical("event=leading_broke", exc_info=e)
        await asyncio.sleep(_AGAIN_S)


async def _run_once(context: Context) -> None:
    settings = context.config.cluster
    async with await Cluster.connect(settings) as cluster:
        election = LeaderElection(
            cluster, name=LEASE, namespace=settings.namespace, identity=identity()
        )
        async with election:
            while True:
                await election.wait_leader()
                await run_while_leading(election, leader_tasks(context, cluster, election))


def leader_tasks(
    context: Context, cluster: Cluster, election: LeaderElection
) -> Mapping[str, LeaderTask]:
    """Tasks of the leader, by name; each runs until cancelled."""
    reconciler = Reconciler(
        cluster,
        store=context.store,
        key=context.key,
        node_key=context.node_key,
        bell=context.bell,
        statuses=context.statuses,
        may_write=lambda: election.is_leader,
    )
    return {
        "reconciler": reconciler.run,
        "departed": partial(orphaned_journals.run, cluster),
        "node labels": NodeLabels(cluster, context.nodes).run,
        "metrics": partial(_measure, context),
    }


async def _measure(context: Context) -> None:
    while True:
        context.metrics.set_cluster_functions(context.statuses.counts())
        await asyncio.sleep(_MEASURE_S)


async def run_while_leading(election: LeaderElection, parts: Mapping[str, LeaderTask]) -> None:
    """Run `parts` until another controller may lead; all have stopped on return. If a part fails,
    stop all and raise."""
    log.info("event=leading parts=%s", ", ".join(parts))
    parts = {"another may lead": election.wait_follower, **parts}
    tasks = [asyncio.create_task(run(), name=name) for name, run in parts.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    log.info("event=not_leading reason=%s", ", ".join(sorted(task.get_name() for task in done)))
    for task in done:
        task.result()


def identity() -> str:
    """Return an identity unique to this process: host name (of a pod: its name), pid, random."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
