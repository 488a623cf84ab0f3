"""Routes for deploying a model version (in model-server terms) and for promoting between
environments."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import Field

from pilotlight.controller import guards, holdings, models_served, prices, promotion, references
from pilotlight.controller.access import Principal
from pilotlight.controller.api import models
from pilotlight.controller.api.models import Body
from pilotlight.controller.api.revisions import Message, Reference
from pilotlight.controller.context import ROOM, Context, Ctx, Deployer, RequestId, place
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.places import Place
from pilotlight.controller.releases import Released, Terms
from pilotlight.controller.rollouts import plan
from pilotlight.controller.store import Write
from pilotlight.controller.stored import accounting
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

    modelId: str = Field(max_length=160, description="`app/function`")  # noqa: N815 - the name in the API
    version: Reference
    resources: ModelResources | None = None
    rolloutPolicy: Literal["all_at_once"] | CanaryPolicy = "all_at_once"  # noqa: N815 - the name in the API


class ModelDeployed(Body):
    """The result of a deployment. `version` is the revision's name."""

    modelId: str  # noqa: N815 - the name in the API
    version: str
    stage: Literal["live", "waiting", "no_traffic", "rollout"]
    approvals: int
    rollout: str


@router.post("/v1/apps/{app}:promote", dependencies=[ROOM])
async def promote_app(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: Annotated[str, Path(max_length=63)],
    body: PromotionRequest,
) -> models.DeployResponse:
    """Deploy in one environment the specs that serve in another."""
    if body.function is None:
        caller.demand_app(app)
    else:
        caller.demand_function(app, body.function)
    for environment in (body.from_environment, body.to_environment):
        if caller.bound_environment not in (None, environment):
            raise Forbidden(
                f"key {caller.key} is bound to environment {caller.bound_environment!r}, not "
                f"{environment!r}"
            )
    done, unpinned = await context.threads.run(
        caller.tenant, _promote, context, caller, request=request, app=app, body=body
    )
    await holdings.settle(context.cache, context.store, unpinned)
    context.metrics.deploys.inc()
    return models.DeployResponse(**promotion.shown(done))


@router.post("/v1/deployments", dependencies=[ROOM])
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

    def make(write: Write) -> tuple[str, Released]:
        spec = models_served.version(write.sql, where, function=function, reference=body.version)
        references.check_rungs(caller, app=where.app, specs=[spec])
        references.check_egress([spec], context.config.egress)
        if "gpu" in resources:
            resized = replace(spec, resources=replace(spec.resources, gpu=tuple(resources["gpu"])))
            references.check_prices(
                [resized], prices.of_tenant(write.sql, context.config, caller.tenant)
            )
        terms = Terms(plan=steps)
        with accounting.deploying(write, context.config.plans, tenant=caller.tenant):
            return models_served.deploy(
                write,
                where,
                function=function,
                reference=body.version,
                resources=resources,
                terms=terms,
            )

    name, done = guards.change(context.store, make)
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
    promotion.demand_other(origin, target)
    with context.store.read() as sql:
        found = promotion.candidates(sql, origin, function=body.function)
        specs = [candidate.spec for candidate in found]
        references.check_rungs(caller, app=app, specs=specs)
        references.check_egress(specs, context.config.egress)
        manifests = promotion.manifests_of(sql, context.files, tenant=caller.tenant, found=found)
    terms = Terms(
        plan=plan.parse(body.rollout) if body.rollout is not None else None,
        allow_breaking=body.allow_breaking,
    )

    def make(write: Write) -> tuple[Any, list[str]]:
        with accounting.deploying(write, context.config.plans, tenant=caller.tenant):
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

    return guards.change(context.store, make)


def _in(caller: Principal, app: str, environment: str, request: str) -> Place:
    return Place(
        tenant=caller.tenant,
        uid=caller.uid,
        environment=environment,
        app=app,
        actor=caller.key,
        request=request,
    )


def _model(caller: Principal, model: str, request: str) -> tuple[Place, str]:
    app, function = models_served.parse(model)
    caller.demand_function(app, function)
    return place(caller, app, request), function
