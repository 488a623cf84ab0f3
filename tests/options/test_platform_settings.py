"""Proofs of sections `platform` and `cluster` of platform.yaml. What `pilotlight render` and `doctor
--cluster` read is read on either fleet; what only a fleet's processes read is refused on the other."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from activator.knative.app import FleetContext, cluster_parts
from pilotlight.cli.commands.operations.drill import refuse_production
from pilotlight.controller.api.artifacts.container_images import repository_of
from pilotlight.controller.kubernetes.leader_election import identify
from pilotlight.controller.kubernetes.warm.sizes import wanted_size
from pilotlight.controller.kubernetes.warm.sizing import wanted_pods
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.crypto import ActivatorKey, load_activator_key, load_platform_key
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.metrics_server import metrics_token_file
from pilotlight.core.object_store import blob_store
from pilotlight.core.oci.image_reference import Repository
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid, load_section
from pilotlight.core.transport.endpoint import Endpoint, TlsFiles, controller_endpoint
from pilotlight.errors import Conflict, InvalidInput
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.credentials import find_credentials
from pilotlight.kubernetes.doctor.checks import run_checks
from pilotlight.kubernetes.errors import ManifestWarned
from pilotlight.kubernetes.manifests.revisions import RevisionOf, promoted_launch
from pilotlight.kubernetes.manifests.warm_pods import deployment
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import MIB, Clocks, Resources
from pilotlight.spec.warm_shape import WarmShape
from snapshotter.settings import SnapshotterSettings
from tests.activator.test_gateway import until
from tests.fakes.authority import Authority
from tests.fakes.fed_platform import FedPlatform, document_of, spec
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.routes import empty_table, spec_of, target_of
from tests.fakes.small_cluster import NothingCalled
from tests.functions.cluster.healthy import healthy
from tests.functions.controller.conftest import Controller
from tests.functions.worker.engine.test_arguments import function
from tests.options.contract import CLUSTER, LOCAL, proves
from tests.options.world import (
    RUNTIME,
    SETTINGS,
    namespace,
    pod,
    scaling_annotations,
    tenancy_of,
)


def write(directory: Path, text: str) -> Path:
    """A platform.yaml."""
    file = directory / "platform.yaml"
    file.write_text(textwrap.dedent(text))
    return file


def platform_of(directory: Path, text: str) -> PlatformSettings:
    return load_section(PlatformSettings, "platform", write(directory, f"platform: {{{text}}}\n"))


# -- section platform ------------------------------------------------------------------------------
@proves("PlatformSettings.home", "PlatformSettings.run")
def test_directories_are_where_they_are_configured(fleet: str, short_tmp: Path) -> None:
    settings = PlatformSettings(home=str(short_tmp / "h"), run=str(short_tmp / "r"))
    paths = Paths.of(settings, {"PILOTLIGHT_HOME": "/elsewhere"}).make()
    assert (paths.home, paths.run) == (short_tmp / "h", short_tmp / "r")
    assert paths.socket("controller").parent == short_tmp / "r"


@proves("PlatformSettings.fleet")
def test_the_fleet_decides_where_instances_come_from(fleet: str, tmp_path: Path) -> None:
    name = "knative" if fleet == CLUSTER else "local"
    config = ControllerConfig.read(write(tmp_path, f"platform: {{fleet: {name}}}\n"))
    from pilotlight.controller.process import _node_backend

    nothing: Any = None
    kind = type(_node_backend(config, nothing, nothing)[0]).__name__
    assert kind == ("ClusterBackend" if fleet == CLUSTER else "AgentClient")
    with pytest.raises(SettingsInvalid, match="fleet = 'swarm': must be"):
        platform_of(tmp_path, "fleet: swarm")


@proves("PlatformSettings.trust", fleets=(LOCAL,))
async def test_tenants_that_share_a_uid_must_trust_each_other(
    fleet: str, controller: Controller
) -> None:
    config = controller.context.config
    for trust, status in (("isolated", 403), ("shared", 201)):
        changed = replace(config, uid_base=None, trust=trust)
        object.__setattr__(controller.context, "config", changed)
        answer = await controller.http.post("/v1/tenants", json={"name": "acme"})
        assert answer.status_code == status, answer.text


@proves(
    "PlatformSettings.trust",
    "PlatformSettings.activator_uid",
    "PlatformSettings.controller_uid",
    fleets=(CLUSTER,),
)
@pytest.mark.parametrize("text", ["trust: shared", "activator_uid: 19000", "controller_uid: 19000"])
def test_users_of_processes_are_refused(fleet: str, tmp_path: Path, text: str) -> None:
    key = text.partition(":")[0]
    with pytest.raises(SettingsInvalid, match=rf"platform\.{key} = .*no effect with fleet"):
        platform_of(tmp_path, f"fleet: knative, {text}")
    platform_of(tmp_path, f"fleet: local, {text}")


@proves("PlatformSettings.activator_uid", "PlatformSettings.controller_uid", fleets=(LOCAL,))
def test_processes_have_users_of_their_own(fleet: str, short_tmp: Path) -> None:
    settings = PlatformSettings(home=str(short_tmp), activator_uid=19001, controller_uid=19002)
    paths = Paths.of(settings, {})
    is_root = os.geteuid() == 0
    assert (paths.activator_uid, paths.controller_uid) == (
        (19001, 19002) if is_root else (None,) * 2
    )
    taken = replace(settings, activator_uid=20_500)
    with pytest.raises(SettingsInvalid, match="activator_uid = 20500: tenants' uids start"):
        SnapshotterSettings().check_uids(taken)


@proves("PlatformSettings.blobs", "PlatformSettings.s3_client")
async def test_blobs_are_stored_where_it_says(fleet: str, short_tmp: Path) -> None:
    paths = Paths(home=short_tmp, run=short_tmp)
    store = blob_store(PlatformSettings(blobs=str(short_tmp / "b")), paths)
    await store.put("k", b"data")
    await store.aclose()
    assert any(
        path.read_bytes() == b"data" for path in (short_tmp / "b").rglob("*") if path.is_file()
    )
    for s3_client, reader in (("boto3", "Boto3RangeReader"), ("obstore", "ObstoreRangeReader")):
        settings = PlatformSettings(blobs="s3://bucket/prefix", s3_client=s3_client)
        bucket = blob_store(settings, paths)
        held = [type(one).__name__ for one in vars(bucket).values()]
        await bucket.aclose()
        assert reader in held


@proves("PlatformSettings.controller_url")
def test_the_controller_is_found_where_it_says(fleet: str, short_tmp: Path) -> None:
    paths = Paths(home=short_tmp, run=short_tmp)
    assert "controller.sock" in repr(controller_endpoint(PlatformSettings(), paths))
    files = Authority().issue(short_tmp / "tls", "127.0.0.1")
    remote = PlatformSettings(
        controller_url="https://10.0.0.9:8711",
        tls_cert=str(files.cert),
        tls_key=str(files.key),
        tls_ca=str(files.ca),
    )
    assert "10.0.0.9" in repr(controller_endpoint(remote, paths))


@proves("PlatformSettings.tls_cert", "PlatformSettings.tls_key", "PlatformSettings.tls_ca")
def test_certificates_are_read_and_checked(fleet: str, tmp_path: Path) -> None:
    files = Authority().issue(tmp_path / "tls", "127.0.0.1")
    given: dict[str, Any] = {
        "tls_cert": str(files.cert),
        "tls_key": str(files.key),
        "tls_ca": str(files.ca),
    }
    found = TlsFiles.of(PlatformSettings(**given))
    assert found is not None
    found.check()
    for name in given:
        broken = TlsFiles.of(PlatformSettings(**{**given, name: str(tmp_path / "missing.pem")}))
        assert broken is not None
        with pytest.raises(SettingsInvalid, match=r"missing\.pem"):
            broken.check()


@proves("PlatformSettings.key_file", "PlatformSettings.activator_key_file")
def test_keys_come_from_their_files(fleet: str, short_tmp: Path) -> None:
    paths = Paths(home=short_tmp, run=short_tmp)
    made = load_platform_key(PlatformSettings(), paths)
    (short_tmp / "other").mkdir()
    elsewhere = Paths(home=short_tmp / "other", run=short_tmp)
    shared = PlatformSettings(key_file=str(short_tmp / "platform.key"))
    assert load_platform_key(shared, elsewhere).token == made.token
    ActivatorKey(bytes(range(32))).write(short_tmp / "a.key")
    apart = PlatformSettings(activator_key_file=str(short_tmp / "a.key"))
    assert load_activator_key(apart, elsewhere).token == ActivatorKey(bytes(range(32))).token


@proves("PlatformSettings.metrics_token_file")
def test_the_token_of_metrics_is_in_its_file(fleet: str, short_tmp: Path) -> None:
    paths = Paths(home=short_tmp, run=short_tmp)
    named = PlatformSettings(metrics_token_file=str(short_tmp / "t"))
    assert metrics_token_file(named, paths) == short_tmp / "t"
    assert metrics_token_file(PlatformSettings(), paths) == short_tmp / "metrics.token"


@proves("PlatformSettings.production")
def test_production_refuses_drills(fleet: str, tmp_path: Path) -> None:
    config = tmp_path / "platform.yaml"
    config.write_text("platform: {production: false}\n")
    refuse_production(config)
    config.write_text("platform: {production: true}\n")
    with pytest.raises(Conflict, match=r"platform\.production: true"):
        refuse_production(config)


@proves("PlatformSettings.disk_floor_bytes")
def test_free_disk_is_kept_for_journals(fleet: str, tmp_path: Path) -> None:
    floor = DiskFloor(
        tmp_path, PlatformSettings(disk_floor_bytes=1000).disk_floor_bytes, free=lambda _: 1500
    )
    assert (floor.missing_bytes(500), floor.missing_bytes(501)) == (0, 1)


# -- section cluster -------------------------------------------------------------------------------
def doctor(settings: ClusterSettings, **facts: Any) -> str:
    """What `pilotlight doctor --cluster` says."""
    return "\n".join(
        f"{one.what}: {one.detail} {one.way_out} {' '.join(one.commands)}"
        for one in run_checks(healthy(**facts), settings)
    )


@proves("ClusterSettings.kubeconfig", "ClusterSettings.context")
async def test_the_cluster_is_the_kubeconfigs(fleet: str, tmp_path: Path) -> None:
    clusters = "".join(
        f"- {{name: {name}, cluster: {{server: 'https://{name}.example:6443'}}}}\n"
        for name in ("one", "two")
    )
    contexts = "".join(
        f"- {{name: {name}, context: {{cluster: {name}, user: u}}}}\n" for name in ("one", "two")
    )
    file = tmp_path / "kubeconfig"
    file.write_text(
        f"apiVersion: v1\nkind: Config\ncurrent-context: one\nclusters:\n{clusters}"
        f"contexts:\n{contexts}users: [{{name: u, user: {{token: x}}}}]\n"
    )
    for context, host in ((None, "one"), ("two", "two")):
        found = await find_credentials(ClusterSettings(kubeconfig=str(file), context=context))
        assert f"{host}.example" in found.configuration.host


@proves(
    "ClusterSettings.namespace",
    "ClusterSettings.controller_account",
    "ClusterSettings.activator_account",
    "ClusterSettings.namespace_prefix",
    "ClusterSettings.field_manager",
    "ClusterSettings.image_pull_secrets",
)
def test_a_tenants_namespace_is_as_it_says(fleet: str) -> None:
    settings = replace(
        SETTINGS,
        namespace="ops",
        controller_account="boss",
        activator_account="door",
        namespace_prefix="t-",
        field_manager="own",
        image_pull_secrets=["regcred"],
    )
    made = namespace(settings)
    assert made["Namespace"]["metadata"]["name"] == "t-acme"
    binding = made["RoleBinding"]
    assert binding["subjects"][0]["name"] == "door"
    assert binding["subjects"][0]["namespace"] == "ops"
    assert "ops:boss:tenant" in repr(tenancy_bindings(settings))
    assert made["Namespace"]["metadata"]["labels"][names.MANAGED_BY] == "ops.own"
    assert made["ServiceAccount"]["imagePullSecrets"] == [{"name": "regcred"}]


def tenancy_bindings(settings: ClusterSettings) -> list[Any]:
    from pilotlight.kubernetes.manifests.tenant_namespace import namespace_manifests

    return [
        one for one in namespace_manifests(tenancy_of(settings)) if one["kind"] == "RoleBinding"
    ]


@proves("ClusterSettings.autoscaler")
def test_the_autoscaler_is_the_class(fleet: str) -> None:
    for name, kind in (("kpa", "kpa.autoscaling.knative.dev"), ("pilotlight", "pilotlight.dev")):
        for shapes in ([], [WarmShape(name="small")]):  # said is said
            settings = replace(SETTINGS, autoscaler=name, warm_pods=shapes)
            assert scaling_annotations(spec(), settings)["class"] == kind
    assert scaling_annotations(spec(), SETTINGS)["class"] == "kpa.autoscaling.knative.dev"
    warm = replace(SETTINGS, warm_pods=[WarmShape(name="small")])
    assert scaling_annotations(spec(), warm)["class"] == "pilotlight.dev"
    with pytest.raises(ValueError, match="'kpa', 'pilotlight', or null"):
        replace(SETTINGS, autoscaler="hpa")


@proves("ClusterSettings.runtime_image", "ClusterSettings.images")
def test_images_are_those_that_are_configured(fleet: str) -> None:
    assert pod(spec())["containers"][0]["image"] == RUNTIME == SETTINGS.runtime_image
    with pytest.raises(InvalidInput, match="no image for functions without their own"):
        pod(spec(), settings=replace(SETTINGS, runtime_image=None))
    from tests.functions.worker.engine.test_arguments import function

    with pytest.raises(InvalidInput, match="no image for engines of environment 'vllm'"):
        pod(function(), settings=replace(SETTINGS, images={}))


@proves("ClusterSettings.registry", fleets=(CLUSTER,))
async def test_images_are_pushed_below_the_registry(fleet: str, controller: Controller) -> None:
    config = controller.context.config
    cluster = replace(config.cluster, registry="registry.example/functions")
    object.__setattr__(controller.context, "config", replace(config, cluster=cluster))
    caller: Any = type("Caller", (), {"tenant_name": "acme"})
    found = repository_of(controller.context, caller)
    assert isinstance(found, Repository)
    assert str(found) == "registry.example/functions/acme"


@proves("ClusterSettings.registry", fleets=(LOCAL,))
def test_images_of_rendered_functions_are_below_the_registry(fleet: str) -> None:
    from pilotlight.cli.commands.apps.render import _Sheaf, _with_images

    made = spec(image="c" * 64)
    tenancy = tenancy_of(replace(SETTINGS, registry="registry.example/functions"))
    (rendered,) = _with_images([made], tenancy, image=None, sheaf=_Sheaf())
    assert str(rendered.container_image).startswith("registry.example/functions/acme@")


@proves("ClusterSettings.egress_cidrs")
def test_private_networks_are_opened(fleet: str) -> None:
    made = namespace(replace(SETTINGS, egress_cidrs=["10.20.0.0/16"]))
    assert "10.20.0.0/16" in str(
        list(network_policies(replace(SETTINGS, egress_cidrs=["10.20.0.0/16"])))
    )
    assert "NetworkPolicy" in made


def network_policies(settings: ClusterSettings) -> list[Any]:
    from pilotlight.kubernetes.manifests.tenant_namespace import namespace_manifests

    return [
        one for one in namespace_manifests(tenancy_of(settings)) if one["kind"] == "NetworkPolicy"
    ]


@proves("ClusterSettings.node_path", "ClusterSettings.restore_into_pods")
def test_pods_see_their_tenants_directory_and_go_to_their_snapshots(fleet: str) -> None:
    settings = replace(SETTINGS, node_path="/srv/node", restore_into_pods=True)
    found = pod(spec(), settings=settings)
    assert found["volumes"][0]["hostPath"]["path"].startswith("/srv/node/t-")
    assert "affinity" in found
    assert "affinity" not in pod(spec(), settings=replace(settings, restore_into_pods=False))


@proves("ClusterSettings.knative_namespace", "ClusterSettings.max_timeout_s")
def test_knatives_settings_are_checked(fleet: str) -> None:
    settings = replace(SETTINGS, knative_namespace="serving", max_timeout_s=900)
    said = doctor(settings)
    assert "-n serving" in said
    assert "cluster.max_timeout_s 900" in said
    with pytest.raises(InvalidInput, match="timeout = 901: this cluster ends requests after 900 s"):
        pod(spec(clocks=Clocks(execution_s=901)), settings=settings)


@proves("ClusterSettings.snapshot_copies_bytes")
def test_copies_of_snapshots_are_bounded_as_it_says(fleet: str, tmp_path: Path) -> None:
    from pilotlight.controller.process import _node_backend

    name = "knative" if fleet == CLUSTER else "local"
    text = f"platform: {{fleet: {name}}}\ncluster: {{snapshot_copies_bytes: 7}}\n"
    nothing: Any = None
    if fleet == CLUSTER:
        config = ControllerConfig.read(write(tmp_path, text))
        _, register = _node_backend(config, nothing, nothing)
        assert 7 in vars(register).values()
    with pytest.raises(ValueError, match="snapshot_copies_bytes = -1: must not be negative"):
        replace(SETTINGS, snapshot_copies_bytes=-1)


@proves("ClusterSettings.tolerated_warnings")
async def test_other_warnings_make_a_write_fail(fleet: str, tmp_path: Path) -> None:
    async with ApiServer() as server:
        server.hooks.append(lambda review: review.warn("this is deprecated"))
        kubeconfig = str(server.write_kubeconfig(tmp_path / "kubeconfig"))
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "a", "namespace": "default"},
        }
        for tolerated, fails in (([], True), (["deprecated"], False)):
            settings = ClusterSettings(kubeconfig=kubeconfig, tolerated_warnings=tolerated)
            async with await Cluster.connect(settings) as cluster:
                if fails:
                    with pytest.raises(ManifestWarned, match=r"cluster\.tolerated_warnings"):
                        await cluster.apply(body)
                else:
                    await cluster.apply(body)


def preferences(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Expressions of the nodes that a pod prefers, in order."""
    found = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    return [term["preference"]["matchExpressions"][0] for term in found]


