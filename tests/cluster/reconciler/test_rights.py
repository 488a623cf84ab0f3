"""Controller and activators with the chart's rights and policies alone: what they do is allowed,
and nothing else is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.doctor.checks import examine_cluster
from pilotlight.kubernetes.errors import Forbidden
from pilotlight.kubernetes.kinds import NAMESPACE, POD, ROLE_BINDING, SECRET
from pilotlight.kubernetes.manifests.tenant_namespace import (
    ACTIVATOR_BINDING,
    CONTROLLER_BINDING,
    Tenancy,
    namespace_manifests,
)
from pilotlight.kubernetes.settings import ClusterSettings
from tests.cluster.reconciler.conftest import Bench
from tests.fakes.chart import Rendering, install_rights, render
from tests.fakes.fed_platform import ACME, spec

RBAC = "rbac.authorization.k8s.io/v1"
COST = "controller.kubernetes.io/pod-deletion-cost"
LABELS = {names.MANAGED_BY: "pilotlight", names.TENANT: ACME.id, names.ENVIRONMENT: "main"}
Json = dict[str, Any]


@dataclass(kw_only=True)
class Installed:
    """A bench whose reconciler is the chart's controller, and the other accounts of the cluster."""

    bench: Bench
    controller: Cluster
    activator: Cluster

    async def deploy(self) -> None:
        """A function with a secret, until it is ready."""
        self.bench.platform.tenant()
        self.bench.platform.secret("api", {"TOKEN": "s3"})
        self.bench.platform.function(spec(secrets=("api",)))
        async with self.bench.running():
            await self.bench.until_phase("ready")
            await self.bench.until_quiet()

    def add_namespace(self) -> None:
        """The tenant's namespace and the RoleBindings in it, as the controller makes them."""
        tenancy = Tenancy.of(
            ACME,
            environment="main",
            settings=self.controller.settings,
            platform=self.bench.platform.identity().id,
        )
        for manifest in namespace_manifests(tenancy):
            if manifest["kind"] in (NAMESPACE.kind, ROLE_BINDING.kind):
                self.bench.server.put(manifest)

    def bindings(self, namespace: str = "fn-acme") -> dict[str, str]:
        """Name of a RoleBinding → account that it binds."""
        found = self.bench.server.list(RBAC, "RoleBinding", namespace)
        return {one["metadata"]["name"]: one["subjects"][0]["name"] for one in found}

    def pod(self, namespace: str, **metadata: Any) -> Json:
        """A pod that is there."""
        container = {"name": "user-container", "image": "registry.example/a@sha256:1"}
        body = {
            "metadata": {"name": "one", "namespace": namespace, **metadata},
            "spec": {"containers": [container]},
        }
        return self.bench.server.put({"apiVersion": "v1", "kind": "Pod", **body})

    def refused(self) -> list[str]:
        """What clients asked for that they may not."""
        return [
            f"{one.verb} {one.resource} in {one.namespace}"
            for one in self.bench.server.requests
            if one.status in (403, 422)
        ]


@pytest.fixture(name="chart", scope="module")
def _chart() -> Rendering:
    return render({})


@pytest.fixture(name="site")
async def _site(bench: Bench, chart: Rendering, tmp_path: Path) -> AsyncIterator[Installed]:
    server = bench.server
    install_rights(chart, server)
    async with contextlib.AsyncExitStack() as stack:
        settings = {}
        for account in ("pilotlight-controller", "pilotlight-activator"):
            file = server.write_kubeconfig(
                tmp_path / account, server.rights.add_account("pilotlight", account)
            )
            settings[account] = replace(
                bench.settings, kubeconfig=str(file), namespace="pilotlight"
            )
        bench.settings = settings["pilotlight-controller"]
        clusters = [
            await stack.enter_async_context(await Cluster.connect(one)) for one in settings.values()
        ]
        yield Installed(bench=bench, controller=clusters[0], activator=clusters[1])


