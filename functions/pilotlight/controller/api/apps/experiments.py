"""Routes for experiments, which compare revisions of a function on a random split of its
callers."""

from __future__ import annotations

import os
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Ctx, Deployer, RequestId, app_ref_of
from pilotlight.controller.database.store import Write
from pilotlight.controller.experiments import design, lifecycle, report
from pilotlight.controller.experiments.lifecycle import Experiment
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import release_gates
from pilotlight.errors import Conflict, NotFound
from pilotlight.spec.traffic import BY_KEY, WHOLE

router = APIRouter(prefix="/v1/experiments", tags=["experiments"])


class ArmBody(Body):
    """One arm: `revision` serves `share` percent of the units in the experiment."""

    name: str = Field(max_length=63)
    revision: str = Field(max_length=200)
    share: float


class ExperimentRequest(Body):
    """An experiment. The first arm is the baseline; it receives the share of any arm that is
    stopped."""

    app: str = Field(max_length=63)
    function: str = Field(max_length=63)
    name: str = Field(max_length=63)
    arms: list[ArmBody] = Field(max_length=64)
    unit: str = Field(
        default=BY_KEY,
        max_length=80,
        description="unit that is assigned to exactly one arm: `key`, `tenant`, `header:<name>`",
    )
    percent: float = Field(
        default=float(WHOLE),
        description="percent of all units; the rest follow the function's weights",
    )
    guardrails: list[str] = Field(
        default=list(design.DEFAULT_GUARDRAILS),
        max_length=64,
        description="`METRIC +BOUND[%]` or `METRIC -BOUND[%]`, against the first arm: an arm that "
        "exceeds a bound is stopped",
    )
    start: bool = Field(default=False, description="start the experiment immediately")


class StoppedArm(Body):
    """When an arm was stopped, and why."""

    at: float
    reason: str


class ExperimentInfo(Body):
    """An experiment. `state`: DRAFT, RUNNING, STOPPED or CONCLUDED. `winner`: the arm with which it
    was concluded."""

    id: str
    environment: str
    app: str
    function: str
    name: str
    state: str
    reason: str
    winner: str
    unit: str
    percent: float
    arms: list[ArmBody]
    guardrails: list[str]
    stopped: dict[str, StoppedArm]
    created_by: str
    created_at: float
    began_at: float | None
    ended_at: float | None


class ExperimentList(Body):
    """Experiments, newest first."""

    experiments: list[ExperimentInfo]


class Bounds(Body):
    """A value with its 95 % confidence interval, valid at all times simultaneously. null: unknown
    or unbounded."""

    value: float | None
    low: float | None
    high: float | None


class ArmReport(ArmBody):
    """An arm's results, by metric."""

    stopped: StoppedArm | None
    units: int
    calls: int
    mistagged: int
    metrics: dict[str, Bounds]


class Comparison(Bounds):
    """An arm's metric minus the first arm's. `verdict`: higher, lower, not shown, or invalid."""

    metric: str
    arm: str
    first: str
    relative: float | None
    verdict: str


class GuardrailReport(Bounds):
    """How far an arm exceeds its bound. `state`: breached (the whole interval is above 0), within
    (below 0), open, or unknown."""

    guardrail: str
    arm: str
    state: str


class SampleRatio(Body):
    """Observed and planned units per arm. `p` is valid for any number of looks, `p_single_look`
    (chi-square) for one."""

    observed: dict[str, int]
    expected: dict[str, float]
    chi_square: float
    p_single_look: float
    p: float


class Report(Body):
    """The results of an experiment. If not `valid`, none of them count, for the reasons in
    `problems`."""

    experiment: ExperimentInfo
    at: float
    valid: bool
    problems: list[str]
    alpha: float
    peeking: str
    arms: list[ArmReport]
    comparisons: list[Comparison]
    sample_ratio: SampleRatio
    guardrails: list[GuardrailReport]


class StopRequest(Body):
    """The reason, and the arm to stop; null: the whole experiment."""

    reason: str = Field(default="stopped by hand", max_length=lifecycle.MAX_REASON)
    arm: str | None = Field(default=None, max_length=63)


class ConcludeRequest(Body):
    """The arm whose revision receives all traffic. `force`: conclude although the report is
    invalid."""

    arm: str = Field(max_length=63)
    force: bool = False


