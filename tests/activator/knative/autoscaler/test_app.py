"""Several activators: one decides, whoever asks; and when that one ends, another does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from activator.knative.autoscaler.app import Autoscaler, AutoscalerContext
from activator.knative.autoscaler.leader import FunctionLister
from activator.knative.autoscaler.load_report import Statement
from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.credentials import find_credentials
from pilotlight.kubernetes.errors import BadCredentials
from pilotlight.kubernetes.kinds import LEASE
from pilotlight.kubernetes.leader_election import LeaseTerms
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.scaled_revision import ScaledRevision

PATIENCE = CallDeadlines(
    pauses=RetryDelays(first_s=0.01, most_s=0.05),
    watch_pauses=RetryDelays(first_s=0.01, most_s=0.1),
)
TERMS = LeaseTerms(lease_s=60.0, renew_s=40.0, retry_s=0.1)
"""A Lease is given back, never left: nobody loses one because the machine is busy."""
NOTHING: Statement = {}


class Connection:
    """A cluster that is reached, at the second attempt where the test says so."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.failures = 0

    async def connected(self) -> Cluster:
        """See Connected."""
        if self.failures:
            self.failures -= 1
            raise BadCredentials("no credentials yet")
        return self.cluster


class Activators:
    """Autoscalers of several activators, on one Redis and one API server."""

    def __init__(
        self,
        server: ApiServer,
        connection: Connection,
        redis_url: str | None,
        closing: AsyncExitStack,
    ) -> None:
        self.server = server
        self.connection = connection
        self._redis_url = redis_url
        self._closing = closing
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def one(self, member: str) -> Autoscaler:
        """It runs."""
        known = asyncio.Event()
        known.set()
        context = AutoscalerContext(
            member=member,
            redis_url=self._redis_url,
            platform="p",
            loads=lambda: NOTHING,
            is_known=lambda: known,
            functions=FunctionLister(
                members=lambda: (),
                pods_of=lambda _: (),
                has_function=lambda _, key: bool(key),
                spec_of=lambda *_: None,
            ),
        )
        autoscaler = Autoscaler(ClusterSettings(), self.connection, context, terms=TERMS)
        self.tasks[member] = asyncio.create_task(autoscaler.run(), name=f"autoscaler {member}")

        async def end() -> None:
            await self.end(member)
            await autoscaler.aclose()

        self._closing.push_async_callback(end)
        return autoscaler

    async def end(self, member: str) -> None:
        """It ends, and gives its Lease back."""
        self.tasks[member].cancel()
        await asyncio.gather(self.tasks[member], return_exceptions=True)

    async def until(self, what: Callable[[], object]) -> None:
        """It is true."""
        async with asyncio.timeout(20):
            while not what():
                await asyncio.sleep(0.01)


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, Connection]]:
    async with ApiServer() as server:
        server.add_namespace("pilotlight")
        settings = ClusterSettings(kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        async with await Cluster.connect(
            settings, credentials=await find_credentials(settings), patience=PATIENCE
        ) as cluster:
            yield server, Connection(cluster)


@pytest.fixture
async def activators(
    connection: tuple[ApiServer, Connection], redis_url: str
) -> AsyncIterator[Activators]:
    async with AsyncExitStack() as closing:
        yield Activators(*connection, redis_url, closing)


async def test_one_leads_and_what_another_asks_for_comes(activators: Activators) -> None:
    revision = ScaledRevision(activators.server).made()
    first = await activators.one("a-0")
    await activators.until(lambda: revision.sks is not None)
    second = await activators.one("a-1")
    await second.reporter.request(revision.key, 2)
    await activators.until(lambda: revision.replicas == 2)
    assert (first.leader is not None, second.leader) == (True, None)
    assert repr(second) == "<Autoscaler a-1 follows>"
    lease = (
        activators.server.get(LEASE.api_version, LEASE.kind, "pilotlight-autoscaler", "pilotlight")
        or {}
    )
    assert lease["spec"]["holderIdentity"].startswith("a-0-")


async def test_when_the_leader_ends_the_next_one_goes_on_and_adopts_what_there_is(
    activators: Activators,
) -> None:
    revision = ScaledRevision(activators.server).made()
    first = await activators.one("a-0")
    await activators.until(lambda: first.leader is not None)
    second = await activators.one("a-1")
    await second.reporter.request(revision.key, 2)
    await activators.until(lambda: revision.replicas == 2)
    await activators.end("a-0")
    await activators.until(lambda: second.leader is not None)
    await second.reporter.withdraw(revision.key)
    await second.reporter.request("other@v1", 1)
    await second.reporter.request(revision.key, 3)
    await activators.until(lambda: revision.replicas == 3)


@pytest.mark.slow  # waits for a second attempt to connect
async def test_an_activator_that_is_alone_needs_no_redis(
    connection: tuple[ApiServer, Connection],
) -> None:
    server, reached = connection
    reached.failures = 1
    async with AsyncExitStack() as closing:
        activators = Activators(server, reached, None, closing)
        revision = ScaledRevision(server).made()
        alone = await activators.one("a-0")
        await activators.until(lambda: alone.leader is not None)
        await alone.reporter.request(revision.key, 1)
        await activators.until(lambda: revision.replicas == 1)


async def test_from_a_poke_to_the_scale_there_is_one_request_and_no_tick(
    activators: Activators,
) -> None:
    revision = ScaledRevision(activators.server).made()
    first = await activators.one("a-0")
    second = await activators.one("a-1")
    await activators.until(lambda: revision.condition("Active") and (first.leader or second.leader))
    activators.server.requests.clear()
    began = time.time()
    await second.reporter.request(revision.key, 1)
    await activators.until(lambda: revision.replicas == 1)
    asked = [one for one in activators.server.requests if one.resource != LEASE.resource]
    assert (asked[0].verb, asked[0].subresource) == ("patch", "scale")
    print(f"poke to PATCH: {(asked[0].at - began) * 1000:.0f} ms")


@pytest.mark.slow  # waits for a second attempt to connect
async def test_a_defect_of_the_autoscaler_does_not_end_its_activator(
    connection: tuple[ApiServer, Connection], caplog: pytest.LogCaptureFixture
) -> None:
    server, reached = connection

    class Broken(Connection):
        async def connected(self) -> Cluster:
            if self.failures:
                self.failures -= 1
                raise KeyError("scaleTargetRef")
            return self.cluster

    broken = Broken(reached.cluster)
    broken.failures = 1
    async with AsyncExitStack() as closing:
        activators = Activators(server, broken, None, closing)
        alone = await activators.one("a-0")
        await activators.until(lambda: alone.leader is not None)
    assert "autoscaler failed" in caplog.text
