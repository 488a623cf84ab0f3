"""An autoscaler and its throttlers over fakes, their time in the test's hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.autoscaler.instance_reconciler import InstanceReconciler
from activator.autoscaler.warm_up import WarmUp
from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance_lifecycle import InstanceProvisioner
from activator.balancing.throttler import Throttler
from activator.billing.service import BillingService
from activator.fairness.start_admission import StartAdmission
from activator.metrics.metrics import Metrics
from activator.routing.route_table import CallTarget, RouteTable
from tests.activator.conftest import MemoryLedger
from tests.fakes.clock import ManualClock
from tests.fakes.fake_fleet import FakeFleet
from tests.fakes.routes import empty_table


def books_of(directory: Path, ledger: MemoryLedger | None = None) -> BillingService:
    """Books whose journal is in `directory`."""
    return BillingService(
        directory=directory / "j",
        activator="a-0",
        sync_s=0.01,
        free_idle_s=60,
        ledger=ledger or MemoryLedger(),
    )


class ScaledWorld:
    """One activator's autoscaler. `fleet`, `table` and `gate` replace the usual ones; `leases`: of
    several activators; `more` goes to the autoscaler."""

    def __init__(
        self,
        directory: Path,
        *,
        fleet: Any = None,
        table: RouteTable | None = None,
        clock: ManualClock | None = None,
        gate: StartAdmission | None = None,
        **more: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.table = table or empty_table()
        self.fleet = fleet or FakeFleet(directory)
        self.queue = GlobalQueue(1000)
        self.ledger = MemoryLedger()
        self.books = books_of(directory, self.ledger)
        self.metrics = Metrics()
        self.provisioner = InstanceProvisioner(
            self.fleet,
            secret_env=self.table.secrets.env_of,
            gate=gate or StartAdmission(clock=self.clock),
        )
        self.scaler = AutoscalerLoop(
            table=self.table,
            fleet=self.fleet,
            make_throttler=self.make_throttler,
            clock=self.clock,
            gate=gate,
            **more,
        )
        self.reconciler = InstanceReconciler(table=self.table, fleet=self.fleet, scaler=self.scaler)
        self.warm_up = WarmUp(
            fleet=self.fleet, throttler_of=self.scaler.throttler_of, clock=self.clock
        )
        self.seq = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path, **more: Any) -> AsyncIterator[Self]:
        """One that has looked at its node, for the time of a block."""
        world = cls(directory, **more)
        await world.reconciler.reconcile()
        yield world
        await world.aclose()

    def make_throttler(
        self, target: CallTarget, kind: Callable[..., Throttler] = Throttler
    ) -> Throttler:
        """The throttler of a revision."""
        return kind(
            target,
            provisioner=self.provisioner,
            queue=self.queue,
            observer=self.metrics,
            account=self.books.account,
            clock=self.clock,
        )

    def pass_s(self, seconds: int) -> None:
        """Seconds go by, with a record at each and a decision at every other."""
        for n in range(seconds):
            self.clock.advance(1.0)
            self.scaler.record(self.clock())
            if n % 2:
                self.decide()

    def decide(self) -> None:
        """One decision for each revision."""
        for scaled in list(self.scaler.revisions.values()):
            self.scaler.apply(scaled, self.clock())

    async def aclose(self) -> None:
        """End it."""
        await self.scaler.aclose()
        await self.fleet.aclose()
        await self.books.aclose()
