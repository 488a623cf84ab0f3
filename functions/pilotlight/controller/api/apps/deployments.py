"""Routes for deploying a model version (in model-server terms) and for promoting between
environments."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import Field

from pilotlight.controller.api import schemas
from pilotlight.controller.api.apps.revisions import Message, Reference
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.billing import price_lists
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Context,
    Ctx,
    Deployer,
    RequestId,
    app_ref_of,
)
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import (
    dependency_checks,
    fleet_checks,
    model_names,
    promotion,
)
from pilotlight.controller.deployments.releases import ReleaseOptions, ReleaseResult
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import release_gates
from pilotlight.controller.rollouts import plan
from pilotlight.controller.weights import node_cache, storage_usage
from pilotlight.errors import Forbidden

router = APIRouter(tags=["releases"])
Environment = Annotated[str, Field(min_length=1, max_length=63)]


class PromotionRequest(Body):
    """Deploy what serves in one environment to another. `function` null: every function of the
    app."""

    from_environment: Environment
    to_environment: Environment
    function: str | None = Field(default=None, max_length=63)
    message: Message = ""
    rollout: dict[str, Any] | None = None
    allow_breaking: bool = False


class ModelResources(Body):
    """Resources of one instance; omitted fields keep the version's values."""

    cpu: float | None = None
    memory_bytes: int | None = None
    gpu: list[str] | None = Field(default=None, max_length=16)
    gpu_count: int | None = None


class CanaryPolicy(Body):
    """A step-by-step rollout: traffic percentages, and the minimum duration of each step."""

    type: Literal["canary"]
    steps: list[int] = Field(min_length=1, max_length=20)
    every_s: float | None = None
    min_samples: int | None = None
    gates: list[dict[str, Any]] | None = None


class ModelDeployment(Body):
    """A model version to serve."""

    modelId: str = Field(max_length=160, description="`app/function`")
    version: Reference
    resources: ModelResources | None = None
    rolloutPolicy: Literal["all_at_once"] | CanaryPolicy = "all_at_once"


class ModelDeployed(Body):
    """The result of a deployment. `version` is the revision's name."""

    modelId: str
    version: str
    stage: Literal["live", "waiting", "no_traffic", "rollout"]
    approvals: int
    rollout: str


@router.post("/v1/apps/{app}:promote", dependencies=[REQUIRE_DISK_SPACE])
async def promote_app(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: Annotated[str, Path(max_length=63)],
    body: PromotionRequest,
) -> schemas.DeployResponse:
    """Deploy in one environment the specs that serve in another."""
    if body.function is None:
        caller.require_app(app)
    else:
        caller.require_function(app, body.function)
    for environment in (body.from_environment, body.to_environment):
        if caller.bound_environment not in (None, environment):
            raise Forbidden(
                f"key {caller.key} is bound to environment {caller.bound_environment!r}, not "
                f"{environment!r}"
            )
    done, unpinned = await context.threads.run(
        caller.tenant, _promote, context, caller, request=request, app=app, body=body
    )
    await node_cache.unpin_unused(context.cache, context.store, unpinned)
    context.metrics.deploys.inc()
    return schemas.DeployResponse(**promotion.describe_promotion(done))


@router.post("/v1/deployments", dependencies=[REQUIRE_DISK_SPACE])
def deploy_model(
    context: Ctx, caller: Deployer, request: RequestId, body: ModelDeployment
) -> ModelDeployed:
    """Serve a model version. Resources that differ from the version's create a new revision."""
    where, function = _model(caller, body.modelId, request)
    policy = body.rolloutPolicy
    steps = (
        None
        if policy == "all_at_once"
        else plan.parse(policy.model_dump(exclude={"type"}, exclude_none=True))
    )
    resources = body.resources.model_dump(exclude_none=True) if body.resources is not None else {}

    def make(write: Write) -> tuple[str, ReleaseResult]:
        spec = model_names.model_version(
            write.sql, where, function=function, reference=body.version
        )
        dependency_checks.check_fallbacks(caller, app=where.app, specs=[spec])
        dependency_checks.check_egress([spec], context.config.egress)
        fleet_checks.check_fleet(write.sql, context.config, tenant=caller.tenant, specs=[spec])
        if "gpu" in resources:
            resized = replace(spec, resources=replace(spec.resources, gpu=tuple(resources["gpu"])))
            dependency_checks.check_prices(
                [resized], price_lists.of_tenant(write.sql, context.config, caller.tenant)
            )
        terms = ReleaseOptions(plan=steps)
        with storage_usage.enforce_deploy_limits(write, context.config.plans, tenant=caller.tenant):
            return model_names.deploy_version(
                write,
                where,
                function=function,
                reference=body.version,
                resources=resources,
                terms=terms,
            )

    name, done = release_gates.write_with_gates(context.store, make)
    return ModelDeployed(
        modelId=body.modelId,
        version=name,
        stage=done.stage.value,
        approvals=done.approvals,
        rollout=done.rollout,
    )


def _promote(
    context: Context, caller: Principal, *, request: str, app: str, body: PromotionRequest
) -> tuple[Any, list[str]]:
    origin = _in(caller, app, body.from_environment, request)
    target = _in(caller, app, body.to_environment, request)
    promotion.require_different_environments(origin, target)
    with context.store.read() as sql:
        found = promotion.candidates(sql, origin, function=body.function)
        specs = [candidate.spec for candidate in found]
        dependency_checks.check_fallbacks(caller, app=app, specs=specs)
        dependency_checks.check_egress(specs, context.config.egress)
        fleet_checks.check_fleet(sql, context.config, tenant=caller.tenant, specs=specs)
        manifests = promotion.manifests_of(sql, context.files, tenant=caller.tenant, found=found)
    terms = ReleaseOptions(
        plan=plan.parse(body.rollout) if body.rollout is not None else None,
        allow_breaking=body.allow_breaking,
    )

    def make(write: Write) -> tuple[Any, list[str]]:
        with storage_usage.enforce_deploy_limits(write, context.config.plans, tenant=caller.tenant):
            return promotion.promote(
                write,
                target,
                origin=origin,
                found=found,
                manifests=manifests,
                terms=terms,
                message=body.message,
                bundle_max_bytes=context.config.settings.bundle_max_bytes,
                whole_app=body.function is None,
                is_bound=caller.bound_app is not None,
            )

    return release_gates.write_with_gates(context.store, make)


def _in(caller: Principal, app: str, environment: str, request: str) -> AppRef:
    return AppRef(
        tenant=caller.tenant,
        uid=caller.uid,
        environment=environment,
        app=app,
        actor=caller.key,
        request=request,
    )


def _model(caller: Principal, model: str, request: str) -> tuple[AppRef, str]:
    app, function = model_names.parse_model_name(model)
    caller.require_function(app, function)
    return app_ref_of(caller, app, request), function
