"""Routes for schedules: list, pause, resume, and run immediately."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Response
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Context, Ctx, Deployer, RequestId
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.scheduling import schedules
from pilotlight.controller.scheduling.schedules import ScheduleEntry
from pilotlight.spec.record_json import to_json

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])
App = Annotated[str, Path(max_length=63)]
Function = Annotated[str, Path(max_length=63)]
Number = Annotated[int, Path(ge=0, le=1000, description="the schedule's `number`")]


def _place(app: App, function: Function, number: Number) -> tuple[str, str, int]:
    return app, function, number


Place = Annotated[tuple[str, str, int], Depends(_place)]


class ScheduleInfo(Body):
    """A schedule of a function. It is declared with the function, and can be paused here."""

    id: str
    app: str
    function: str
    number: int
    cron: str = Field(description='"" if the schedule has a period')
    period_s: float | None
    timezone: str
    missed: str = Field(
        description="skip: times that passed while the platform was down are skipped; catch_up: "
        "one call replaces all of them"
    )
    method: str
    arguments: Any
    is_paused: bool
    next_at: float | None = Field(description="null: paused, or the app is stopped")
    last_at: float | None = Field(description="the last scheduled time that started a call")


class ScheduleList(Body):
    """The environment's schedules that the key may access."""

    schedules: list[ScheduleInfo]


class Begun(Body):
    """A call that was started."""

    id: str
    url: str


@router.get("")
def list_schedules(
    context: Ctx, caller: Deployer, app: str | None = None, function: str | None = None
) -> ScheduleList:
    """List the schedules of the environment's functions."""
    app, function = caller.restrict(app, function)
    with context.store.read() as sql:
        found = schedules.listing(
            sql, tenant=caller.tenant, environment=caller.environment, app=app, function=function
        )
    return ScheduleList(schedules=[_info(one) for one in found])


@router.post("/{app}/{function}/{number}:pause")
def pause_schedule(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    place: Place,
) -> ScheduleInfo:
    """Pause the schedule until it is resumed, across deploys."""
    return _set_paused(context, caller, request, place, is_paused=True)


@router.post("/{app}/{function}/{number}:resume")
def resume_schedule(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    place: Place,
) -> ScheduleInfo:
    """Resume the schedule at its next time. Times that passed while it was paused are skipped."""
    return _set_paused(context, caller, request, place, is_paused=False)


@router.post("/{app}/{function}/{number}:run", dependencies=[REQUIRE_DISK_SPACE], status_code=202)
def run_schedule(
    *,
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    place: Place,
    response: Response,
) -> Begun:
    """Start a call now, in addition to the schedule."""
    with context.store.write() as write:
        planned = _planned(write, caller, *place)
        call_id = schedules.run_now(write, planned, actor=caller.key, request=request)
    response.headers["location"] = f"/v1/calls/{call_id}"
    return Begun(id=call_id, url=f"/v1/calls/{call_id}")


def _planned(
    write: Write, caller: Principal, app: str, function: str, number: int
) -> ScheduleEntry:
    caller.require_function(app, function)
    return schedules.get(
        write.sql,
        tenant=caller.tenant,
        environment=caller.environment,
        app=app,
        function=function,
        number=number,
    )


def _info(planned: ScheduleEntry) -> ScheduleInfo:
    named = {
        name: getattr(planned, name)
        for name in ("id", "app", "function", "number", "is_paused", "next_at", "last_at")
    }
    return ScheduleInfo(**named, **to_json(planned.schedule))


def _set_paused(
    context: Context,
    caller: Principal,
    request: str,
    place: tuple[str, str, int],
    *,
    is_paused: bool,
) -> ScheduleInfo:
    with context.store.write() as write:
        planned = _planned(write, caller, *place)
        schedules.pause(write, planned, is_paused=is_paused, actor=caller.key, request=request)
        return _info(_planned(write, caller, *place))
