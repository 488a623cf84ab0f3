"""Pages of calls: the newest, with filters, and one call with its attempts, error and log lines."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Query
from fastapi.responses import Response

from pilotlight.controller.analytics import function_stats, recent_calls, traces
from pilotlight.controller.analytics.environment_usage import START_KINDS
from pilotlight.controller.analytics.recent_calls import STATES, STATUS_CLASSES, CallFilter
from pilotlight.controller.billing import ledger
from pilotlight.controller.dashboard import call_details, log_lines
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.log_lines import LogFilter
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.svg import total_ms
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.controller.scheduling.submitted_calls import CallQuery
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import NOT_RUN

PAGE = 50
LINES = 200
"""Log lines on the page of a call."""
PENDING_STATES = ("QUEUED", "RUNNING", "DEAD")
"""States of submitted calls that have no usage record yet, or can be redriven."""
STATE_WORDS = {
    "ok": "succeeded",
    "failed": "failed",
    "cancelled": "cancelled",
    "lost": "lost",
    "not_run": "not run (busy, unsent)",
    "QUEUED": "submitted, queued",
    "RUNNING": "submitted, running",
    "DEAD": "submitted, dead letter",
}
STATUS_CHOICES = (*STATUS_CLASSES[:1], *STATUS_CLASSES[2:], "429", "500", "502", "503", "504")
_Text = Annotated[str, Query(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The filters as the URL has them; `links` are the parameters of a link that keeps them."""

    function: str
    state: str
    status: str
    start_kind: str
    since: str
    until: str

    @property
    def links(self) -> dict[str, str]:
        """The parameters that are set."""
        return {name: value for name in self.__slots__ if (value := str(getattr(self, name)))}


@router.get("/dashboard/calls")
async def listing(
    *,
    visit: Visitor,
    function: _Text = "",
    state: _Text = "",
    status: _Text = "",
    start_kind: _Text = "",
    since: _Text = "",
    until: _Text = "",
    before: _Text = "",
) -> Response:
    """Render the calls of the environment, newest first: of one function (`app/name`), in a state,
    with a status, of a start kind, within a time. Raises NotFound, InvalidInput."""
    asked = _Asked(
        function=function,
        state=state,
        status=status,
        start_kind=start_kind,
        since=since,
        until=until,
    )
    if state in PENDING_STATES:
        found, known, pending = await visit.read(lambda sql: _pending(sql, visit, asked))
    else:
        found, known, pending = await visit.read(lambda sql: _load(sql, visit, asked, before))
    return render(
        "calls.html",
        visit=visit,
        found=found,
        pending=pending,
        known=known,
        asked=asked,
        before=before,
        states=(*STATES, *PENDING_STATES),
        state_words=STATE_WORDS,
        statuses=STATUS_CHOICES,
        start_kinds=START_KINDS,
        max_scanned=recent_calls.MAX_SCANNED,
    )


_Listing = tuple[recent_calls.CallPage, list[str], list[dict[str, Any]]]


def _load(sql: sa.Connection, visit: PageContext, asked: _Asked, before: str) -> _Listing:
    wanted = CallFilter(
        function_id=_function_id(sql, visit, asked.function) if asked.function else None,
        state=asked.state,
        status=asked.status,
        start_kind=asked.start_kind,
        since=_moment("since", asked.since),
        until=_moment("until", asked.until),
    )
    found = recent_calls.read(
        sql, **visit.where, now=visit.now, limit=PAGE, wanted=wanted, before=before
    )
    return found, function_stats.names(sql, **visit.where), []


def _function_id(sql: sa.Connection, visit: PageContext, function: str) -> str:
    app, _, name = function.partition("/")
    deployed = function_stats.one(
        sql, tenant=visit.caller.tenant, environment=visit.environment, app=app, name=name
    )
    if deployed is None:
        raise NotFound(f"there is no function {function} in environment {visit.environment!r}")
    return deployed.id


