"""The HTTP client of the platform: transport with retries, typed methods, and responses and errors
as Python values. Declarations and handles are in `pilotlight.sdk`.

The names below are loaded on first use, because `pilotlight.client.pickling` needs no HTTP
client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pilotlight.client.client import (
        LONG_POLL_S,
        AsyncClient,
        BlobBody,
        CallResponse,
        Client,
        DeployedFunction,
        Deployment,
    )

__all__ = [
    "LONG_POLL_S",
    "AsyncClient",
    "BlobBody",
    "CallResponse",
    "Client",
    "DeployedFunction",
    "Deployment",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("pilotlight.client.client"), name)
