"""Manifests: golden files of whole functions, what Kubernetes and Knative say of them, and what is
refused.

`PILOTLIGHT_WRITE_GOLDEN=1 pytest tests/functions/cluster/test_manifests.py` writes the golden files
anew."""

from __future__ import annotations

import copy
import ipaddress
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.manifests.knative_service import function_manifests
from pilotlight.kubernetes.manifests.labels import Manifest
from pilotlight.kubernetes.manifests.quantities import cores, size
from pilotlight.kubernetes.manifests.secrets import secret_manifest
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy, namespace_manifests
from pilotlight.kubernetes.manifests.yaml_text import to_yaml
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import FunctionRoute, TenantRecord
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import (
    GIB,
    MIB,
    Clocks,
    FunctionKind,
    FunctionSpec,
    MethodSpec,
    Resources,
    WeightsSpec,
)
from pilotlight.spec.instances.scaling import Scaling
from snapshotter.types import LaunchSpec
from tests.fakes.fed_platform import ACME, document_of, spec
from tests.fakes.kubernetes.server import ApiServer

GOLDEN = Path(__file__).parent / "golden"
RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
VLLM = "registry.example/vllm@sha256:" + "1" * 64
SETTINGS = ClusterSettings(
    runtime_image=RUNTIME,
    images={"vllm": VLLM},
    gpu_products={"H100": "NVIDIA-H100-80GB-HBM3", "L4": "NVIDIA-L4"},
)
PLATFORM = "p-0123456789abcdef"
TENANCY = Tenancy.of(ACME, environment="main", settings=SETTINGS, platform=PLATFORM)
HELLO = spec("hello", resources=Resources(cpu=0.25, memory_bytes=256 * MIB))
EMBEDDER = spec(
    "Embedder",
    kind=FunctionKind.CLASS,
    methods=(MethodSpec(name="embed"),),
    resources=Resources(cpu=4, memory_bytes=24 * GIB, gpu=("H100", "L4"), gpu_count=1),
    scaling=Scaling(
        max_inputs=16, target_inputs=8, min_instances=1, max_instances=4, scaledown_window_s=300
    ),
    weights=(
        WeightsSpec(name="minilm", manifest="3f" * 32),
        WeightsSpec(name="tokenizer", manifest="91" * 32),
    ),
    secrets=("api-keys", "Tracing.key"),
)
ASSISTANT = spec(
    "assistant",
    kind=FunctionKind.ENGINE,
    module="",
    qualname="",
    methods=(MethodSpec(name="", is_generator=True),),
    resources=Resources(cpu=8, memory_bytes=64 * GIB, gpu=("H100",), gpu_count=2),
    scaling=Scaling(max_inputs=64, max_instances=2, scaledown_window_s=5),
    clocks=Clocks(startup_s=240, execution_s=300),
    weights=(WeightsSpec(name="model", manifest="ab" * 32),),
    engine=EngineSpec(model="model", max_model_len=8192, max_num_seqs=64, parallel=2),
)


def route(specs: Mapping[str, FunctionSpec] | FunctionSpec, **how: Any) -> FunctionRoute:
    """A route as the feed has it."""
    by_name = specs if isinstance(specs, Mapping) else {"v7-3f2a1c": specs}
    return FunctionRoute.from_json(document_of(by_name, **how)[1])


def hello() -> list[Manifest]:
    """The smallest one, with its tenant's namespace."""
    return [*namespace_manifests(TENANCY), *function_manifests(route(HELLO, app="hello"), TENANCY)]


def gpu() -> list[Manifest]:
    """A class on one of two kinds of GPUs, with weights and secrets."""
    made = [secret_manifest(name, TENANCY, values=None) for name in EMBEDDER.secrets]
    return [*made, *function_manifests(route(EMBEDDER), TENANCY)]


def llm() -> list[Manifest]:
    """A language model's stock server on two GPUs, on a cluster with our own autoscaler and
    restores into pods."""
    settings = replace(
        SETTINGS, autoscaler="pilotlight", restore_into_pods=True, image_pull_secrets=["regcred"]
    )
    tenancy = Tenancy.of(ACME, environment="staging", settings=settings, platform=PLATFORM)
    return function_manifests(route(ASSISTANT, app="llm", environment="staging"), tenancy)


def canary() -> list[Manifest]:
    """Two revisions share the traffic, a third is a tenant's pin, a fourth has a tag."""
    revisions = {
        f"v{number}-{number:06d}": replace(HELLO, env={"N": str(number)})
        for number in (5, 6, 7, 10)
    }
    weights = {"v6-000006": 95, "v7-000007": 5}
    return function_manifests(
        route(
            revisions, weights=weights, pins={"globex": "v5-000005"}, tags={"next": "v10-000010"}
        ),
        TENANCY,
    )


CASES: Mapping[str, Callable[[], list[Manifest]]] = {
    "hello": hello,
    "gpu": gpu,
    "llm": llm,
    "canary": canary,
}