def _pending(sql: sa.Connection, visit: PageContext, asked: _Asked) -> _Listing:
    """Return submitted calls in one of PENDING_STATES: they are not in the ledger."""
    app, _, name = asked.function.partition("/")
    query = CallQuery(
        tenant=visit.caller.tenant,
        environment=visit.environment,
        app=app or None,
        function=name or None,
        state=asked.state,
    )
    calls = submitted_calls.listing(sql, query, limit=PAGE)
    nothing = recent_calls.CallPage(calls=[], older="")
    return nothing, function_stats.names(sql, **visit.where), calls


def _moment(name: str, text: str) -> float | None:
    """Parse a time of the form, UTC. Raises InvalidInput."""
    if not text:
        return None
    try:
        return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()
    except (ValueError, OverflowError) as e:
        raise InvalidInput(
            f"{name} = {text!r} is not a time: write it as 2026-11-21T10:00 (UTC)", parameter=name
        ) from e


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallData:
    """What the database knows of a call: its usage records, whether its trace was kept, and for a
    submitted call its state (`CallRecord`) with its result."""

    records: Sequence[UsageRecord]
    is_traced: bool
    submitted: Mapping[str, Any] | None


@router.get("/dashboard/calls/{call:path}")
async def one(visit: Visitor, call: Annotated[str, Path(max_length=MAX_NAME)]) -> Response:
    """Render one call. Raises NotFound, also for another tenant's call."""
    found = await visit.read(lambda sql: _one(sql, visit, call))
    attempts = [record for record in found.records if record.kind != ledger.ADJUSTMENT]
    if not attempts and found.submitted is None:
        raise NotFound(f"there is no call {call} in environment {visit.environment!r}")
    lines, trouble = await _lines(visit, call, attempts)
    error = None
    if _has_failed(attempts, found.submitted):
        error = await visit.context.threads.run(
            visit.caller.tenant, call_details.error_of, found.submitted, lines
        )
    return render(
        "call.html",
        visit=visit,
        call=call,
        attempts=attempts,
        last=attempts[-1] if attempts else None,
        corrections=[record for record in found.records if record.kind == ledger.ADJUSTMENT],
        cost=sum((Decimal(record.cost) for record in found.records), Decimal(0)),
        is_traced=found.is_traced and visit.sees_instances,
        longest_ms=max((total_ms(attempt) for attempt in attempts), default=1),
        submitted=found.submitted,
        is_pending=found.submitted is not None
        and found.submitted["state"] not in submitted_calls.FINAL,
        result=call_details.result_of(found.submitted),
        failure=error,
        lines=lines,
        trouble=trouble,
        server_timing=call_details.server_timing,
    )


def _one(sql: sa.Connection, visit: PageContext, call: str) -> _CallData:
    return _CallData(
        records=recent_calls.attempts(sql, **visit.where, call=call),
        is_traced=traces.is_kept(sql, tenant=visit.caller.tenant, call=call),
        # results are not for a key that reads bills
        submitted=submitted_calls.find(
            sql, **visit.where, call=call, result_chars=call_details.RESULT_CHARS
        )
        if visit.sees_instances
        else None,
    )


def _has_failed(attempts: Sequence[UsageRecord], submitted: Mapping[str, Any] | None) -> bool:
    if submitted is not None:
        return bool(submitted["state"] == "FAILED")
    last = attempts[-1]
    return last.outcome not in NOT_RUN and (last.outcome != "ok" or last.status >= 400)


async def _lines(
    visit: PageContext, call: str, attempts: Sequence[UsageRecord]
) -> tuple[Sequence[log_lines.Line], str]:
    if not visit.sees_instances or not attempts:
        return [], ""
    first = attempts[0]
    wanted = LogFilter(function=f"{first.app}/{first.function}", call=call)
    # nodes have clocks of their own
    return await log_lines.tail(visit, wanted, since=first.started_at - 60, limit=LINES)