@proves(
    "ClusterSettings.gpu_resource",
    "ClusterSettings.gpu_label",
    "ClusterSettings.gpu_memory_label",
    "ClusterSettings.gpu_products",
    "ClusterSettings.gpu_runtime_class",
    "ClusterSettings.runtime_class",
)
def test_gpus_are_selected_as_the_nodes_name_them(fleet: str) -> None:
    settings = replace(
        SETTINGS,
        gpu_resource="example.com/gpu",
        gpu_label="example.com/product",
        gpu_memory_label="example.com/mib",
        gpu_products={"H100": "H100-80GB"},
        gpu_runtime_class="nv",
        runtime_class="gvisor",
    )
    found = pod(spec(resources=Resources(gpu=("H100",), gpu_count=1)), settings=settings)
    assert found["containers"][0]["resources"]["limits"]["example.com/gpu"] == "1"
    assert found["nodeSelector"] == {"example.com/product": "H100-80GB"}
    assert found["runtimeClassName"] == "nv"
    assert found["tolerations"][0]["key"] == "example.com/gpu"
    assert pod(spec(), settings=settings)["runtimeClassName"] == "gvisor"
    model = function(gpu=("H100", "H100"), gpu_bytes=30 << 30)
    (size, *_) = preferences(pod(model, settings=settings))
    assert size == {"key": "example.com/mib", "operator": "Gt", "values": ["15359"]}
    without = pod(model, settings=replace(settings, gpu_memory_label=None))
    assert all(one["operator"] == "In" for one in preferences(without))


