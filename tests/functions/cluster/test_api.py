"""The facade, against an API server over real HTTP."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.errors import (
    AlreadyExists,
    BadCredentials,
    ClusterError,
    ClusterUnreachable,
    Conflict,
    Forbidden,
    Invalid,
    KindMissing,
    ManifestWarned,
    NamespaceEnding,
    NotFound,
    Overloaded,
)
from pilotlight.kubernetes.kinds import CONFIG_MAP, NAMESPACE, POD, SERVICE, kind_of
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.server import ApiServer
from tests.functions.cluster.conftest import IMPATIENT


def config_map(name: str = "a", namespace: str = "default", **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    }


def service(**spec: Any) -> dict[str, Any]:
    container = {"image": "registry.example/fn@sha256:" + "0" * 64}
    template = {"spec": {"containers": [container], **spec}}
    metadata = {"name": "embed", "namespace": "default"}
    return {
        "apiVersion": SERVICE.api_version,
        "kind": "Service",
        "metadata": metadata,
        "spec": {"template": template},
    }


async def test_an_object_lives_through_all_verbs(cluster: Cluster) -> None:
    assert await cluster.get(CONFIG_MAP, "a", "default") is None
    made = await cluster.apply(config_map(x="1", y="2"))
    assert (await cluster.get(CONFIG_MAP, "a", "default") or {})["data"] == {"x": "1", "y": "2"}
    # what we no longer say is gone
    assert (await cluster.apply(config_map(x="1")))["data"] == {"x": "1"}
    assert (await cluster.patch(CONFIG_MAP, "a", "default", {"data": {"z": "3"}}))["data"] == {
        "x": "1",
        "z": "3",
    }
    with pytest.raises(AlreadyExists):
        await cluster.create(config_map())
    with pytest.raises(Conflict):
        await cluster.replace({**config_map(), "metadata": made["metadata"]})
    with pytest.raises(Conflict):
        await cluster.delete(CONFIG_MAP, "a", "default", uid="another")
    assert await cluster.delete(CONFIG_MAP, "a", "default", uid=made["metadata"]["uid"])
    assert not await cluster.delete(CONFIG_MAP, "a", "default")
    with pytest.raises(NotFound):
        await cluster.patch(CONFIG_MAP, "a", "default", {})


async def test_we_are_the_manager_of_what_we_apply(cluster: Cluster) -> None:
    made = await cluster.apply(config_map(x="1"))
    assert [
        (entry["manager"], entry["operation"]) for entry in made["metadata"]["managedFields"]
    ] == [("pilotlight", "Apply")]


async def test_a_dry_run_changes_nothing(cluster: Cluster, api_server: ApiServer) -> None:
    assert (await cluster.apply(config_map(x="1"), dry_run=True))["data"] == {"x": "1"}
    assert await cluster.get(CONFIG_MAP, "a", "default") is None
    assert api_server.requests.writes() == 0


async def test_another_managers_field_is_taken_only_by_force(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(config_map(x="theirs"))
    with pytest.raises(Conflict):
        await cluster.apply(config_map(x="ours"), force=False)
    assert api_server.requests.count(verb="apply") == 1  # an answer, not an accident
    assert (await cluster.apply(config_map(x="ours")))["data"] == {"x": "ours"}


async def test_a_list_has_all_pages_and_says_what_its_items_are(
    cluster: Cluster, api_server: ApiServer
) -> None:
    for index in range(1201):
        api_server.put(config_map(f"c{index:04}"))
    listing = await cluster.list(CONFIG_MAP, "default")
    names = [
        item["metadata"]["name"]
        for item in listing.items
        if item["metadata"]["name"].startswith("c")
    ]
    assert names == [f"c{index:04}" for index in range(1201)]
    assert {item["kind"] for item in listing.items} == {"ConfigMap"}
    assert api_server.requests.count(verb="list") == 3


async def test_a_field_that_the_cluster_does_not_know_is_refused_not_dropped(
    cluster: Cluster,
) -> None:
    with pytest.raises(Invalid, match="lifecycle"):
        await cluster.apply(service(lifecycle={}))


async def test_a_feature_that_is_off_is_refused_with_the_command_that_switches_it_on(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.hooks[:] = []
    refused = "validation failed: must not set the field(s): spec.template.spec.nodeSelector"
    api_server.faults.refusals.append(("services.serving.knative.dev", refused))
    with pytest.raises(Invalid, match="kubectl patch configmap/config-features") as caught:
        await cluster.apply(service(nodeSelector={"a": "b"}))
    assert "kubernetes.podspec-nodeselector" in caught.value.problems[0].fix


async def test_a_missing_right_names_the_rule(cluster: Cluster, api_server: ApiServer) -> None:
    api_server.rights.deny("list", "pods")
    with pytest.raises(Forbidden) as caught:
        await cluster.list(POD)
    assert caught.value.rule == '{apiGroups: [""], resources: ["pods"], verbs: ["list"]}'
    assert not await cluster.may(ApiRequest(verb="list", kind=POD))
    assert await cluster.may(ApiRequest(verb="get", kind=POD))


async def test_a_missing_kind_names_what_to_install(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.remove_kind("services.serving.knative.dev")
    for call in (
        cluster.get(SERVICE, "a", "default"),
        cluster.list(SERVICE),
        cluster.apply(service()),
    ):
        with pytest.raises(KindMissing, match="install Knative Serving"):
            await call


async def test_nothing_is_made_in_a_namespace_on_its_way_out(cluster: Cluster) -> None:
    await cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "going"}})
    held = config_map("held", "going")
    held["metadata"]["finalizers"] = ["example.com/hold"]
    await cluster.create(held)
    await cluster.delete(NAMESPACE, "going")
    with pytest.raises(NamespaceEnding, match="going"):
        await cluster.apply(config_map("late", "going"))


async def test_an_absent_namespace_is_named(cluster: Cluster) -> None:
    with pytest.raises(NotFound, match="namespace nowhere"):
        await cluster.apply(config_map(namespace="nowhere"))


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_fails_for_a_while_is_asked_again(
    cluster: Cluster, api_server: ApiServer, status: int
) -> None:
    api_server.faults.add(Fault(status=status, times=3))
    assert (await cluster.apply(config_map(x="1")))["data"] == {"x": "1"}
    assert api_server.requests.count(verb="apply") == 4


async def test_a_token_that_just_ended_is_renewed_once(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.faults.add(Fault(status=401, times=1))
    assert (await cluster.apply(config_map(x="1")))["data"] == {"x": "1"}
    api_server.faults.add(Fault(status=401))
    with pytest.raises(BadCredentials, match="does not accept our credentials"):
        await cluster.apply(config_map(x="2"))
    assert api_server.requests.count(verb="apply") == 4


async def test_attempts_are_bounded(cluster: Cluster, api_server: ApiServer) -> None:
    api_server.faults.add(Fault(status=429))
    with pytest.raises(Overloaded):
        await cluster.list(POD)
    assert api_server.requests.count(verb="list") == IMPATIENT.pauses.attempts


async def test_the_server_says_how_long_to_wait(cluster: Cluster, api_server: ApiServer) -> None:
    api_server.faults.add(Fault(status=429, retry_after_s=3600))
    with pytest.raises(Overloaded) as caught:  # longer than a call may take: not waited for
        await cluster.list(POD)
    assert caught.value.retry_after_s == 3600
    assert api_server.requests.count(verb="list") == 1


async def test_a_create_is_not_repeated_when_it_may_have_been_done(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.faults.add(Fault(reset=True, after=True, verb="create", times=1))
    with pytest.raises(ClusterUnreachable):
        await cluster.create(config_map())
    assert api_server.requests.count(verb="create") == 1
    assert api_server.get("v1", "ConfigMap", "a", "default") is not None


async def test_a_cut_connection_is_no_reason_to_give_up_what_can_be_repeated(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.faults.add(Fault(reset=True, after=True, times=2))
    assert (await cluster.apply(config_map(x="1")))["data"] == {"x": "1"}


async def test_a_server_that_says_nothing_is_given_up_in_time(
    api_server: ApiServer, tmp_path: Path
) -> None:
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    hasty = CallDeadlines(call_s=0.2, attempt_s=0.05, pauses=RetryDelays(first_s=0.001))
    api_server.faults.add(Fault(hang=True))
    async with await Cluster.connect(settings, patience=hasty) as cluster:
        with pytest.raises(ClusterUnreachable, match="no answer from the API server"):
            await cluster.get(POD, "a", "default")
        with pytest.raises(ClusterUnreachable, match="no answer"):
            async with aclosing(cluster.logs("a", "default")) as pieces:
                await anext(pieces)


async def test_an_absent_server_is_named(cluster: Cluster, api_server: ApiServer) -> None:
    url = api_server.url
    await api_server.stop()
    with pytest.raises(ClusterUnreachable, match=url):
        await cluster.get(POD, "a", "default")


async def test_a_server_that_comes_back_is_found_again(
    cluster: Cluster, api_server: ApiServer
) -> None:
    await cluster.version()
    await api_server.stop()
    asking = asyncio.create_task(cluster.version())
    await asyncio.sleep(0)
    await api_server.start()
    assert (await asking)["major"] == "1"


async def test_a_warning_is_an_error_unless_it_is_tolerated(
    api_server: ApiServer, tmp_path: Path
) -> None:
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    api_server.hooks.append(
        lambda review: (
            review.warn("drop: [all] should be upper case")
            if review.resource.kind == "Service"
            else None
        )
    )
    async with await Cluster.connect(settings, patience=IMPATIENT) as strict:
        manifest = service()
        with pytest.raises(ManifestWarned) as caught:
            await strict.apply(manifest)
        assert caught.value.warnings == ("drop: [all] should be upper case",)
        assert caught.value.result["metadata"]["name"] == "embed"
    async with await Cluster.connect(
        settings, patience=IMPATIENT, tolerated=["should be upper case"]
    ) as tolerant:
        assert (await tolerant.apply(manifest))["metadata"]["name"] == "embed"


async def test_logs_are_what_the_pod_printed(cluster: Cluster, api_server: ApiServer) -> None:
    spec = {"containers": [{"name": "user", "image": "registry.example/a"}]}
    api_server.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", "namespace": "default"},
            "spec": spec,
        }
    )
    api_server.logs.texts["default", "p", "user"] = "one\ntwo\n"
    assert (
        b"".join([piece async for piece in cluster.logs("p", "default", container="user")])
        == b"one\ntwo\n"
    )
    with pytest.raises(NotFound):
        async with aclosing(cluster.logs("q", "default")) as pieces:
            await anext(pieces)


async def test_no_connection_is_left_open(api_server: ApiServer, tmp_path: Path) -> None:
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    async with await Cluster.connect(settings) as cluster:
        watch = cluster.watch(POD)
        assert (await anext(watch)).type == "SYNCED"
        reading = asyncio.create_task(anext(watch))
        while not api_server.watches:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while api_server.watches:
            await asyncio.sleep(0.001)


def test_an_unknown_kind_is_told_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="does not know this kind"):
        kind_of({"apiVersion": "v2", "kind": "Pod"})
    assert issubclass(ManifestWarned, ClusterError)


async def test_the_environments_proxy_is_used_unless_it_names_the_api_server(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "http://127.0.0.1:9"  # discard: nothing listens
    monkeypatch.setenv("http_proxy", nowhere)
    monkeypatch.setenv("no_proxy", "")
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "config")))
    async with await Cluster.connect(settings, patience=IMPATIENT) as cluster:
        with pytest.raises(ClusterUnreachable, match=r"127\.0\.0\.1:9"):
            await cluster.get(POD, "a", "default")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with await Cluster.connect(settings, patience=IMPATIENT) as cluster:
        assert await cluster.get(POD, "a", "default") is None
