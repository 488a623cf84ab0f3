"""The id of a request, which its response and its log lines carry."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from fastapi import Request

_KEY = "pilotlight.request_id"


def set_request_id(scope: MutableMapping[str, Any], value: str) -> None:
    """Store the id of the request in its ASGI scope."""
    scope[_KEY] = value


def request_id_in(scope: MutableMapping[str, Any]) -> str:
    """Return the id of the request with this ASGI scope; "" if it has none yet."""
    return str(scope.get(_KEY, ""))


def request_id(request: Request) -> str:
    """Return the id of this request, which its response carries."""
    return request_id_in(request.scope)
