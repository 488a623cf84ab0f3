"""The reconciler: what the platform wants comes to be in the cluster, step by step, and nothing is
written where nothing changed."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

from pilotlight.controller.database import feed
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import LIMIT_RANGE
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import TenantRecord
from pilotlight.spec.function import Clocks, FunctionSpec
from pilotlight.spec.policies import RolloutTerms
from tests.cluster.reconciler.conftest import RUNTIME, Bench
from tests.fakes.fed_platform import ACME, document_of, spec

SERVING = "serving.knative.dev/v1"
ONE, TWO = "search-embed-v1-000001", "search-embed-v2-000002"
PATH = f"{ACME.id}/main/search/embed"


def traffic_of(bench: Bench, name: str = "search-embed") -> list[tuple[str, int, str]]:
    """(revision, percent, tag) of a Service."""
    service = bench.server.get(SERVING, "Service", name, "fn-acme")
    entries = service["spec"]["traffic"] if service is not None else []
    return [(entry["revisionName"], entry["percent"], entry.get("tag", "")) for entry in entries]


def two(**changes: Any) -> dict[str, Any]:
    """The function with a second revision."""
    return {"v1-000001": spec(), "v2-000002": spec(env={"NEW": "1"}, **changes)}


async def test_a_deployed_function_becomes_a_service_in_its_tenants_namespace(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        status = await bench.until_phase("ready")
    assert status.revision == "v1-000001"
    assert traffic_of(bench) == [(ONE, 100, "")]
    assert bench.server.get("v1", "ConfigMap", ONE, "fn-acme") is not None
    assert (
        bench.server.get("policy/v1", "PodDisruptionBudget", "search-embed", "fn-acme") is not None
    )
    namespace = bench.server.get("v1", "Namespace", "fn-acme")
    assert namespace is not None
    assert namespace["metadata"]["labels"][names.TENANT] == ACME.id
    quota = bench.server.get("v1", "ResourceQuota", "pilotlight", "fn-acme")
    assert quota is not None
    assert quota["spec"]["hard"]["pods"] == "40"


async def test_nothing_is_written_where_nothing_changed(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.secret("api", {"TOKEN": "s3"})
    bench.platform.function(spec(secrets=("api",)))
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until_quiet()
        bench.server.requests.clear()
        bench.platform.notifier.ring()
        bench.platform.function(spec(secrets=("api",)))  # the same again
        await bench.until_quiet()
        assert bench.server.requests.writes() == 0
    bench.statuses.drop(next(iter(bench.statuses.known())))
    async with bench.running():  # a controller that has just started looks at everything
        await bench.until_phase("ready")
        await bench.until_quiet()
        assert bench.server.requests.writes() == 0
        assert bench.reconciler is not None
        assert bench.reconciler.writer.writes == 0


async def test_a_new_revision_takes_traffic_once_it_is_ready(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        bench.serving.held.add(TWO)
        bench.platform.function(two(), weights={"v2-000002": 100}, tags={"old": "v1-000001"})
        await bench.until(lambda: TWO in bench.serving.made)
        await bench.until_phase("pending")
        assert traffic_of(bench) == [(ONE, 100, ""), (TWO, 0, "v2-000002")]
        bench.serving.held.clear()
        bench.serving.look()
        await bench.until(lambda: traffic_of(bench) == [(TWO, 100, ""), (ONE, 0, "v1-000001")])
        status = await bench.until_phase("ready")
    assert status.revision == "v2-000002"


async def test_a_revision_that_will_not_be_ready_takes_no_traffic_and_says_why(
    bench: Bench,
) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        bench.serving.failing[TWO] = (
            "ImagePullBackOff",
            'Back-off pulling image "registry.example/x"',
        )
        bench.platform.function(two(), weights={"v2-000002": 100})
        status = await bench.until_phase("failed")
        assert status.reason == "ImagePullBackOff"
        assert TWO in status.message
        assert "registry.example/x" in status.message
        assert "image_pull_secrets" in status.message
        assert [entry for entry in traffic_of(bench) if entry[1]] == [(ONE, 100, "")]


async def test_a_revision_with_traffic_that_fails_later_says_why(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")  # before it had to have a pod
        said = 'pods "search-embed-v1" is forbidden: pod rejected: RuntimeClass "nvidia" not found'
        bench.serving.failing[ONE] = ("FailedCreate", said)
        bench.serving.look()
        status = await bench.until_phase("failed")
    assert status.reason == "FailedCreate"
    assert f"revision {ONE}: {said}" in status.message
    assert "cluster.gpu_runtime_class" in status.message


async def test_a_canary_is_a_change_of_percents_alone(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(two(), weights={"v1-000001": 100}, tags={"candidate": "v2-000002"})
    async with bench.running():
        await bench.until_phase("ready")
        made = list(bench.serving.made)
        for weight in (5, 25):
            bench.platform.function(two(), weights={"v1-000001": 100 - weight, "v2-000002": weight})
            await bench.until(partial(_is_split, bench, weight))
        await bench.until_phase("ready")
        bench.platform.function(two(), weights={"v1-000001": 100})  # back
        await bench.until(lambda: traffic_of(bench) == [(ONE, 100, "")])
    assert bench.serving.made == made == [ONE, TWO]


def _is_split(bench: Bench, weight: int) -> bool:
    return traffic_of(bench) == [(ONE, 100 - weight, ""), (TWO, weight, "")]


async def test_the_revision_before_stays_reachable_for_the_way_back(bench: Bench) -> None:
    specs = two(rollout=RolloutTerms(keep_previous_s=600.0))
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        bench.platform.function({"v2-000002": specs["v2-000002"]})
        kept = [(TWO, 100, ""), (ONE, 0, "previous")]
        await bench.until(lambda: traffic_of(bench) == kept)
        await bench.until_quiet()
        bench.server.requests.clear()
    async with bench.running():  # a controller that was restarted goes on with it
        await bench.until_quiet()
        assert traffic_of(bench) == kept
        assert bench.server.requests.writes() == 0
    bench.wall_s += 601
    async with bench.running():
        await bench.until(lambda: traffic_of(bench) == [(TWO, 100, "")])


async def test_going_back_to_the_revision_before_ends_its_being_kept(bench: Bench) -> None:
    specs = two(rollout=RolloutTerms(keep_previous_s=600.0))
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        bench.platform.function({"v2-000002": specs["v2-000002"]})
        await bench.until(lambda: (ONE, 0, "previous") in traffic_of(bench))
        bench.platform.function(spec())
        await bench.until(lambda: traffic_of(bench) == [(ONE, 100, "")])
    assert bench.serving.made == [ONE, TWO]


async def test_a_platform_that_moves_to_another_cluster_brings_all_its_revisions(
    bench: Bench,
) -> None:
    bench.platform.tenant()
    bench.platform.function(two(), weights={"v1-000001": 90, "v2-000002": 10})
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until(lambda: traffic_of(bench) == [(ONE, 90, ""), (TWO, 10, "")])
    service = bench.server.get(SERVING, "Service", "search-embed", "fn-acme")
    assert service is not None
    assert service["spec"]["template"]["metadata"]["name"] == TWO


async def test_other_settings_of_the_platform_concern_new_revisions_only(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until_quiet()
    object.__setattr__(
        bench.settings, "runtime_image", "registry.example/runtime@sha256:" + "1" * 64
    )
    bench.server.requests.clear()
    async with bench.running():
        await bench.until_quiet()
        assert bench.server.requests.writes() == 0
        bench.platform.function(two(), weights={"v2-000002": 100})
        await bench.until(lambda: traffic_of(bench)[0] == (TWO, 100, ""))
    images = {
        name: bench.server.get(SERVING, "Revision", name, "fn-acme")["spec"]["containers"][0][  # type: ignore[index]
            "image"
        ][-1]
        for name in (ONE, TWO)
    }
    assert images == {ONE: "0", TWO: "1"}


async def test_secrets_are_written_by_their_values_and_follow_them(bench: Bench) -> None:
    def value() -> str:
        secret = bench.server.get("v1", "Secret", "secret-api", "fn-acme")
        return base64.b64decode(secret["data"]["TOKEN"]).decode() if secret is not None else ""

    bench.platform.tenant()
    bench.platform.secret("api", {"TOKEN": "one"})
    bench.platform.function(spec(secrets=("api",)))
    async with bench.running():
        await bench.until_phase("ready")
        assert value() == "one"
        bench.platform.secret("api", {"TOKEN": "two"})
        await bench.until(lambda: value() == "two")


async def test_a_secret_that_was_deleted_leaves_no_values_in_the_cluster(bench: Bench) -> None:
    def names_of_secrets() -> list[str]:
        return [item["metadata"]["name"] for item in bench.server.list("v1", "Secret", "fn-acme")]

    bench.platform.tenant()
    for name in ("api", "other"):
        bench.platform.secret(name, {"TOKEN": "one"})
    bench.platform.function(spec(secrets=("api", "other")))
    async with bench.running():
        await bench.until_phase("ready")
        bench.server.put(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "theirs", "namespace": "fn-acme"},
            }
        )
        bench.platform.no_secret("api")
        await bench.until(lambda: sorted(names_of_secrets()) == ["secret-other", "theirs"])
        await bench.until_quiet()
    bench.platform.no_secret("other")
    async with bench.running():  # and of one that was deleted while nobody looked
        await bench.until(lambda: names_of_secrets() == ["theirs"])


async def test_a_secret_that_is_missing_is_told_with_the_way_to_one(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec(secrets=("api",)))
    async with bench.running():
        status = await bench.until_phase("failed")
        assert (status.reason, "pilotlight secret create api" in status.message) == (
            "Invalid",
            True,
        )
        bench.platform.secret("api", {"TOKEN": "one"})
        await bench.until_phase("ready")


async def test_what_the_cluster_cannot_run_is_told_before_anything_is_sent(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec(clocks=Clocks(execution_s=3600)))
    async with bench.running():
        status = await bench.until_phase("failed")
    assert status.reason == "Invalid"
    assert "max-revision-timeout-seconds" in status.message
    assert bench.server.list(SERVING, "Service") == []


async def test_a_function_that_is_gone_leaves_nothing_and_its_neighbour_stays(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    other = bench.platform.function(spec("rank"))
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until_phase("ready", other)
        bench.platform.no_function(PATH)
        await bench.until(
            lambda: bench.server.get(SERVING, "Service", "search-embed", "fn-acme") is None
        )
        await bench.until(lambda: bench.server.get("v1", "ConfigMap", ONE, "fn-acme") is None)
        await bench.until(lambda: len(bench.statuses.known()) == 1)
        assert (
            bench.server.get("policy/v1", "PodDisruptionBudget", "search-embed", "fn-acme") is None
        )
        assert traffic_of(bench, "search-rank") == [("search-rank-v1-000001", 100, "")]


async def test_a_stopped_app_has_no_service_until_it_is_deployed_again(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        bench.platform.function(spec(), stopped=True)
        await bench.until(lambda: traffic_of(bench) == [])
        await bench.until(
            lambda: (status := bench.status()) is not None and status.reason == "Stopped"
        )
        bench.platform.function(spec())
        await bench.until(lambda: traffic_of(bench) == [(ONE, 100, "")])


async def test_a_tenants_namespaces_go_with_the_tenant(bench: Bench) -> None:
    other = TenantRecord(id="t-00000000000b", name="globex", uid=20_002)
    bench.platform.tenant()
    bench.platform.tenant(other)
    bench.platform.function(spec())
    bench.platform.function(spec(), environment="staging")
    async with bench.running():
        await bench.until(
            lambda: all(status.phase == "ready" for status in bench.statuses.known().values())
        )
        await bench.until(
            lambda: bench.server.get("v1", "Namespace", "fn-acme--staging") is not None
        )
        for environment in ("main", "staging"):
            bench.platform.no_function(f"{ACME.id}/{environment}/search/embed")
        bench.platform.no_tenant()
        await bench.until(lambda: bench.server.get("v1", "Namespace", "fn-acme") is None)
        await bench.until(lambda: bench.server.get("v1", "Namespace", "fn-acme--staging") is None)


async def test_a_changed_plan_reaches_the_quota(bench: Bench) -> None:
    def hard() -> dict[str, str]:
        quota = bench.server.get("v1", "ResourceQuota", "pilotlight", "fn-acme")
        return quota["spec"]["hard"] if quota is not None else {}

    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        assert hard()["requests.nvidia.com/gpu"] == "4"
        bench.platform.tenant(
            TenantRecord(id=ACME.id, name=ACME.name, uid=ACME.uid, plan={"gpus": 8})
        )
        await bench.until(lambda: hard().get("requests.nvidia.com/gpu") == "8")
        assert "pods" not in hard()


async def test_a_feed_of_many_pages_is_taken_whole(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.functions(dict(document_of(spec(f"f{number}")) for number in range(30)))
    async with bench.running():
        await bench.until(lambda: bench.statuses.counts()["ready"] == 30)
    assert len(bench.server.list(SERVING, "Service", "fn-acme")) == 30


async def test_many_functions_cost_three_reads_and_three_writes_each(bench: Bench) -> None:
    """What a tenant's namespace needs is compared once, not once for each function."""
    bench.platform.tenant()
    bench.platform.functions(dict(document_of(spec(f"f{number}")) for number in range(10)))
    async with bench.running():
        await bench.until(lambda: bench.statuses.counts()["ready"] == 10)
        await bench.until_quiet()
    requests = bench.server.requests
    assert requests.count("apply", "services.serving.knative.dev") == 10
    of_the_namespace = 12
    assert requests.count("apply") <= 3 * 10 + of_the_namespace
    assert requests.count("get") <= 3 * 10 + of_the_namespace


