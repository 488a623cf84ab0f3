"""pilotlight: serverless functions for models, back from zero in milliseconds.

    import pilotlight

    app = pilotlight.App("hello")

    @app.function()
    def greet(name: str) -> str:
        return f"hello {name}"

The names below are loaded lazily, on first use, so that importing the package is cheap."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pilotlight import exception, functions, weights
    from pilotlight.client.async_client import AsyncClient
    from pilotlight.client.client import Client
    from pilotlight.client.resources.releases import Deployment
    from pilotlight.current_call.context import (
        Context,
        context,
        current_function_call_id,
        current_input_id,
    )
    from pilotlight.current_call.spans import span
    from pilotlight.errors import (
        ClientClosedRequest,
        Conflict,
        DeadlineExceeded,
        Forbidden,
        FunctionRaised,
        InvalidInput,
        NotFound,
        PilotlightError,
        RemoteError,
        StartFailed,
        TooLarge,
        TooManyRequests,
        Unauthenticated,
        Unavailable,
        WorkerCrashed,
    )
    from pilotlight.packaging.app import App
    from pilotlight.packaging.deploy import deploy
    from pilotlight.packaging.progress_output import enable_output
    from pilotlight.packaging.sandbox import Sandbox
    from pilotlight.profile import Profile
    from pilotlight.sdk.binding.parameters import parameter
    from pilotlight.sdk.calls import FunctionCall
    from pilotlight.sdk.cls import Cls
    from pilotlight.sdk.decorator_metadata import PilotlightWarning
    from pilotlight.sdk.decorators import (
        asgi_app,
        batched,
        concurrent,
        enter,
        exit,
        fastapi_endpoint,
        method,
        web_endpoint,
        web_server,
        wsgi_app,
    )
    from pilotlight.sdk.function import Function
    from pilotlight.sdk.image import Image
    from pilotlight.sdk.llm import Engine, Guard
    from pilotlight.sdk.policies import (
        Cron,
        Monitor,
        Period,
        PredictionLog,
        Redis,
        ResponseCache,
        Retries,
        cached_answer,
        static_answer,
    )
    from pilotlight.sdk.secret import Secret
    from pilotlight.sdk.storage.collections import Dict, Queue
    from pilotlight.sdk.storage.volume import Volume
    from pilotlight.sdk.storage.weights import Weights
    from pilotlight.sdk.unsupported import NotSupported
    from pilotlight.spec.engines import TokenLimits
    from pilotlight.spec.features.schema import Feature, FeatureSchema
    from pilotlight.spec.features.sources import Features
    from pilotlight.spec.policies import (
        Fallback,
        ModelCard,
        Objectives,
        RetryPolicy,
        ScalingSchedule,
        Schedule,
        Variant,
    )

__version__ = "0.1.0"

_WHERE = {
    "pilotlight.client.async_client": ("AsyncClient",),
    "pilotlight.client.client": ("Client",),
    "pilotlight.client.resources.releases": ("Deployment",),
    "pilotlight.spec.engines": ("TokenLimits",),
    "pilotlight.spec.features.schema": ("Feature", "FeatureSchema"),
    "pilotlight.spec.features.sources": ("Features",),
    "pilotlight.errors": (
        *(
            "ClientClosedRequest",
            "Conflict",
            "DeadlineExceeded",
            "Forbidden",
            "FunctionRaised",
            "InvalidInput",
            "NotFound",
        ),
        *(
            "PilotlightError",
            "RemoteError",
            "StartFailed",
            "TooLarge",
            "TooManyRequests",
            "Unauthenticated",
            "Unavailable",
        ),
        "WorkerCrashed",
    ),
    "pilotlight.packaging.deploy": ("deploy",),
    "pilotlight.packaging.progress_output": ("enable_output",),
    "pilotlight.profile": ("Profile",),
    "pilotlight.packaging.app": ("App",),
    "pilotlight.sdk.calls": ("FunctionCall",),
    "pilotlight.sdk.cls": ("Cls",),
    "pilotlight.current_call.context": (
        "Context",
        "context",
        "current_function_call_id",
        "current_input_id",
    ),
    "pilotlight.sdk.function": ("Function",),
    "pilotlight.sdk.image": ("Image",),
    "pilotlight.sdk.llm": ("Engine", "Guard"),
    "pilotlight.sdk.decorator_metadata": ("PilotlightWarning",),
    "pilotlight.sdk.decorators": (
        "asgi_app",
        "batched",
        "concurrent",
        "enter",
        "exit",
        "fastapi_endpoint",
        "method",
        "web_endpoint",
        "web_server",
        "wsgi_app",
    ),
    "pilotlight.spec.policies": (
        "Fallback",
        "ModelCard",
        "Objectives",
        "RetryPolicy",
        "ScalingSchedule",
        "Schedule",
        "Variant",
    ),
    "pilotlight.sdk.binding.parameters": ("parameter",),
    "pilotlight.sdk.policies": (
        "Cron",
        "Monitor",
        "Period",
        "PredictionLog",
        "Redis",
        "ResponseCache",
        "Retries",
        "cached_answer",
        "static_answer",
    ),
    "pilotlight.packaging.sandbox": ("Sandbox",),
    "pilotlight.sdk.secret": ("Secret",),
    "pilotlight.sdk.unsupported": ("NotSupported",),
    "pilotlight.current_call.spans": ("span",),
    "pilotlight.sdk.storage.collections": ("Dict", "Queue"),
    "pilotlight.sdk.storage.volume": ("Volume",),
    "pilotlight.sdk.storage.weights": ("Weights",),
}
_MODULES = ("exception", "functions", "weights")
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = [
    "App",
    "AsyncClient",
    "Client",
    "ClientClosedRequest",
    "Cls",
    "Conflict",
    "Context",
    "Cron",
    "DeadlineExceeded",
    "Deployment",
    "Dict",
    "Engine",
    "Fallback",
    "Feature",
    "FeatureSchema",
    "Features",
    "Forbidden",
    "Function",
    "FunctionCall",
    "FunctionRaised",
    "Guard",
    "Image",
    "InvalidInput",
    "ModelCard",
    "Monitor",
    "NotFound",
    "NotSupported",
    "Objectives",
    "Period",
    "PilotlightError",
    "PilotlightWarning",
    "PredictionLog",
    "Profile",
    "Queue",
    "Redis",
    "RemoteError",
    "ResponseCache",
    "Retries",
    "RetryPolicy",
    "Sandbox",
    "ScalingSchedule",
    "Schedule",
    "Secret",
    "StartFailed",
    "TokenLimits",
    "TooLarge",
    "TooManyRequests",
    "Unauthenticated",
    "Unavailable",
    "Variant",
    "Volume",
    "Weights",
    "WorkerCrashed",
    "__version__",
    "asgi_app",
    "batched",
    "cached_answer",
    "concurrent",
    "context",
    "current_function_call_id",
    "current_input_id",
    "deploy",
    "enable_output",
    "enter",
    "exception",
    "exit",
    "fastapi_endpoint",
    "functions",
    "is_local",
    "method",
    "parameter",
    "span",
    "static_answer",
    "web_endpoint",
    "web_server",
    "weights",
    "wsgi_app",
]


def is_local() -> bool:
    """Whether this runs outside a worker of the platform."""
    return os.environ.get("PILOTLIGHT_WORKER") != "1"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"pilotlight.{name}")
    module = _MODULE_OF.get(name)
    if module is not None:
        value = getattr(importlib.import_module(module), name)
        globals()[name] = value
        return value
    from pilotlight.sdk.unsupported import is_unsupported, not_supported

    if is_unsupported(name):
        raise not_supported(name)
    raise AttributeError(f"pilotlight has no {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
