"""A language model's throttler over fakes, its time in the test's hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from activator.balancing.instance import Instance
from activator.balancing.throttler import Throttler
from activator.llm.engine_throttler import EngineThrottler
from activator.routing.route_table import CallTarget
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec, WeightsSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import Objectives
from tests.activator.scaled_world import ScaledWorld
from tests.fakes.routes import TENANT, change, route_of, spec_of


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


class World(ScaledWorld):
    """Its scaler."""

    def make_throttler(
        self, target: CallTarget, kind: Callable[..., Throttler] = Throttler
    ) -> Throttler:
        return super().make_throttler(
            target,
            kind
            if target.spec.engine is None
            else partial(EngineThrottler, chance=random.Random(1)),
        )

    def deploy(self, spec: FunctionSpec) -> Throttler:
        """A function's throttler."""
        self.seq += 1
        self.table.apply(change(self.seq, route_of(spec)))
        return self.scaler.throttler_of(self.table.targets_of(f"{TENANT}/main/shop/{spec.name}")[0])

    def engine(self, **spec: object) -> EngineThrottler:
        """A language model's throttler."""
        throttler = self.deploy(engine_spec(**spec))  # type: ignore[arg-type]
        assert isinstance(throttler, EngineThrottler)
        return throttler


async def started(throttler: Throttler, count: int) -> list[Instance]:
    """So many instances of it."""
    throttler.start(count - len(throttler.instances))
    reservations = [await throttler.reserve(30.0)]
    while len(throttler.instances) < count:
        reservations.append(await throttler.reserve(30.0))
    for reservation in reservations:
        reservation.release_unused()
    return list(throttler.instances.values())