@proves("ClusterSettings.dedicated_key", "ClusterSettings.reserved_priority_class")
def test_tenants_are_placed_by_their_isolation(fleet: str) -> None:
    settings = replace(SETTINGS, dedicated_key="example.com/only", reserved_priority_class="paid")
    dedicated = pod(spec(), settings=settings, isolation="dedicated")
    assert dedicated["nodeSelector"] == {"example.com/only": "acme"}
    assert dedicated["tolerations"][0]["key"] == "example.com/only"
    assert "priorityClassName" not in dedicated
    assert pod(spec(), settings=settings, isolation="reserved")["priorityClassName"] == "paid"
    assert "priorityClassName" in doctor(settings)


@proves(
    "WarmShape.name",
    "WarmShape.cpu",
    "WarmShape.memory_bytes",
    "WarmShape.gpu",
    "WarmShape.gpu_count",
    "WarmShape.min_pods",
    "WarmShape.max_pods",
)
def test_warm_pods_have_their_shape(fleet: str, tmp_path: Path) -> None:
    """As `doctor --cluster` reads them, too, which runs on either fleet."""
    text = """
        cluster:
          runtime_image: {}
          warm_pods:
          - {{name: big, cpu: 2.5, memory_bytes: 8589934592, gpu: H100, gpu_count: 2, min_pods: 2,
             max_pods: 3}}
    """
    settings = load_section(ClusterSettings, "cluster", write(tmp_path, text.format(RUNTIME)))
    (shape,) = settings.warm_pods
    made = deployment(shape, settings, platform="p-1", replicas=1)
    template = made["spec"]["template"]
    resources = template["spec"]["containers"][0]["resources"]
    assert made["metadata"]["name"] == template["metadata"]["labels"][names.WARM_SHAPE] == "big"
    assert resources == {
        "requests": {"cpu": "2500m", "memory": "8Gi"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "2"},
    }
    assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "H100"}
    assert [wanted_pods(shape, [100.0] * n, now=101) for n in (0, 3, 9)] == [2, 3, 3]
    said = doctor(settings, warm_pods={"big": made})
    assert "no node has GPUs with nvidia.com/gpu.product=H100" in said


