"""Routes for rollouts: their state and decisions, and manual control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Context, Ctx, Deployer, RequestId
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.rollouts import lifecycle, repository, views
from pilotlight.controller.rollouts.repository import Rollout
from pilotlight.errors import NotFound

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"])
RolloutId = Annotated[str, Path(max_length=64)]
MAX_DECISIONS = 1000


class RolloutInfo(Body):
    """A rollout. Times are seconds since the epoch; `weight` is the candidate's percent of the
    traffic."""

    id: str
    environment: str
    app: str
    function: str
    candidate: str
    stable: str
    state: str = Field(
        description="`running`, `paused`, `done`, `rolled_back`, `halted`, `aborted` or "
        "`superseded`"
    )
    reason: str
    steps: list[int] = Field(description="percentages of the traffic")
    step: int = Field(description="index into `steps`")
    weight: int
    every_s: float
    elapsed_s: float = Field(description="seconds since the step began")
    created_by: str
    created_at: float
    step_began_at: float
    updated_at: float
    finished_at: float | None


class GateInfo(Body):
    """The result of one gate. Numbers are in `unit` (`share`, `ms`, `money` or none); null: no
    data."""

    metric: str
    kind: str
    outcome: str = Field(description="`pass`, `fail`, `unclear` or `no_data`")
    candidate: float | None
    stable: float | None
    limit: float | None
    samples: int
    reason: str
    unit: str


class Judgement(Body):
    """The decision that would be made now."""

    verdict: str
    cause: str
    action: str
    reasons: list[str]
    gates: list[GateInfo]


class DecisionInfo(Judgement):
    """A past decision. A repeated decision is stored once a minute."""

    number: int
    at: float
    step: int


class RolloutDetail(RolloutInfo):
    """A rollout with its plan, its decisions (newest first), and the decision that would be made
    now."""

    plan: dict[str, Any]
    now: Judgement | None = Field(description="null once the rollout has ended")
    decisions: list[DecisionInfo]


class RolloutList(Body):
    """Rollouts that the key may access, newest first."""

    rollouts: list[RolloutInfo]


@router.get("")
def list_rollouts(
    *,
    context: Ctx,
    caller: Deployer,
    app: str | None = None,
    function: str | None = None,
    state: Literal[
        "active", "running", "paused", "done", "rolled_back", "halted", "aborted", "superseded"
    ]
    | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> RolloutList:
    """List the rollouts of the environment."""
    app, function = caller.restrict(app, function)
    with context.store.read() as sql:
        found = repository.listing(
            sql,
            tenant=caller.tenant,
            environment=caller.environment,
            app=app,
            function=function,
            state=state,
            limit=limit,
        )
    now = context.clock()
    return RolloutList(
        rollouts=[RolloutInfo(**views.summary(rollout, now=now)) for rollout in found]
    )


@router.get("/{rollout}")
def get_rollout(
    context: Ctx,
    caller: Deployer,
    rollout: RolloutId,
    limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 50,
) -> RolloutDetail:
    """Return one rollout, with up to `limit` decisions."""
    with context.store.read() as sql:
        found = repository.find(sql, tenant=caller.tenant, rollout=rollout)
        _require_visible(caller, found)
        return RolloutDetail(
            **views.detail(
                sql, found, now=context.clock(), limit=limit, rates=context.config.prices.rates()
            )
        )


@router.post("/{rollout}:pause")
def pause_rollout(
    context: Ctx, caller: Deployer, request: RequestId, rollout: RolloutId
) -> RolloutInfo:
    """Hold the rollout at its current step. A failing gate still rolls it back."""
    return _act(context, caller, request, rollout, lifecycle.pause)


@router.post("/{rollout}:resume")
def resume_rollout(
    context: Ctx, caller: Deployer, request: RequestId, rollout: RolloutId
) -> RolloutInfo:
    """Resume a paused rollout."""
    return _act(context, caller, request, rollout, lifecycle.resume)


@router.post("/{rollout}:promote")
def promote_rollout(
    context: Ctx, caller: Deployer, request: RequestId, rollout: RolloutId
) -> RolloutInfo:
    """Give all traffic to the candidate now, regardless of the gates."""
    return _act(context, caller, request, rollout, lifecycle.promote)


@router.post("/{rollout}:abort")
def abort_rollout(
    context: Ctx, caller: Deployer, request: RequestId, rollout: RolloutId
) -> RolloutInfo:
    """Return all traffic to stable now."""
    return _act(context, caller, request, rollout, lifecycle.abort)


def _act(
    context: Context,
    caller: Principal,
    request: str,
    rollout: str,
    act: Callable[[Write, Rollout, AppRef], None],
) -> RolloutInfo:
    with context.store.write() as write:
        found = repository.find(write.sql, tenant=caller.tenant, rollout=rollout)
        _require_visible(caller, found)
        act(write, found, found.place(actor=caller.key, request=request))
        after = repository.find(write.sql, tenant=caller.tenant, rollout=rollout)
        return RolloutInfo(**views.summary(after, now=write.now))


def _require_visible(caller: Principal, found: Rollout) -> None:
    """Raise NotFound for a rollout that the key may not access."""
    if caller.bound_environment not in (None, found.environment) or not caller.may_see(
        found.app, found.function
    ):
        raise NotFound(
            f"there is no rollout {found.id!r} that key {caller.key} may access", rollout=found.id
        )
