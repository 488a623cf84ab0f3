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
    from pilotlight import weights
    from pilotlight.client.client import AsyncClient, Client, Deployment
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
    from pilotlight.packaging.deploy import deploy
    from pilotlight.profile import Profile
    from pilotlight.sdk.app import App
    from pilotlight.sdk.calls import FunctionCall
    from pilotlight.sdk.cls import Cls
    from pilotlight.sdk.context import Context, context
    from pilotlight.sdk.decorators import (
        PilotlightWarning,
        asgi_app,
        batched,
        concurrent,
        enter,
        exit,
        method,
    )
    from pilotlight.sdk.function import Function
    from pilotlight.sdk.image import Image
    from pilotlight.sdk.llm import Engine
    from pilotlight.sdk.policies import Cron, Period, Retries, cached_answer, static_answer
    from pilotlight.sdk.secret import Secret
    from pilotlight.sdk.spans import span
    from pilotlight.sdk.weights import Weights
    from pilotlight.spec.engines import TokenLimits
    from pilotlight.spec.policies import (
        Fallback,
        ModelCard,
        Objectives,
        RetryPolicy,
        Schedule,
        Variant,
    )

__version__ = "0.1.0"

_WHERE = {
    "pilotlight.client.client": ("AsyncClient", "Client", "Deployment"),
    "pilotlight.spec.engines": ("TokenLimits",),
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
    "pilotlight.profile": ("Profile",),
    "pilotlight.sdk.app": ("App",),
    "pilotlight.sdk.calls": ("FunctionCall",),
    "pilotlight.sdk.cls": ("Cls",),
    "pilotlight.sdk.context": ("Context", "context"),
    "pilotlight.sdk.function": ("Function",),
    "pilotlight.sdk.image": ("Image",),
    "pilotlight.sdk.llm": ("Engine",),
    "pilotlight.sdk.decorators": (
        "PilotlightWarning",
        "asgi_app",
        "batched",
        "concurrent",
        "enter",
        "exit",
        "method",
    ),
    "pilotlight.spec.policies": (
        "Fallback",
        "ModelCard",
        "Objectives",
        "RetryPolicy",
        "Schedule",
        "Variant",
    ),
    "pilotlight.sdk.policies": ("Cron", "Period", "Retries", "cached_answer", "static_answer"),
    "pilotlight.sdk.secret": ("Secret",),
    "pilotlight.sdk.spans": ("span",),
    "pilotlight.sdk.weights": ("Weights",),
}
_MODULES = ("weights",)
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
_NOT_HERE = {
    "Volume": "model files belong in pilotlight.Weights, other data in an object store",
    "NetworkFileSystem": "model files belong in pilotlight.Weights, other data in an object store",
    "CloudBucketMount": "model files belong in pilotlight.Weights, other data in an object store",
    "Mount": "the app's directory is packaged automatically; add other files with Image.copy()",
    "Stub": "use App",
    "Dict": "use your own database or cache",
    "Queue": "use your own queue, or .spawn()",
    "Sandbox": "declare a function",
    "parameter": "classes take no parameters: pass the value to the method",
    "web_endpoint": "every function already has an HTTP endpoint: POST "
    "/v1/functions/{app}/{function}:invoke",
    "fastapi_endpoint": "every function already has an HTTP endpoint: POST "
    "/v1/functions/{app}/{function}:invoke",
    "web_server": "return an ASGI application from a function with @pilotlight.asgi_app()",
    "wsgi_app": "wrap it (a2wsgi.WSGIMiddleware) and return it from a function with "
    "@pilotlight.asgi_app()",
    "gpu": 'write the accelerator as a string: gpu="H100" or gpu="H100:2"',
}

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
    "Engine",
    "Fallback",
    "Forbidden",
    "Function",
    "FunctionCall",
    "FunctionRaised",
    "Image",
    "InvalidInput",
    "ModelCard",
    "NotFound",
    "Objectives",
    "Period",
    "PilotlightError",
    "PilotlightWarning",
    "Profile",
    "RemoteError",
    "Retries",
    "RetryPolicy",
    "Schedule",
    "Secret",
    "StartFailed",
    "TokenLimits",
    "TooLarge",
    "TooManyRequests",
    "Unauthenticated",
    "Unavailable",
    "Variant",
    "Weights",
    "WorkerCrashed",
    "__version__",
    "asgi_app",
    "batched",
    "cached_answer",
    "concurrent",
    "context",
    "deploy",
    "enter",
    "exit",
    "is_local",
    "method",
    "span",
    "static_answer",
    "weights",
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
    hint = f": {_NOT_HERE[name]} (docs/from-modal.md)" if name in _NOT_HERE else ""
    raise AttributeError(f"pilotlight has no {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
