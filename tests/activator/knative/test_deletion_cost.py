"""Which pods go first when a revision shrinks."""

from __future__ import annotations

import pytest

from activator.knative.deletion_cost import DeletionCosts, cost_of
from activator.knative.pod_watcher import COST
from pilotlight.kubernetes.errors import ClusterUnreachable
from tests.fakes.pod_maker import FakePod
from tests.fakes.small_cluster import World


def _written(world: World, pod: FakePod) -> str | None:
    stored = world.server.get("v1", "Pod", pod.name, pod.namespace)
    assert stored is not None
    return stored["metadata"]["annotations"].get(COST)  # type: ignore[no-any-return]


def test_the_busiest_cost_most_and_nobodys_least() -> None:
    assert (
        int(cost_of(None))
        < 0
        < int(cost_of(0))
        < int(cost_of(1))
        < int(cost_of(5))
        < int(cost_of(50))
    )
    assert cost_of(4) == cost_of(7), "a call more or less is not worth a write"


async def test_only_what_changed_is_written(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    one, two = await world.maker.up(target), await world.maker.up(target)
    await world.until(lambda: len(fleet.pods.of(target.key)) == 2)
    loads = {one.uid: (target.key, 3)}
    costs = DeletionCosts(fleet.pods, world.cluster, load_of=lambda: loads)

    await costs.update()
    assert (_written(world, one), _written(world, two)) == (cost_of(3), None)
    await world.until(lambda: any(pod.cost for pod in fleet.pods.of(target.key)))
    world.server.requests.clear()
    await costs.update()
    assert world.server.requests.writes() == 0

    loads.clear()
    costs.on_released(next(pod for pod in fleet.pods.of(target.key) if pod.uid == one.uid))
    await costs.update()
    assert _written(world, one) == cost_of(None)


async def test_the_only_pod_of_a_revision_needs_no_order(world: World) -> None:
    target, fleet = world.target(), await world.fleet()
    pod = await world.maker.up(target)
    await world.until(lambda: fleet.pods.of(target.key))
    await DeletionCosts(
        fleet.pods, world.cluster, load_of=lambda: {pod.uid: (target.key, 3)}
    ).update()
    assert _written(world, pod) is None


async def test_while_the_api_server_is_away_nothing_fails(world: World) -> None:
    class Away:
        async def patch(self, *_: object) -> dict[str, object]:
            raise ClusterUnreachable("away")

    target, fleet = world.target(), await world.fleet()
    pods = [await world.maker.up(target) for _ in range(2)]
    await world.until(lambda: len(fleet.pods.of(target.key)) == 2)
    await DeletionCosts(
        fleet.pods, Away(), load_of=lambda: {pod.uid: (target.key, 1) for pod in pods}
    ).update()
    assert [_written(world, pod) for pod in pods] == [None, None]


@pytest.mark.parametrize("calls", [0, 1, 2, 1000])
def test_a_cost_is_a_number_that_kubernetes_takes(calls: int) -> None:
    assert -(2**31) < int(cost_of(calls)) < 2**31