def settled(manifests: list[Manifest]) -> list[Manifest]:
    """Without what changes with every new field of a spec: the launch documents' texts."""
    made = copy.deepcopy(manifests)
    for one in made:
        if one["kind"] == "ConfigMap":
            one["data"] = dict.fromkeys(
                one["data"], "(see test_a_launch_document_is_what_the_launcher_reads)"
            )
            one["metadata"]["annotations"][names.APPLIED] = "(of the text)"
    return made


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_what_was_reviewed(name: str) -> None:
    text = to_yaml(settled(CASES[name]()))
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("PILOTLIGHT_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_the_same_every_time(name: str) -> None:
    assert to_yaml(CASES[name]()) == to_yaml(CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_kinds_of_kubernetes_fit_their_schemas(name: str) -> None:
    import kubernetes_validate

    for one in CASES[name]():
        if "knative" not in one["apiVersion"]:
            kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.mark.parametrize("name", CASES)
async def test_services_are_taken_by_a_cluster_that_was_prepared(
    cluster: Cluster, api_server: ApiServer, name: str
) -> None:
    for one in CASES[name]():
        if one["kind"] == "Service":
            api_server.add_namespace(one["metadata"]["namespace"])
            await cluster.apply(one, dry_run=True)


def test_no_pod_of_a_function_is_privileged_or_writes_to_its_node() -> None:
    for one in [*hello(), *gpu(), *llm()]:
        if one["kind"] != "Service":
            continue
        pod = one["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        rights = container["securityContext"]
        assert rights["runAsUser"] == ACME.uid
        assert rights["runAsNonRoot"]
        assert rights["readOnlyRootFilesystem"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert not rights["allowPrivilegeEscalation"]
        assert not pod["automountServiceAccountToken"]
        (node,) = (mount for mount in container["volumeMounts"] if mount["name"] == "node")
        assert node["readOnly"]
        (volume,) = (volume for volume in pod["volumes"] if "hostPath" in volume)
        assert volume["hostPath"]["path"] == f"/var/lib/pilotlight/node/{ACME.id}"


def test_a_launch_document_is_what_the_launcher_reads() -> None:
    (document,) = (one for one in gpu() if one["kind"] == "ConfigMap")
    launch = LaunchSpec.from_json(json.loads(document["data"]["launch.json"]))
    assert document["immutable"]
    assert launch.revision.endswith("@v7-3f2a1c")
    assert launch.revision == document["metadata"]["annotations"][names.KEY]
    assert (launch.uid, launch.trust_domain, launch.gpu_count) == (ACME.uid, ACME.id, 1)


def test_values_of_secrets_are_never_rendered() -> None:
    shown = secret_manifest("api-keys", TENANCY, values=None)
    applied = secret_manifest("api-keys", TENANCY, values={"TOKEN": "s3cr3t"})
    assert "data" not in shown
    assert applied["data"] == {"TOKEN": "czNjcjN0"}
    assert "s3cr3t" not in to_yaml([applied])
    assert applied["metadata"]["name"] == shown["metadata"]["name"] == "secret-api-keys"


def test_a_function_without_a_network_reaches_nothing() -> None:
    (out,) = (one for one in hello() if one["metadata"]["name"] == "pilotlight-out")
    assert out["spec"]["podSelector"] == {"matchLabels": {names.NETWORK: "open"}}
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"][names.NETWORK]
        for one in [*hello(), *llm()]
        if one["kind"] == "Service"
    }
    assert labels == {"hello-hello": "open", "llm-assistant": "none"}


def test_nobody_reaches_the_clouds_metadata_or_other_pods() -> None:
    (out,) = (one for one in hello() if one["metadata"]["name"] == "pilotlight-out")
    (four,) = (
        to["ipBlock"]
        for rule in out["spec"]["egress"]
        for to in rule["to"]
        if to.get("ipBlock", {}).get("cidr") == "0.0.0.0/0"
    )
    for network in (
        "169.254.0.0/16",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "168.63.129.16/32",
        "192.0.0.0/24",
    ):
        assert network in four["except"]


@pytest.mark.parametrize(
    "address, reached",
    [
        *((address, True) for address in ("1.1.1.1", "2606:4700::1111", "64:ff9b::101:101")),
        *(
            (address, False)
            for address in (
                "10.0.0.7",
                "fd00:ec2::254",
                "fe80::1",
                "::1",
                "ff02::1",
                "::ffff:10.0.0.7",
                "::a00:7",
            )
        ),
        *(
            (address, False)
            for address in (
                "64:ff9b::a9fe:a9fe",
                "64:ff9b::a00:7",
                "64:ff9b::7f00:1",
                "64:ff9b::a83f:8110",
            )
        ),
        *(
            (address, False)
            for address in (
                "64:ff9b:1::101:101",
                "::ffff:0:10.0.0.7",
                "2002:a9fe:a9fe::1",
                "2002:101:101::1",
            )
        ),
        *((address, False) for address in ("2001:0:a00:7::1", "2001::1")),
    ],
)
def test_no_address_that_holds_one_of_ipv4_leads_where_that_does_not(
    address: str, reached: bool
) -> None:
    (out,) = (one for one in hello() if one["metadata"]["name"] == "pilotlight-out")
    blocks = [
        to["ipBlock"] for rule in out["spec"]["egress"] if "ports" not in rule for to in rule["to"]
    ]
    ip = ipaddress.ip_address(address)
    found = [b for b in blocks if ip in ipaddress.ip_network(b["cidr"])]
    assert (
        any(all(ip not in ipaddress.ip_network(one) for one in b["except"]) for b in found)
        is reached
    )


def test_several_gpus_are_a_choice_and_the_order_is_a_preference() -> None:
    (service,) = (one for one in gpu() if one["kind"] == "Service")
    pod = service["spec"]["template"]["spec"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == [
        "NVIDIA-H100-80GB-HBM3",
        "NVIDIA-L4",
    ]
    assert "nodeSelector" not in pod
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["runtimeClassName"] == "nvidia"


def test_the_newest_revision_is_the_one_with_the_highest_number() -> None:
    (service,) = (one for one in canary() if one["kind"] == "Service")
    assert service["spec"]["template"]["metadata"]["name"] == "search-hello-v10-000010"
    assert sum(entry["percent"] for entry in service["spec"]["traffic"]) == 100


@pytest.mark.parametrize(
    "broken, part",
    [
        (lambda: route(spec(clocks=Clocks(execution_s=700))), "max-revision-timeout-seconds"),
        (lambda: route(spec(image="d" * 64)), "cluster.registry"),
    ],
)
def test_what_the_cluster_cannot_run_is_refused_with_the_way_out(
    broken: Callable[[], FunctionRoute], part: str
) -> None:
    with pytest.raises(InvalidInput, match="search/embed") as refused:
        function_manifests(broken(), TENANCY)
    assert part in refused.value.detail["hint"]


def test_traffic_that_does_not_add_up_is_refused() -> None:
    good = route(HELLO)
    broken = replace(good, document={**good.document, "weights": {"v7-3f2a1c": 90}, "segments": []})
    with pytest.raises(InvalidInput, match="search/hello: the weights add up to 90"):
        function_manifests(broken, TENANCY)


def test_without_a_runtime_image_nothing_is_rendered() -> None:
    tenancy = replace(TENANCY, settings=ClusterSettings())
    with pytest.raises(InvalidInput, match="no image") as refused:
        function_manifests(route(spec()), tenancy)
    assert "cluster.runtime_image" in refused.value.detail["hint"]
    with pytest.raises(InvalidInput, match="engines of environment 'vllm'"):
        function_manifests(route(ASSISTANT), tenancy)


def test_a_pod_is_made_of_the_container_image_of_its_revision() -> None:
    pushed = f"registry.example/functions/acme@sha256:{'2' * 64}"
    made = function_manifests(route(spec(image="d" * 64, container_image=pushed)), TENANCY)
    assert made[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == pushed


def test_an_image_without_a_digest_is_refused_by_the_settings() -> None:
    with pytest.raises(ValueError, match="must be referenced by digest"):
        ClusterSettings(runtime_image="registry.example/runtime:latest")
    with pytest.raises(ValueError, match=r"images\.vllm"):
        ClusterSettings(images={"vllm": "registry.example/vllm"})
    with pytest.raises(ValueError, match="egress_cidrs"):
        ClusterSettings(egress_cidrs=["10.0.0.1/8"])
    for registry in ("acme", "https://registry.example/x", f"registry.example/{'x' * 175}"):
        with pytest.raises(ValueError, match="registry"):
            ClusterSettings(registry=registry)


def test_a_tenant_without_a_uid_has_no_pods() -> None:
    with pytest.raises(InvalidInput, match="no uid of its own"):
        Tenancy.of(
            TenantRecord(id="t-1", name="acme", uid=None),
            environment="main",
            settings=SETTINGS,
            platform=PLATFORM,
        )


def test_a_description_that_is_too_large_is_refused() -> None:
    huge = spec(methods=(MethodSpec(example=["x" * (1 << 20)]),))
    with pytest.raises(InvalidInput, match="a ConfigMap can hold only"):
        function_manifests(route(huge), TENANCY)


def test_quantities_are_written_as_kubernetes_writes_them_back() -> None:
    assert [cores(cpu) for cpu in (0.05, 0.25, 1, 1.5, 96)] == ["50m", "250m", "1", "1500m", "96"]
    assert [size(count) for count in (GIB, 1536 * MIB, 1000, 4096 * GIB, 3 << 10)] == [
        "1Gi",
        "1536Mi",
        "1000",
        "4Ti",
        "3Ki",
    ]
