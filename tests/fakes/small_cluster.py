"""A cluster in the test's event loop: API server, pods that the test makes step by step, and fleets
of activators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from pathlib import Path

from activator.knative.activation_requests import ActivationRequests
from activator.knative.fleet import KnativeFleet
from activator.knative.leases.pod_leases import InMemoryPodLeases, PodLeaseStore
from activator.knative.node_gpus import NodeGpus
from activator.knative.pod_registry import PodTargets
from activator.knative.pod_watcher import PodWatcher
from activator.knative.scale_request import ScaleRequester
from activator.knative.warm.waiting_starts import Promotions
from activator.routing.route_table import CallTarget
from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.credentials import find_credentials
from pilotlight.kubernetes.names import function_selector
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.pricing import Rates
from snapshotter.types import InstanceId, InstanceInfo
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.pod_maker import PodMaker, revision_name_of
from tests.fakes.routes import route_of, spec_of

NO_SECRETS: Mapping[str, str] = {}
NO_PRICES: Mapping[str, int] = {}
PATIENCE = CallDeadlines(
    pauses=RetryDelays(first_s=0.01, most_s=0.05),
    watch_pauses=RetryDelays(first_s=0.01, most_s=0.1),
)


class NothingCalled:
    """The revisions of an activator that nobody calls (`warm.handover_loop.CalledRevisions`)."""

    def active(self, _key: str) -> None:
        """No throttler."""

    def concurrency(self) -> Mapping[str, float]:
        """No load."""
        return {}

    def wanted(self, _key: str) -> int:
        """No instances."""
        return 0


class World:
    """One cluster, and fleets of it.

    Attributes:
        wakes: (namespace, revision) of the requests that came to Knative's activator.
        waiting: calls that wait, by revision key, as the fleets are told.
    """

    def __init__(
        self, server: ApiServer, cluster: Cluster, maker: PodMaker, closing: AsyncExitStack
    ) -> None:
        self.server = server
        self.cluster = cluster
        self.maker = maker
        self.wakes: list[tuple[str, str]] = []
        self.waiting = 1
        self.wake_status = 404
        self.woken = asyncio.Event()
        self._closing = closing
        self.wake_url = ""
        self.targets: dict[str, CallTarget] = {}

    async def on_wake(self, request: WorkerRequest) -> WorkerAnswer:
        """Knative's activator."""
        self.wakes.append(
            (
                request.headers["knative-serving-namespace"],
                request.headers["knative-serving-revision"],
            )
        )
        self.woken.set()
        return WorkerAnswer(status=self.wake_status)

    def target(
        self, name: str = "hello", *, prices: Mapping[str, int] = NO_PRICES, **more: object
    ) -> CallTarget:
        """A function's revision. `prices`: of kinds of GPUs."""
        rates = Rates(
            version="test", gpu_s={kind: Decimal(price) for kind, price in prices.items()}
        )
        route = route_of(spec_of(name, **more))  # type: ignore[arg-type]
        target = CallTarget(route, route.traffic[0][0], rates)
        self.targets[target.key] = target
        return target

    async def fleet(
        self,
        member: str = "a-0",
        claims: PodLeaseStore | None = None,
        *,
        grace_s: float = 0.05,
        scale_requester: ScaleRequester | None = None,
        port: int = 8012,
        synced: bool = True,
        promotions: Promotions | None = None,
    ) -> KnativeFleet:
        """One activator's fleet; it follows the cluster. `synced`: wait until it knows it."""
        settings = ClusterSettings()
        fleet = KnativeFleet(
            cluster=self.cluster,
            pods=PodWatcher(selector=function_selector(settings)),
            claims=claims or InMemoryPodLeases(member=member),
            scale_requester=scale_requester
            or ActivationRequests(
                self.wake_url, revision_name_of=revision_name_of, waiting_of=lambda _: self.waiting
            ),
            targets=PodTargets(
                target_of=lambda pod: self.targets.get(pod.key),
                revision_name_of=revision_name_of,
                gpus=NodeGpus(settings),
                port=port,
            ),
            member=member,
            grace_s=grace_s,
            promotions=promotions,
        )
        running = asyncio.create_task(fleet.run(), name=f"fleet {member}")

        async def end() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await fleet.aclose()

        self._closing.push_async_callback(end)
        # deployments, which no start waits for, are told as well
        if not synced:
            return fleet
        await self.until(lambda: "not synced" not in repr(fleet.pods))
        return fleet

    async def start(self, fleet: KnativeFleet, target: CallTarget, number: int = 0) -> InstanceInfo:
        """A start, as a throttler asks for it."""
        return await fleet.start(target, InstanceId(f"i-{number:016x}"), NO_SECRETS)

    async def until(self, what: object) -> None:
        """`what()` is true: what the cluster says takes moments to come."""
        assert callable(what)
        async with asyncio.timeout(20):
            while not what():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def small_cluster(directory: Path) -> AsyncIterator[World]:
    """It, until the context ends."""
    async with AsyncExitStack() as closing:
        server = await closing.enter_async_context(ApiServer())
        settings = ClusterSettings(
            kubeconfig=str(server.write_kubeconfig(directory / "kubeconfig"))
        )
        cluster = await Cluster.connect(
            settings, credentials=await find_credentials(settings), patience=PATIENCE
        )
        closing.push_async_callback(cluster.aclose)
        maker = PodMaker(server, cluster)
        closing.push_async_callback(maker.aclose)
        made = World(server, cluster, maker, closing)
        made.wake_url = await maker.waker(made.on_wake)
        yield made
