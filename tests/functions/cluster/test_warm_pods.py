"""Manifests of the pool, and how many warm pods a shape keeps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pilotlight.controller.kubernetes.warm.choice import fitting, growable
from pilotlight.controller.kubernetes.warm.sizes import wanted_size
from pilotlight.controller.kubernetes.warm.sizing import KEEP_S, LEAD_S, RecentStarts, wanted_pods
from pilotlight.kubernetes import names
from pilotlight.kubernetes.manifests.warm_pods import deployment, pool_manifests
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import GIB, MIB, FunctionKind, MethodSpec, Resources, WeightsSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.warm_shape import WarmShape
from snapshotter.types import LaunchSpec, RevisionKey
from tests.fakes.chart import faults
from tests.fakes.fed_platform import spec

RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
SMALL = WarmShape(name="small", cpu=0.5, memory_bytes=512 * MIB, min_pods=2, max_pods=6)
H100 = WarmShape(name="h100", cpu=4, memory_bytes=32 * GIB, gpu="H100", gpu_count=1)
L4 = WarmShape(name="l4", cpu=4, memory_bytes=16 * GIB, gpu="L4", gpu_count=1)
LARGE = WarmShape(name="large", cpu=4, memory_bytes=8 * GIB)
SHAPES = [H100, LARGE, L4, SMALL]
LAUNCH = LaunchSpec(
    revision=RevisionKey("f-1@v1"),
    trust_domain="t-1",
    uid=None,
    bundle="b" * 64,
    image=None,
    entry={},
    memory_bytes=GIB,
    cpu=1.0,
    startup_timeout_s=60.0,
)
SETTINGS = ClusterSettings(
    runtime_image=RUNTIME,
    warm_pods=SHAPES,
    image_pull_secrets=["regcred"],
    gpu_products={"H100": "NVIDIA-H100-80GB-HBM3"},
)


def test_manifests_are_valid_and_the_same_each_time() -> None:
    made = [
        *pool_manifests(SETTINGS, platform="p-1"),
        *(deployment(one, SETTINGS, platform="p-1", replicas=1) for one in SHAPES),
    ]
    assert not [fault for one in made for fault in faults(one)]
    again = [
        *pool_manifests(SETTINGS, platform="p-1"),
        *(deployment(one, SETTINGS, platform="p-1", replicas=1) for one in SHAPES),
    ]
    assert json.dumps(made) == json.dumps(again)
    assert {one["metadata"].get("namespace", "pilotlight-warm") for one in made} == {
        "pilotlight-warm"
    }
    assert not [one for one in made if names.TENANT in one["metadata"]["labels"]]


def test_a_warm_pod_has_no_rights_and_reaches_nothing() -> None:
    pod = deployment(SMALL, SETTINGS, platform="p-1", replicas=1)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "runAsUser": 64000,
        "runAsGroup": 64000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    paths = [one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one]
    assert paths == ["/var/lib/pilotlight/node/warm"]
    assert container["volumeMounts"][0] == {
        "name": "node",
        "mountPath": "/pilotlight",
        "readOnly": True,
    }
    policies = {
        one["metadata"]["name"]: one["spec"]
        for one in pool_manifests(SETTINGS, platform="p-1")
        if one["kind"] == "NetworkPolicy"
    }
    closed, opened = policies["pilotlight-in"], policies["pilotlight-out"]
    assert closed["podSelector"] == {}
    assert "egress" not in closed
    (rule,) = closed["ingress"]
    assert [one["port"] for one in rule["ports"]] == list(range(8079, 8096))
    assert rule["from"][0]["podSelector"] == {
        "matchLabels": {"app.kubernetes.io/component": "activator"}
    }
    assert opened["podSelector"] == {
        "matchLabels": {names.NETWORK: "open"},
        "matchExpressions": [{"key": names.TENANT, "operator": "Exists"}],
    }


def test_the_launcher_waits_for_a_promotion() -> None:
    pod = deployment(SMALL, SETTINGS, platform="p-1", replicas=1)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    said = {one["name"]: one.get("value") or one["valueFrom"] for one in container["env"]}
    assert (said["PILOTLIGHT_WARM"], said["PILOTLIGHT_NODE"]) == ("1", "/pilotlight")
    assert said["PILOTLIGHT_POD"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert said["PILOTLIGHT_NAMESPACE"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    assert container["readinessProbe"]["tcpSocket"] == {"port": 8079}


def test_gpus_are_held_on_their_nodes_and_a_rollout_needs_no_further_one() -> None:
    made = deployment(H100, SETTINGS, platform="p-1", replicas=1)["spec"]
    pod = made["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert made["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    without = deployment(SMALL, replace(SETTINGS, runtime_class="gvisor"), platform="p", replicas=1)
    assert without["spec"]["template"]["spec"]["runtimeClassName"] == "gvisor"
    assert "nodeSelector" not in without["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "resources, expected",
    [
        (Resources(cpu=0.25, memory_bytes=256 * MIB), ["small", "large"]),
        (Resources(cpu=0.5, memory_bytes=513 * MIB), ["large"]),
        (Resources(cpu=8, memory_bytes=GIB), []),
        (Resources(cpu=1, memory_bytes=GIB, gpu=("H100",), gpu_count=1), ["h100"]),
        (Resources(cpu=1, memory_bytes=GIB, gpu=("H100", "L4"), gpu_count=1), ["h100", "l4"]),
        (Resources(cpu=1, memory_bytes=GIB, gpu=("L4", "H100"), gpu_count=1), ["l4", "h100"]),
        (Resources(cpu=1, memory_bytes=GIB, gpu=("any",), gpu_count=1), ["l4", "h100"]),
        (Resources(cpu=1, memory_bytes=GIB, gpu=("H100",), gpu_count=2), []),
    ],
)
def test_shapes_that_fit_in_the_order_of_preference(
    resources: Resources, expected: list[str]
) -> None:
    assert [one.name for one in fitting(SHAPES, resources)] == expected


@pytest.mark.parametrize(
    "made, expected",
    [
        (Resources(cpu=0.25, memory_bytes=256 * MIB), []),
        (Resources(cpu=0.25, memory_bytes=2 * GIB), ["small"]),
        (Resources(cpu=2, memory_bytes=256 * MIB), ["small"]),
        (Resources(cpu=2.1, memory_bytes=256 * MIB), []),
        (Resources(cpu=5, memory_bytes=2 * GIB), ["large"]),
        (Resources(cpu=0.25, memory_bytes=33 * GIB), []),
        (Resources(cpu=1, memory_bytes=33 * GIB, gpu=("L4", "H100"), gpu_count=1), ["l4", "h100"]),
        (Resources(cpu=1, memory_bytes=33 * GIB, gpu=("H100",), gpu_count=2), []),
    ],
)
def test_shapes_that_are_near_enough_to_grow_the_largest_first(
    made: Resources, expected: list[str]
) -> None:
    assert [one.name for one in growable(SHAPES, spec(resources=made))] == expected


def test_an_engine_gets_no_pod_with_less_shared_memory_than_its_own_would_have() -> None:
    made = spec(resources=Resources(cpu=1, memory_bytes=GIB))
    assert [one.name for one in growable(SHAPES, made)] == ["small"]
    engine = replace(
        made,
        kind=FunctionKind.ENGINE,
        module="",
        qualname="",
        methods=(MethodSpec(name="", is_generator=True),),
        weights=(WeightsSpec(name="model", manifest="ab" * 32),),
        engine=EngineSpec(model="model", max_model_len=8192, max_num_seqs=64),
    )
    assert growable(SHAPES, engine) == []


@pytest.mark.parametrize(
    "shape, cpu, mebibytes, most, expected",
    [
        (SMALL, 0.5, 512, 8, (0.5, 512)),
        (SMALL, 1.0, 2048, 8, (1.0, 2048)),
        (SMALL, 0.1, 100, 8, (0.5, 500)),
        (SMALL, 0.1, 100, 2, (0.2, 200)),
        (SMALL, 0.1, 300, 8, (0.1, 300)),
        (replace(SMALL, instances=1), 0.1, 100, 8, (0.1, 100)),
        (replace(SMALL, instances=3), 0.1, 100, 8, (0.3, 300)),
        (LARGE, 0.1, 100, 100, (1.6, 1600)),
    ],
    ids=["same", "grows", "instances", "max", "one", "its own", "three", "ports"],
)
def test_a_promoted_pod_has_the_size_of_the_instances_that_it_has_room_for(
    shape: WarmShape, cpu: float, mebibytes: int, most: int, expected: tuple[float, int]
) -> None:
    made = spec(
        resources=Resources(cpu=cpu, memory_bytes=mebibytes * MIB),
        scaling=Scaling(max_instances=most),
    )
    size = wanted_size(made, LAUNCH, shape)
    assert (size.cpu, size.memory_bytes // MIB) == pytest.approx(expected)
    alone = (replace(LAUNCH, forkable=False), replace(LAUNCH, engine="vllm"))
    for launch in alone:
        size = wanted_size(made, launch, shape)
        assert (size.cpu, size.memory_bytes) == (cpu, mebibytes * MIB)


@pytest.mark.parametrize(
    "ago, wanted",
    [
        ([], 2),
        ([1.0], 2),
        ([5.0, 4.0, 3.0], 3),
        ([LEAD_S * n for n in range(9, 0, -1)], 2),
        ([300 + one for one in (4.0, 3.0, 2.0, 1.0)] + [1.0], 4),
        ([1.0] * 9, 6),
        ([KEEP_S + 1] * 5, 2),
    ],
    ids=["none", "one", "burst", "spread", "an earlier burst", "more than max", "long ago"],
)
def test_as_many_pods_as_starts_within_the_time_of_a_replacement(
    ago: list[float], wanted: int
) -> None:
    now = 10_000.0
    assert wanted_pods(SMALL, [now - one for one in ago], now=now) == wanted


def test_starts_are_in_order_although_the_clock_is_set_back() -> None:
    heard: list[None] = []
    starts = RecentStarts(on_add=lambda: heard.append(None))
    for at in (10.0, 5.0, 12.0):
        starts.add("small", now=at)
    assert starts.of("small") == (10.0, 10.0, 12.0)
    assert len(heard) == 3
    assert starts.of("large") == ()
