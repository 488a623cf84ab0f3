"""Modal's module of handles: `from pilotlight.functions import FunctionCall, gather`."""

from __future__ import annotations

from pilotlight.sdk.calls import FunctionCall
from pilotlight.sdk.function import Function

__all__ = ["Function", "FunctionCall", "gather"]

gather = FunctionCall.gather