# -- what the platform does ------------------------------------------------------------------------
async def test_a_function_is_deployed_and_removed_with_the_charts_rights(site: Installed) -> None:
    bench = site.bench
    await site.deploy()
    assert site.bindings() == {
        CONTROLLER_BINDING: "pilotlight-controller",
        ACTIVATOR_BINDING: "pilotlight-activator",
    }
    assert bench.server.get("v1", "Secret", "secret-api", "fn-acme") is not None
    async with bench.running():
        bench.platform.no_function(f"{ACME.id}/main/search/embed")
        await bench.until(lambda: not bench.server.list("serving.knative.dev/v1", "Service"))
        bench.platform.no_secret("api")
        await bench.until(lambda: not bench.server.list("v1", "Secret", "fn-acme"))
        await bench.until_quiet()
        assert site.refused() == []
        bench.platform.no_tenant()
        await bench.until(lambda: bench.server.get("v1", "Namespace", "fn-acme") is None)


async def test_what_goes_with_its_namespace_is_no_failure(site: Installed) -> None:
    """The RoleBinding may go before what it lets the controller delete."""
    bench = site.bench
    await site.deploy()
    held = {"name": "held", "namespace": "fn-acme", "finalizers": ["example.com/hold"]}
    bench.server.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": held})
    async with await Cluster.connect(ClusterSettings(kubeconfig=str(bench.kubeconfig))) as admin:
        await admin.delete(NAMESPACE, "fn-acme", None)
        await bench.until(lambda: not site.bindings())
    left = {
        "name": "search-embed-v1-000001",
        "namespace": "fn-acme",
        "labels": {**LABELS, names.FUNCTION_ID: "f-1"},
        "uid": "1",
    }
    async with Informers(site.controller, on_change=lambda *_: None) as mirror:
        writer = Applier(site.controller, mirror, owns=lambda _: True)
        await writer.remove(kinds.CONFIG_MAP, {"metadata": left})
        bench.server.add_namespace("staying")
        with pytest.raises(Forbidden):
            await writer.remove(kinds.CONFIG_MAP, {"metadata": {**left, "namespace": "staying"}})


async def test_doctor_finds_the_rights_complete(site: Installed) -> None:
    await site.deploy()
    for cluster, role in ((site.controller, "controller"), (site.activator, "activator")):
        found = await examine_cluster(cluster.settings, role=role)  # type: ignore[arg-type]
        assert [one.state for one in found if one.what == f"rights of {role}"] == ["ok"]


async def test_bindings_are_put_right_when_somebody_changes_them(site: Installed) -> None:
    bench = site.bench
    bench.platform.tenant()
    bench.platform.function(spec())
    async with (
        bench.running(),
        await Cluster.connect(ClusterSettings(kubeconfig=str(bench.kubeconfig))) as admin,
    ):
        await bench.until_phase("ready")
        whole = site.bindings()
        await admin.delete(ROLE_BINDING, ACTIVATOR_BINDING, "fn-acme")
        await bench.until(lambda: site.bindings() == whole)
        stranger = {"kind": "ServiceAccount", "name": "default", "namespace": "fn-acme"}
        await admin.patch(ROLE_BINDING, ACTIVATOR_BINDING, "fn-acme", {"subjects": [stranger]})
        await bench.until(lambda: site.bindings() == whole)


async def test_a_secret_that_somebody_changed_is_put_right_by_a_watch_of_its_namespace(
    site: Installed,
) -> None:
    bench = site.bench
    bench.platform.tenant()
    bench.platform.secret("api", {"TOKEN": "s3"})
    bench.platform.function(spec(secrets=("api",)))

    def watches() -> list[str]:
        return [
            one.namespace
            for one in bench.server.requests
            if (one.verb, one.resource) == ("watch", "secrets")
        ]

    async with (
        bench.running(),
        await Cluster.connect(ClusterSettings(kubeconfig=str(bench.kubeconfig))) as admin,
    ):
        await bench.until_phase("ready")
        whole = bench.server.get("v1", "Secret", "secret-api", "fn-acme")
        assert whole is not None
        await bench.until(lambda: "fn-acme" in watches())
        await admin.patch(SECRET, "secret-api", "fn-acme", {"data": {"TOKEN": "eA=="}})
        await bench.until(
            lambda: (
                (bench.server.get("v1", "Secret", "secret-api", "fn-acme") or {}).get("data")
                == whole["data"]
            )
        )
        await admin.delete(SECRET, "secret-api", "fn-acme")
        await bench.until(
            lambda: (
                (bench.server.get("v1", "Secret", "secret-api", "fn-acme") or {}).get("data")
                == whole["data"]
            )
        )
    assert set(watches()) == {"fn-acme"}


