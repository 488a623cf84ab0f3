"""The parts of the product that proofs look at, each as one of the two fleets has it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from activator.settings import ActivatorSettings
from pilotlight.kubernetes.manifests.knative_service import function_manifests
from pilotlight.kubernetes.manifests.labels import Manifest
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy, namespace_manifests
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import FunctionSpec
from snapshotter.types import LaunchSpec
from tests.activator.conftest import Edge, served
from tests.activator.scaled_world import ScaledWorld
from tests.fakes.fake_worker import Behaviour, echo
from tests.fakes.fed_platform import ACME, document_of
from tests.options.contract import CLUSTER

RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
VLLM = "registry.example/vllm@sha256:" + "1" * 64
SETTINGS = ClusterSettings(runtime_image=RUNTIME, images={"vllm": VLLM})
PLATFORM = "p-0123456789abcdef"


def tenancy_of(settings: ClusterSettings = SETTINGS, **plan: Any) -> Tenancy:
    """The tenant acme in environment `main`, with this plan."""
    tenant = replace(ACME, plan=plan)
    return Tenancy.of(tenant, environment="main", settings=settings, platform=PLATFORM)


def manifests(
    spec: FunctionSpec, *, settings: ClusterSettings = SETTINGS, **plan: Any
) -> dict[str, Manifest]:
    """What a cluster is given for a function of app `search`, by kind."""
    route = FunctionRoute.from_json(document_of(spec)[1])
    return {one["kind"]: one for one in function_manifests(route, tenancy_of(settings, **plan))}


def template(
    spec: FunctionSpec, *, settings: ClusterSettings = SETTINGS, **plan: Any
) -> dict[str, Any]:
    """The template of a revision's pods: `metadata` and `spec`."""
    found: dict[str, Any] = manifests(spec, settings=settings, **plan)["Service"]["spec"][
        "template"
    ]
    return found


def pod(spec: FunctionSpec, *, settings: ClusterSettings = SETTINGS, **plan: Any) -> dict[str, Any]:
    """The spec of a revision's pods."""
    found: dict[str, Any] = template(spec, settings=settings, **plan)["spec"]
    return found


def scaling_annotations(spec: FunctionSpec, settings: ClusterSettings = SETTINGS) -> dict[str, str]:
    """What Knative's autoscaler reads of a revision, without the keys' domain."""
    found = template(spec, settings=settings)["metadata"]["annotations"]
    return {key.partition("/")[2]: value for key, value in found.items()}


def namespace(settings: ClusterSettings = SETTINGS, **plan: Any) -> dict[str, Manifest]:
    """The objects of a tenant's namespace, by kind; of RoleBindings the last."""
    return {one["kind"]: one for one in namespace_manifests(tenancy_of(settings, **plan))}


def launched(spec: FunctionSpec, fleet: str) -> LaunchSpec:
    """What a node starts: from the route of an activator, or from the ConfigMap of a pod."""
    if fleet == CLUSTER:
        data: Mapping[str, str] = manifests(spec)["ConfigMap"]["data"]
        return LaunchSpec.from_json(json.loads(next(iter(data.values()))))
    route = document_of(spec)[1]
    return LaunchSpec.from_json(next(iter(route["revisions"].values()))["launch"])


@asynccontextmanager
async def serving(
    directory: Path, fleet: str, *, behaviour: Behaviour = echo, **settings: Any
) -> AsyncIterator[Edge]:
    """An activator that serves over loopback; on a cluster its fleet has no Templates and nothing
    sleeps."""
    usual = {"max_body_bytes": 1000, "unauthenticated_per_s": 5.0}
    edge = Edge(directory, ActivatorSettings(**{**usual, **settings}), behaviour)
    on_fleet(edge.fleet, fleet)
    async with served(edge):
        yield edge


def on_fleet(fake: Any, fleet: str) -> None:
    """A fleet of pods has no Templates, and pods do not sleep."""
    fake.has_templates = fake.can_sleep = fleet != CLUSTER


@asynccontextmanager
async def scaling(directory: Path, fleet: str, **more: Any) -> AsyncIterator[ScaledWorld]:
    """An autoscaler whose clock the test moves."""
    async with ScaledWorld.running(directory, **more) as world:
        on_fleet(world.fleet, fleet)
        yield world


def parts_of(root: Any, kind: type, *, depth: int = 6) -> Iterator[Any]:
    """The parts of that type that an object is made of, directly or through others."""
    seen: set[int] = set()
    level = [root]
    for _ in range(depth):
        following = []
        for one in level:
            if id(one) in seen or isinstance(one, str | bytes | int | float | Path):
                continue
            seen.add(id(one))
            if isinstance(one, kind):
                yield one
            following += list(getattr(one, "__dict__", {}).values())
            following += [getattr(one, name, None) for name in getattr(one, "__slots__", ())]
        level = following


def made_with(root: Any, kind: type) -> dict[str, Any]:
    """What the one part of that type holds, by name without underscores."""
    part = next(parts_of(root, kind))
    return {name.strip("_"): value for name, value in vars(part).items()}
