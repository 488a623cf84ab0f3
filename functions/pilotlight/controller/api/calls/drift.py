"""Routes for drift and quality of monitored functions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from pydantic import Field

from pilotlight.controller.api.account.billing import parse_time
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, Deployer, RequestId
from pilotlight.controller.database import audit_trail
from pilotlight.controller.drift import sketch_store, views
from pilotlight.controller.drift.sketch_store import FeatureCounts
from pilotlight.controller.drift.targets import MonitoredFunction, find_target
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import InvalidInput
from pilotlight.spec.monitor import MAX_WINDOW_H, PREDICTION
from pilotlight.spec.prediction_log import HOUR_S

router = APIRouter(prefix="/v1", tags=["drift"])
_Revision = Annotated[str | None, Query(max_length=200)]


class BaselineRequest(Body):
    """What windows are compared with: a time of the log, or counts of other rows, such as those
    of the training data, which `pilotlight drift baseline --from` makes."""

    since: str | None = Field(default=None, max_length=200, description="with `until`: whole hours")
    until: str | None = Field(default=None, max_length=200)
    rows: int = Field(default=0, ge=0, le=2**53)
    features: dict[str, Any] = Field(
        default={}, max_length=64, description="path, or `prediction` → sketch"
    )


class BaselineAnswer(Body):
    """The stored reference."""

    rows: int
    features: list[str]
    source: str


@router.get("/drift")
async def list_drift(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """Return the monitored functions, with their last windows."""

    def load(sql: Any) -> list[dict[str, Any]]:
        found = views.listing(sql, tenant=caller.tenant, environment=caller.environment)
        return [views.summary(sql, one) for one in found if caller.may_see(one.app, one.function)]

    return {"functions": await context.read(caller.tenant, load)}


@router.get("/apps/{app}/functions/{function}/drift")
async def show_drift(
    *,
    context: Ctx,
    caller: Deployer,
    app: str,
    function: str,
    limit: Annotated[int, Query(ge=1, le=views.MAX_REPORTS)] = 10,
    revision: _Revision = None,
    against: _Revision = None,
) -> dict[str, Any]:
    """Return the windows of a monitored function: the judged ones, and the current one so far.
    `revision` and `against`: also the difference of two revisions."""
    if (revision is None) != (against is None):
        raise InvalidInput("give both revision and against, or neither", parameter="against")

    def load(sql: Any) -> dict[str, Any]:
        target = _target(sql, caller, app, function)
        now = context.clock()
        found = views.detail(sql, target, now=now, limit=limit)
        if revision is not None and against is not None:
            found["contrast"] = views.compare_revisions(
                sql, target, revision=revision, against=against, now=now
            )
        return found

    return await context.read(caller.tenant, load)


@router.put("/apps/{app}/functions/{function}/drift/baseline")
async def set_baseline(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: str,
    function: str,
    body: BaselineRequest,
) -> BaselineAnswer:
    """Replace the reference of a monitored function."""
    since, until = parse_time("since", body.since), parse_time("until", body.until)
    if (since is None) != (until is None) or (since is None) == (not body.features):
        raise InvalidInput("give since and until, or rows and features", parameter="since")

    def count(sql: Any) -> FeatureCounts:
        target = _target(sql, caller, app, function)
        if since is not None and until is not None:
            return _of_log(sql, target, since, until, now=context.clock())
        return FeatureCounts.from_json(body.rows, body.features)

    source = "rows" if since is None else f"log {body.since} to {body.until}"
    counted = await context.read(caller.tenant, count)  # takes seconds: no transaction

    def store(write: Any) -> BaselineAnswer:
        target = _target(write.sql, caller, app, function)
        _require_complete(target, counted)
        sketch_store.set_reference(
            write,
            target.function_id,
            counted,
            tenant=target.tenant,
            source=source,
            actor=caller.key,
        )
        answer = BaselineAnswer(rows=counted.rows, features=sorted(counted.features), source=source)
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="drift.baseline",
            subject=f"{caller.environment}/{app}/{function}",
            after=answer.model_dump(),
            request=request,
        )
        return answer

    return await context.write(caller.tenant, store)


def _of_log(
    sql: Any, target: MonitoredFunction, since: float, until: float, *, now: float
) -> FeatureCounts:
    since_h, until_h = int(since // HOUR_S), int(-(-until // HOUR_S))
    if not 0 < until_h - since_h <= MAX_WINDOW_H:
        raise InvalidInput(
            f"since and until are {until_h - since_h} hours apart: give 1 to {MAX_WINDOW_H}",
            parameter="until",
        )
    return sketch_store.window(sql, target.function_id, since_h=since_h, until_h=until_h, now=now)


def _require_complete(target: MonitoredFunction, counted: FeatureCounts) -> None:
    """Raise InvalidInput for a reference without enough rows, or of unknown features."""
    terms = target.terms
    known = {*(one.path for one in terms.features), PREDICTION}
    if unknown := sorted(counted.features.keys() - known):
        raise InvalidInput(
            f"{unknown[0]!r} is no feature of {target.name}: it watches {', '.join(sorted(known))}",
            parameter="features",
        )
    if counted.rows < terms.min_rows:
        raise InvalidInput(
            f"a reference of {target.name} needs {terms.min_rows} rows, and this has "
            f"{counted.rows}",
            hint="Take a longer time of the log, more rows, or a smaller min_rows.",
            parameter="rows",
        )


def _target(sql: Any, caller: Principal, app: str, function: str) -> MonitoredFunction:
    caller.require_function(app, function)
    return find_target(
        sql,
        tenant=caller.tenant,
        environment=caller.environment,
        app=app,
        function=function,
    )
