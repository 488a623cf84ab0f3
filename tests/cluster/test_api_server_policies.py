"""The chart's admission policies, enforced by an API server: the tests' own, and with
`--kubeconfig` a real one. Each promise of docs/reference/security/cluster.md that a policy
keeps is broken by somebody whose rights would allow it."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.controller.kubernetes.orphaned_journals import OrphanedJournal, drain_job
from pilotlight.kubernetes import names
from pilotlight.kubernetes.manifests.tenant_namespace import RUNNER
from pilotlight.kubernetes.manifests.warm_pods import deployment
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import GIB
from pilotlight.spec.warm_shape import WarmShape
from tests.fakes.api_client import api_client, token_in
from tests.fakes.installed_chart import InstalledChart, installed_chart
from tests.fakes.kubernetes.thread import running_api_server
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.api_server

Json = dict[str, Any]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
COST = "controller.kubernetes.io/pod-deletion-cost"
IMAGE = f"registry.example/a@sha256:{'0' * 64}"
SHAPE = WarmShape(name="small", cpu=0.1, memory_bytes=GIB, min_pods=1, max_pods=1)
TENANT = "t-acme"
NOWHERE = {"schedulerName": "nobody"}
"""Nobody runs these pods."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A release in a cluster: its namespace, that of a tenant and that of warm pods are there."""

    admin: httpx.Client
    anonymous: httpx.Client
    settings: ClusterSettings
    chart: InstalledChart

    @property
    def namespace(self) -> str:
        """The platform's."""
        return self.settings.namespace

    @property
    def tenants(self) -> str:
        """A tenant's."""
        return f"{self.settings.namespace_prefix}acme"

    @property
    def warm(self) -> str:
        """Of warm pods."""
        return names.warm_namespace(self.settings)

    def ask(self, who: str, method: str, path: str, body: Any = None, **query: str) -> Json:
        """A request of `admin`, `controller` or `activator`; the answer with its `code`."""
        client = self.admin if who == "admin" else self.anonymous
        headers = {"content-type": "application/json"}
        if method == "PATCH":
            headers["content-type"] = JSON_PATCH if isinstance(body, list) else MERGE
        if who != "admin":
            headers["authorization"] = f"Bearer {self.chart.tokens[who]}"
        answer = client.request(method, path, json=body, headers=headers, params=query)
        return {**answer.json(), "code": answer.status_code}

    def expect(self, said: str, who: str, method: str, path: str, body: Any = None) -> None:
        """A policy refuses it, with these words."""
        answer = self.ask(who, method, path, body)
        assert answer["code"] == 422, answer
        assert said in answer["message"], answer
        assert "ValidatingAdmissionPolicy" in answer["message"]

    def allowed(
        self, who: str, method: str, path: str, body: Any = None, *, is_kept: bool = False
    ) -> Json:
        """It is allowed; a dry run unless `is_kept`."""
        answer = self.ask(who, method, path, body, **({} if is_kept else {"dryRun": "All"}))
        assert answer["code"] in (200, 201), answer
        return answer

    def pod(self, namespace: str, name: str, **metadata: Any) -> str:
        """A pod that nobody runs; its path."""
        body = {
            "metadata": {"name": name, **metadata},
            "spec": {**NOWHERE, "containers": [{"name": "user-container", "image": IMAGE}]},
        }
        self.allowed("admin", "POST", pods(namespace), body, is_kept=True)
        return f"{pods(namespace)}/{name}"

    def warm_pod(self, name: str) -> str:
        """A warm pod that nobody runs; its path."""
        template = self.template()
        body = {
            "metadata": {"name": name, **template["metadata"]},
            "spec": {**template["spec"], **NOWHERE},
        }
        self.allowed("admin", "POST", pods(self.warm), body, is_kept=True)
        return f"{pods(self.warm)}/{name}"

    def template(self) -> Json:
        """Of the pool's Deployment."""
        made = deployment(SHAPE, self.settings, platform="p-1", replicas=1)
        found: Json = made["spec"]["template"]
        return found


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


@pytest.fixture(scope="module")
def kubeconfig(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Path]:
    """Of a real cluster, else of an API server of the tests."""
    given: str | None = request.config.getoption("--kubeconfig")
    if given:
        yield Path(given)
        return
    with running_api_server() as threaded:
        yield threaded.server.write_kubeconfig(tmp_path_factory.mktemp("api") / "kubeconfig")


