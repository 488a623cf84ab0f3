"""Route documents for tests, as the controller would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from activator.routing.route_table import CallTarget, RouteTable
from pilotlight.core.crypto import ActivatorKey
from pilotlight.protocol import FeedChange, FunctionRoute
from pilotlight.spec.function import FunctionKind, FunctionNetwork, FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.pricing import Rates
from pilotlight.spec.record_json import to_json
from pilotlight.spec.traffic import TrafficDocument, with_weights
from pilotlight.spec.traffic import to_json as document_to_json
from snapshotter.types import LaunchSpec, RevisionKey, WeightsMount

TEST_KEY = ActivatorKey(b"0123456789abcdef0123456789abcdef")
TENANT = "t-000000000001"
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def spec_of(
    name: str = "hello",
    *,
    scaling: Scaling | None = None,
    methods: tuple[MethodSpec, ...] = (MethodSpec(schema=SCHEMA, parameters=("x", "y")),),
    kind: FunctionKind = FunctionKind.FUNCTION,
    **more: Any,
) -> FunctionSpec:
    """A function's spec with a checked integer argument `x` and an optional `y`."""
    return FunctionSpec(
        name=name,
        module="app",
        qualname=name,
        bundle="b" * 64,
        methods=methods,
        scaling=scaling or Scaling(),
        kind=kind,
        **more,
    )


def route_of(
    spec: FunctionSpec,
    *,
    app: str = "shop",
    tenant: str = TENANT,
    environment: str = "main",
    revision: str = "v1-abcdef",
) -> FunctionRoute:
    """A route with all traffic on one revision."""
    launch = LaunchSpec(
        revision=RevisionKey(f"f-{app}-{spec.name}@{revision}"),
        trust_domain=tenant,
        uid=None,
        bundle=spec.bundle,
        image=None,
        entry={},
        memory_bytes=spec.resources.memory_bytes,
        cpu=spec.resources.cpu,
        startup_timeout_s=spec.clocks.startup_s,
        forkable=spec.snapshot,
        labels={
            "tenant": tenant,
            "environment": environment,
            "app": app,
            "function": spec.name,
            "revision": revision,
        },
        weights=tuple(WeightsMount(name=w.name, manifest=w.manifest) for w in spec.weights),
        gpu=spec.resources.gpu,
        gpu_count=spec.resources.gpu_count,
        offline=spec.network is FunctionNetwork.NONE,
    )
    return FunctionRoute(
        id=f"f-{app}-{spec.name}",
        tenant=tenant,
        environment=environment,
        app=app,
        function=spec.name,
        traffic=((revision, 100),),
        revisions={revision: {"spec": to_json(spec), "launch": launch.to_json()}},
    )


def target_of(spec: FunctionSpec, **more: Any) -> CallTarget:
    """The CallTarget of that route."""
    route = route_of(spec, **more)
    return CallTarget(route, route.traffic[0][0], Rates(version="test"))


def change(seq: int, route: FunctionRoute) -> FeedChange:
    """The route as a change of the feed."""
    return FeedChange(
        seq=seq,
        kind="function",
        key=f"{route.tenant}/{route.environment}/{route.app}/{route.function}",
        value=route.to_json(),
    )


def empty_table() -> RouteTable:
    """A RouteTable that knows nothing but its price lists: the platform's own, and `tokens`."""
    lists = (
        Rates(version="test", gpu_s={"L4": Decimal("0.0002")}),
        Rates(version="tokens", token_in=Decimal("0.001"), token_out=Decimal("0.01")),
    )
    return RouteTable({rates.version: rates for rates in lists}, TEST_KEY.secrets)


def split_route(
    spec: FunctionSpec, weights: Mapping[str, int], *, named: Sequence[str] = (), **more: Any
) -> FunctionRoute:
    """A route of several revisions: `weights`, the `named` ones beside them, and the other members
    of its traffic document in `more`."""
    names = sorted({*weights, *named})
    routes = {name: route_of(spec, revision=name) for name in names}
    first = routes[names[0]]
    document = with_weights(TrafficDocument(salt=first.id, **more), weights)
    return replace(
        first,
        traffic=tuple(sorted(weights.items())),
        revisions={name: route.revisions[name] for name, route in routes.items()},
        document=document_to_json(document),
    )
