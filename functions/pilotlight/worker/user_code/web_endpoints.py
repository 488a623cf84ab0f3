"""The ASGI applications of functions that are no ASGI applications themselves: one endpoint in
FastAPI, and WSGI applications.

FastAPI is imported when the application is built, in the environment of the function."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.errors import InvalidInput


def application_builder(build: Callable[..., Any], mark: Any) -> Callable[[], Any]:
    """Return what builds the ASGI application of a function or bound method. `mark`: its "asgi"
    mark, with `endpoint` (method, docs) for a FastAPI endpoint, and `wsgi` for a WSGI
    application."""
    details = mark if isinstance(mark, Mapping) else {}
    if endpoint := details.get("endpoint"):
        return lambda: _endpoint(build, method=endpoint["method"], has_docs=endpoint["docs"])
    if details.get("wsgi"):
        return lambda: _wsgi(build)
    return build


def _endpoint(function: Callable[..., Any], *, method: str, has_docs: bool) -> Any:
    try:
        from fastapi import FastAPI
    except ImportError as e:
        raise InvalidInput(
            "@pilotlight.fastapi_endpoint() needs FastAPI in the function's environment: add "
            ".pip_install('fastapi') to its image"
        ) from e
    application = FastAPI(
        title=getattr(function, "__name__", "endpoint"),
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
    )
    application.add_api_route("/", function, methods=[method])
    return application


async def _wsgi(build: Callable[..., Any]) -> Any:
    """uvicorn's adapter, which is that of a2wsgi where the environment has it (PEP 3333)."""
    adapter = importlib.import_module("uvicorn.middleware.wsgi").WSGIMiddleware
    built = build()
    application = await built if inspect.isawaitable(built) else built
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own; it recommends a2wsgi
        return adapter(application)