@pytest.fixture(scope="module")
def site(kubeconfig: Path) -> Iterator[Site]:
    """The chart's accounts, rights and policies, with warm pods."""
    namespace = f"pl-{uuid.uuid4().hex[:8]}"
    section: dict[str, Any] = {
        "namespace": namespace,
        "namespace_prefix": f"{namespace}-fn-",
        "runtime_image": IMAGE,
        "node_path": "/var/lib/pl-tests/node",
    }
    shape = {"name": SHAPE.name, "cpu": SHAPE.cpu, "memory_bytes": SHAPE.memory_bytes}
    settings = ClusterSettings(**section, warm_pods=[SHAPE])
    with (
        api_client(kubeconfig) as admin,
        api_client(kubeconfig, is_anonymous=True) as anonymous,
    ):
        _add_namespace(admin, namespace)
        try:
            with installed_chart(
                admin,
                anonymous,
                namespace,
                {**section, "warm_pods": [shape]},
                admin_token=token_in(kubeconfig) or "",
            ) as chart:
                site = Site(admin=admin, anonymous=anonymous, settings=settings, chart=chart)
                ours = {names.MANAGED_BY: names.manager_of(settings)}
                _add_namespace(admin, site.tenants, {**ours, names.TENANT: TENANT})
                _add_namespace(admin, site.warm, ours)
                runner = {"metadata": {"name": RUNNER}}
                path = f"/api/v1/namespaces/{site.warm}/serviceaccounts"
                site.allowed("admin", "POST", path, runner, is_kept=True)
                _bind(site)
                yield site
        finally:
            for one in (f"{namespace}-fn-acme", f"{namespace}-warm", namespace):
                admin.delete(f"/api/v1/namespaces/{one}")


def _add_namespace(admin: httpx.Client, name: str, labels: Json | None = None) -> None:
    """With its default account, without which there are no pods."""
    body = {"metadata": {"name": name, "labels": labels or {}}}
    admin.post("/api/v1/namespaces", json=body).raise_for_status()
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_until(lambda: admin.get(account).status_code == 200)


def binding(site: Site, role: str, account: str, name: str) -> Json:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": f"{site.namespace}:{role}",
        },
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": site.namespace}],
    }


def _bindings(namespace: str) -> str:
    return f"{RBAC}/namespaces/{namespace}/rolebindings"


CONTROLLER, ACTIVATOR = "pilotlight-controller", "pilotlight-activator"


def _bind(site: Site) -> None:
    """As the controller does: its own rights in a namespace first."""
    for namespace, role, account in (
        (site.tenants, f"{CONTROLLER}:tenant", CONTROLLER),
        (site.tenants, f"{ACTIVATOR}:tenant", ACTIVATOR),
        (site.warm, f"{CONTROLLER}:warm", CONTROLLER),
    ):
        body = binding(site, role, account, account)
        site.allowed("controller", "POST", _bindings(namespace), body, is_kept=True)


# -- activators ------------------------------------------------------------------------------------
CHANGES: tuple[tuple[Json, str], ...] = (
    ({"spec": {"activeDeadlineSeconds": 1}}, "do not change the spec"),
    ({"metadata": {"labels": {"pilotlight.dev/tenant": "t-other"}}}, "do not change labels"),
    ({"metadata": {"labels": None}}, "do not change labels"),
    ({"metadata": {"annotations": {"pilotlight.dev/key": "other"}}}, "change no annotation"),
    ({"metadata": {"annotations": {"more": "x", COST: "1"}}}, "change no annotation"),
    ({"metadata": {"annotations": None}}, "change no annotation"),
    ({"metadata": {"ownerReferences": None}}, "do not change owners"),
    ({"metadata": {"finalizers": ["example.com/hold"]}}, "do not change finalizers"),
)