@proves("WarmShape.instances")
def test_a_promoted_pod_has_room_for_as_many_instances(fleet: str, tmp_path: Path) -> None:
    """As the controller sizes it, which `doctor` need not know."""
    text = """
        cluster:
          runtime_image: {}
          warm_pods:
          - {{name: small, cpu: 1, memory_bytes: 1073741824, instances: 3}}
    """
    settings = load_section(ClusterSettings, "cluster", write(tmp_path, text.format(RUNTIME)))
    (shape,) = settings.warm_pods
    made = spec(resources=Resources(cpu=0.25, memory_bytes=200 * MIB))
    shapes = (shape, replace(shape, instances=None))
    sizes = [wanted_size(made, target_of(made).launch, one) for one in shapes]
    assert [(one.cpu, one.memory_bytes // MIB) for one in sizes] == [(0.75, 600), (1.0, 1000)]


@pytest.mark.parametrize(
    "text, said",
    [
        ("warm_pods: [{name: a, instances: 17}]", "instances = 17: must be 1 to 16"),
        ("warm_pods: [{name: Big}]", r"warm_pods\[0\].name = 'Big': must have 1 to 30"),
        ("warm_pods: [{}]", r"warm_pods\[0\].name = ''"),
        ("warm_pods: [{name: a}, 3]", r"warm_pods\[1\] = 3: expected keys and values"),
        ("warm_pods: [{name: a, cpus: 1}]", r"warm_pods\[0\].cpus: unknown key; known: cpu, "),
        ("warm_pods: [{name: a, cpu: x}]", r"warm_pods\[0\].cpu = 'x': expected a number"),
        ("warm_pods: [{name: a, cpu: 0}]", "cpu = 0: must be 0.05 to 256"),
        ("warm_pods: [{name: a, min_pods: 11}]", "min_pods = 11: must be 0 to 10: raise max_pods"),
        ("warm_pods: [{name: a, gpu: any, gpu_count: 1}]", "gpu = 'any': must be one kind"),
        ("warm_pods: [{name: a, gpu: H100}]", "gpu_count = 0 with gpu = 'H100': set both"),
        ("warm_pods: [{name: a}, {name: a}]", "two shapes are named 'a': rename one"),
        ("warm_pods: [{name: a}]\n  runtime_image: null", "set cluster.runtime_image"),
        ("warm_pods: [{name: a}]\n  namespace: " + "n" * 60, "more than 63 characters"),
        ("warm_pods: [{name: a}]\n  namespace_prefix: pilot", "could be a tenant's"),
        ("warm_uid: 0", "warm_uid = 0: must be 1000 to 65533"),
        ("handover_s: -1", "handover_s = -1.0: must be 0 .at once. to 3600"),
        ("idle_templates: 101", "idle_templates = 101: must be 0 to 100"),
        ("idle_template_s: -1", "idle_template_s = -1.0: must be 0 to 86400"),
    ],
)
def test_a_wrong_setting_of_warm_pods_is_named_with_its_bound_and_line(
    tmp_path: Path, text: str, said: str
) -> None:
    image = "" if "runtime_image" in text else f"  runtime_image: {RUNTIME}\n"
    file = tmp_path / "platform.yaml"
    file.write_text(f"cluster:\n{image}  {text}\n")
    with pytest.raises(SettingsInvalid, match=said) as refused:
        load_section(ClusterSettings, "cluster", file)
    assert f"platform.yaml:{2 + bool(image)}: cluster." in str(refused.value)


@proves("ClusterSettings.warm_uid", "ClusterSettings.handover_s", fleets=(CLUSTER,))
def test_promoted_pods_have_the_warm_uid_and_load_has_to_last(fleet: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, warm_uid=60_000, warm_pods=[WarmShape(name="small")])
    made = deployment(settings.warm_pods[0], settings, platform="p-1", replicas=1)
    context = made["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (60_000, 60_000)
    route = FunctionRoute.from_json(document_of(spec())[1])
    revision = RevisionOf.of(route, tenancy_of(settings), "v1-000001")
    assert promoted_launch(revision, pod="u-1").uid == 60_000
    with pytest.raises(SettingsInvalid, match="handover_s = 3601"):
        load_section(ClusterSettings, "cluster", write(tmp_path, "cluster: {handover_s: 3601}"))


@proves(
    "ClusterSettings.adopt",
    "ClusterSettings.wake_url",
    "ClusterSettings.unschedulable_grace_s",
    "ClusterSettings.warm_uid",
    "ClusterSettings.handover_s",
    "ClusterSettings.idle_templates",
    "ClusterSettings.idle_template_s",
    fleets=(LOCAL,),
)
@pytest.mark.parametrize(
    "text",
    [
        "adopt: [unlabelled]",
        "wake_url: 'http://x'",
        "unschedulable_grace_s: 3",
        "warm_uid: 60000",
        "handover_s: 9",
        "idle_templates: 2",
        "idle_template_s: 9",
    ],
)
def test_what_only_a_clusters_processes_read_is_refused(
    fleet: str, tmp_path: Path, text: str
) -> None:
    key = text.partition(":")[0]
    with pytest.raises(SettingsInvalid, match=rf"cluster\.{key} = .*platform\.fleet: knative"):
        ControllerConfig.read(write(tmp_path, f"cluster: {{{text}}}\n"))
    ControllerConfig.read(write(tmp_path, f"platform: {{fleet: knative}}\ncluster: {{{text}}}\n"))


@proves("ClusterSettings.adopt", fleets=(CLUSTER,))
async def test_another_platforms_objects_are_adopted(fleet: str, tmp_path: Path) -> None:
    from pilotlight.controller.database.change_notifier import ChangeNotifier

    platform = FedPlatform(tmp_path, notifier=ChangeNotifier())
    other = "p-00000000000000bb"
    assert not platform.identity().owns(other)
    assert identify(platform.store, ClusterSettings(adopt=[other]).adopt).owns(other)
    platform.close()


AROUND = FleetContext(
    member="a-0",
    table=empty_table(),
    redis_url=None,
    platform="p",
    demand=None,
    waiting_of=lambda _: 1,
    in_flight=dict,
    revisions=NothingCalled,
    controller=Endpoint.at(Path("/nowhere")),
    token="t",
)
"""A single activator whose functions nobody calls."""


@proves("ClusterSettings.idle_templates", "ClusterSettings.idle_template_s", fleets=(CLUSTER,))
async def test_a_promoted_pod_is_kept_for_its_template_for_few_and_for_a_while(fleet: str) -> None:
    warm = [WarmShape(name="small")]
    settings = replace(SETTINGS, warm_pods=warm, idle_templates=3, idle_template_s=7.0)
    parts = cluster_parts(settings, AROUND)
    assert repr(parts.fleet.forks) == "<PodForks keeps 3 idle pods of a tenant for 7 s>"
    await parts.fleet.aclose()
    await parts.cluster.aclose()


@proves("ClusterSettings.wake_url", "ClusterSettings.unschedulable_grace_s", fleets=(CLUSTER,))
async def test_pods_are_requested_at_the_wake_url_and_awaited_for_the_grace(fleet: str) -> None:
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = ClusterSettings(wake_url=f"http://127.0.0.1:{port}", unschedulable_grace_s=3.0)
    parts = cluster_parts(settings, AROUND)
    assert parts.fleet.grace_s == settings.unschedulable_grace_s
    async with parts.fleet.scale_requester.requested(target_of(spec_of())):
        await until(lambda: bool(asked))
    assert "host: " in asked[0]
    await parts.fleet.aclose()
    await parts.cluster.aclose()
    server.close()
    await server.wait_closed()
