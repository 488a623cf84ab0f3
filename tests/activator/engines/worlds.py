"""A language model's throttler over fakes, its time in the test's hand."""

from __future__ import annotations

import random
from pathlib import Path

from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance import Instance
from activator.balancing.throttler import Throttler
from activator.billing.service import BillingService
from activator.llm.engine_throttler import EngineThrottler
from activator.metrics.metrics import Metrics
from activator.routing.route_table import CallTarget, RouteTable
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec, Scaling, WeightsSpec
from pilotlight.spec.policies import Objectives
from tests.activator.conftest import MemoryLedger
from tests.fakes.clock import ManualClock
from tests.fakes.fake_fleet import FakeFleet
from tests.fakes.routes import TENANT, change, empty_table, route_of, spec_of


def engine_spec(
    *, max_num_seqs: int = 8, scaling: Scaling | None = None, objectives: Objectives | None = None
) -> FunctionSpec:
    """A language model's."""
    return spec_of(
        "assistant",
        kind=FunctionKind.ENGINE,
        methods=(MethodSpec(),),
        scaling=scaling,
        objectives=objectives,
        weights=(WeightsSpec(name="model", manifest="e" * 64),),
        engine=EngineSpec(model="model", max_model_len=512, max_num_seqs=max_num_seqs),
    )


class World:
    """Its scaler."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.table: RouteTable = empty_table()
        self.fleet = FakeFleet(directory)
        self.books = BillingService(
            directory=directory / "j",
            activator="a-0",
            sync_s=0.01,
            free_idle_s=60,
            ledger=MemoryLedger(),
        )
        self.scaler = AutoscalerLoop(
            table=self.table, fleet=self.fleet, make_throttler=self._throttler, clock=self.clock
        )
        self._queue = GlobalQueue(1000)
        self._metrics = Metrics()
        self._seq = 0

    def _throttler(self, target: CallTarget) -> Throttler:
        make = Throttler if target.spec.engine is None else EngineThrottler
        return make(
            target,
            fleet=self.fleet,
            queue=self._queue,
            secret_env=self.table.secret_env,
            observer=self._metrics,
            account=self.books.account,
            clock=self.clock,
        )

    def deploy(self, spec: FunctionSpec) -> Throttler:
        """A function's throttler."""
        self._seq += 1
        self.table.apply(change(self._seq, route_of(spec)))
        return self.scaler.throttler_of(self.table.targets_of(f"{TENANT}/main/shop/{spec.name}")[0])

    def engine(self, **spec: object) -> EngineThrottler:
        """A language model's throttler."""
        throttler = self.deploy(engine_spec(**spec))  # type: ignore[arg-type]
        assert isinstance(throttler, EngineThrottler)
        throttler._chance = random.Random(1)
        return throttler

    def pass_s(self, seconds: int) -> None:
        """Seconds go by, with a tick at each."""
        for n in range(seconds):
            self.clock.advance(1.0)
            self.scaler.record(self.clock())
            for scaled in list(self.scaler._scaled.values()):
                if n % 2:
                    self.scaler._apply(scaled, self.clock())

    async def aclose(self) -> None:
        """End it."""
        await self.scaler.aclose()
        await self.fleet.aclose()
        await self.books.aclose()


async def started(throttler: Throttler, count: int) -> list[Instance]:
    """So many instances of it."""
    throttler.start(count - len(throttler.instances))
    reservations = [await throttler.reserve(30.0)]
    while len(throttler.instances) < count:
        reservations.append(await throttler.reserve(30.0))
    for reservation in reservations:
        reservation.release_unused()
    return list(throttler.instances.values())
