"""The autoscaler of an activator: its load reports, and its candidacy for leadership."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from activator.knative.autoscaler.leader import FunctionLister, Leader
from activator.knative.autoscaler.load_report import Statement
from activator.knative.autoscaler.load_report_store import LoadReportStore, ProcessBoard
from activator.knative.autoscaler.load_reporter import LoadReporter
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.doctor.facts import AUTOSCALER_LEASE
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.leader_election import LeaderElection, LeaseLock, LeaseTerms
from pilotlight.kubernetes.names import function_selector
from pilotlight.kubernetes.settings import ClusterSettings

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Pause before a failed candidacy (no credentials, no CRDs) is repeated."""


class Connected(Protocol):
    """`activator.knative.lazy_client.LazyCluster`."""

    async def connected(self) -> Cluster:
        """The cluster. Raises BadCredentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerContext:
    """What the autoscaler needs of its activator.

    Attributes:
        member: its id; `redis_url`, `platform`: see `activator.knative.app.FleetContext`.
        loads: its load report.
        is_known: set once its claims are restored; nothing is reported before.
        functions: those that have a route here."""

    member: str
    redis_url: str | None
    platform: str
    loads: Callable[[], Statement]
    is_known: Callable[[], asyncio.Event]
    functions: FunctionLister


class Autoscaler:
    """Reports loads and runs for leader. Owner: the event loop.

    Attributes:
        reporter: the Demand of this activator.
        leader: set while this activator leads, otherwise None."""

    def __init__(
        self,
        settings: ClusterSettings,
        cluster: Connected,
        context: AutoscalerContext,
        *,
        terms: LeaseTerms | None = None,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._context = context
        self._terms = terms
        self._board = _board(context)
        self.reporter = LoadReporter(
            _board(context) if context.redis_url is not None else self._board, loads=context.loads
        )
        self.leader: Leader | None = None

    def __repr__(self) -> str:
        return f"<Autoscaler {self._context.member} {self.leader or 'follows'}>"

    async def run(self) -> None:
        """Report loads, and lead whenever there is no other leader, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report(), name="loads")
            tasks.create_task(self._candidacy(), name="candidacy")

    async def _report(self) -> None:
        await self._context.is_known().wait()
        await self.reporter.run()

    async def _candidacy(self) -> None:
        while True:
            try:
                cluster = await self._cluster.connected()
                await self._run_election(cluster)
            except ClusterError as e:
                log.warning("autoscaler not available error=%s", e)
            except (AttributeError, LookupError, TypeError, ValueError):
                log.critical(
                    "autoscaler failed; calls continue, and another activator may lead",
                    exc_info=True,
                )
            await asyncio.sleep(AGAIN_S)

    async def _run_election(self, cluster: Cluster) -> None:
        # an activator's journal is locked, so that no two processes have its id at a time
        member = f"{self._context.member}-"
        lock = LeaseLock(
            name=AUTOSCALER_LEASE,
            namespace=self._settings.namespace,
            identity=f"{member}{secrets.token_hex(4)}",
            member=member,
        )
        election = LeaderElection(cluster, lock, terms=self._terms)
        async with election:
            while True:
                await election.wait_leader()
                self.leader = Leader(
                    cluster,
                    self._board,
                    election,
                    selector=function_selector(self._settings),
                    functions=self._context.functions,
                )
                try:
                    await self.leader.run()
                finally:
                    self.leader = None

    async def aclose(self) -> None:
        """Withdraw all demand. Call after `run` has ended."""
        await self.reporter.aclose()
        await self._board.aclose()


def _board(context: AutoscalerContext) -> LoadReportStore:
    if context.redis_url is None:
        return ProcessBoard(member=context.member)
    from activator.knative.autoscaler.redis_load_report_store import RedisBoard

    return RedisBoard(context.redis_url, platform=context.platform, member=context.member)
