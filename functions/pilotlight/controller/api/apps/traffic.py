"""Routes for a function's traffic document: read, replace, or change parts of it.

A client that sends the generation it has read cannot overwrite a concurrent change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Header, Response
from pydantic import Field

from pilotlight.controller.analytics.time_range import DAY_S
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Context, Ctx, Deployer, RequestId, app_ref_of
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import aliases, release_gates, traffic
from pilotlight.controller.slo import observations
from pilotlight.errors import Conflict, InvalidInput
from pilotlight.spec import traffic as documents
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.observations import SHADOW_ARM, latency_quantile_ms
from pilotlight.spec.traffic import PER_REQUEST, WHOLE, Shadow, TrafficDocument

router = APIRouter(prefix="/v1/functions", tags=["traffic"])
Weights = dict[str, int]
Sticky = Annotated[
    str, Field(max_length=80, description="sticky unit: request, key, tenant, or header:<name>")
]
Names = Annotated[dict[str, str], Field(max_length=documents.MAX_NAMES)]
Changes = Annotated[dict[str, str | None], Field(max_length=documents.MAX_NAMES)]
MaxCandidate = Annotated[
    int,
    Field(
        ge=0, le=WHOLE, description="maximum percent of all revisions together except the heaviest"
    ),
]
AllowBreaking = Annotated[
    bool,
    Field(description="allow a revision without traffic so far to break callers by its schema"),
]
OverrideFreeze = Annotated[
    bool, Field(description="allow while an error budget is spent; requires a key with scope admin")
]
BaseGeneration = Annotated[
    int | None,
    Field(description="the generation on which this change is based; 409 if it has changed"),
]
_CHANGE_FIELDS = {"generation", "message", "allow_breaking", "override_freeze"}
"""Fields that describe a change and are not part of the document."""
_Edit = Callable[[TrafficDocument, Callable[[str], str]], TrafficDocument]
IfMatch = Annotated[str | None, Header(description="same as `generation`: the ETag that was read")]


class ShadowBody(Body):
    """Copies of calls, whose responses are compared and discarded. They are free of charge and use
    at most the share `max_compute` of the function's compute."""

    revision: str
    percent: float = Field(default=100.0, ge=0, le=WHOLE)
    max_compute: float = Field(default=0.15, ge=0, le=1)


class TrafficBody(Body):
    """The complete traffic document. A revision may be named by an alias or a tag."""

    weights: Weights
    tags: Names = Field(default_factory=dict)
    sticky: Sticky = PER_REQUEST
    pins: Names = Field(default_factory=dict)
    max_candidate: MaxCandidate = WHOLE
    shadow: ShadowBody | None = None
    generation: BaseGeneration = None
    message: str = Field(default="", max_length=2000)
    allow_breaking: AllowBreaking = False
    override_freeze: OverrideFreeze = False


class TrafficChange(Body):
    """Fields to change; omitted fields stay. null removes a tag, a pin, or the shadow."""

    weights: Weights | None = None
    tags: Changes = Field(default_factory=dict)
    sticky: Sticky | None = None
    pins: Changes = Field(default_factory=dict)
    max_candidate: MaxCandidate | None = None
    shadow: ShadowBody | None = None
    generation: BaseGeneration = None
    message: str = Field(default="", max_length=2000)
    allow_breaking: AllowBreaking = False
    override_freeze: OverrideFreeze = False


class ShadowResult(Body):
    """A shadow's results of the last 24 hours."""

    answered: int
    failed: int
    compared: int = Field(
        description="responses compared with the caller's; streams and raised "
        "errors are not compared"
    )
    matched: int = Field(description="compared responses that were equal (numbers to a millionth)")
    skipped: int = Field(
        description="copies not made, for lack of capacity or because of `max_compute`"
    )
    p50_ms: float | None
    p99_ms: float | None


