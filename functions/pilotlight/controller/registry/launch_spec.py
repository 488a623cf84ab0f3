"""Function ids, launch specs for nodes, and routes for activators, derived from a function's
spec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pilotlight.controller.database import feed
from pilotlight.protocol import FunctionRoute
from pilotlight.spec import traffic
from pilotlight.spec.function import FunctionKind, FunctionNetwork, FunctionSpec
from pilotlight.spec.identifiers import FunctionId
from pilotlight.spec.record_json import to_json
from pilotlight.spec.traffic import TrafficDocument
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.types import LaunchSpec, RevisionKey, VolumeMount, WeightsMount


def function_id(*, tenant: str, environment: str, app: str, function: str) -> FunctionId:
    """Return the function's id: `f-` and 16 hex digits. It depends only on the names, so that a
    redeployed function continues its metrics and bills."""
    path = f"{tenant}/{environment}/{app}/{function}"
    return FunctionId("f-" + hashlib.sha256(path.encode()).hexdigest()[:16])


def launch_spec(
    spec: FunctionSpec,
    *,
    revision: str,
    tenant: str,
    uid: int | None,
    environment: str,
    app: str,
    snapshots: bool,
    variables: Mapping[str, Sequence[str]],
) -> LaunchSpec:
    """Return what the node agent needs to start `spec`.

    `snapshots`: the operator's switch. `variables`: secret → names of the variables that it sets.
    """
    resources = spec.resources
    return LaunchSpec(
        revision=RevisionKey(
            f"{function_id(tenant=tenant, environment=environment, app=app, function=spec.name)}@{revision}"
        ),
        trust_domain=tenant,
        uid=uid,
        bundle=spec.bundle,
        image=spec.image,
        entry=to_json(spec),
        env=dict(spec.env),
        weights=tuple(WeightsMount(name=w.name, manifest=w.manifest) for w in spec.weights),
        volumes=tuple(VolumeMount(name=v.name, path=v.path) for v in spec.volumes),
        memory_bytes=resources.memory_bytes,
        cpu=resources.cpu,
        engine=spec.engine.environment if spec.engine is not None and spec.image is None else None,
        offline=spec.kind is FunctionKind.ENGINE or spec.network is FunctionNetwork.NONE,
        egress=spec.egress,
        gpu=resources.gpu,
        gpu_count=resources.gpu_count,
        gpu_memory_bytes=spec.engine.gpu_bytes if spec.engine is not None else 0,
        startup_timeout_s=spec.clocks.startup_s,
        # forks share their slot, and a sandbox has one for itself
        forkable=spec.snapshot and not spec.sandbox,
        snapshot=spec.snapshot and snapshots,
        secret_variables=tuple(
            sorted({variable for secret in spec.secrets for variable in variables.get(secret, ())})
        ),
        labels={
            "tenant": tenant,
            "environment": environment,
            "app": app,
            "function": spec.name,
            "revision": revision,
        },
    )


def function_route(
    *,
    tenant: str,
    uid: int | None,
    environment: str,
    app: str,
    function: str,
    document: TrafficDocument,
    specs: Mapping[str, FunctionSpec],
    stopped: bool,
    snapshots: bool,
    variables: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return the route of a function for activators. `specs` has every revision that `document`
    names; the other arguments are those of `launch_spec`."""
    revisions: dict[str, dict[str, Any]] = {}
    for name, spec in sorted(specs.items()):
        launch = launch_spec(
            spec,
            revision=name,
            tenant=tenant,
            uid=uid,
            environment=environment,
            app=app,
            snapshots=snapshots,
            variables=variables,
        )
        revisions[name] = {"spec": to_json(spec), "launch": launch.to_json()}
    return FunctionRoute(
        id=function_id(tenant=tenant, environment=environment, app=app, function=function),
        tenant=tenant,
        environment=environment,
        app=app,
        function=function,
        traffic=tuple(sorted(document.weights.items())),
        revisions=revisions,
        stopped=stopped,
        document=traffic.to_json(document),
    ).to_json()


def seal_page(page: feed.Page, grants: LaunchSigner) -> feed.Page:
    """Return the page for activators of this machine: each launch document has the seal that the
    node agent requires."""
    return replace(page, changes=tuple(_seal_change(change, grants) for change in page.changes))


def _seal_change(text: str, grants: LaunchSigner) -> str:
    change = json.loads(text)
    if change["kind"] != feed.FUNCTION or change["value"] is None:
        return text
    for document in change["value"]["revisions"].values():
        document["launch"] = grants.signed(LaunchSpec.from_json(document["launch"])).to_json()
    return json.dumps(change, separators=(",", ":"))
