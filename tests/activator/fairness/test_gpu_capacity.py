"""What counts as a tenant's use of GPUs while its instances are still starting."""

from __future__ import annotations

from decimal import Decimal

import pytest

from activator.fairness.gpu_capacity import GpuCapacity
from activator.fairness.preemption import TURN_S, PreemptionCandidate
from activator.fairness.queue_priority import DEFAULT_RANK
from activator.fairness.share_policy import UnlimitedShares
from activator.fairness.start_request import StartRequest
from activator.routing.call_target import CallTarget
from activator.routing.route_table import RouteTable
from pilotlight.spec.function import Resources
from pilotlight.spec.pricing import Rates
from tests.activator.fairness.test_gpu_preemption import tenure
from tests.fakes.clock import ManualClock
from tests.fakes.routes import TEST_KEY, change, route_of, spec_of


class BusyNode:
    """Busy instances of tenant `a`, each on an H100."""

    def __init__(self, count: int = 2) -> None:
        self.held = [tenure(f"a{n}", "a", idle_s=None) for n in range(count)]
        self.released: list[str] = []

    def tenures(self) -> list[PreemptionCandidate]:
        return self.held

    def give_up(self, instance_id: str) -> None:
        self.released.append(instance_id)


def target_of(tenant: str, *kinds: str) -> CallTarget:
    prices = dict.fromkeys(("H100", "h100", "L4", "any"), Decimal(1))
    table = RouteTable({"test": Rates(version="test", gpu_s=prices)}, TEST_KEY.secrets)
    spec = spec_of("hello", resources=Resources(gpu=kinds, gpu_count=1))
    table.apply(change(1, route_of(spec, app="app", tenant=tenant)))
    (target,) = table.targets_of(f"{tenant}/main/app/hello")
    return target


def request_of(*, since: float) -> StartRequest:
    return StartRequest(
        "next",
        target_of("b", "H100"),
        rank=DEFAULT_RANK,
        is_needed=lambda: True,
        on_cancel=lambda: None,
        since=since,
    )


@pytest.mark.parametrize(
    "kinds, is_within",
    [(("H100",), False), (("L4", "h100"), False), (("any",), False), (("L4",), True)],
)
def test_an_instance_that_starts_counts_where_it_may_get_a_gpu_of_the_kind(
    kinds: tuple[str, ...], is_within: bool
) -> None:
    clock, node = ManualClock(), BusyNode()
    capacity = GpuCapacity(UnlimitedShares(), lambda: node, clock=clock)
    capacity.add("starting", target_of("b", *kinds))
    request = request_of(since=clock())
    figures = {"free": 0, "claimed": 2, "total": 2}
    detail = {"resource": "gpu", "asked": 1, **figures, "kinds": {"H100": figures}}
    assert capacity.make_room(request, detail) is is_within, "within its share it waits"
    assert node.released == []
    clock.advance(TURN_S)
    capacity.make_room(request, detail)
    assert bool(node.released) is is_within
    capacity.remove("starting")
    capacity.make_room(request, detail)
    assert len(node.released) == 1


def test_no_second_busy_instance_is_drained_while_one_is() -> None:
    clock, node = ManualClock(), BusyNode(4)
    capacity = GpuCapacity(UnlimitedShares(), lambda: node, clock=clock)
    figures = {"free": 0, "claimed": 4, "total": 4}
    detail = {"resource": "gpu", "asked": 1, **figures, "kinds": {"H100": figures}}
    request = request_of(since=clock() - TURN_S)
    assert [capacity.make_room(request, detail) for _ in range(2)] == [True, True]
    assert node.released == ["a0"]
    capacity.remove("a0")
    del node.held[0]
    assert capacity.make_room(request, detail)
    assert node.released == ["a0", "a1"], "a is still over its share of two"