async def test_a_deleted_object_of_a_namespace_comes_back(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
        await bench.until_quiet()
        async with await Cluster.connect(bench.settings) as operator:
            await operator.delete(LIMIT_RANGE, "pilotlight", "fn-acme")
        await bench.until(lambda: bench.server.get("v1", "LimitRange", "pilotlight", "fn-acme"))


def test_a_revision_is_parsed_once_until_it_changes(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(two(), weights={"v1-000001": 100}, tags={"new": "v2-000002"})
    settings = ClusterSettings(runtime_image=RUNTIME)
    state = DesiredState(
        settings=settings, platform=bench.platform.identity(), key=bench.platform.key
    )
    seq = 0

    def parsed() -> dict[str, FunctionSpec]:
        nonlocal seq
        with bench.platform.store.read() as sql:
            page = feed.read(sql, after=seq, limit=1000)
        seq = page.seq
        state.take(page)
        route = next(iter(state.functions.values()))
        tenancy = state.tenancy(ACME.id, "main")
        assert tenancy is not None
        assert state.tenancy(ACME.id, "main") is tenancy
        made = {name: state.revision(route, tenancy, name).spec for name in route.revisions}
        assert all(state.spec(route, name) is one for name, one in made.items())
        return made

    before = parsed()
    bench.platform.function(two(), weights={"v2-000002": 100}, tags={"old": "v1-000001"})
    after = parsed()
    assert all(after[name] is before[name] for name in before)
    changed = {"v1-000001": spec(), "v2-000002": spec(env={"NEW": "2"})}
    bench.platform.function(changed, weights={"v2-000002": 100}, tags={"old": "v1-000001"})
    again = parsed()
    assert again["v1-000001"] is before["v1-000001"]
    assert again["v2-000002"].env == {"NEW": "2"}