@router.post("", dependencies=[REQUIRE_DISK_SPACE], status_code=201)
def create_experiment(
    context: Ctx, caller: Deployer, request: RequestId, body: ExperimentRequest
) -> ExperimentInfo:
    """Create an experiment, and start it if requested."""
    caller.require_function(body.app, body.function)
    arms = [arm.model_dump() for arm in body.arms]
    plan = design.parse(
        unit=body.unit,
        percent=body.percent,
        arms=arms,
        guardrails=body.guardrails,
        salt=os.urandom(8).hex(),
    )
    where = app_ref_of(caller, body.app, request)

    def make(write: Write) -> ExperimentInfo:
        made = lifecycle.create(write, where, function=body.function, name=body.name, design=plan)
        return _info(lifecycle.start(write, where, made) if body.start else made)

    return release_gates.write_with_gates(context.store, make)


@router.get("")
def list_experiments(
    context: Ctx,
    caller: Deployer,
    app: Annotated[str | None, Query(max_length=63)] = None,
    function: Annotated[str | None, Query(max_length=63)] = None,
) -> ExperimentList:
    """List the experiments of the environment that the key may access."""
    app, function = caller.restrict(app, function)
    with context.store.read() as sql:
        found = lifecycle.listing(sql, tenant=caller.tenant, environment=caller.environment)
    return ExperimentList(
        experiments=[
            _info(one)
            for one in found
            if app in (None, one.app) and function in (None, one.function)
        ]
    )


@router.get("/{experiment}")
def get_experiment(context: Ctx, caller: Deployer, experiment: str) -> ExperimentInfo:
    """Return one experiment."""
    with context.store.read() as sql:
        return _info(
            _require_visible(
                caller, lifecycle.get(sql, tenant=caller.tenant, experiment=experiment)
            )
        )


@router.get("/{experiment}/report")
def get_report(context: Ctx, caller: Deployer, experiment: str) -> Report:
    """Return the current results. They may be requested at any time without biasing the test."""
    with context.store.read() as sql:
        found = _require_visible(
            caller, lifecycle.get(sql, tenant=caller.tenant, experiment=experiment)
        )
        return Report(**report.make_report(sql, found, now=context.clock()))


@router.post("/{experiment}:start")
def start_experiment(
    context: Ctx, caller: Deployer, request: RequestId, experiment: str
) -> ExperimentInfo:
    """Start the experiment: assign units to its arms."""

    def make(write: Write) -> ExperimentInfo:
        found = _require_visible(
            caller, lifecycle.get(write.sql, tenant=caller.tenant, experiment=experiment)
        )
        return _info(lifecycle.start(write, _place(caller, found, request), found))

    return release_gates.write_with_gates(context.store, make)


@router.post("/{experiment}:stop")
def stop_experiment(
    context: Ctx, caller: Deployer, request: RequestId, experiment: str, body: StopRequest
) -> ExperimentInfo:
    """Stop the experiment: all callers follow the function's weights again within a second. With
    `arm`, stop only that arm; its share goes to the first."""
    with context.store.write() as write:
        found = _require_visible(
            caller, lifecycle.get(write.sql, tenant=caller.tenant, experiment=experiment)
        )
        where = _place(caller, found, request)
        if body.arm is not None:
            return _info(lifecycle.stop_arm(write, where, found, arm=body.arm, reason=body.reason))
        return _info(lifecycle.halt(write, where, found, reason=body.reason))


@router.post("/{experiment}:conclude")
def conclude_experiment(
    context: Ctx, caller: Deployer, request: RequestId, experiment: str, body: ConcludeRequest
) -> ExperimentInfo:
    """End the experiment and give all traffic to one arm's revision. Refused if the report is
    invalid, unless forced."""
    with context.store.write() as write:
        found = _require_visible(
            caller, lifecycle.get(write.sql, tenant=caller.tenant, experiment=experiment)
        )
        problems = report.problems(write.sql, found)
        if problems and not body.force:
            hint = "See `pilotlight experiment report`; `--force` concludes it anyway."
            raise Conflict(
                f"experiment {found.name!r} is invalid: {'; '.join(problems)}",
                problems=problems,
                hint=hint,
            )
        return _info(lifecycle.conclude(write, _place(caller, found, request), found, arm=body.arm))


def _require_visible(caller: Principal, found: Experiment) -> Experiment:
    """Return the experiment. Raises NotFound if the key may not access it."""
    if caller.bound_environment not in (None, found.environment) or not caller.may_see(
        found.app, found.function
    ):
        raise NotFound(f"there is no experiment {found.id!r}", experiment=found.id)
    return found


def _place(caller: Principal, found: Experiment, request: str) -> AppRef:
    return AppRef(
        tenant=found.tenant,
        uid=caller.uid,
        environment=found.environment,
        app=found.app,
        actor=caller.key,
        request=request,
    )


def _info(found: Experiment) -> ExperimentInfo:
    body: dict[str, Any] = found.to_json()
    return ExperimentInfo(**body)