class TrafficAnswer(Body):
    """The current traffic. `aliases` can be called like tags; `stable` is the revision to which an
    active rollout reverts."""

    app: str
    function: str
    generation: int
    weights: Weights
    tags: dict[str, str]
    aliases: dict[str, str]
    sticky: str
    pins: dict[str, str]
    max_candidate: int
    experiment: dict[str, Any] | None
    shadow: dict[str, Any] | None
    shadow_result: ShadowResult | None = Field(default=None, description="null without a shadow")
    stable: str


@router.get("/{app}/{function}/traffic")
def get_traffic(
    context: Ctx, caller: Deployer, response: Response, app: str, function: str
) -> TrafficAnswer:
    """Return a function's traffic; the ETag is its generation."""
    caller.require_function(app, function)
    target = _Target(
        context=context, caller=caller, where=app_ref_of(caller, app, ""), function=function
    )
    with context.store.read() as sql:
        document = traffic.find(sql, target.where, function)
    return _answer(response, target, document)


@router.put("/{app}/{function}/traffic")
def put_traffic(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    response: Response,
    *,
    app: str,
    function: str,
    body: TrafficBody,
    if_match: IfMatch = None,
) -> TrafficAnswer:
    """Replace a function's traffic at once. The decisions of an experiment or a rollout are not
    changed."""
    given = body.model_dump(exclude=_CHANGE_FIELDS)

    def edit(document: TrafficDocument, name: Callable[[str], str]) -> TrafficDocument:
        return _with(
            document,
            {
                **given,
                "tags": _resolved(given["tags"], name),
                "pins": _resolved(given["pins"], name),
            },
            name,
        )

    target = _Target(
        context=context, caller=caller, where=app_ref_of(caller, app, request), function=function
    )
    return _answer(response, target, _change(target, edit, body, if_match))


@router.patch("/{app}/{function}/traffic")
def change_traffic(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    response: Response,
    *,
    app: str,
    function: str,
    body: TrafficChange,
    if_match: IfMatch = None,
) -> TrafficAnswer:
    """Change parts of a function's traffic at once."""
    given = body.model_dump(exclude=_CHANGE_FIELDS, exclude_unset=True)
    for name in ("weights", "sticky", "max_candidate"):
        if name in given and given[name] is None:
            raise InvalidInput(
                f"{name} cannot be null: leave it out, or set a value", parameter=name
            )

    def edit(document: TrafficDocument, name: Callable[[str], str]) -> TrafficDocument:
        tags, pins = (
            _merged(document.tags, given.get("tags", {}), name),
            _merged(document.pins, given.get("pins", {}), name),
        )
        return _with(document, {**given, "tags": tags, "pins": pins}, name)

    target = _Target(
        context=context, caller=caller, where=app_ref_of(caller, app, request), function=function
    )
    return _answer(response, target, _change(target, edit, body, if_match))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The function whose traffic a request concerns, and the caller."""

    context: Context
    caller: Principal
    where: AppRef
    function: str


def _change(
    target: _Target, edit: _Edit, body: TrafficBody | TrafficChange, if_match: str | None
) -> TrafficDocument:
    where, function, expected = target.where, target.function, _expected(body.generation, if_match)
    target.caller.require_function(where.app, function)
    if body.override_freeze:
        target.caller.require_scope(Scope.ADMIN)

    def make(write: Write) -> TrafficDocument:
        def edited(document: TrafficDocument) -> TrafficDocument:
            after = edit(document, lambda name: aliases.resolve(write.sql, where, function, name))
            _check(write.sql, document, after, f"{where.app}/{function}")
            release_gates.require_gates_for_change(
                write,
                where,
                function=function,
                before=document,
                after=after,
                allow_breaking=body.allow_breaking,
                override_freeze=body.override_freeze,
            )
            return after

        return traffic.change(
            write,
            where,
            function,
            edited,
            expected=expected,
            action="traffic.change",
            message=body.message,
        )

    return release_gates.write_with_gates(target.context.store, make)


def _check(
    sql: sa.Connection, before: TrafficDocument, after: TrafficDocument, function: str
) -> None:
    """Check what the document itself cannot: whether a rollout controls the weights, and whether
    the pins' tenants exist."""
    if before.stable and after.weights != before.weights:
        text = (
            f"a rollout controls the weights of {function}: `pilotlight rollout "
            f"pause|promote|abort {function}` overrides it"
        )
        raise Conflict(text, stable=before.stable)
    if missing := tenants.unknown_names(sql, set(after.pins) - set(before.pins)):
        raise InvalidInput(f"pins: there is no tenant {min(missing)!r}", parameter="pins")


