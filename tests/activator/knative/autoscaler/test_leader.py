"""The one who decides, against an API server: what it writes, what it does not, and what happens
when things fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from activator.knative.autoscaler.leader import FunctionLister, Leader, LeaderIntervals
from activator.knative.autoscaler.load_report import Load
from activator.knative.autoscaler.load_report_store import InMemoryHub, ProcessBoard
from activator.knative.pod_watcher import COST, Pod, PodWatcher
from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.credentials import find_credentials
from pilotlight.kubernetes.kinds import POD_AUTOSCALER
from pilotlight.kubernetes.names import function_selector
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling
from tests.fakes.absence import away
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.pod_maker import PodMaker
from tests.fakes.routes import spec_of, target_of
from tests.fakes.scaled_revision import NETWORKING, ScaledRevision

READING = ("get", "list", "watch")
PATIENCE = CallDeadlines(
    pauses=RetryDelays(first_s=0.01, most_s=0.05),
    watch_pauses=RetryDelays(first_s=0.01, most_s=0.1),
)


class Held:
    """A Lease that the test gives and takes."""

    def __init__(self) -> None:
        self.is_leader = True
        self.lost = asyncio.Event()

    async def wait_follower(self) -> None:
        """See Leading."""
        await self.lost.wait()


class Rig:
    """A cluster, the board of two activators, and who leads."""

    def __init__(self, server: ApiServer, cluster: Cluster, closing: AsyncExitStack) -> None:
        self.server = server
        self.cluster = cluster
        self.now = 1000.0
        self.wall = InMemoryHub(clock=lambda: self.now)
        self.one, self.other = (
            ProcessBoard(self.wall, member="a-0"),
            ProcessBoard(self.wall, member="a-1"),
        )
        self.election = Held()
        self.pods: dict[str, list[Pod]] = {}
        self.specs: dict[str, FunctionSpec] = {}
        self.functions = {"f-1"}
        self.members: set[str] = set()
        self._closing = closing

    async def leader(self, *, settle_s: float = 0.0) -> Leader:
        """One who leads, on the test's clock: it ticks only where the test says so."""
        leader = Leader(
            self.cluster,
            self.one,
            self.election,
            selector=function_selector(ClusterSettings()),
            functions=FunctionLister(
                members=lambda: self.members,
                pods_of=lambda key: self.pods.get(key, []),
                has_function=lambda _, key: key.partition("@")[0] in self.functions,
                spec_of=lambda _, key: self.specs.get(key),
            ),
            intervals=LeaderIntervals(settle_s=settle_s, tick_s=3600.0),
            clock=lambda: self.now,
            wall=lambda: 1_800_000_000.0,
        )
        running = asyncio.create_task(leader.run(), name="leader")

        async def end() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        self._closing.push_async_callback(end)
        for reflector in (leader.autoscalers, leader.services, leader.deployments):
            await reflector.wait_synced(30)
        await self.until(lambda: bool(self.wall.listeners))
        return leader

    async def passes(self, leader: Leader, revision: ScaledRevision, seconds: float = 0.0) -> None:
        """Time passes, second by second, with everybody repeating what they said; then it is
        decided."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for board, said in (
                (self.one, self.wall.statements.get("a-0")),
                (self.other, self.wall.statements.get("a-1")),
            ):
                if said is not None:
                    await board.post(said[1])
            await leader.read_reports()
            leader.record()
        await leader.reconcile(("fn-acme", revision.name))

    async def until(self, what: Callable[[], object]) -> None:
        """It is true: what the cluster says takes moments to come."""
        async with asyncio.timeout(20):
            while not what():
                await asyncio.sleep(0.01)

    def writes(self) -> list[str]:
        """Requests that changed something, `verb resource`, since they were last counted; leases
        are not."""
        found = [
            f"{one.verb} {one.resource}/{one.subresource}".rstrip("/")
            for one in self.server.requests
            if one.verb not in READING
        ]
        self.server.requests.clear()
        return found


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as closing:
        server = await closing.enter_async_context(ApiServer())
        settings = ClusterSettings(kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        cluster = await Cluster.connect(
            settings, credentials=await find_credentials(settings), patience=PATIENCE
        )
        closing.push_async_callback(cluster.aclose)
        yield Rig(server, cluster, closing)


SKS = "serverlessservices.networking.internal.knative.dev"
SCALE = "deployments.apps/scale"
AUTO = Scaling(scaledown_window_s=3600.0, waiting_cost=10.0)


async def led(rig: Rig, revision: ScaledRevision, *, settle_s: float = 0.0) -> Leader:
    """Who leads, once what it says of a fresh revision is said, and both activators were heard."""
    await rig.one.post({})
    await rig.other.post({})
    leader = await rig.leader(settle_s=settle_s)
    await rig.until(lambda: revision.sks is not None)
    revision.served()
    await rig.until(lambda: any(one.get("status") for one in leader.services.items()))
    await rig.passes(leader, revision)
    rig.writes()
    return leader


async def told(
    rig: Rig, leader: Leader, revision: ScaledRevision, *, replicas: int, ready: int
) -> None:
    """The Deployment has so many pods, and the leader knows."""
    revision.deployment(replicas=replicas, ready=ready)

    def is_known() -> bool:
        known = leader.deployments.get(f"{revision.name}-deployment", "fn-acme") or {}
        return (known["spec"]["replicas"], known["status"].get("readyReplicas")) == (
            replicas,
            ready,
        )

    await rig.until(is_known)


# -- up from zero ----------------------------------------------------------------------------------
async def test_a_fresh_revision_that_needs_no_pod_is_ready_for_its_route(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    await led(rig, revision)
    status = revision.autoscaler["status"]
    assert revision.condition("ScaleTargetInitialized")["status"] == "True"
    assert revision.condition("SKSReady")["status"] == "True"
    assert (revision.condition("Active")["status"], revision.condition("Active")["reason"]) == (
        "False",
        "NoTraffic",
    )
    assert (revision.condition("Ready")["status"], revision.condition("Ready")["reason"]) == (
        "False",
        "NoTraffic",
    )
    assert (status["desiredScale"], status["actualScale"], status["observedGeneration"]) == (
        0,
        0,
        1,
    )
    assert (status["serviceName"], status["metricsServiceName"]) == (
        revision.name,
        f"{revision.name}-private",
    )


async def test_its_serverless_service_is_its_own_and_leads_to_knatives_activator_until_a_pod_is_ready(
    rig: Rig,
) -> None:
    revision = ScaledRevision(rig.server, metric="concurrency").made()
    leader = await led(rig, revision)
    sks = revision.sks
    assert sks is not None
    assert sks["spec"] == {
        "mode": "Proxy",
        "protocolType": "http1",
        "numActivators": 2,
        "objectRef": {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": f"{revision.name}-deployment",
        },
    }
    (owner,) = sks["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (
        "PodAutoscaler",
        revision.autoscaler["metadata"]["uid"],
        True,
    )
    assert "autoscaling.knative.dev/metric" not in sks["metadata"]["annotations"]
    await rig.one.post({revision.key: Load(in_flight=1, concurrency=1.0, held={"p-1": 1})})
    await told(rig, leader, revision, replicas=1, ready=1)
    await rig.passes(leader, revision, 1)
    await rig.until(lambda: (revision.sks or {})["spec"]["mode"] == "Serve")


async def test_revisions_of_functions_that_the_platform_does_not_have_are_left_alone(
    rig: Rig,
) -> None:
    theirs = ScaledRevision(rig.server, "search-embed-v1-bbbbbb", key="f-2@v1-bbbbbb").made(
        replicas=3
    )
    leader = await led(rig, ScaledRevision(rig.server).made())
    for _ in range(2):
        await rig.passes(leader, theirs, 70)
    assert (rig.writes(), theirs.replicas, theirs.sks) == ([], 3, None)
    rig.functions.add("f-2")  # its route has arrived
    for _ in range(2):
        await rig.passes(leader, theirs, 70)
    assert (theirs.replicas, theirs.sks is None) == (0, False)


async def test_a_poke_at_zero_is_one_call_of_the_api_before_pods_are_made(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    await led(rig, revision)
    await rig.other.post({revision.key: Load(waiting=3, asked=2, concurrency=3.0)}, (revision.key,))
    await rig.until(lambda: revision.condition("Active").get("reason") == "Queued")
    writes = rig.writes()
    assert writes[0] == f"patch {SCALE}", "nothing stands before the scale"
    assert revision.replicas >= 2
    assert (
        revision.condition("Active")["status"] == revision.condition("Ready")["status"] == "Unknown"
    )
    assert writes.count(f"patch {SCALE}") == 1


async def test_what_activators_ask_for_adds_up_to_the_maximum(rig: Rig) -> None:
    revision = ScaledRevision(rig.server, max_scale="4").made()
    await led(rig, revision)
    await rig.one.post({revision.key: Load(waiting=3, asked=3)}, (revision.key,))
    await rig.other.post({revision.key: Load(waiting=3, asked=3)}, (revision.key,))
    await rig.until(lambda: revision.replicas == 4)


async def test_a_pod_that_is_ready_makes_it_active(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    await rig.one.post({revision.key: Load(waiting=1, asked=1, concurrency=1.0)}, (revision.key,))
    await rig.until(lambda: revision.replicas == 1)
    await told(rig, leader, revision, replicas=1, ready=1)
    await rig.one.post({revision.key: Load(in_flight=1, concurrency=1.0, held={"p-1": 1})})
    await rig.passes(leader, revision, 1)
    await rig.until(lambda: revision.condition("Ready").get("status") == "True")
    assert revision.autoscaler["status"]["actualScale"] == 1


async def test_a_first_scale_is_reached_once_and_kept_no_longer(rig: Rig) -> None:
    revision = ScaledRevision(rig.server, initial_scale="2").made()
    leader = await led(rig, revision)
    await rig.until(lambda: revision.replicas == 2)
    assert revision.condition("ScaleTargetInitialized")["status"] == "Unknown"
    await told(rig, leader, revision, replicas=2, ready=2)
    await rig.until(lambda: revision.condition("ScaleTargetInitialized")["status"] == "True")
    await rig.passes(leader, revision, 3)
    await rig.until(lambda: revision.replicas == 0)


# -- nothing changed -------------------------------------------------------------------------------
async def test_where_nothing_changes_nothing_is_written(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=1)
    leader = await led(rig, revision)
    await told(rig, leader, revision, replicas=1, ready=1)
    await rig.one.post({revision.key: Load(concurrency=0.5, in_flight=1, held={"p-1": 1})})
    await rig.passes(leader, revision, 4)
    await rig.until(lambda: revision.condition("Active").get("status") == "True")
    rig.writes()
    await rig.passes(leader, revision, 30)
    assert rig.writes() == []


async def test_what_somebody_else_changed_is_set_right(rig: Rig) -> None:
    revision = ScaledRevision(rig.server, min_scale="1").made(replicas=1)
    leader = await led(rig, revision)
    revision.deployment(replicas=0)
    await rig.until(lambda: revision.replicas == 1)
    assert leader.deployments.is_synced


# -- down ------------------------------------------------------------------------------------------
async def test_pods_that_nobody_has_go_and_claimed_ones_stay(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=3)
    rig.specs[revision.key] = spec_of(scaling=AUTO)
    leader = await led(rig, revision)
    await rig.one.post({revision.key: Load(held={"p-1": 0})})
    await told(rig, leader, revision, replicas=3, ready=3)
    await rig.passes(leader, revision, 10)
    await rig.until(lambda: revision.replicas == 1)
    await rig.one.post({})
    await told(rig, leader, revision, replicas=1, ready=1)
    await rig.passes(leader, revision, 10)
    await rig.until(lambda: revision.replicas == 0)
    await rig.until(lambda: revision.condition("Active").get("reason") == "NoTraffic")


async def test_before_it_shrinks_claimed_pods_are_last_to_go(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=2)
    target = target_of(spec_of("embed"))
    maker = PodMaker(rig.server, rig.cluster)
    pods = PodWatcher(selector=function_selector(ClusterSettings()))
    follow = asyncio.create_task(pods.follow(rig.cluster), name="pods")
    busy, free = maker.made(target, key=revision.key), maker.made(target, key=revision.key)
    await rig.until(lambda: len(pods.of(revision.key)) == 2)
    rig.pods[revision.key] = pods.of(revision.key)
    leader = await led(rig, revision)
    await rig.one.post({revision.key: Load(in_flight=3, held={busy.uid: 3})})
    await told(rig, leader, revision, replicas=2, ready=2)
    await rig.passes(leader, revision, 70)
    await rig.until(lambda: revision.replicas == 1)
    found = [rig.server.get("v1", "Pod", one.name, one.namespace) or {} for one in (busy, free)]
    costs = [one["metadata"]["annotations"].get(COST) for one in found]
    assert int(costs[0]) > 100
    assert costs[1] is None
    writes = rig.writes()
    assert writes.index("patch pods") < writes.index(f"patch {SCALE}")
    follow.cancel()
    await asyncio.gather(follow, return_exceptions=True)
    await maker.aclose()


async def test_a_revision_that_no_route_names_goes_its_floor_with_it(rig: Rig) -> None:
    revision = ScaledRevision(rig.server, min_scale="2").made(replicas=2)
    leader = await led(rig, revision)
    await told(rig, leader, revision, replicas=2, ready=2)
    await rig.passes(leader, revision, 3)
    assert revision.replicas == 2
    revision.reachability("Unreachable")
    await rig.until(lambda: revision.replicas == 0)


async def test_what_never_comes_up_is_given_up_after_its_deadline(rig: Rig) -> None:
    revision = ScaledRevision(rig.server)
    revision.annotate("serving.knative.dev/progress-deadline", "100s")
    leader = await led(rig, revision.made())
    await rig.one.post({revision.key: Load(waiting=1, asked=1, concurrency=1.0)}, (revision.key,))
    await rig.until(lambda: revision.replicas == 1)
    await told(rig, leader, revision, replicas=1, ready=0)
    await rig.passes(leader, revision, 129)
    assert revision.condition("Active")["reason"] == "Queued"
    await rig.passes(leader, revision, 3)
    await rig.until(lambda: revision.replicas == 0)
    await rig.until(lambda: revision.condition("Active").get("reason") == "TimedOut")
    await rig.passes(leader, revision, 61)
    await rig.until(lambda: revision.replicas == 1)


# -- no data is never zero -------------------------------------------------------------------------
async def test_a_new_leader_adopts_what_there_is_until_it_has_listened(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=3)
    leader = await led(rig, revision, settle_s=15.0)
    await told(rig, leader, revision, replicas=3, ready=3)
    await rig.passes(leader, revision, 14)
    assert revision.replicas == 3
    await rig.passes(leader, revision, 70)
    await rig.until(lambda: revision.replicas == 0)


async def test_while_an_activator_is_silent_nothing_shrinks_and_what_is_asked_for_still_comes(
    rig: Rig,
) -> None:
    revision = ScaledRevision(rig.server).made(replicas=2)
    leader = await led(rig, revision)
    await told(rig, leader, revision, replicas=2, ready=2)
    rig.now += 6.0  # both are silent
    await leader.read_reports()
    await rig.passes(leader, revision)
    assert revision.replicas == 2
    await rig.one.post({revision.key: Load(asked=4)}, (revision.key,))
    await rig.until(lambda: revision.replicas == 4)


async def test_while_an_activator_that_lives_reports_nothing_nothing_shrinks(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=2)
    leader = await led(rig, revision)
    rig.members = {"a-0", "a-1", "a-2"}  # the last one does not know this autoscaler yet
    await told(rig, leader, revision, replicas=2, ready=2)
    await rig.passes(leader, revision, 100)
    assert revision.replicas == 2
    rig.members = {"a-0", "a-1"}
    await rig.passes(leader, revision, 100)
    await rig.until(lambda: revision.replicas == 0)


async def test_a_board_that_lost_its_memory_shrinks_nothing(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=2)
    leader = await led(rig, revision)
    await rig.one.post({revision.key: Load(held={"p-1": 1, "p-2": 1}, in_flight=2)})
    await told(rig, leader, revision, replicas=2, ready=2)
    await rig.passes(leader, revision, 2)
    rig.wall.statements.clear()
    for _ in range(3):
        rig.now += 4.0
        await leader.read_reports()
        leader.record()
        await leader.reconcile(("fn-acme", revision.name))
    assert revision.replicas == 2


async def test_after_all_were_silent_who_speaks_first_is_not_taken_for_all(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=3)
    leader = await led(rig, revision, settle_s=15.0)
    await rig.other.post(
        {revision.key: Load(held={f"p-{n}": 1 for n in range(3)}, in_flight=3, concurrency=3.0)}
    )
    await told(rig, leader, revision, replicas=3, ready=3)
    await rig.passes(leader, revision, 16)
    assert revision.replicas == 3
    rig.wall.statements.clear()  # what activators share is away
    rig.now += 20.0
    await leader.read_reports()
    await rig.one.post({})
    await rig.passes(leader, revision, 14)
    assert revision.replicas == 3
    await rig.passes(leader, revision, 140)
    await rig.until(lambda: revision.replicas == 0)


async def test_however_often_it_is_poked_looks_do_not_queue(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=1)
    await led(rig, revision)

    def queued() -> int:
        return sum(one.get_name() == f"reconcile {revision.name}" for one in asyncio.all_tasks())

    for _ in range(2):
        await rig.until(lambda: not queued())  # events of its own writes cause looks, too
        await rig.other.post({}, [revision.key] * 50)
        while any(one.qsize() for one in rig.wall.listeners):
            await asyncio.sleep(0)
        assert queued() == 1, "none of them has begun"


async def test_what_a_dead_activator_held_is_free_once_it_is_no_member_any_more(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made(replicas=1)
    rig.specs[revision.key] = spec_of(scaling=AUTO)
    leader = await led(rig, revision)
    await rig.other.post({revision.key: Load(held={"p-1": 0})})
    await told(rig, leader, revision, replicas=1, ready=1)
    await rig.passes(leader, revision, 20)
    assert revision.replicas == 1
    said = rig.wall.statements.pop("a-1")
    await rig.passes(leader, revision, 14)
    assert revision.replicas == 1, said
    await rig.passes(leader, revision, 10)
    await rig.until(lambda: revision.replicas == 0)


# -- faults ----------------------------------------------------------------------------------------
async def test_without_the_lease_nothing_is_written(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    rig.election.is_leader = False
    await rig.one.post({revision.key: Load(asked=1)}, (revision.key,))
    await rig.passes(leader, revision, 3)
    assert rig.writes() == []
    assert revision.replicas == 0


async def test_a_lease_that_is_lost_while_it_decides_ends_before_the_write(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    await rig.one.post({revision.key: Load(asked=1)})
    await leader.read_reports()

    class Losing(dict[str, list[Pod]]):
        def get(self, key: str, default: object = None) -> list[Pod]:
            rig.election.is_leader = False
            return []

    rig.pods = Losing()
    await leader.reconcile(("fn-acme", revision.name))
    assert rig.election.is_leader is False
    assert rig.writes() == []


async def test_a_leadership_ends_with_its_lease(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    assert repr(leader) == "<Leader of 1 revisions, <Members a-0, a-1>>"
    rig.election.is_leader = False
    rig.election.lost.set()
    await rig.until(lambda: not rig.wall.listeners)


async def test_while_the_api_is_away_all_stays_and_is_made_up_for_afterwards(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    async with away(rig.server):
        await rig.one.post({revision.key: Load(asked=2)})
        await leader.read_reports()
        await leader.reconcile(("fn-acme", revision.name))  # fails, and says so
        assert revision.replicas == 0
    await rig.passes(leader, revision)
    await rig.until(lambda: revision.replicas == 2)


async def test_a_refused_scale_is_tried_again(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    fault = Fault(status=403, verb="patch", path="/scale")
    rig.server.faults.chosen.append(fault)
    await rig.one.post({revision.key: Load(asked=1)})
    await rig.passes(leader, revision, 1)
    assert revision.replicas == 0
    rig.server.faults.chosen.clear()
    await rig.passes(leader, revision, 1)
    await rig.until(lambda: revision.replicas == 1)


async def test_an_answer_that_was_lost_is_written_once_more_and_no_oftener(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    rig.server.faults.chosen.append(
        Fault(reset=True, after=True, times=1, verb="patch", path="/scale")
    )
    await rig.one.post({revision.key: Load(asked=1)}, (revision.key,))
    await rig.until(lambda: revision.replicas == 1)
    await rig.passes(leader, revision, 4)
    assert revision.replicas == 1


async def test_a_revision_that_goes_meanwhile_is_no_failure(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    leader = await led(rig, revision)
    await rig.cluster.delete(POD_AUTOSCALER, revision.name, "fn-acme")
    await rig.until(lambda: not leader.autoscalers.items())
    await rig.one.post({revision.key: Load(asked=1)}, (revision.key,))
    await leader.reconcile(("fn-acme", revision.name))
    assert revision.replicas == 0


async def test_a_serverless_service_that_is_anothers_is_left_alone(rig: Rig) -> None:
    revision = ScaledRevision(rig.server).made()
    body = {
        "apiVersion": NETWORKING,
        "kind": "ServerlessService",
        "metadata": {"name": revision.name, "namespace": "fn-acme"},
    }
    rig.server.put({**body, "spec": {"mode": "Serve"}})
    leader = await rig.leader()
    await rig.passes(leader, revision)
    await rig.until(lambda: revision.condition("Active").get("reason") == "NotOwned")
    assert (revision.sks or {})["spec"] == {"mode": "Serve"}


async def test_other_classes_are_none_of_ours(rig: Rig) -> None:
    revision = ScaledRevision(rig.server, **{"class": "kpa.autoscaling.knative.dev"}).made()
    leader = await rig.leader()
    await rig.one.post({revision.key: Load(asked=1)}, (revision.key,))
    await rig.passes(leader, revision, 2)
    assert rig.writes() == []


async def test_the_servers_clock_is_no_matter(rig: Rig) -> None:
    rig.server.faults.clock_skew_s = 3600.0
    revision = ScaledRevision(rig.server).made(replicas=2)
    leader = await led(rig, revision)
    await told(rig, leader, revision, replicas=2, ready=2)
    await rig.passes(leader, revision, 70)
    await rig.until(lambda: revision.replicas == 0)
