"""The HTTP client of the platform: transport with retries, typed methods, and responses and errors
as Python values. Declarations and handles are in `pilotlight.sdk`.

The names below are loaded on first use, because `pilotlight.client.pickling` needs no HTTP
client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pilotlight.client.async_client import AsyncClient
    from pilotlight.client.client import Client
    from pilotlight.client.resources.artifacts import BlobBody
    from pilotlight.client.resources.releases import DeployedFunction, Deployment
    from pilotlight.client.responses import LONG_POLL_S, CallResponse

__all__ = [
    "LONG_POLL_S",
    "AsyncClient",
    "BlobBody",
    "CallResponse",
    "Client",
    "DeployedFunction",
    "Deployment",
]
_MODULES = {
    "AsyncClient": "async_client",
    "BlobBody": "resources.artifacts",
    "CallResponse": "responses",
    "Client": "client",
    "DeployedFunction": "resources.releases",
    "Deployment": "resources.releases",
    "LONG_POLL_S": "responses",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
