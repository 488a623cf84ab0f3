"""Spare instances under Knative's autoscaler: `min-scale` while there is traffic."""

from __future__ import annotations

import pytest

from pilotlight.controller.kubernetes.buffer_floors import ObservedTraffic, floor_of
from pilotlight.spec.instances.scaling import Scaling


def traffic(calls: int, *, busy: float = 0.0) -> ObservedTraffic:
    """A minute of it, with so many calls at once on average."""
    return ObservedTraffic(calls=calls, exec_s=60 * busy, seconds=60)


@pytest.mark.parametrize(
    "scaling, seen, floor",
    [
        (Scaling(buffer_instances=2), traffic(0), 0),
        (Scaling(buffer_instances=2, min_instances=1), traffic(0), 1),
        (Scaling(buffer_instances=2), traffic(1), 3),
        (Scaling(buffer_instances=2), traffic(100, busy=3.2), 6),
        (Scaling(buffer_instances="50%"), traffic(100, busy=4), 6),
        (Scaling(buffer_instances=2, max_inputs=4), traffic(100, busy=3.2), 3),
        (Scaling(buffer_instances=2, max_instances=2), traffic(100, busy=3.2), 2),
        (Scaling(buffer_instances=1, min_instances=5), traffic(1), 5),
    ],
)
def test_the_floor_is_the_busy_and_the_spare_instances_while_there_are_calls(
    scaling: Scaling, seen: ObservedTraffic, floor: int
) -> None:
    assert floor_of(scaling, seen) == floor


def test_the_floor_is_never_below_what_is_scheduled_nor_above_the_ceiling() -> None:
    scaling = Scaling(buffer_instances=2, min_instances=1, max_instances=6)
    floors = [floor_of(scaling, traffic(0), scheduled=least) for least in (0, 4, 9)]
    assert floors == [1, 4, 6]
    assert floor_of(scaling, traffic(100, busy=3.2), scheduled=4) == 6
    assert floor_of(scaling, traffic(1), scheduled=4) == 4
