"""Controller and activators with the chart's rights and policies alone: what they do is allowed,
and nothing else is."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.controller.kubernetes.orphaned_journals import OrphanedJournal, drain_job
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.doctor.checks import examine_cluster
from pilotlight.kubernetes.errors import ClusterError, Forbidden, Invalid
from pilotlight.kubernetes.kinds import NAMESPACE, NODE, POD, ROLE_BINDING, SECRET
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
async def test_an_activator_changes_the_deletion_cost_of_a_tenants_pod_and_deletes_it(
    site: Installed,
) -> None:
    site.add_namespace()
    for metadata in (
        {},
        {"annotations": {"a": "b"}},
        {"annotations": {COST: "1"}, "labels": {"a": "b"}},
    ):
        pod = site.pod("fn-acme", **metadata)
        patched = await site.activator.patch(
            POD, "one", "fn-acme", {"metadata": {"annotations": {COST: "-100"}}}
        )
        assert patched["metadata"]["annotations"] == {
            **metadata.get("annotations", {}),
            COST: "-100",
        }
        assert await site.activator.delete(POD, "one", "fn-acme", uid=pod["metadata"]["uid"])


MORE: tuple[tuple[Json, str], ...] = (
    ({"spec": {"containers": [{"name": "user-container", "image": "evil"}]}}, "spec"),
    ({"spec": {"activeDeadlineSeconds": 1}}, "spec"),
    ({"metadata": {"labels": {"pilotlight.dev/tenant": "t-other"}}}, "labels"),
    ({"metadata": {"labels": None}}, "labels"),
    ({"metadata": {"annotations": {"pilotlight.dev/key": "other"}}}, "annotation"),
    ({"metadata": {"annotations": {"more": "x", COST: "1"}}}, "annotation"),
    ({"metadata": {"annotations": None}}, "annotation"),
    ({"metadata": {"ownerReferences": None}}, "owners"),
    ({"metadata": {"finalizers": ["example.com/hold"]}}, "finalizers"),
)


async def test_an_activator_changes_nothing_else_of_a_pod(site: Installed) -> None:
    site.add_namespace()
    metadata = {"name": "r", "namespace": "fn-acme"}
    owner = site.bench.server.put(
        {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": metadata,
            "spec": _replica_set(),
        }
    )
    reference = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": "r",
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    before = site.pod(
        "fn-acme",
        labels={"a": "b"},
        annotations={"pilotlight.dev/key": "k"},
        ownerReferences=[reference],
    )
    for patch, named in MORE:
        with pytest.raises(Invalid, match=named):
            await site.activator.patch(POD, "one", "fn-acme", patch)
    assert site.bench.server.get("v1", "Pod", "one", "fn-acme") == before


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


async def test_a_binding_by_mistake_does_not_give_an_activator_other_namespaces(
    site: Installed,
) -> None:
    site.pod("kube-system")
    role = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "pilotlight:pilotlight-activator:tenant",
    }
    subject = {"kind": "ServiceAccount", "name": "pilotlight-activator", "namespace": "pilotlight"}
    metadata = {"name": "mistake", "namespace": "kube-system"}
    site.bench.server.put(
        {
            "apiVersion": RBAC,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": [subject],
        }
    )
    for work in (
        site.activator.patch(POD, "one", "kube-system", {"metadata": {"annotations": {COST: "1"}}}),
        site.activator.delete(POD, "one", "kube-system"),
    ):
        with pytest.raises(Invalid, match="in tenants' namespaces only"):
            await work


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


def _binding(namespace: str, role: str, account: str = "pilotlight-controller") -> Json:
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "pilotlight"}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    metadata = {"name": "mine", "namespace": namespace}
    return {
        "apiVersion": RBAC,
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": ref,
        "subjects": [subject],
    }


async def _refusal(site: Installed, manifest: Json) -> ClusterError:
    with pytest.raises((Forbidden, Invalid)) as caught:
        await site.controller.apply(manifest)
    return caught.value


async def test_the_controller_binds_only_two_roles_to_accounts_of_the_platform_in_namespaces_of_its_own(
    site: Installed,
) -> None:
    site.bench.server.put(
        {
            "apiVersion": RBAC,
            "kind": "ClusterRole",
            "metadata": {"name": "all"},
            "rules": [_everything()],
        }
    )
    site.add_namespace()
    role = "pilotlight:pilotlight-controller:tenant"
    assert isinstance(await _refusal(site, _binding("fn-acme", "all")), Forbidden)
    assert "only in namespaces with the label" in str(
        await _refusal(site, _binding("kube-system", role))
    )
    assert "only to accounts of the platform" in str(
        await _refusal(site, _binding("fn-acme", role, account="default"))
    )
    await site.controller.apply(_binding("fn-acme", role))


async def test_the_controller_takes_no_namespace_over(site: Installed) -> None:
    site.bench.server.add_namespace("theirs")
    for work in (
        site.controller.patch(NAMESPACE, "theirs", None, {"metadata": {"labels": LABELS}}),
        site.controller.delete(NAMESPACE, "theirs", None),
        site.controller.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "new"}}
        ),
    ):
        with pytest.raises(Invalid, match="label"):
            await work
    site.add_namespace()
    with pytest.raises(Invalid, match="label"):
        await site.controller.patch(
            NAMESPACE, "fn-acme", None, {"metadata": {"labels": {names.MANAGED_BY: None}}}
        )


async def test_the_controller_changes_only_its_labels_of_nodes(site: Installed) -> None:
    site.bench.server.put(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": {"zone": "a"}}}
    )
    for _ in range(2):  # the second time there is something to change
        patched = await site.controller.patch(
            NODE,
            "n",
            None,
            {
                "metadata": {
                    "labels": {f"{names.cache_domain(site.controller.settings)}/w-1": "hot"}
                }
            },
        )
        assert patched["metadata"]["labels"]["zone"] == "a"
    await site.controller.patch(
        NODE,
        "n",
        None,
        {"metadata": {"labels": {f"{names.cache_domain(site.controller.settings)}/w-1": None}}},
    )
    for patch in (
        {"metadata": {"labels": {"zone": "b"}}},
        {"metadata": {"labels": {"zone": None}}},
        {"metadata": {"labels": {"pilotlight.dev/other": "b"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"finalizers": ["example.com/hold"]}},
        {"spec": {"unschedulable": True}},
    ):
        with pytest.raises(Invalid, match="of a node"):
            await site.controller.patch(NODE, "n", None, patch)


async def test_the_controllers_jobs_have_no_rights_on_their_node(
    site: Installed, chart: Rendering
) -> None:
    activators = copy.deepcopy(chart.one("StatefulSet", "-activator"))
    activators["metadata"]["namespace"] = "pilotlight"
    claim = {
        "metadata": {
            "name": "journal-pilotlight-activator-4",
            "namespace": "pilotlight",
            "uid": "u",
        }
    }
    job = drain_job(
        activators, OrphanedJournal(claim=claim, ordinal=4), labels={names.MANAGED_BY: "pilotlight"}
    )
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    root = {"name": "root", "hostPath": {"path": "/"}}
    for worse, named in (
        ({**pod, "volumes": [*pod["volumes"], root]}, "no directory of its node"),
        ({**pod, "serviceAccountName": "pilotlight-node"}, "as an activator"),
        ({**pod, "hostPID": True}, "namespaces of its own"),
        (
            {**pod, "containers": [{**container, "securityContext": {"privileged": True}}]},
            "not privileged",
        ),
    ):
        with pytest.raises(Invalid, match=named):
            await site.controller.create(
                {**job, "spec": {"template": {**job["spec"]["template"], "spec": worse}}}
            )
    await site.controller.create(job)
    assert await site.controller.delete(kinds.JOB, job["metadata"]["name"], "pilotlight")


# -- pods of tenants -------------------------------------------------------------------------------
OWN = f"/var/lib/pilotlight/node/{ACME.id}"


def _pod(path: str, *, read_only: bool = True, security: Json | None = None, **more: Any) -> Json:
    mount = {"name": "node", "mountPath": "/node", "readOnly": read_only}
    container = {
        "name": "a",
        "image": "i",
        "volumeMounts": [mount],
        "securityContext": security or {},
    }
    body = {
        "containers": [container],
        "volumes": [{"name": "node", "hostPath": {"path": path}}, {"name": "s", "emptyDir": {}}],
        **more,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one", "namespace": "fn-acme"},
        "spec": body,
    }


BAD_PODS: tuple[tuple[Json, str], ...] = (
    (_pod("/etc"), "but that of its tenant"),
    (_pod("/var/lib/pilotlight/node"), "but that of its tenant"),
    (_pod("/var/lib/pilotlight/node/t-other"), "but that of its tenant"),
    (_pod(OWN, read_only=False), "read-only"),
    (
        _pod(
            OWN,
            initContainers=[
                {"name": "b", "image": "i", "volumeMounts": [{"name": "node", "mountPath": "/x"}]}
            ],
        ),
        "read-only",
    ),
    (_pod(OWN, hostNetwork=True), "namespaces of its own"),
    (_pod(OWN, hostPID=True), "namespaces of its own"),
    (_pod(OWN, security={"privileged": True}), "not privileged"),
    (_pod(OWN, security={"capabilities": {"add": ["SYS_ADMIN"]}}), "no capabilities added"),
)


async def test_a_pod_in_a_tenants_namespace_sees_its_tenants_directory_read_only(
    site: Installed,
) -> None:
    site.add_namespace()
    async with await Cluster.connect(
        ClusterSettings(kubeconfig=str(site.bench.kubeconfig))
    ) as admin:
        for pod, named in BAD_PODS:
            with pytest.raises(Invalid, match=named):
                await admin.create(pod)
        await admin.create(_pod(OWN, security={"capabilities": {"drop": ["ALL"]}}))
        elsewhere = _pod("/etc", security={"privileged": True})
        elsewhere["metadata"]["namespace"] = "kube-system"
        await admin.create(elsewhere)


def _bare(item: Json) -> Json:
    return {key: item["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}


def _role(bench: Bench, name: str) -> str:
    found = bench.server.get(RBAC, "RoleBinding", name, "fn-acme")
    return str(found["roleRef"]["name"]) if found is not None else ""


def _everything() -> Json:
    return {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}


def _replica_set() -> Json:
    labels = {"app": "r"}
    container = {"name": "a", "image": "i"}
    return {
        "replicas": 0,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
    }
