"""Routes whose endpoints FastAPI analyses at their first request, or for the first OpenAPI
document.

The analysis builds a validator for each parameter and body: for all routes together it takes half
of the controller's start time, and most processes serve few of them. Matching does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastapi
from fastapi.routing import APIRoute
from starlette.routing import compile_path, get_name


class LazyRoute(APIRoute):
    """An `APIRoute` with only the attributes that matching reads; reading any other creates them
    all."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._options: dict[str, Any] | None = options
        self.path = path
        self.endpoint = endpoint
        self.name = options.get("name") or get_name(endpoint)
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.methods = {method.upper() for method in options.get("methods") or ("GET",)}
        self.include_in_schema = options.get("include_in_schema", True)

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("_options")
        if options is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Build another object first: with two concurrent threads, neither may see a partial one.
        complete = object.__new__(type(self))
        APIRoute.__init__(complete, self.path, self.endpoint, **options)
        self.__dict__.update(complete.__dict__, _options=None)
        return getattr(self, name)


class APIRouter(fastapi.APIRouter):
    """A router whose routes are lazy, unless it names another class for them."""

    def __init__(self, *, route_class: type[APIRoute] = LazyRoute, **options: Any) -> None:
        super().__init__(route_class=route_class, **options)
