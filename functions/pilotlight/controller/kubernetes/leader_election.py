"""Leader election of controllers in a cluster; the leader reconciles."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database import audit_trail, platform_identity, tables
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.platform_identity import PlatformIdentity
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import access_control
from pilotlight.controller.kubernetes import orphaned_journals
from pilotlight.controller.kubernetes.buffer_floors import BufferFloors
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.function_status import FunctionStatuses
from pilotlight.controller.kubernetes.node_labels import NodeLabels
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.kubernetes.reconciler import Reconciler
from pilotlight.controller.kubernetes.warm.pool import WarmPool
from pilotlight.controller.kubernetes.warm.status import WarmPods
from pilotlight.controller.server.metrics import Metrics
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import PilotlightError
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.doctor.facts import CONTROLLER_LEASE
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.leader_election import LeaderElection, LeaseLock
from pilotlight.kubernetes.settings import ClusterSettings

log = logging.getLogger(__name__)

LeaderTask = Callable[[], Coroutine[Any, Any, None]]
_AGAIN_S = 5.0
_MEASURE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterController:
    """The part of a controller that manages a cluster: takes part in the leader election, and
    reconciles while it leads.

    `node_key`: authenticates node agents; None where the cluster has none."""

    settings: ClusterSettings
    store: Store
    key: PlatformKey
    node_key: PlatformKey | None
    notifier: ChangeNotifier
    statuses: FunctionStatuses
    nodes: NodeReports
    warm_pods: WarmPods
    metrics: Metrics

    async def run(self) -> None:
        """Take part in the election until cancelled."""
        self.statuses.is_kept = True
        while True:
            try:
                await self._run_once()
            except ClusterError as e:
                # for example missing or wrong credentials, which the operator must correct
                log.error("event=cluster_not_reached error=%s", e)
            except (PilotlightError, SQLAlchemyError) as e:
                log.error("event=identity_not_read error=%r", e)
            except (ExceptionGroup, LookupError, TypeError, ValueError) as e:
                # a defect must not stop reconciliation permanently
                log.critical("event=leading_broke", exc_info=e)
            await asyncio.sleep(_AGAIN_S)

    async def _run_once(self) -> None:
        platform = await anyio.to_thread.run_sync(identify, self.store, self.settings.adopt)
        async with await Cluster.connect(self.settings) as cluster:
            election = LeaderElection(
                cluster,
                LeaseLock(
                    name=CONTROLLER_LEASE,
                    namespace=self.settings.namespace,
                    identity=identity(),
                    annotations={names.PLATFORM: platform.id},
                ),
            )
            async with election:
                while True:
                    await election.wait_leader()
                    await run_while_leading(
                        election, self.leader_tasks(cluster, election, platform)
                    )

    def leader_tasks(
        self, cluster: Cluster, election: LeaderElection, platform: PlatformIdentity
    ) -> Mapping[str, LeaderTask]:
        """Tasks of the leader, by name; each runs until cancelled."""
        state = DesiredState(
            settings=cluster.settings, platform=platform, key=self.key, node_key=self.node_key
        )
        reconciler = Reconciler(
            cluster,
            state,
            store=self.store,
            notifier=self.notifier,
            statuses=self.statuses,
            may_write=lambda: election.is_leader,
        )
        floors = BufferFloors(
            cluster,
            state,
            self.store,
            counts_spare=self.settings.uses_kpa,
            may_write=lambda: election.is_leader,
        )
        pool = WarmPool(
            cluster,
            reconciler,
            nodes=self.nodes,
            pool=self.warm_pods,
            may_write=lambda: election.is_leader,
            on_resize=lambda outcome: self.metrics.pod_resizes.labels(outcome).inc(),
        )
        return {
            "reconciler": reconciler.run,
            "floors": floors.run,
            "departed": partial(orphaned_journals.run, cluster, platform=platform.id),
            "node labels": NodeLabels(cluster, self.nodes).run,
            "warm pods": pool.run,
            "metrics": self._measure,
        }

    async def _measure(self) -> None:
        while True:
            self.metrics.set_cluster_functions(self.statuses.counts())
            if (ownership := self.statuses.ownership) is not None:
                self.metrics.set_foreign_namespaces(sum(map(len, ownership.foreign.values())))
            self.metrics.set_warm_pods(self.warm_pods.counts())
            await asyncio.sleep(_MEASURE_S)


def identify(store: Store, adopt: Sequence[str]) -> PlatformIdentity:
    """Adopt what the settings say, and return who we are. Raises InvalidInput, StorageFull."""
    with store.read() as sql:
        known = platform_identity.read(sql)
    if all(known.owns(platform) for platform in adopt):
        return known
    with store.write() as write:
        table = tables.tenants
        query = sa.select(table.c.id).where(table.c.name == access_control.PLATFORM_TENANT)
        tenant = write.sql.scalar(query) or ""
        platform_identity.adopt(write, adopt, tenant=tenant, actor=audit_trail.PLATFORM)
        return platform_identity.read(write.sql)


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