def _with(
    document: TrafficDocument, given: Mapping[str, Any], name: Callable[[str], str]
) -> TrafficDocument:
    changes = dict(given)
    if "weights" in changes:
        changes["weights"] = _resolved_weights(changes["weights"], name)
    if changes.get("shadow") is not None:
        changes["shadow"] = Shadow(
            **{**changes["shadow"], "revision": name(changes["shadow"]["revision"])}
        )
    return replace(document, **changes)


def _resolved_weights(weights: Mapping[str, int], name: Callable[[str], str]) -> dict[str, int]:
    """Add up the weights of names that refer to the same revision."""
    out: dict[str, int] = {}
    for one, weight in weights.items():
        revision = name(one)
        out[revision] = out.get(revision, 0) + weight
    return out


def _resolved(names: Mapping[str, str], name: Callable[[str], str]) -> dict[str, str]:
    return {key: name(reference) for key, reference in names.items()}


def _merged(
    current: Mapping[str, str], changes: Mapping[str, str | None], name: Callable[[str], str]
) -> dict[str, str]:
    named = {key: reference for key, reference in changes.items() if reference is not None}
    return {
        **{key: revision for key, revision in current.items() if key not in changes},
        **_resolved(named, name),
    }


def _expected(generation: int | None, if_match: str | None) -> int | None:
    """Return the generation on which the change is based. Raises InvalidInput."""
    if if_match is None or if_match.strip() == "*":
        return generation
    text = if_match.strip().removeprefix("W/").strip('"')
    if not text.isdecimal():
        raise InvalidInput(
            f"header If-Match: {if_match!r} is not a generation: send the ETag that was read",
            parameter="if-match",
        )
    if generation not in (None, int(text)):
        raise InvalidInput(
            "If-Match and the field generation differ: send only one of them",
            parameter="generation",
        )
    return int(text)


def _answer(response: Response, target: _Target, document: TrafficDocument) -> TrafficAnswer:
    response.headers["etag"] = f'"{document.generation}"'
    with target.context.store.read() as sql:
        function_id = target.where.function_id(target.function)
        named = aliases.aliases_for(sql, function_id)
        result = (
            _shadow_result(sql, function_id, document.shadow.revision, target.context.clock())
            if document.shadow is not None
            else None
        )
    shown = traffic.describe_traffic(document)
    return TrafficAnswer(
        app=target.where.app, function=target.function, aliases=named, shadow_result=result, **shown
    )


def _shadow_result(sql: sa.Connection, function_id: str, revision: str, now: float) -> ShadowResult:
    found = observations.window(
        sql,
        function_id=function_id,
        since_s=now - DAY_S,
        until_s=now,
        revision=revision,
        arm=SHADOW_ARM,
    )
    seen = found.get((revision, SHADOW_ARM))
    if seen is None:
        return ShadowResult(
            answered=0, failed=0, compared=0, matched=0, skipped=0, p50_ms=None, p99_ms=None
        )
    took = seen.latency.get("warm", {})
    return ShadowResult(
        answered=seen.answered,
        failed=seen.failed,
        compared=seen.compared,
        matched=seen.matched,
        skipped=seen.skipped,
        p50_ms=latency_quantile_ms(took, 0.5),
        p99_ms=latency_quantile_ms(took, 0.99),
    )