async def test_a_binding_of_another_role_is_made_anew(site: Installed) -> None:
    """After the release was renamed; a role of a binding cannot be changed."""
    bench = site.bench
    await site.deploy()
    before = bench.server.get(RBAC, "RoleBinding", ACTIVATOR_BINDING, "fn-acme")
    assert before is not None
    async with await Cluster.connect(ClusterSettings(kubeconfig=str(bench.kubeconfig))) as admin:
        await admin.delete(ROLE_BINDING, ACTIVATOR_BINDING, "fn-acme")
    bench.server.put(
        {
            **before,
            "metadata": {**_bare(before), "resourceVersion": ""},
            "roleRef": {**before["roleRef"], "name": "old"},
        }
    )
    async with bench.running():
        await bench.until(
            lambda: _role(bench, ACTIVATOR_BINDING) == "pilotlight:pilotlight-activator:tenant"
        )
    assert site.refused() == []


async def test_namespaces_of_an_earlier_version_get_their_bindings(site: Installed) -> None:
    """Also those without a function: what is left in them has to be removed some day."""
    bench = site.bench
    annotations = {names.PATH: f"{ACME.id}/main"}
    bench.server.put(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "fn-acme", "labels": LABELS, "annotations": annotations},
        }
    )
    bench.platform.tenant()
    bench.platform.adopt("unlabelled")
    async with bench.running():
        await bench.until(lambda: len(site.bindings()) == 2)
        await bench.until_quiet()
    assert site.refused() == []


async def test_a_binding_that_takes_effect_late_fails_nothing(site: Installed) -> None:
    bench = site.bench
    bench.platform.tenant()
    bench.platform.function(spec())
    late = bench.server.rights.deny("create", "*", namespace="fn-acme")
    late.resource = "secrets"  # what is looked for
    async with bench.running():
        await bench.until(
            lambda: any(
                one.resource == "selfsubjectaccessreviews.authorization.k8s.io"
                for one in bench.server.requests
            )
        )
        assert bench.server.list("v1", "LimitRange", "fn-acme") == []
        bench.server.rights.denied.remove(late)
        await bench.until_phase("ready")


# -- what an activator may do ----------------------------------------------------------------------


async def test_an_activator_touches_no_pod_outside_of_tenants_namespaces(site: Installed) -> None:
    site.add_namespace()
    site.pod("kube-system")
    for namespace in ("kube-system", "pilotlight", "default"):
        for work in (
            site.activator.patch(POD, "one", namespace, {"metadata": {"annotations": {COST: "1"}}}),
            site.activator.delete(POD, "one", namespace),
        ):
            with pytest.raises(Forbidden):
                await work
    assert site.bench.server.get("v1", "Pod", "one", "kube-system") is not None


async def test_an_activator_reads_no_secret_and_grants_nothing(site: Installed) -> None:
    site.add_namespace()
    for deed in (
        ApiRequest(verb="list", kind=SECRET, namespace="fn-acme"),
        ApiRequest(verb="create", kind=POD, namespace="fn-acme"),
        ApiRequest(verb="create", kind=POD, namespace="fn-acme", subresource="exec"),
        ApiRequest(verb="create", kind=ROLE_BINDING, namespace="fn-acme"),
        ApiRequest(verb="create", kind=NAMESPACE),
    ):
        assert not await site.activator.may(deed), deed


# -- what the controller may do --------------------------------------------------------------------
async def test_the_controller_reads_secrets_and_runs_commands_in_tenants_namespaces_only(
    site: Installed,
) -> None:
    site.add_namespace()
    for namespace, is_allowed in (
        ("fn-acme", True),
        ("kube-system", False),
        ("pilotlight", False),
        (None, False),
    ):
        for deed in (
            ApiRequest(verb="list", kind=SECRET, namespace=namespace),
            ApiRequest(verb="create", kind=POD, namespace=namespace, subresource="exec"),
            ApiRequest(verb="delete", kind=POD, namespace=namespace),
            ApiRequest(verb="create", kind=kinds.SERVICE, namespace=namespace),
        ):
            assert await site.controller.may(deed) is is_allowed, deed


def _bare(item: Json) -> Json:
    return {key: item["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}


def _role(bench: Bench, name: str) -> str:
    found = bench.server.get(RBAC, "RoleBinding", name, "fn-acme")
    return str(found["roleRef"]["name"]) if found is not None else ""