def test_an_activator_changes_the_deletion_cost_of_a_tenants_pod_alone_and_deletes_it(
    site: Site,
) -> None:
    kept = {"metadata": {"name": "kept"}}
    maps = f"/api/v1/namespaces/{site.tenants}/configmaps"
    uid = site.allowed("admin", "POST", maps, kept, is_kept=True)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "kept", "uid": uid}
    path = site.pod(
        site.tenants,
        "own",
        labels={"a": "b"},
        annotations={"pilotlight.dev/key": "k"},
        ownerReferences=[owner],
    )
    for change, said in CHANGES:
        site.expect(said, "activator", "PATCH", path, change)
    cost = {"metadata": {"annotations": {COST: "-100"}}}
    site.allowed("activator", "PATCH", path, cost)
    site.allowed("activator", "DELETE", path)


def test_a_binding_by_mistake_gives_an_activator_no_pods_elsewhere(site: Site) -> None:
    for namespace in (site.namespace, site.warm):
        path = (
            site.pod(namespace, "elsewhere")
            if namespace == site.namespace
            else site.warm_pod("elsewhere")
        )
        change = {"metadata": {"annotations": {COST: "1"}}}
        assert site.ask("activator", "PATCH", path, change)["code"] == 403
        mistake = binding(site, f"{ACTIVATOR}:tenant", ACTIVATOR, "mistake")
        site.allowed("admin", "POST", _bindings(namespace), mistake, is_kept=True)
        said = "in tenants' namespaces only"

        def is_bound(path: str = path) -> bool:
            return bool(site.ask("activator", "DELETE", path)["code"] != 403)

        wait_until(is_bound)
        site.expect(said, "activator", "PATCH", path, change)
        site.expect(said, "activator", "DELETE", path)


# -- the controller --------------------------------------------------------------------------------
def test_the_controller_takes_no_namespace_over(site: Site) -> None:
    labels = {"metadata": {"labels": {names.MANAGED_BY: names.manager_of(site.settings)}}}
    taken = f"/api/v1/namespaces/{site.namespace}"
    site.expect("with the label", "controller", "PATCH", taken, labels)
    site.expect("with the label", "controller", "DELETE", taken)
    new = {"metadata": {"name": f"{site.namespace}-new"}}
    site.expect("has the label", "controller", "POST", "/api/v1/namespaces", new)
    bare = {"metadata": {"labels": {names.MANAGED_BY: None}}}
    site.expect("has the label", "controller", "PATCH", f"/api/v1/namespaces/{site.tenants}", bare)


def test_the_controller_binds_its_roles_to_accounts_of_the_platform_in_its_namespaces(
    site: Site,
) -> None:
    tenant, warm = f"{CONTROLLER}:tenant", f"{CONTROLLER}:warm"
    for namespace, role, account, said in (
        (site.namespace, tenant, CONTROLLER, "only in namespaces with the label"),
        (site.tenants, tenant, "default", "only to accounts of the platform"),
        (site.warm, warm, ACTIVATOR, "only to itself"),
    ):
        body = binding(site, role, account, "mine")
        site.expect(said, "controller", "POST", _bindings(namespace), body)
    other = binding(site, tenant, CONTROLLER, "mine")
    other["roleRef"]["name"] = "cluster-admin"
    answer = site.ask("controller", "POST", _bindings(site.tenants), other)
    assert answer["code"] == 403, answer


def test_the_controller_changes_its_labels_of_a_node_alone(site: Site) -> None:
    node = f"/api/v1/nodes/{site.namespace}"
    site.allowed(
        "admin",
        "POST",
        "/api/v1/nodes",
        {"metadata": {"name": site.namespace, "labels": {"zone": "a"}}},
        is_kept=True,
    )
    try:
        for change in (
            {"metadata": {"labels": {"zone": "b"}}},
            {"metadata": {"labels": {"zone": None}}},
            {"metadata": {"labels": {"pilotlight.dev/other": "b"}}},
            {"metadata": {"labels": {"cache.pilotlight.dev/w-1": "hot"}}},  # another platform's
            {"metadata": {"annotations": {"a": "b"}}},
            {"metadata": {"finalizers": ["example.com/hold"]}},
            {"spec": {"unschedulable": True}},
        ):
            site.expect("of a node", "controller", "PATCH", node, change)
        label = f"{names.cache_domain(site.settings)}/w-1"
        for value in ("hot", None):
            mine = {"metadata": {"labels": {label: value}}}
            site.allowed("controller", "PATCH", node, mine, is_kept=True)
    finally:
        site.ask("admin", "DELETE", node)


