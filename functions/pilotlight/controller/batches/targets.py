"""What the lines of a batch call: the endpoint, and the model that a line names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.serving_revisions import select_serving
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import aliases
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.spec.function import FunctionKind, FunctionSpec
from pilotlight.spec.identifiers import parse_function_path
from pilotlight.spec.record_json import from_json

OPENAI_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_PREFIX, _VERB = "/v1/functions/", ":invoke"
MAX_ENDPOINT: Final = 512
_CALLABLE = (FunctionKind.FUNCTION, FunctionKind.CLASS)


class ModelNotFound(NotFound):
    """Raised when `model` does not name a model that the batch's key may call."""

    type = "model_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTarget:
    """The function that a line calls; `revision`: "" = by the traffic split."""

    app: str
    function: str
    method: str = ""
    revision: str = ""


def find_target(sql: sa.Connection, caller: Principal, *, endpoint: str, model: str) -> LineTarget:
    """Return what a line with this model calls. Raises InvalidInput, NotFound, Forbidden for a
    function that the key may not call."""
    return (
        find_model(sql, caller, model)
        if endpoint in OPENAI_ENDPOINTS
        else find_function(sql, caller, endpoint)
    )


def find_function(sql: sa.Connection, caller: Principal, endpoint: str) -> LineTarget:
    """Return the function of an endpoint `/v1/functions/app/function:invoke`. Raises InvalidInput,
    NotFound, Forbidden."""
    path = endpoint.removeprefix(_PREFIX).removesuffix(_VERB)
    if not endpoint.startswith(_PREFIX) or not endpoint.endswith(_VERB):
        raise InvalidInput(
            f"endpoint = {endpoint[:200]!r}: use {', '.join(OPENAI_ENDPOINTS)}, or "
            f"{_PREFIX}APP/FUNCTION{_VERB}",
            parameter="endpoint",
        )
    path, _, reference = path.partition("@")
    try:
        app, function, method = parse_function_path(path)
    except ValueError as e:
        raise InvalidInput(f"endpoint: {e}", parameter="endpoint") from e
    caller.require_function(app, function)
    spec = _spec(sql, caller, app, function)
    if spec is None:
        raise NotFound(f"there is no function {app}/{function} in {caller.environment!r}")
    if spec.sandbox or (spec.language_model is None and spec.kind not in _CALLABLE):
        raise InvalidInput(
            f"endpoint: {app}/{function} is a web application or a sandbox, which a batch cannot "
            f"call",
            parameter="endpoint",
        )
    if spec.language_model is None and spec.method(method) is None:
        raise NotFound(f"{app}/{function} has no method {method!r}")
    return LineTarget(
        app=app,
        function=function,
        method=method,
        revision=_revision(sql, caller, app, function, reference),
    )


def find_model(sql: sa.Connection, caller: Principal, text: str) -> LineTarget:
    """Return the function that OpenAI's `model` names, as the gateway does: `app/function`,
    `app/function@tag`, either with `:adapter`, or a bare name that is unique in the environment.
    Raises ModelNotFound, InvalidInput, Forbidden."""
    name, _, adapter = text.partition(":")
    place, _, reference = name.partition("@")
    app, slash, function = place.partition("/")
    if not slash:
        app, function = _by_bare_name(sql, caller, place, is_adapter=not adapter)
    caller.require_function(app, function)
    spec = _spec(sql, caller, app, function)
    if spec is None or spec.language_model is None:
        raise ModelNotFound(f"no model {text[:80]!r}", parameter="model")
    try:
        revision = _revision(sql, caller, app, function, reference)
    except NotFound as e:
        raise ModelNotFound(f"no model {text[:80]!r}: {e}", parameter="model") from e
    return LineTarget(app=app, function=function, revision=revision)


def _by_bare_name(
    sql: sa.Connection, caller: Principal, name: str, *, is_adapter: bool
) -> tuple[str, str]:
    functions, revisions = tables.functions, tables.revisions
    mine = [functions.c.tenant == caller.tenant, functions.c.environment == caller.environment]
    if caller.bound_app is not None:
        mine.append(functions.c.app == caller.bound_app)
    rows = [
        row
        for row in sql.execute(select_serving(*mine, functions.c.name == name))
        if _parsed(row.spec).language_model is not None
    ]
    if not rows and is_adapter:
        quoted = json.dumps(name, ensure_ascii=False)
        there = revisions.c.spec.contains(quoted, autoescape=True)
        for row in sql.execute(select_serving(*mine, there)):
            model = _parsed(row.spec).language_model
            if model is not None and name in model.others:
                rows.append(row)
    found = [(row.app, row.name) for row in rows if caller.may_see(row.app, row.name)]
    found = list(dict.fromkeys(found))
    if len(found) > 1:
        raise InvalidInput(
            f"model: the name {name[:80]!r} is ambiguous: use app/function", parameter="model"
        )
    if not found:
        raise ModelNotFound(f"no model {name[:80]!r}", parameter="model")
    return found[0]


def _spec(sql: sa.Connection, caller: Principal, app: str, function: str) -> FunctionSpec | None:
    """Return the spec of the revision with most traffic; None = there is no such function."""
    c = tables.functions.c
    row = sql.execute(
        select_serving(
            c.tenant == caller.tenant,
            c.environment == caller.environment,
            c.app == app,
            c.name == function,
        )
    ).first()
    return None if row is None else _parsed(row.spec)


def _parsed(spec: str) -> FunctionSpec:
    return from_json(FunctionSpec, json.loads(spec), "spec")


def _revision(
    sql: sa.Connection, caller: Principal, app: str, function: str, reference: str
) -> str:
    if not reference:
        return ""
    place = AppRef(
        tenant=caller.tenant,
        uid=caller.uid,
        environment=caller.environment,
        app=app,
        actor=caller.key,
    )
    return aliases.resolve(sql, place, function, reference)
