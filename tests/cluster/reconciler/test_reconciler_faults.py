"""What goes wrong in a cluster, and what the reconciler makes of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.audit_trail import AuditQuery
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.informers import KINDS
from pilotlight.controller.kubernetes.leader_election import identify, run_while_leading
from pilotlight.controller.kubernetes.ownership import ClusterOwnership
from pilotlight.controller.kubernetes.reconciler import Reconciler
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import NAMESPACE, POD, REVISION, SECRET, SERVICE
from pilotlight.kubernetes.leader_election import LeaderElection, LeaseLock, LeaseTerms
from pilotlight.kubernetes.settings import ClusterSettings
from tests.cluster.reconciler.conftest import RUNTIME, Bench
from tests.cluster.reconciler.test_reconciler import ONE, SERVING, TWO, traffic_of, two
from tests.fakes.absence import away
from tests.fakes.fed_platform import ACME, FedPlatform, document_of, spec
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.knative_settings import config_maps
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.small_serving import SmallServing

SERVICES = "services.serving.knative.dev"
OTHER_ID = "p-0123456789abcdef"


def labelled(bench: Bench) -> set[tuple[str, str, str]]:
    """Kind, name and platform of every object of ours but revisions, which Knative makes."""
    return {
        (kind.kind, item["metadata"]["name"], item["metadata"]["labels"].get(names.PLATFORM, ""))
        for kind in (*KINDS, SECRET)
        if kind != REVISION
        for item in bench.server.list(kind.api_version, kind.kind)
        if names.MANAGED_BY in (item["metadata"].get("labels") or {})
    }


async def test_foreign_edits_are_put_right(bench: Bench) -> None:
    def edited(api_version: str, kind: str, name: str, spec: dict[str, Any]) -> None:
        there = bench.server.get(api_version, kind, name, "fn-acme")
        assert there is not None
        bench.server.put({**there, "spec": {**there["spec"], **spec}})

    def egress() -> Any:
        policy = bench.server.get(
            "networking.k8s.io/v1", "NetworkPolicy", "pilotlight-out", "fn-acme"
        )
        return policy["spec"]["egress"] if policy is not None else None

    bench.platform.tenant()
    bench.platform.function(two(), weights={"v1-000001": 100}, tags={"next": "v2-000002"})
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until_quiet()
        wanted = traffic_of(bench)
        edited(
            SERVING,
            "Service",
            "search-embed",
            {"traffic": [{"revisionName": TWO, "latestRevision": False, "percent": 100}]},
        )
        await bench.until(lambda: traffic_of(bench) == wanted)
        rules = egress()
        edited("networking.k8s.io/v1", "NetworkPolicy", "pilotlight-out", {"egress": [{}]})
        await bench.until(lambda: egress() == rules)


async def test_a_revision_that_was_deleted_behind_our_back_comes_back_the_same(
    bench: Bench,
) -> None:
    bench.platform.tenant()
    bench.platform.function(two(), weights={"v1-000001": 60, "v2-000002": 40})
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until(lambda: traffic_of(bench) == [(ONE, 60, ""), (TWO, 40, "")])
        await bench.until_quiet()
        before = bench.server.get(SERVING, "Revision", ONE, "fn-acme")
        assert before is not None
        async with await Cluster.connect(bench.settings) as operator:
            await operator.delete(REVISION, ONE, "fn-acme")
        await bench.until(lambda: bench.serving.made == [ONE, TWO, ONE])
        await bench.until_phase("ready")
        after = bench.server.get(SERVING, "Revision", ONE, "fn-acme")
        assert after is not None
        assert after["spec"] == before["spec"]
        assert (
            after["metadata"]["annotations"][names.KEY]
            == before["metadata"]["annotations"][names.KEY]
        )
        assert traffic_of(bench) == [(ONE, 60, ""), (TWO, 40, "")]


async def test_a_service_that_was_deleted_behind_our_back_is_made_anew(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(two(), weights={"v1-000001": 60, "v2-000002": 40})
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until_quiet()
        async with await Cluster.connect(bench.settings) as operator:
            await operator.delete(SERVICE, "search-embed", "fn-acme")
        await bench.until(lambda: sorted(bench.serving.made[2:]) == [ONE, TWO])
        await bench.until(lambda: traffic_of(bench) == [(ONE, 60, ""), (TWO, 40, "")])


async def test_a_namespace_that_is_being_deleted_is_waited_for(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until_quiet()
        held = bench.server.get("v1", "ConfigMap", ONE, "fn-acme")
        assert held is not None
        bench.server.put({**held, "metadata": {**held["metadata"], "finalizers": ["test/hold"]}})
        async with await Cluster.connect(bench.settings) as operator:
            await operator.delete(NAMESPACE, "fn-acme")
            await bench.until(
                lambda: (
                    (status := bench.status()) is not None and status.reason == "NamespaceEnding"
                )
            )
            assert (await bench.until_phase("pending")).message
            held = bench.server.get("v1", "ConfigMap", ONE, "fn-acme")
            assert held is not None
            bench.server.put({**held, "metadata": {**held["metadata"], "finalizers": []}})
        await bench.until_phase("ready")
        await bench.until(lambda: traffic_of(bench) == [(ONE, 100, "")])


async def test_a_missing_right_is_named_and_waited_for(bench: Bench) -> None:
    denied = bench.server.rights.deny("patch", "services", group="serving.knative.dev")
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        status = await bench.until_phase("failed")
        assert status.reason == "Forbidden"
        assert "serving.knative.dev" in status.message
        assert "patch" in status.message
        bench.server.rights.denied.remove(denied)
        await bench.until_phase("ready")


async def test_a_cluster_without_knative_is_told_by_name(bench: Bench) -> None:
    bench.server.remove_kind(SERVICES)
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        status = await bench.until_phase("failed")
    assert status.reason == "KindMissing"
    assert SERVICES in status.message


async def test_names_that_are_taken_are_left_alone(bench: Bench) -> None:
    theirs: dict[str, Any] = {
        "apiVersion": SERVING,
        "kind": "Service",
        "metadata": {"name": "search-embed", "namespace": "fn-acme"},
        "spec": {
            "template": {
                "spec": {"containers": [{"image": "registry.example/theirs@sha256:" + "2" * 64}]}
            }
        },
    }
    bench.server.put(theirs)  # its namespace is theirs, too
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        status = await bench.until_phase("failed")
        assert status.reason == "NameTaken"
        assert "Namespace fn-acme" in status.message
        namespace = bench.server.get("v1", "Namespace", "fn-acme")
        assert namespace is not None
        labels = {
            names.MANAGED_BY: names.manager_of(bench.settings),
            names.PLATFORM: bench.platform.identity().id,
        }
        metadata = {**namespace["metadata"], "labels": labels}
        bench.server.put({**namespace, "metadata": metadata})  # handed over
        await bench.until(
            lambda: (
                "Service fn-acme/search-embed"
                in (status.message if (status := bench.status()) else "")
            )
        )
    there = bench.server.get(SERVING, "Service", "search-embed", "fn-acme")
    assert there is not None
    assert (
        there["spec"]["template"]["spec"]["containers"][0]["image"]
        == "registry.example/theirs@sha256:" + "2" * 64
    )


async def test_a_feature_that_is_off_is_named_with_the_command_that_switches_it_on(
    tmp_path: Path,
) -> None:
    async with ApiServer(ready=False) as server:
        with SmallServing(server) as serving:
            kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
            settings = ClusterSettings(
                kubeconfig=str(kubeconfig), runtime_image=RUNTIME, namespace="default"
            )
            platform = FedPlatform(tmp_path, notifier=ChangeNotifier())
            bench = Bench(
                server=server,
                serving=serving,
                platform=platform,
                kubeconfig=kubeconfig,
                settings=settings,
            )
            platform.tenant()
            platform.function(spec())
            async with bench.running():
                status = await bench.until_phase("failed")
                assert status.reason == "Refused"
                assert "kubernetes.podspec-volumes-hostpath" in status.message
                assert "kubectl patch configmap/config-features" in status.message
                assert server.list(SERVING, "Service") == []
                for body in config_maps():
                    server.put(body)
                await bench.until_phase("ready")
            platform.close()


async def test_what_a_webhook_says_is_told(bench: Bench) -> None:
    bench.server.faults.refusals.append((SERVICES, "images must come from our own registry"))
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        status = await bench.until_phase("failed")
        assert status.reason == "Refused"
        assert "images must come from our own registry" in status.message
        bench.server.faults.clear()
        await bench.until_phase("ready")


async def test_one_that_fails_holds_up_nobody_else(bench: Bench) -> None:
    bench.server.faults.add(Fault(status=500, verb="apply", resource=SERVICES, path="search-bad"))
    bench.platform.tenant()
    bad = bench.platform.function(spec("bad"))
    others = [bench.platform.function(spec(f"good{number}")) for number in range(8)]
    async with bench.running():
        for other in others:
            await bench.until_phase("ready", other)
        assert bad not in bench.statuses.known() or bench.statuses.known()[bad].phase != "ready"


@pytest.mark.slow  # an API server is away for 3 s
async def test_an_api_server_that_was_away_finds_everything_as_it_should_be(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        async with away(bench.server):
            bench.platform.function(two(), weights={"v2-000002": 100})
            await bench.until(
                lambda: (
                    (status := bench.status()) is not None
                    and status.reason in ("ClusterUnreachable", "Overloaded")
                )
            )
        await bench.until(lambda: traffic_of(bench)[:1] == [(TWO, 100, "")])
        await bench.until_phase("ready")


async def test_watches_that_are_cut_again_and_again_lose_nothing(bench: Bench) -> None:
    bench.server.faults.cut_watches_every_s = 0.05
    bench.platform.tenant()
    async with bench.running():
        functions = [bench.platform.function(spec(f"f{number}")) for number in range(5)]
        bench.server.expire_watches()
        for function in functions:
            await bench.until_phase("ready", function)


async def test_a_new_database_changes_nothing_in_the_cluster_until_it_adopts_it(
    bench: Bench, tmp_path: Path
) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
    home = tmp_path / "fresh"
    home.mkdir()
    old = bench.platform
    bench.platform = new = FedPlatform(home, notifier=ChangeNotifier())
    new.renewed(OTHER_ID)
    acme = replace(ACME, id="t-9876543210ab")
    new.tenant(acme)
    other = new.function(spec("other"), tenant=acme)
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "ending", "namespace": "fn-acme"},
        "spec": {"nodeName": "n", "containers": [{"name": "user", "image": "registry.example/a"}]},
    }
    bench.server.put(pod)
    bench.server.requests.clear()
    async with bench.running(bench.renewed_statuses()):
        status = await bench.until_phase("failed", other)
        await bench.until_quiet()
        assert (status.reason, old.identity().id in status.message) == ("ForeignObjects", True)
        assert "pilotlight cluster adopt" in status.message
        assert bench.server.requests.writes() == 0
        assert bench.statuses.ownership == ClusterOwnership(
            platform=OTHER_ID, foreign={old.identity().id: ("fn-acme",)}
        )
        new.adopt(old.identity().id)
        # what it does not know is deleted: the function, and the namespace, which has the name of
        # its own tenant's; that ends with its last pod
        await bench.until(lambda: traffic_of(bench) == [])
        await bench.until(
            lambda: (
                (now := bench.statuses.known()[other]).reason == "NamespaceEnding"
                and now.phase == "pending"
            )
        )
        async with await Cluster.connect(bench.settings) as kubelet:
            await kubelet.delete(POD, "ending", "fn-acme", grace_s=0)
        await bench.until_phase("ready", other)
        made = bench.server.get("v1", "Namespace", "fn-acme")
        assert made is not None
        assert made["metadata"]["labels"][names.TENANT] == acme.id
    # and the controller of the old database finds that the cluster is no longer its own
    bench.platform = old
    bench.server.requests.clear()
    async with bench.running(bench.renewed_statuses()):
        await bench.until_phase("failed")
        await bench.until_quiet()
        assert bench.server.requests.writes() == 0
    new.close()


async def test_objects_from_before_the_label_are_adopted_as_they_are(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.secret("api", {"TOKEN": "one"})
    bench.platform.function(spec(secrets=("api",)))
    async with bench.running():
        await bench.until_phase("ready")
    ours = labelled(bench)
    assert {platform for _, _, platform in ours} == {bench.platform.identity().id}
    for kind in (*KINDS, SECRET):
        for item in list(bench.server.list(kind.api_version, kind.kind)):
            metadata = item["metadata"]
            labels = {
                k: v for k, v in (metadata.get("labels") or {}).items() if k != names.PLATFORM
            }
            bench.server.put({**item, "metadata": {**metadata, "labels": labels}})
    uid = bench.server.get("v1", "Namespace", "fn-acme")["metadata"]["uid"]  # type: ignore[index]
    bench.server.requests.clear()
    async with bench.running(bench.renewed_statuses()):
        await bench.until_phase("failed")
        assert bench.server.requests.writes() == 0
        bench.platform.adopt("unlabelled")
        await bench.until_phase("ready")
        await bench.until_quiet()
        assert labelled(bench) == ours
        assert not [one for one in bench.server.requests if one.verb == "delete"]
        assert bench.server.get("v1", "Namespace", "fn-acme")["metadata"]["uid"] == uid  # type: ignore[index]


async def test_the_settings_name_whom_to_adopt_and_it_is_noted_once(tmp_path: Path) -> None:
    platform = FedPlatform(tmp_path, notifier=ChangeNotifier())
    own = platform.identity().id
    assert identify(platform.store, []).adopted == frozenset()
    for _ in range(2):
        assert identify(platform.store, [OTHER_ID, own]).adopted == {OTHER_ID}
    with platform.store.read() as sql:
        entries = audit_trail.entries(sql, AuditQuery(tenant=None), limit=9)
    assert [(one["action"], one["subject"], one["actor"]) for one in entries] == [
        ("cluster.adopt", OTHER_ID, "platform")
    ]
    platform.close()
    with pytest.raises(ValueError, match="16 hex digits"):
        ClusterSettings(adopt=["acme"])


async def test_two_platforms_in_two_namespaces_leave_each_other_alone(
    bench: Bench, tmp_path: Path
) -> None:
    home = tmp_path / "neighbour"
    home.mkdir()
    first, settings = bench.platform, bench.settings
    neighbour = FedPlatform(home, notifier=ChangeNotifier())
    neighbour.renewed(OTHER_ID)
    globex = replace(ACME, id="t-9876543210ab", name="globex")
    first.tenant()
    first.function(spec())
    neighbour.tenant(globex)
    theirs = neighbour.function(spec("rank"), tenant=globex)
    async with bench.running():
        await bench.until_phase("ready")
        bench.platform = neighbour
        bench.settings = replace(settings, namespace="team-b")
        async with bench.running(bench.renewed_statuses()):
            await bench.until_phase("ready", theirs)
            await bench.until_quiet()
            assert bench.statuses.ownership == ClusterOwnership(platform=OTHER_ID, foreign={})
            # a tenant of theirs has the name of one of the first platform's
            acme = replace(globex, id="t-aaaaaaaaaaaa", name="acme")
            neighbour.tenant(acme)
            taken = neighbour.function(spec("embed"), tenant=acme)
            status = await bench.until_phase("failed", taken)
            assert status.reason == "NameTaken"
            assert "namespace_prefix" in status.message
            neighbour.no_tenant(globex)
            neighbour.no_function(f"{globex.id}/main/search/rank")
            await bench.until(lambda: bench.server.get("v1", "Namespace", "fn-globex") is None)
    assert traffic_of(bench) == [(ONE, 100, "")]
    neighbour.close()


async def test_a_route_that_is_not_understood_is_no_wish_that_its_function_were_gone(
    bench: Bench,
) -> None:
    bench.platform.tenant()
    embed = bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
    path, route = document_of(spec())
    bench.platform.functions({path: {**route, "said_by_a_later_version": True}})
    bench.statuses.drop(embed)
    async with bench.running():
        await bench.until(
            lambda: (status := bench.status(embed)) is not None and status.reason == "NotUnderstood"
        )
        await bench.until_quiet()
        assert traffic_of(bench) == [(ONE, 100, "")]
        bench.platform.no_function(path)
        await bench.until(lambda: traffic_of(bench) == [])


async def test_of_two_controllers_one_works_and_the_other_takes_over(bench: Bench) -> None:
    # given back, never left: nobody loses it on a busy machine
    terms = LeaseTerms(lease_s=60.0, renew_s=40.0, retry_s=0.1)
    at_work: list[str] = []
    overlaps: list[list[str]] = []
    bench.platform.tenant()
    bench.platform.function(spec())

    async def controller(name: str) -> None:
        async with (
            await Cluster.connect(bench.settings) as cluster,
            LeaderElection(
                cluster,
                LeaseLock(name="reconciler", namespace="default", identity=name),
                terms=terms,
            ) as election,
        ):
            while True:
                await election.wait_leader()
                at_work.append(name)
                overlaps.append(list(at_work))
                try:
                    reconciler = Reconciler(
                        cluster,
                        DesiredState(
                            settings=cluster.settings,
                            platform=bench.platform.identity(),
                            key=bench.platform.key,
                        ),
                        store=bench.platform.store,
                        notifier=bench.platform.notifier,
                        statuses=bench.statuses,
                    )
                    await run_while_leading(election, {"reconciler": reconciler.run})
                finally:
                    at_work.remove(name)

    tasks = {name: asyncio.create_task(controller(name)) for name in ("one", "two")}
    try:
        await bench.until_phase("ready")
        first = at_work[0]
        tasks[first].cancel()
        await asyncio.gather(tasks[first], return_exceptions=True)
        bench.platform.function(two(), weights={"v2-000002": 100})
        await bench.until(lambda: traffic_of(bench)[:1] == [(TWO, 100, "")])
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert all(len(names) == 1 for names in overlaps)
    assert {names[0] for names in overlaps} == {"one", "two"}


async def test_two_functions_with_one_name_are_noticed(bench: Bench) -> None:
    """Marks make it unlikely, and `PATH` makes it impossible to miss."""
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        service = bench.server.get(SERVING, "Service", "search-embed", "fn-acme")
        assert service is not None
        annotations = {
            **service["metadata"]["annotations"],
            names.PATH: f"{ACME.id}/main/search-embed/x",
        }
        bench.server.put(
            {**service, "metadata": {**service["metadata"], "annotations": annotations}}
        )
        status = await bench.until_phase("failed")
    assert status.reason == "NameTaken"
    assert "rename one of them" in status.message


async def test_whoever_may_not_lead_any_more_writes_nothing(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    bench.may_write = False
    async with bench.running():
        await bench.until(
            lambda: (status := bench.status()) is not None and status.reason == "NotLeading"
        )
        assert bench.server.requests.writes() == 0
        bench.may_write = True
        await bench.until_phase("ready")
