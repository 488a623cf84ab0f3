"""Error responses: problem documents (RFC 9457) for all errors, including the framework's."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from pilotlight.controller.server.request_id import request_id
from pilotlight.errors import InvalidInput, PilotlightError, Unavailable
from pilotlight.protocol import CONTENT_PROBLEM, problem
from snapshotter.errors import (
    AgentUnavailable,
    BundleUnavailable,
    ImageBuildFailed,
    InstanceUnknown,
    LogsBusy,
    NoCapacity,
    ProofsBusy,
    SnapshotRefused,
    SnapshotterError,
    SnapshotUnknown,
    StartFailed,
    StartTimeout,
    Unsupported,
)

log = logging.getLogger(__name__)

AGENT_RETRY_S = 1.0
"""The supervisor restarts a dead agent within a fraction of this."""
DATABASE_RETRY_S = 2.0
_AGENT: Mapping[type[SnapshotterError], tuple[int, str]] = {
    AgentUnavailable: (503, "unavailable"),
    NoCapacity: (503, "unavailable"),
    LogsBusy: (429, "too-many-requests"),
    ProofsBusy: (429, "too-many-requests"),
    InstanceUnknown: (404, "not-found"),
    SnapshotUnknown: (404, "not-found"),
    SnapshotRefused: (409, "snapshot-refused"),
    StartFailed: (502, "start-failed"),
    StartTimeout: (504, "deadline-exceeded"),
    ImageBuildFailed: (400, "image-build-failed"),
    BundleUnavailable: (400, "invalid-input"),
    Unsupported: (400, "unsupported"),
}
_OPENAI = ("/v1/files", "/v1/batches")
"""Paths of OpenAI's API, whose clients read the member `error` of a problem."""
_HTTP: Mapping[int, str] = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    413: "too-large",
    415: "unsupported-media-type",
}


def problem_document(error: Exception, request: str) -> dict[str, Any]:
    """Return the problem document of an error that we raise deliberately."""
    if isinstance(error, SnapshotterError):
        status, kind = _AGENT.get(type(error), (500, "internal"))
        return _problem(status, kind, str(error), request, error.detail)
    if isinstance(error, PilotlightError):
        return _problem(error.status, error.type, str(error), request, error.detail)
    return _problem(
        500,
        "internal",
        "internal error of the controller; its log has the cause under this request's id",
        request,
    )


def _problem(
    status: int, kind: str, detail: str, request: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    # half of a surrogate pair in a caller's text cannot be encoded
    text = detail.encode(errors="backslashreplace").decode()
    return problem(
        type=kind,
        title=HTTPStatus(status).phrase,
        status=status,
        detail=text,
        instance=request or None,
        extra=extra,
    )


def problem_response(
    body: Mapping[str, Any],
    retry_after_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a problem document as a response."""
    extra = dict(headers or {})
    if retry_after_s is not None:
        extra["retry-after"] = str(max(1, round(retry_after_s)))
    if body["status"] == 401:
        extra["www-authenticate"] = "Bearer"
    return JSONResponse(body, status_code=body["status"], media_type=CONTENT_PROBLEM, headers=extra)


def install_error_handlers(app: FastAPI) -> None:
    """Respond to every error of `app` with a problem document."""
    app.add_exception_handler(PilotlightError, _on_ours)
    app.add_exception_handler(SnapshotterError, _on_agent)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DataError, _on_data)
    app.add_exception_handler(OperationalError, _on_database)
    app.add_exception_handler(InterfaceError, _on_database)
    app.add_exception_handler(UnicodeEncodeError, _on_data)
    app.add_exception_handler(Exception, _on_defect)


async def _on_ours(request: Request, error: Exception) -> Response:
    retry_after_s = error.retry_after_s if isinstance(error, PilotlightError) else None
    body = problem_document(error, request_id(request))
    if request.url.path.startswith(_OPENAI):
        body = {"error": _openai_error(body), **body}
    return problem_response(body, retry_after_s)


def _openai_error(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what OpenAI's clients read of an error."""
    kind = "invalid_request_error" if body["status"] < 500 else "server_error"
    code = str(body["type"]).rpartition("/")[2]
    return {"message": body["detail"], "type": kind, "param": body.get("parameter"), "code": code}


async def _on_agent(request: Request, error: Exception) -> Response:
    body = problem_document(error, request_id(request))
    return problem_response(
        body, body.get("retry_after_s", AGENT_RETRY_S if body["status"] == 503 else None)
    )


async def _on_validation(request: Request, error: Exception) -> Response:
    found = error.errors() if isinstance(error, RequestValidationError) else []
    errors = [{"parameter": ".".join(str(p) for p in e["loc"]), "message": e["msg"]} for e in found]
    first = errors[0] if errors else {"parameter": "body", "message": "not valid"}
    wrong = InvalidInput(
        f"{first['parameter']}: {first['message']}", parameter=first["parameter"], errors=errors
    )
    return await _on_ours(request, wrong)


async def _on_data(request: Request, error: Exception) -> Response:
    """Respond to a value that the database cannot store: half of a surrogate pair, and in
    PostgreSQL also NUL and numbers out of a column's range. Nothing was changed."""
    log.info(
        "event=value_refused request=%s path=%s error=%s",
        request_id(request),
        request.url.path,
        type(error).__name__,
    )
    return await _on_ours(
        request,
        InvalidInput(
            "a value cannot be stored: a text is not valid Unicode or contains NUL, or a number is "
            "out of range"
        ),
    )


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _HTTP.get(error.status_code, "invalid-input" if error.status_code < 500 else "internal")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    headers = error.headers
    if error.status_code == 405:
        headers = {**(headers or {}), "allow": ", ".join(_methods_at(request))}
    return problem_response(
        _problem(error.status_code, kind, detail, request_id(request)), headers=headers
    )


def _methods_at(request: Request) -> list[str]:
    """Return the methods of all routes of the request's path; the framework names those of the
    first one."""
    path = request.scope["path"]
    return sorted(
        {
            method
            for route in request.app.router.routes
            if isinstance(route, Route) and route.path_regex.match(path)
            for method in route.methods or ()
        }
    )


async def _on_database(request: Request, error: Exception) -> Response:
    """Respond to an unreachable database, or one locked for longer than we wait: nothing was
    changed, and a retry may succeed.

    SQLite raises the same error class for an invalid statement (no such table), which no retry can
    fix."""
    if getattr(getattr(error, "orig", None), "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
        return await _on_defect(request, error)
    log.error(
        "event=database_away request=%s path=%s error=%s",
        request_id(request),
        request.url.path,
        error,
    )
    away = Unavailable(
        "the control plane's database does not answer: nothing was changed; functions still work",
        retry_after_s=DATABASE_RETRY_S,
    )
    return await _on_ours(request, away)


async def _on_defect(request: Request, error: Exception) -> Response:
    log.error(
        "event=defect request=%s path=%s error=%s",
        request_id(request),
        request.url.path,
        type(error).__name__,
    )
    return problem_response(problem_document(error, request_id(request)))