def test_the_controllers_jobs_have_no_rights_on_their_node(site: Site) -> None:
    activators = copy.deepcopy(site.chart.rendering.one("StatefulSet", "-activator"))
    claim = {
        "metadata": {"name": "journal-a-4", "namespace": site.namespace, "uid": str(uuid.uuid4())}
    }
    job = drain_job(
        activators,
        OrphanedJournal(claim=claim, ordinal=4),
        labels={names.MANAGED_BY: names.manager_of(site.settings)},
    )
    path = f"/apis/batch/v1/namespaces/{site.namespace}/jobs"
    template = job["spec"]["template"]
    pod = template["spec"]
    privileged = {**pod["containers"][0], "securityContext": {"privileged": True}}
    root = {"name": "root", "hostPath": {"path": "/"}}
    for worse, said in (
        ({**pod, "volumes": [*pod["volumes"], root]}, "no directory of its node"),
        ({**pod, "serviceAccountName": "pilotlight-node"}, "as an activator"),
        ({**pod, "hostPID": True}, "namespaces of its own"),
        ({**pod, "containers": [privileged]}, "not privileged"),
    ):
        bad = {**job, "spec": {**job["spec"], "template": {**template, "spec": worse}}}
        site.expect(said, "controller", "POST", path, bad)
    site.allowed("controller", "POST", path, job)


# -- pods of tenants -------------------------------------------------------------------------------
def _pod(path: str, *, read_only: bool = True, security: Json | None = None, **more: Any) -> Json:
    mount = {"name": "node", "mountPath": "/node", "readOnly": read_only}
    container = {
        "name": "a",
        "image": IMAGE,
        "volumeMounts": [mount],
        "securityContext": security or {},
    }
    volumes = [{"name": "node", "hostPath": {"path": path}}]
    return {
        "metadata": {"name": "seen"},
        "spec": {"containers": [container], "volumes": volumes, **more},
    }


def test_a_pod_in_a_tenants_namespace_sees_its_tenants_directory_read_only(site: Site) -> None:
    root = site.settings.node_path
    own = f"{root}/{TENANT}"
    writable = {
        "name": "b",
        "image": IMAGE,
        "volumeMounts": [{"name": "node", "mountPath": "/x"}],
    }
    for pod, said in (
        (_pod("/etc"), "but that of its tenant"),
        (_pod(root), "but that of its tenant"),
        (_pod(f"{root}/t-other"), "but that of its tenant"),
        (_pod(f"{root}/warm"), "but that of its tenant"),
        (_pod(own, read_only=False), "read-only"),
        (_pod(own, initContainers=[writable]), "read-only"),
        (_pod(own, hostNetwork=True), "namespaces of its own"),
        (_pod(own, hostPID=True), "namespaces of its own"),
        (_pod(own, hostIPC=True), "namespaces of its own"),
        (_pod(own, security={"privileged": True}), "not privileged"),
        (_pod(own, security={"capabilities": {"add": ["SYS_ADMIN"]}}), "no capabilities added"),
    ):
        site.expect(said, "admin", "POST", pods(site.tenants), pod)
    good = _pod(own, security={"capabilities": {"drop": ["ALL"]}})
    site.allowed("admin", "POST", pods(site.tenants), good)


# -- warm pods -------------------------------------------------------------------------------------
def labels(**changed: str | None) -> Json:
    return {"metadata": {"labels": {f"{names.DOMAIN}/{k}": v for k, v in changed.items()}}}


def claim(site: Site, path: str) -> list[Json]:
    """A promotion, as `promotion_patch` writes it."""
    uid = site.ask("admin", "GET", path)["metadata"]["uid"]
    mine = {
        names.PROMOTED: SHAPE.name,
        names.TENANT: TENANT,
        names.FUNCTION_ID: "f-1",
        names.REVISION: "v1-1",
        names.NETWORK: "open",
    }
    shape = "/metadata/labels/pilotlight.dev~1warm-shape"
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": shape, "value": SHAPE.name},
        {"op": "remove", "path": shape},
        *(
            {"op": "add", "path": f"/metadata/labels/{key.replace('/', '~1')}", "value": value}
            for key, value in mine.items()
        ),
        {"op": "add", "path": "/metadata/annotations/pilotlight.dev~1key", "value": "f-1@v1-1"},
        {"op": "add", "path": "/metadata/annotations/pilotlight.dev~1attempt", "value": "i-1"},
    ]


