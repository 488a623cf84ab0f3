"""The hand-over of one activator, second by second, on a real throttler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from activator.knative.pod_registry import OwnedPod
from activator.knative.pod_watcher import Pod
from activator.knative.scale_request import ScaleRequester
from activator.knative.warm.handover_loop import HandoverLoop
from activator.routing.route_table import CallTarget
from pilotlight.spec.instances.scaling import Scaling
from snapshotter.types import InstanceId
from tests.activator.scaled_world import ScaledWorld
from tests.fakes.routes import spec_of, target_of
from tests.fakes.waiting import until


class Requests:
    """Starts that request a pod (`scale_request.ScaleRequester`)."""

    def __init__(self) -> None:
        self.held = 0

    @asynccontextmanager
    async def requested(self, _target: CallTarget) -> AsyncIterator[None]:
        """One more, until the end of the context."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    def status(self, _key: str) -> str:
        """Nothing to say."""
        return ""

    async def aclose(self) -> None:
        """There are no connections."""


class BridgingFleet:
    """What the loop sees of a fleet: which instances are in promoted pods, and free own pods."""

    def __init__(self) -> None:
        self.requests = Requests()
        self.scale_requester: ScaleRequester = self.requests
        self.promoted: list[str] = []
        self.free = 0
        self.key = ""

    def bridges(self) -> Mapping[str, Sequence[OwnedPod]]:
        """The promoted ones."""
        pods = [
            OwnedPod(cast(Pod, None), InstanceId(one), {InstanceId(one): 8080})
            for one in self.promoted
        ]
        return {self.key: pods} if pods else {}

    async def free_own_pods(self, _key: str) -> int:
        """Own pods that are ready."""
        return self.free


async def test_own_pods_are_requested_claimed_and_the_promoted_one_drains_last(
    tmp_path: Path,
) -> None:
    target = target_of(spec_of(scaling=Scaling(max_inputs=1, max_instances=4)))
    async with ScaledWorld.running(tmp_path) as world:
        fleet = BridgingFleet()
        loop = HandoverLoop(
            fleet.scale_requester,
            lambda: world.scaler,
            promoted=fleet.bridges,
            free_own_pods=fleet.free_own_pods,
            handover_s=3.0,
            clock=world.clock,
        )
        throttler = world.scaler.throttler_of(target)
        call = await throttler.reserve(5.0)
        fleet.key, fleet.promoted = target.key, [call.instance.id]

        async def second() -> None:
            world.clock.advance(1.0)
            world.scaler.record(world.clock())
            await loop.poll_once()

        for _ in range(2):
            await second()
        assert (fleet.requests.held, loop.requested(target.key)) == (0, 0)
        await second()
        assert (fleet.requests.held, loop.requested(target.key)) == (1, 1)
        fleet.free = 1
        await second()
        assert fleet.requests.held == 0
        await until(lambda: len(throttler.instances) == 2)  # the own pod was claimed
        fleet.free = 0
        assert not call.instance.is_draining
        await second()
        assert call.instance.is_draining
        assert call.instance.id in throttler.instances  # its call ends first
        call.release_unused()
        await until(lambda: len(throttler.instances) == 1)
        fleet.promoted = []
        await second()
        assert repr(loop) == "<HandoverLoop 0 revisions bridged, 0 own pods requested>"