def test_the_controller_alone_promotes_a_warm_pod_whole_and_once(site: Site) -> None:
    path = site.warm_pod("one")
    patch = claim(site, path)
    site.expect("the controller alone", "admin", "PATCH", path, patch)
    for part in (
        labels(tenant=TENANT),
        labels(promoted=SHAPE.name, tenant=TENANT),
        labels(**{"promoted": "large", "warm-shape": None, "tenant": TENANT}),
    ):
        site.expect("a promotion names", "controller", "PATCH", path, part)
    site.allowed("controller", "PATCH", path, patch, is_kept=True)
    for change in (
        labels(tenant="t-other"),
        labels(**{"function-id": None}),
        labels(network="none"),
        labels(**{"warm-shape": "small"}),
        labels(**{"warm-shape": "small", "promoted": None, "tenant": None}),
        {"metadata": {"annotations": {names.KEY: "f-2@v1"}}},
        {"metadata": {"annotations": {names.ATTEMPT: None}}},
    ):
        stays = "stays what it was promoted to"
        site.expect(stays, "controller", "PATCH", path, change)
        site.expect("the controller alone", "admin", "PATCH", path, change)
    for who in ("controller", "admin"):
        evil = {"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}
        site.expect("the spec of a pod", who, "PATCH", path, [evil])
    site.allowed("admin", "PATCH", path, {"metadata": {"labels": {"theirs": "x"}}})
    site.allowed("controller", "DELETE", path)


def test_a_warm_pod_begins_as_no_tenants_and_sees_the_agents_socket_alone(site: Site) -> None:
    template, root = site.template(), site.settings.node_path
    spec = {**template["spec"], **NOWHERE}
    volumes = [one for one in spec["volumes"] if one["name"] != "node"]
    mount = {"name": "node", "mountPath": "/pilotlight"}

    def seeing(path: str) -> Json:
        return {**spec, "volumes": [{"name": "node", "hostPath": {"path": path}}, *volumes]}

    for mine, body, said in (
        ({names.TENANT: TENANT}, spec, "begins as no tenant's"),
        ({names.PROMOTED: "small"}, spec, "begins as no tenant's"),
        ({names.FUNCTION_ID: "f-1"}, spec, "begins as no tenant's"),
        ({}, {**spec, "automountServiceAccountToken": True}, "no token"),
        ({}, seeing(root), "no directory of its node"),
        ({}, seeing(f"{root}/{TENANT}"), "no directory of its node"),
        ({}, {**spec, "containers": [{**spec["containers"][0], "volumeMounts": [mount]}]}, "only"),
        ({}, {**spec, "hostPID": True}, "namespaces of its own"),
    ):
        pod = {"metadata": {"name": "two", "labels": mine}, "spec": body}
        site.expect(said, "admin", "POST", pods(site.warm), pod)
    pod = {"metadata": {"name": "two", **template["metadata"]}, "spec": spec}
    site.allowed("admin", "POST", pods(site.warm), pod)


@pytest.mark.parametrize(
    "who, method, path",
    [
        ("activator", "GET", lambda site: f"/api/v1/namespaces/{site.tenants}/secrets"),
        ("activator", "POST", lambda site: pods(site.tenants)),
        ("activator", "POST", lambda site: _bindings(site.tenants)),
        ("activator", "POST", lambda _: "/api/v1/namespaces"),
        ("controller", "GET", lambda _: "/api/v1/secrets"),
        ("controller", "GET", lambda site: f"/api/v1/namespaces/{site.warm}/secrets"),
        ("controller", "GET", lambda _: "/api/v1/namespaces/kube-system/secrets"),
        ("controller", "POST", lambda site: pods(site.warm)),
        ("controller", "POST", lambda site: pods(site.tenants)),
        ("controller", "DELETE", lambda _: "/api/v1/namespaces/kube-system/pods/any"),
        ("controller", "POST", lambda site: f"/apis/apps/v1/namespaces/{site.tenants}/deployments"),
    ],
)
def test_what_no_role_allows_is_forbidden(
    site: Site, who: str, method: str, path: Callable[[Site], str]
) -> None:
    body = {"metadata": {"name": "any"}} if method == "POST" else None
    answer = site.ask(who, method, path(site), body)
    assert answer["code"] == 403, answer
